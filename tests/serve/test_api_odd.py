"""Bodies in which any value at any place is something else: refused with a status and one line, or answered. Never a
fault of the server's, and never a reply that is no JSON.

Not every combination in each run: a sample that is the same each time, large enough to meet every place.
"""

import copy
import http.client
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from rille.text.images import ImageConfig
from tests.serve.scripted import reply_ids, small_tokenizer
from tests.serve.served import serving
from tests.serve.test_api_chat import FORMAT, PIXEL, SCHEMA, TOOL, USER
from tests.serve.test_api_others import CLAUDE, FLAT
from tests.serve.test_chat import CALL

SAMPLE = 600
PICTURE = {
    "role": "user",
    "content": [{"type": "image_url", "image_url": {"url": PIXEL}}, {"type": "text", "text": "x"}],
}
HALF = {"role": "assistant", "content": "x", "reasoning_content": "r"}
TURN = {**HALF, "tool_calls": [{**CALL, "id": "a"}]}
CHAT = {
    "messages": [
        {"role": "system", "content": "s"},
        USER,
        TURN,
        {"role": "tool", "tool_call_id": "a", "content": "42"},
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "function", "function": {"name": "double"}},
    "parallel_tool_calls": False,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "n": 2,
    "stop": ["a", "b"],
    "seed": 3,
    "max_tokens": 5,
    "logprobs": True,
    "top_logprobs": 2,
    "logit_bias": {"5": 1.0},
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "user": "u",
    "stream": True,
    "stream_options": {"include_usage": True},
    "thinking": {"type": "enabled", "effort": "low", "keep": "all"},
    "reasoning_effort": "low",
    "metadata": {"a": "b"},
}
CLAUDE_TURN = [
    {"type": "thinking", "thinking": "h", "signature": "x"},
    {"type": "text", "text": "t"},
    {"type": "tool_use", "id": "a", "name": "double", "input": {"number": 1}},
]
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "42"}], "is_error": True}
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL.partition(",")[2]}
MESSAGES = {
    "model": "tiny",
    "max_tokens": 5,
    "temperature": 1.0,
    "top_p": 0.9,
    "top_k": 4,
    "stream": True,
    "system": [{"type": "text", "text": "s", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        USER,
        {"role": "assistant", "content": CLAUDE_TURN},
        {"role": "user", "content": [RESULT, {"type": "image", "source": SOURCE}]},
    ],
    "tools": [CLAUDE],
    "tool_choice": {"type": "tool", "name": "double", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "stop_sequences": ["x"],
    "metadata": {"user_id": "x"},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}},
}
ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "t"}, {"type": "input_image", "image_url": PIXEL}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "I"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "s"}]},
    {"type": "function_call", "call_id": "a", "name": "double", "arguments": '{"number": 1}'},
    {"type": "function_call_output", "call_id": "a", "output": "42"},
]
RESPONSES = {
    "input": ITEMS,
    "instructions": "i",
    "tools": [FLAT],
    "tool_choice": {"type": "function", "name": "double"},
    "parallel_tool_calls": True,
    "reasoning": {"effort": "low", "summary": "auto"},
    "max_output_tokens": 5,
    "temperature": 1.0,
    "top_p": 0.5,
    "stream": True,
    "store": False,
    "truncation": "disabled",
    "text": {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
    "include": ["reasoning.encrypted_content"],
}
BODIES: list[tuple[str, dict]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {"model": "tiny", "messages": [PICTURE], "response_format": FORMAT}),
    ("/v1/chat/completions", {"messages": [USER, {"role": "system", "tools": [TOOL]}, {**HALF, "partial": True}]}),
    ("/v1/chat/completions", {"messages": [USER], "min_tokens": 1, "max_completion_tokens": 5, "stop": "x"}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "echo": True, "stop": "x", "stream": True}),
    ("/v1/completions", {"prompt": [[5, 6], [7]], "logprobs": 2, "return_token_ids": True}),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", {"model": "tiny", "messages": [USER], "system": "x", "tools": [CLAUDE]}),
    ("/v1/responses", RESPONSES),
    ("/tokenize", {"messages": [USER], "tools": [TOOL]}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
]
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**70, 1.5, 1e308, "", "x", "\ud800", "\0", "a" * 100_000, "<|end_of_msg|>"),
    *(
        [],
        [None],
        [[]],
        [1],
        ["x"],
        [{}],
        {},
        {"x": 1},
        {"type": None},
        {"type": "function"},
        {"type": "text", "text": 5},
    ),
]
GONE = object()  # the place itself is taken away


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[key], (*path, key))


def changed(body: Any, path: tuple, new: Any) -> Any:
    if not path:
        return [] if new is GONE else new
    body = copy.deepcopy(body)
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    if new is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return body


def cases() -> list[tuple[str, Any]]:
    """Every place once, and then others."""
    random, first, rest = Random(1), [], []
    for path, body in BODIES:
        for place in places(body):
            odd = random.sample([*ODD, GONE], len(ODD) + 1)
            first.append((path, changed(body, place, odd[0])))
            rest += [(path, changed(body, place, value)) for value in odd[1:4]]
    return first + random.sample(rest, SAMPLE - len(first))


def asked(connection: http.client.HTTPConnection, path: str, body: Any) -> tuple[int, str]:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, response.read().decode("utf-8")


def test_anything_anywhere():
    tokenizer = small_tokenizer()
    ids = reply_ids(tokenizer, content="x")
    statuses = set()
    with serving(tokenizer, images=ImageConfig(), media_id=tokenizer.specials["<|media_pad|>"]) as server:
        server.engine.is_checking = False
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
        for number, (path, body) in enumerate([*BODIES, *cases()]):
            for _ in range(8 - len(server.engine.scripts)):
                server.say(ids)
            status, text = asked(connection, path, body)
            statuses.add(status)
            where = f"{path} {json.dumps(body)[:2000]}"
            assert status == 200 or number >= len(BODIES), f"as it stands it is right: {text} {where}"
            if status == 200:
                events = text.split("data: ")[1:] if text.startswith(("data:", "event:")) else [text]
                every = [json.loads(one.partition("\n")[0]) for one in events if not one.startswith("[DONE]")]
                assert not any(one.get("error") for one in every), where
                continue
            assert status in (400, 404), where
            message = json.loads(text)["error"]["message"]
            assert message and "\n" not in message and len(message) < 1100 and "Traceback" not in message, where
    assert {200, 400, 404} == statuses


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
        ("/v1/responses", {"input": [{"role": "assistant", "content": 5}]}, "input[0].content must be a list"),
        ("/v1/responses", {"input": [{"type": "reasoning", "content": {"a": 1}}]}, "input[0].content must be a list"),
        (
            "/v1/chat/completions",
            {
                "messages": [USER],
                "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "thing"}}},
            },
            "the grammar does not compile: failed to compile JSON schema: Invalid type: thing",
        ),
        ("/v1/chat/completions", {"messages": [{"role": "x" * 5000, "content": ""}]}, "characters left out"),
    ],
)
def test_the_message_says_where(path, body, told):
    with serving(small_tokenizer()) as server:
        server.say([])
        status, answer, _ = server.post(path, body)
    assert status == 400 and told in answer["error"]["message"] and len(answer["error"]["message"]) < 1100
