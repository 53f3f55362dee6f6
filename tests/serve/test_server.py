"""`rille serve` as a process, with a real model: from a checkpoint to clients, and its end."""

import gc
import re
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import openai
import pytest
import torch
import zmq

import rille
from rille import cli
from rille.model.checkpoint import save_model
from rille.serve.chain import Chain
from rille.serve.kv_events import Announcer, BlockRemoved, BlockStored, EventBatch, Publisher
from rille.serve.server import allow_connections, keep_loaded, leave_a_core
from tests.serve.scripted import small_tokenizer

SERVE = (sys.executable, "-m", "rille", "serve")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    tokenizer = small_tokenizer()
    place = tmp_path_factory.mktemp("models") / "small"
    config = rille.preset("tiny").replace(vocab_size=tokenizer.vocab_size, num_layers=4, mla_layers=(3,))
    save_model(rille.new_model(config), place, tokenizer=tokenizer)
    return place


class Process:
    """A server in a process of its own, as far as the line that says where."""

    def __init__(self, checkpoint, *flags: str):
        settings = ["--port", "0", "--engine.num-pages", "200", "--engine.hash-unit", "64", *flags]
        self.process = subprocess.Popen([*SERVE, str(checkpoint), *settings], stdout=subprocess.PIPE, text=True)
        self.lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.strip())
            if line.startswith("ready: "):
                break
        assert self.lines and self.lines[-1].startswith("ready: "), self.lines
        self.url = self.lines[-1].removeprefix("ready: ")
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=20)


@pytest.fixture(scope="module")
def server(checkpoint):
    process = Process(checkpoint, "--kv-events", "tcp://127.0.0.1:*", "--kv-events-topic", "kv@here@small")
    yield process
    if process.process.poll() is None:
        process.process.kill()


def ask(server, text: str, **request):
    messages = [{"role": "user", "content": text}]
    return server.client.chat.completions.create(
        **{"model": "small", "messages": messages, "max_tokens": 6, "temperature": 0, **request}
    )


def test_b2_it_says_at_the_start_what_it_has(server):
    said = "\n".join(server.lines)
    assert "hash unit 64 tokens" in said and re.search(r"prefix of \d+ is the shortest that is reused", said)
    assert "model: small" in said and "pages" in said


def test_a6_a_later_turn_is_mostly_cached(server):
    first = ask(server, "word " * 150)
    assert first.usage.cached_tokens == 0
    history = [
        {"role": "user", "content": "word " * 150},
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "more"},
    ]
    second = ask(server, "", messages=history)
    new = second.usage.prompt_tokens - first.usage.prompt_tokens
    assert second.usage.prompt_tokens > second.usage.cached_tokens >= first.usage.prompt_tokens - 64 - 10
    assert second.usage.prompt_tokens - second.usage.cached_tokens <= new + 64 + 10


def test_many_at_once_and_a_stream(server):
    with ThreadPoolExecutor(8) as pool:
        alone = [ask(server, f"question {i}").choices[0].message for i in range(8)]
        at_once = list(pool.map(lambda i: ask(server, f"question {i}").choices[0].message, range(8)))
    assert [message.reasoning_content for message in at_once] == [message.reasoning_content for message in alone]
    chunks = ask(server, "question 3", stream=True)
    text = "".join(getattr(c.delta, "reasoning_content", None) or "" for chunk in chunks for c in chunk.choices)
    assert text == alone[3].reasoning_content


def test_d7_two_grammars_in_one_batch(server):
    def form(key):
        schema = {
            "type": "object",
            "properties": {key: {"enum": [1]}},
            "required": [key],
            "additionalProperties": False,
        }
        return {"type": "json_schema", "json_schema": {"name": key, "schema": schema}}

    def one(key):
        extra = {"thinking": {"type": "disabled"}}
        return ask(server, "?", response_format=form(key), max_tokens=60, extra_body=extra).choices[0].message.content

    with ThreadPoolExecutor(2) as pool:
        texts = [re.sub(r"\s", "", text) for text in pool.map(one, ("a", "b"))]
    for text, whole in zip(texts, ('{"a":1}', '{"b":1}'), strict=True):
        assert text and whole.startswith(text), (
            "an untrained model may fill the limit with white space, and nothing else"
        )


def test_a_signal_ends_streams_and_the_process(checkpoint):
    server = Process(checkpoint, "--engine.max-length", "30000")
    stream = ask(server, "on and on", stream=True, max_tokens=20_000, extra_body={"ignore_eos": True})
    next(iter(stream))
    ends = []

    def read():
        try:
            list(stream)
        except openai.APIError as error:
            ends.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    assert server.stop() in (-signal.SIGTERM, 143)
    reader.join(timeout=10)
    assert ends == ["the server is shutting down"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--port", "70000"], "port is 70000"),
        (["--engine.hash-unit", "100"], "hash_unit is 100"),
        (["--timeout-s", "0"], "timeout_s is 0"),
        (["--kv-events", "nonsense"], "kv_events: nonsense cannot be bound"),
    ],
)
def test_wrong_settings(checkpoint, flags, told, capsys):
    assert cli.main(["serve", str(checkpoint), "--port", "0", *flags]) == 2
    assert told in capsys.readouterr().err


def test_a_port_that_is_taken(server, checkpoint, capsys):
    assert cli.main(["serve", str(checkpoint), "--port", server.url.rpartition(":")[2]]) == 1
    err = capsys.readouterr().err
    assert "cannot be listened on" in err and "give another port, or 0" in err and err.count("\n") == 1


# --- events of the cache ----------------------------------------------------------------------------------------------


def test_a16_only_what_can_be_resumed_is_told_and_once():
    told: list = []
    announcer, chain = Announcer(told.append), Chain(range(100), 16)
    announcer.resumable(chain, 48)
    announcer.resumable(chain, 48)
    announcer.resumable(chain, 80)
    keys = [chain.at(end) for end in (16, 32, 48, 64, 80)]
    assert [(one.block_hashes, one.parent_block_hash) for one in told] == [(keys[:3], None), (keys[3:], keys[2])]
    assert [len(one.token_ids) for one in told] == [48, 32] and told[1].token_ids == list(range(48, 80))
    other = Chain([*range(48), *range(500, 540)], 16)
    announcer.resumable(other, 64)
    assert told[2].block_hashes == [other.at(64)] and told[2].parent_block_hash == keys[2]
    del told[:]
    announcer.gone(chain.at(48))
    announcer.gone(chain.at(32))
    assert told == [], "deeper checkpoints lie behind those blocks"
    announcer.gone(chain.at(80))
    assert told == [BlockRemoved(keys[:2:-1], "GPU")]
    announcer.gone(other.at(64))
    assert told[1].block_hashes == [other.at(64), *keys[2::-1]]


def test_the_format_is_vllms():
    event = BlockStored([b"h"], None, [1, 2], 2, None, "GPU")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.5, [event]))) == [
        1.5,
        [["BlockStored", [b"h"], None, [1, 2], 2, None, "GPU"]],
        None,
    ]


def test_a_prompt_is_told_over_zmq_once_it_can_be_resumed(server):
    """From the running server: what was told of a prompt is its ids, in units, from the beginning."""
    [line] = [line for line in server.lines if line.startswith("events: ")]
    address = line.removeprefix("events: ").partition(",")[0]
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(address)
    socket.subscribe("kv@here")
    socket.setsockopt(zmq.RCVTIMEO, 500)
    for number in range(40):  # a subscriber hears what comes after it was heard of
        ids = [5 + (number * 31 + place) % 200 for place in range(130)]
        reply = server.client.completions.create(model="small", prompt=ids, max_tokens=1)
        assert reply.usage.prompt_tokens == 130
        try:
            topic, _, payload = socket.recv_multipart()
        except zmq.Again:
            continue
        break
    else:
        raise AssertionError("nothing came")
    socket.close(0)
    _, [[kind, hashes, parent, told, unit, _, medium]], _ = msgspec.msgpack.decode(payload)
    assert (topic, kind, parent, unit, medium) == (b"kv@here@small", "BlockStored", None, 64, "GPU")
    assert told == ids[: len(hashes) * unit] and len(hashes) == 2


def test_messages_are_numbered():
    publisher = Publisher("tcp://127.0.0.1:*", topic="kv")
    socket = zmq.Context.instance().socket(zmq.SUB)
    socket.connect(publisher.address)
    socket.subscribe("kv")
    socket.setsockopt(zmq.RCVTIMEO, 50)
    for number in range(100):  # a subscriber hears what comes after it was heard of
        publisher.send(BlockRemoved([b"h"], "GPU"))
        try:
            topic, counted, payload = socket.recv_multipart()
        except zmq.Again:
            continue
        assert topic == b"kv" and int.from_bytes(counted, "big") <= number
        assert msgspec.msgpack.decode(payload)[1] == [["BlockRemoved", [b"h"], "GPU"]]
        break
    else:
        raise AssertionError("nothing came")
    publisher.close()
    socket.close(0)


def test_what_was_loaded_is_not_visited_by_the_collector():
    before = gc.get_freeze_count()
    keep_loaded()
    try:
        assert gc.get_freeze_count() > before + 10_000 and len(gc.get_objects()) < 10_000
    finally:
        gc.unfreeze()


@pytest.mark.parametrize(("threads", "variable", "left"), [(4, None, 3), (2, None, 2), (4, "4", 4), (9, None, 3)])
def test_products_leave_a_core_unless_told_otherwise(monkeypatch, threads, variable, left):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(4)), raising=False)
    kept = [threads]
    monkeypatch.setattr(torch, "get_num_threads", lambda: kept[-1])
    monkeypatch.setattr(torch, "set_num_threads", kept.append)
    leave_a_core()
    assert kept[-1] == left


def test_a_full_queue_may_be_connected():
    """Where a process begins with a few hundred files and may have more."""
    before = _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1 << 16 if hard == resource.RLIM_INFINITY else min(hard, 1 << 16)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (600, hard))
        for _ in range(2):
            allow_connections()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
