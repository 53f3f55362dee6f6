"""Where a chat ends: stop strings, stop ids, min_tokens; streamed and whole."""

import http.client
import json

import pytest

from rille.serve.replying import Ended, total
from rille.serve.schema import Usage
from tests.serve.scripted import reply_ids
from tests.serve.test_api_chat import TOOL, USER, both
from tests.serve.test_chat import CALL


def test_stop_strings_count_in_the_answer_alone(server, client, tokenizer):
    ids = reply_ids(tokenizer, reasoning_content="one STOP two", content="three STOP four")
    reply = both(server, client, ids, stop=["STOP", "none"])
    assert reply.choices[0].message.content == "three " and reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].message.reasoning_content == "one STOP two"
    assert server.engine.ended and reply.usage.completion_tokens < len(ids)
    reply = both(server, client, reply_ids(tokenizer, content="three ST"), stop="STOP")
    assert reply.choices[0].message.content == "three ST", "what was held back comes at the end"


def ask(server, body) -> list:
    """The chunks of a stream, or the one whole answer."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    text = connection.getresponse().read().decode()
    connection.close()
    if not body["stream"]:
        return [json.loads(text)]
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_stopped_is_not_written_on(server, tokenizer, stream):
    """One choice is at a stop string while another writes on: nobody waits for the rest of the first, and the other is
    whole."""
    server.engine.ended.clear()
    stopped, other = reply_ids(tokenizer, content="two STOP" + " more" * 300), reply_ids(tokenizer, content="one")
    server.say(stopped, other, gap_s=0.001)
    body = {"model": "tiny", "messages": [USER], "n": 2, "stop": "STOP", "stream": stream}
    parts = ask(server, body)
    said = {0: "", 1: ""}
    for choice in (choice for part in parts for choice in part["choices"]):
        said[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
    assert said == {0: "two ", 1: "one"}
    assert [index for _, index in server.engine.ended] == [0], "by itself, with the other still at work"


def test_a_fault_behind_a_stop_string_is_nobodys(server, tokenizer):
    """The reply was whole before what the engine wrote on came to nothing."""
    server.say(reply_ids(tokenizer, content="one STOP two"), reason="error", error="not a number")
    [told] = ask(server, {"model": "tiny", "messages": [USER], "stop": "STOP", "stream": False})
    assert told["choices"][0]["message"]["content"] == "one " and told["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("is_refused, kind", [(True, "invalid_request_error"), (False, "server_error")])
@pytest.mark.parametrize("stream", [False, True])
def test_whose_fault_it_is_that_a_reply_breaks_off(server, tokenizer, is_refused, kind, stream):
    """Clients ask again after a fault of the server, which a grammar that cannot be followed is no reason for."""
    server.say(reply_ids(tokenizer, content="one"), reason="error", error="no further", is_refused=is_refused)
    *_, told = ask(server, {"model": "tiny", "messages": [USER], "stream": stream})
    assert told["error"]["type"] == kind and "no further" in told["error"]["message"]


def test_usage_of_several_choices_counts_what_was_there_before():
    """Others than the first find in the cache what that has just read."""
    ends = [Ended(index, "stop", Usage(80, cached, 5), 2, None) for index, cached in enumerate((16, 79, 79))]
    assert total(ends) == (Usage(80, 16, 15), 6)


def test_min_tokens_hold_stop_strings_back_too(server, client, tokenizer):
    """As in `/v1/completions`, where the engine itself looks for them."""
    ids = reply_ids(tokenizer, content="one STOP two STOP three")
    text = tokenizer.encode("one STOP two STOP three")
    begin = next(place for place in range(len(ids)) if ids[place : place + len(text)] == text)
    extra = {"min_tokens": begin + len(tokenizer.encode("one STOP ")) + 1}
    reply = both(server, client, ids, stop="STOP", extra_body=extra)
    assert reply.choices[0].message.content == "one STOP two " and reply.choices[0].finish_reason == "stop"
    assert reply.usage.completion_tokens >= extra["min_tokens"]


@pytest.mark.parametrize("path", ["chat", "completions"])
def test_every_chunk_counts_where_that_is_asked_for(server, client, tokenizer, path):
    """Tokens so far, rising to those of the last chunk, which alone knows what was cached."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    server.say(reply_ids(tokenizer, content="one two three"), gap_s=0.01, cached=2)
    request = {"model": "tiny", "stream": True, "stream_options": options, "logprobs": None, "max_tokens": 500}
    if path == "chat":
        *chunks, last = client.chat.completions.create(messages=[USER], **request)
    else:
        *chunks, last = client.completions.create(prompt=["one two"], **request)
    written = [chunk.usage.completion_tokens for chunk in chunks]
    assert written == sorted(written) and len(set(written)) > 5 and written[-1] == last.usage.completion_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {last.usage.prompt_tokens}
    assert last.usage.prompt_tokens_details.cached_tokens == 2
    assert (
        server.post(
            "/v1/completions", {"prompt": "a", "stream": True, "stream_options": {**options, "include_usage": False}}
        )[0]
        == 400
    )


def test_a_stop_id_is_no_part_of_the_text(server, client, tokenizer):
    """As in `/v1/completions`."""
    for channel in ("content", "reasoning_content"):
        ids = reply_ids(tokenizer, **{"content": "", channel: "one!"})
        ids = ids[: ids.index(tokenizer.encode("!")[0]) + 1]
        request = {"logprobs": True, "extra_body": {"stop_token_ids": [ids[-1]]}}
        [choice] = both(server, client, ids, **request).choices
        assert getattr(choice.message, channel) == "one" and choice.finish_reason == "stop"
        assert len(choice.logprobs.content) == len(ids), "it was written all the same"


@pytest.mark.parametrize("cut", [False, True])
def test_a_call_that_a_stop_id_cuts_is_not_to_be_carried_out(server, client, tokenizer, monkeypatch, cut):
    monkeypatch.setattr(server.engine, "is_checking", False)
    call = {**CALL, "function": {"name": "double", "arguments": {"a": "x!y"}}}
    ids = reply_ids(tokenizer, content="", tool_calls=[call])
    ids = ids[: ids.index(tokenizer.encode("!")[0]) + 1] if cut else ids
    request = {"tools": [TOOL], "extra_body": {"stop_token_ids": [tokenizer.encode("!")[0]] if cut else []}}
    [choice] = both(server, client, ids, **request).choices
    assert choice.message.tool_calls[0].function.arguments == ('{"a": "x' if cut else '{"a": "x!y"}')
    assert choice.finish_reason == ("stop" if cut else "tool_calls")
