"""Completions, tokenise and detokenise: texts and token ids in and out, log-probabilities; streamed and whole."""

import openai
import pytest

from tests.serve.scripted import reply_ids
from tests.serve.test_api_chat import TOOL, USER


def test_completions_of_texts_and_ids(server, client, tokenizer):
    words = tokenizer.encode("then é call")
    for prompt, ids in (("The tools", tokenizer.encode("The tools")), ([5, 6, 7], [5, 6, 7])):
        server.say(words, cached=1)
        reply = client.completions.create(model="tiny", prompt=prompt, max_tokens=50)
        assert reply.choices[0].text == "then é call" and reply.choices[0].finish_reason == "stop"
        assert list(server.request.prompt) == ids
        assert reply.usage.completion_tokens == len(words) and reply.usage.prompt_tokens_details.cached_tokens == 1
        assert server.request.params.max_tokens == 50


def test_completions_stream_what_they_say_whole(server, client, tokenizer):
    texts = ["one STOP", "two é", "three", "four"]
    request = {"prompt": ["a", "b"], "n": 2, "stop": ["STOP"], "logprobs": 1, "max_tokens": 60}
    for _ in range(2):
        server.say(*map(tokenizer.encode, texts[:2]))
        server.say(*map(tokenizer.encode, texts[2:]))
    reply = client.completions.create(model="tiny", **request)
    chunks = list(
        client.completions.create(model="tiny", stream=True, stream_options={"include_usage": True}, **request)
    )
    assert [choice.text for choice in reply.choices] == ["one ", "two é", "three", "four"]
    assert chunks[-1].usage == reply.usage
    for choice in reply.choices:
        pieces = [piece for chunk in chunks for piece in chunk.choices if piece.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == [choice.finish_reason]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            joined = [one for piece in pieces if piece.logprobs for one in getattr(piece.logprobs, name)]
            assert joined == getattr(choice.logprobs, name)


def test_log_probabilities_name_every_token(server, client, tokenizer):
    """Parts of characters do not fall on one name, offsets are places in the text, and a word that only the model has
    among the likeliest is no fault; whole and streamed."""
    text = "é🙂!"
    ids = tokenizer.encode(text)
    assert len(ids) == 7, "every byte is a token here"
    request = {"model": "tiny", "prompt": "a", "max_tokens": 50, "logprobs": 3}
    for _ in range(2):
        server.say(ids, gap_s=0.01)
    whole = client.completions.create(**request).choices[0].logprobs
    pieces = [c.choices[0].logprobs for c in client.completions.create(stream=True, **request) if c.choices]
    for found in (whole, *[piece for piece in pieces if piece]):
        assert all(name in top for name, top in zip(found.tokens, found.top_logprobs, strict=True))
        assert all(top[f"token_id:{tokenizer.vocab_size + 1}"] == -3.5 for top in found.top_logprobs)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for piece in pieces if piece for one in getattr(piece, name)] == getattr(whole, name)
    assert whole.tokens == [*(f"bytes:\\x{byte:02x}" for byte in "é🙂".encode()), "!"]
    assert len(set(whole.tokens)) == len(ids) and whole.text_offset == [0, 0, 1, 1, 1, 1, 2]
    server.say(ids)
    chosen = client.completions.create(**{**request, "logprobs": 0}).choices[0].logprobs
    assert chosen.top_logprobs == [{name: -0.5} for name in chosen.tokens]


def test_chat_log_probabilities_of_words_that_only_the_model_has(server, client, tokenizer):
    ids = reply_ids(tokenizer, content="é")
    server.say(ids)
    request = {"model": "tiny", "messages": [USER], "logprobs": True, "top_logprobs": 3}
    tokens = client.chat.completions.create(**request).choices[0].logprobs.content
    assert len(tokens) == len(ids)
    for token in tokens:
        last = token.top_logprobs[2]
        assert (last.token, last.logprob, last.bytes) == (f"token_id:{tokenizer.vocab_size + 1}", -3.5, None)


def test_an_echo_that_cannot_be_begins_nothing(server, tokenizer):
    """Ids that only the model has cannot be said again; nothing may run for a request that was refused."""
    before = len(server.engine.requests)
    body = {"prompt": [[5], [tokenizer.vocab_size + 1]], "echo": True}
    server.say([5])
    status, answer, _ = server.post("/v1/completions", body)
    server.engine.scripts.clear()
    assert status == 400 and f"token id {tokenizer.vocab_size + 1}" in answer["error"]["message"]
    assert len(server.engine.requests) == before


def test_token_ids_come_back_where_asked_for(server, client, tokenizer):
    words = tokenizer.encode("then é call")
    for _ in range(2):
        server.say(words)
    request = {"model": "tiny", "prompt": "a", "max_tokens": 50, "extra_body": {"return_token_ids": True}}
    assert client.completions.create(**request).choices[0].token_ids == words
    chunks = list(client.completions.create(stream=True, **request))
    assert [i for chunk in chunks for i in getattr(chunk.choices[0], "token_ids", [])] == words


def test_echo_and_limits(server, client, tokenizer):
    ids = tokenizer.encode("then call the tools")
    server.say(ids)
    assert client.completions.create(model="tiny", prompt="Say: ", echo=True, max_tokens=50).choices[0].text == (
        "Say: then call the tools"
    )
    server.say(ids)
    reply = client.completions.create(model="tiny", prompt="Say: ", max_tokens=2)
    assert reply.choices[0].finish_reason == "length" and reply.usage.completion_tokens == 2
    server.say(ids)
    client.completions.create(model="tiny", prompt="a")
    assert server.request.params.max_tokens == 16, "OpenAI's default"
    for wrong in ({"echo": True, "logprobs": 1}, {"prompt": []}, {"prompt": [[]]}, {"logprobs": 21}, {"best_of": 2}):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(**{"model": "tiny", "prompt": "a", **wrong})


def test_tokenize_and_back(server, tokenizer):
    status, body, _ = server.post("/tokenize", {"prompt": "the tools é"})
    assert (status, body["tokens"]) == (200, tokenizer.encode("the tools é")) and body["count"] == len(body["tokens"])
    assert server.post("/detokenize", {"tokens": body["tokens"]})[1] == {"prompt": "the tools é"}
    server.say(reply_ids(tokenizer, content="x"))
    server.post("/v1/chat/completions", {"messages": [USER], "tools": [TOOL]})
    body = server.post("/tokenize", {"messages": [USER], "tools": [TOOL]})[1]
    assert body["tokens"] == list(server.request.prompt)
    for wrong in ({}, {"prompt": "a", "messages": [USER]}, {"prompt": "a", "tools": [TOOL]}):
        assert server.post("/tokenize", wrong)[0] == 400
    assert server.post("/detokenize", {"tokens": [10**9]})[0] == 400
