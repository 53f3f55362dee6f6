"""Many clients of all four APIs at once, some of whom leave at any moment: afterwards nothing is held, in the engine or
in this process."""

import asyncio
import gc
import http.client
import json
import time
import tracemalloc
from collections import Counter
from contextlib import aclosing, contextmanager
from random import Random

import pytest

import rille
from rille.serve.api import create_app
from rille.serve.engine import Engine
from rille.serve.front import Abilities, Front
from rille.serve.load import stream
from tests.serve.scripted import small_tokenizer
from tests.serve.served import listening, until
from tests.serve.test_api_chat import FORMAT, TOOL

STREAMS, ROUNDS = 16, 3
PASSING = (
    "rille.serve.",
    "rille.text.",
    "starlette.",
    "fastapi.",
    "builtins.coroutine",
    "builtins.async_gen",
    "_asyncio",
)


@pytest.fixture(scope="module")
def served():
    tokenizer = small_tokenizer()
    config = rille.preset("tiny").replace(vocab_size=tokenizer.vocab_size, num_layers=2, mla_layers=(1,))
    with real_server(rille.new_model(config), tokenizer, num_pages=100, hash_unit=64, max_running=16) as pair:
        yield pair


@contextmanager
def real_server(model, tokenizer, images=None, **settings):
    """A server of a real engine in this process: its address and the engine. images: for a model that sees."""
    engine = rille.Engine(model, tokenizer=tokenizer, **settings)
    engine.start()
    front = Front(engine, tokenizer, Abilities(("small",), engine.longest, images, model.config.media_pad_id))
    try:
        with listening(create_app(front)) as url:
            yield url, engine
    finally:
        engine.close()


def a_request(random: Random) -> tuple[str, dict]:
    """Of any API, with or without tools, forms, several choices; short."""
    text, limit = "word " * random.randrange(1, 60), random.randrange(1, 12)
    user = [{"role": "user", "content": text}]
    chat = {"messages": user, "max_tokens": limit, "n": random.randrange(1, 4)}
    claude = {"model": "small", "messages": user, "max_tokens": limit}
    return random.choice(
        [
            ("/v1/chat/completions", chat),
            ("/v1/chat/completions", {**chat, "tools": [TOOL], "stop": "e"}),
            ("/v1/chat/completions", {**chat, "response_format": FORMAT, "logprobs": True}),
            ("/v1/completions", {"prompt": [text, "the"], "max_tokens": limit, "n": 2, "stop": ["a"], "echo": True}),
            ("/v1/messages", claude),
            ("/v1/responses", {"input": text, "max_output_tokens": limit}),
        ]
    )


async def a_client(url: str, random: Random) -> None:
    """Some read to the end, some leave before the first event or at any later one, some ask for no stream."""
    path, body = a_request(random)
    kind = random.randrange(4)
    if kind == 0:
        await asyncio.to_thread(ask_whole, url, path, body)
        return
    leave_after = random.randrange(4) if kind == 1 else None
    task = asyncio.ensure_future(read_stream(url, path, {**body, "stream": True}, leave_after))
    if kind == 2:
        await asyncio.sleep(random.random() * 0.2)
        task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()


def ask_whole(url: str, path: str, body: dict) -> None:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    assert response.status == 200, text
    json.loads(text)
    connection.close()


async def read_stream(url: str, path: str, body: dict, leave_after: int | None) -> None:
    count = 0
    async with aclosing(stream(url, path, body)) as events:
        async for _ in events:
            count += 1
            if count == leave_after:
                return
    assert count


def living() -> Counter:
    """Objects of types that a request makes, by name; what the cache stores is not a request's."""
    gc.collect()
    names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.get_objects())
    return Counter(name for name in names if name.startswith(PASSING) and name != "rille.serve.store.Entry")


def a_round(url: str, engine: Engine, random: Random) -> None:
    """Many clients, until nothing of them is held."""

    async def clients():
        await asyncio.gather(*(a_client(url, random) for _ in range(STREAMS)))

    asyncio.run(clients())
    until(lambda: engine.stats().running == engine.stats().waiting == 0, seconds=60)
    until(lambda: not engine._handles and not engine._replies)
    assert engine.stats().pages_used == 0
    time.sleep(0.3)  # the last tasks of those who left


def test_nothing_is_left_of_requests_that_are_over(served):
    url, engine = served
    before = first = living()  # other tests may have left some
    for number in range(ROUNDS):
        a_round(url, engine, Random(number))
        first = living() if number == 0 else first
    finished = engine.stats().finished
    assert finished["abort"] > 3 and finished["length"] > 3, "some left and some stayed"
    assert sum(finished.values()) == sum(engine.stats().resumed_tokens.counts)
    assert 0 < sum(engine.stats().queued_s.counts) <= sum(finished.values()), "some left before they ran"
    assert engine.stats().steps == sum(engine.stats().step_tokens.counts) > 0
    until(lambda: living() - first == Counter())  # what a request makes goes with it
    of_requests = {"rille.serve.front.Turn", "rille.serve.handle.RequestHandle", "rille.serve.sequences.Sequence"}
    assert not of_requests & set(living() - before)


def traced() -> int:
    """Bytes that lines of this project and of what serves it have taken and not given back. Small pieces do not count:
    the interpreter keeps thousands of them for the next object of their size."""
    gc.collect()
    ours = [tracemalloc.Filter(True, f"*/{name}/*") for name in ("rille", "starlette", "fastapi", "uvicorn", "asyncio")]
    traces = tracemalloc.take_snapshot().filter_traces(ours).traces
    return sum(trace.size for trace in traces if trace.size >= 200)


def test_memory_comes_back_after_a_load(served):
    """What is cached is given up first, so that all pages must be free."""
    url, engine = served
    store, found = engine.scheduler.cache.store, []
    tracemalloc.start()
    try:
        for number in range(1 + ROUNDS):
            a_round(url, engine, Random(number))
            engine._between_steps(store.clear)
            assert store.pool.num_free == store.pool.num_pages and not list(store.entries())
            found.append(traced())
    finally:
        tracemalloc.stop()
    assert found[-1] - found[0] < 400 * ROUNDS * STREAMS, found  # less than a handle of each request
