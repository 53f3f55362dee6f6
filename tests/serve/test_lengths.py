"""How long a sequence may be is one number: the checkpoint's, unless a setting says another or the memory is smaller.
The engine, the server, its model list, a chat here or by URL, and a continued text all hold to it."""

import json
from dataclasses import replace

import pytest

import rille
from rille.model.model import new_model
from rille.serve.chat import Conversation
from rille.serve.config import ChatConfig, GenerateConfig
from rille.serve.dialogue import Finished
from rille.serve.engine import Engine
from rille.serve.generate import continue_text
from rille.serve.remote import RemoteDialogue
from rille.serve.schema import SamplingParams, TooLarge
from rille.serve.screen import Screen
from rille.serve.terminal import Terminal
from tests.serve.scripted import small_tokenizer
from tests.serve.served import Served
from tests.serve.test_leaks import real_server
from tests.train.small import MODEL

LIMIT = 300
SETTINGS = {"num_pages": 40, "hash_unit": 64, "max_running": 2}


@pytest.fixture(scope="module")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer):
    return new_model(MODEL.replace(vocab_size=tokenizer.vocab_size, max_positions=LIMIT, init_std=0.2), seed=3)


@pytest.mark.parametrize(("settings", "longest"), [
    ({}, LIMIT), ({"max_length": 100}, 100), ({"max_length": 1000}, 1000),
    ({"max_length": 1 << 20, "num_pages": 7}, None),
])  # fmt: skip
def test_the_engine_takes_so_many_tokens_and_not_one_more(model, settings, longest):
    engine = Engine(model, **{**SETTINGS, **settings})
    cache = engine.scheduler.cache
    longest = longest or (7 - cache.groups) * cache.page_tokens
    assert engine.longest == longest
    said = f"a sequence may have {longest:,} tokens (the checkpoint was made for {LIMIT:,})"
    assert any(said in line for line in engine.describe())
    [[one]] = engine.generate([[5] * (longest - 1)], SamplingParams(max_tokens=1, ignore_eos=True))
    assert one.reason == "length" and len(one.tokens) == 1
    for prompt, new in ((longest, 1), (longest - 1, 2), (1, longest)):
        with pytest.raises(TooLarge, match=f"a sequence may have {longest:,} tokens"):
            engine.generate([[5] * prompt], SamplingParams(max_tokens=new))


def test_lengths_that_cannot_be():
    for make in (
        lambda: rille.Engine("nowhere", max_length=1),
        lambda: ChatConfig(checkpoint="nowhere", max_length=0),
        lambda: GenerateConfig(checkpoint="nowhere", prompt="", max_length=-3),
    ):
        with pytest.raises(ValueError, match="it must be at least 2, a token to read and one to write"):
            make()


@pytest.fixture(scope="module")
def server(model, tokenizer):
    with real_server(model, tokenizer, **SETTINGS) as (url, engine):
        served: Served = Served(url, engine, None)  # pyright: ignore[reportArgumentType]
        yield served


def test_the_server_tells_the_same_number_everywhere(server):
    assert json.loads(server.get("/v1/models")[1])["data"][0]["max_model_len"] == LIMIT == server.engine.longest
    assert server.post("/tokenize", {"prompt": "the"})[1]["max_model_len"] == LIMIT
    assert f"may have {LIMIT} tokens" in server.get("/figures")[1].decode()


def test_texts_at_the_limit(server):
    for prompt, asked, written in ((LIMIT - 1, 1, 1), (LIMIT - 9, 9, 9), (LIMIT - 9, 3, 3)):
        body = {"prompt": [5] * prompt, "max_tokens": asked, "ignore_eos": True}
        status, answer, _ = server.post("/v1/completions", body)
        assert status == 200 and answer["choices"][0]["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == written
    for prompt, asked in ((LIMIT - 1, 2), (LIMIT, 1), (LIMIT + 1, 1), (1, LIMIT)):
        status, answer, _ = server.post("/v1/completions", {"prompt": [5] * prompt, "max_tokens": asked})
        error = answer["error"]
        assert (status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
        assert all(part in error["message"] for part in (f"{prompt} tokens", f"{asked} asked", f"of {LIMIT} tokens"))


USER = [{"role": "user", "content": "then call the tools"}]


@pytest.mark.parametrize("path, asked, body", [
    ("/v1/chat/completions", "max_tokens", {}), ("/v1/chat/completions", "max_completion_tokens", {}),
    ("/v1/messages", "max_tokens", {"model": "small"}), ("/v1/responses", "max_output_tokens", {}),
])  # fmt: skip
def test_conversations_beyond_the_limit_are_400(server, path, asked, body):
    whole = {"input" if "responses" in path else "messages": USER, **body}
    status, answer, _ = server.post(path, {**whole, asked: LIMIT})
    assert status == 400 and f"context length of {LIMIT} tokens" in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    long = [{"role": "user", "content": "word " * LIMIT}]
    status, answer, _ = server.post(path, {**whole, asked: 1, "input" if "responses" in path else "messages": long})
    assert status == 400 and f"context length of {LIMIT} tokens" in answer["error"]["message"]


def test_a_reply_without_a_limit_of_its_own_ends_with_the_context(server):
    status, answer, _ = server.post("/v1/chat/completions", {"messages": USER, "ignore_eos": True, "temperature": 0})
    usage = answer["usage"]
    assert status == 200 and usage["prompt_tokens"] + usage["completion_tokens"] == LIMIT
    assert answer["choices"][0]["finish_reason"] == "length"


def conversations(model, tokenizer, server, **settings):
    """Here and by URL."""
    config = ChatConfig(checkpoint="", temperature=0, **settings)
    yield Conversation(model, tokenizer, config)
    yield RemoteDialogue(replace(config, checkpoint=server.url))


def test_a_chat_ends_where_the_server_would(model, tokenizer, server, capsys):
    for talk in conversations(model, tokenizer, server):  # 1,024 tokens to a reply: more than there is room for
        assert talk.longest == LIMIT
        last = list(talk.say("then call the tools"))[-1]
        assert isinstance(last, Finished) and last.reason == "full" and last.kept + last.read + last.new == LIMIT
        with pytest.raises(ValueError, match=rf"{LIMIT}\b"):
            list(talk.say("and then?"))
        assert len(talk.messages) == 2, "a message without any reply is taken back"
    for talk in conversations(model, tokenizer, server, max_new_tokens=3):
        assert list(talk.say("then call the tools"))[-1].reason == "limit"
    terminal = Terminal(next(conversations(model, tokenizer, server)), Screen(False))
    terminal.take("then call the tools")
    assert f"the conversation is full; one may have {LIMIT} tokens here: /reset begins a new one" in (
        capsys.readouterr().err
    )


def test_a_chat_may_ask_for_more(model, tokenizer, server):
    config = ChatConfig(checkpoint="", temperature=0, max_length=LIMIT + 20)
    last = list(Conversation(model, tokenizer, config).say("then call the tools"))[-1]
    assert last.reason == "full" and last.kept + last.read + last.new == LIMIT + 20
    with pytest.raises(ValueError, match="max_length is the server's"):
        RemoteDialogue(replace(config, checkpoint=server.url))


def test_a_continued_text_ends_there_too(model, tokenizer, tmp_path, capsys):
    rille.save_model(model, tmp_path, tokenizer=tokenizer)
    text = "then " * 90
    used = len(tokenizer.encode(text))
    config = GenerateConfig(checkpoint=str(tmp_path), prompt=text, max_new_tokens=1000, max_length=used + 5)
    continue_text(config)
    assert f"5 tokens, prompt and continuation may have {used + 5} (--max-length)" in told(capsys)
    continue_text(replace(config, max_new_tokens=2))
    assert "2 tokens" in (err := told(capsys)) and "--max-length" not in err
    with pytest.raises(ValueError, match=f"the prompt has {used} tokens, prompt and continuation may have {used}; "):
        continue_text(replace(config, max_length=used))
    with pytest.raises(ValueError, match=f"may have {LIMIT}; shorten it"):
        continue_text(replace(config, prompt="then " * 600, max_length=None))


def told(capsys) -> str:
    """The last line on standard error, without its speed."""
    line = capsys.readouterr().err.splitlines()[-1].partition(": ")[2]
    tokens, _, rest = line.partition(", ")
    return ", ".join([tokens, *rest.split("; ")[1:]])
