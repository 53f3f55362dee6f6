"""Every field of every body acts: it changes what the engine is asked or what the client is told. Those that change
nothing are named here, and in docs/serving.md; a new field must be in one of the two lists."""

import asyncio
import http.client
import json
import re
from contextlib import suppress
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from rille.serve.api import streamed
from rille.serve.asking import StreamOptions
from rille.serve.chat_api import ChatBody, Thinking
from rille.serve.completions_api import CompletionBody
from rille.serve.messages_api import CountBody, MessagesBody, OutputConfig
from rille.serve.responses_api import ReasoningOptions, ResponsesBody, TextFormat
from tests.serve.scripted import reply_ids
from tests.serve.served import serving
from tests.serve.test_api_chat import FORMAT, SCHEMA, TOOL, USER
from tests.serve.test_api_others import CLAUDE, FLAT

OTHER = {**TOOL, "function": {**TOOL["function"], "name": "halve"}}
SILENT = {
    "user": "u",
    "metadata": {"user_id": "a"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "s",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "prompt_cache_options": {"mode": "explicit"},
    "cache_control": {"type": "ephemeral"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "verbosity": "medium",
    "modalities": ["text"],
    "background": False,
    "truncation": "disabled",
    "include": ["reasoning.encrypted_content"],
}
SAMPLING: dict[str, Any] = {
    "model": "other",
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 1.0},
    "seed": 3,
    "n": 2,
    "stop": "STOP",
    "stop_token_ids": [3],
    "ignore_eos": True,
    "min_tokens": 2,
    "stream": True,
    "stream_options": {"include_usage": True},
}
# Of each path: its body, what is sent in any case, a value for each field that acts, and what must go along with some.
CHAT: dict[str, Any] = {
    **SAMPLING,
    "messages": [{"role": "developer", "content": "s"}, USER],
    "tools": [TOOL, OTHER],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "response_format": FORMAT,
    "reasoning_effort": "low",
    "thinking": {"type": "disabled"},
    "max_tokens": 99,
    "max_completion_tokens": 99,
    "logprobs": True,
    "top_logprobs": 2,
}
COMPLETION = {
    **SAMPLING,
    "prompt": [5, 6],
    "max_tokens": 99,
    "logprobs": 1,
    "echo": True,
    "return_token_ids": True,
}
MESSAGES = {
    "model": "other",
    "messages": [USER, USER],
    "max_tokens": 98,
    "system": "s",
    "tools": [CLAUDE, {**CLAUDE, "name": "halve"}],
    "tool_choice": {"type": "any"},
    "thinking": {"type": "enabled", "budget_tokens": 2000},
    "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    "stop_sequences": ["STOP"],
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 3,
    "stream": True,
}
RESPONSES = {
    "model": "other",
    "input": "other",
    "instructions": "s",
    "tools": [FLAT, {**FLAT, "name": "halve"}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_object"}},
    "max_output_tokens": 99,
    "temperature": 0.5,
    "top_p": 0.9,
    "stream": True,
    "metadata": {"a": "b"},  # comes back
}
WITH = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "min_tokens": {"tools": None},
}
# Taken as null only; and of responses the usage of a stream always comes.
NEVER = {"previous_response_id", "conversation", "thread", "stream_options"}
BODIES: dict[str, tuple[Any, dict, dict]] = {
    "/v1/chat/completions": (ChatBody, {"messages": [USER], "tools": [TOOL]}, CHAT),
    "/v1/completions": (CompletionBody, {"prompt": "a"}, COMPLETION),
    "/v1/messages": (
        MessagesBody,
        {"model": "tiny", "messages": [USER], "max_tokens": 99, "tools": [CLAUDE]},
        MESSAGES,
    ),
    "/v1/responses": (ResponsesBody, {"input": "hi", "tools": [FLAT]}, RESPONSES),
}


@pytest.fixture(scope="module")
def server(tokenizer):
    with serving(tokenizer) as served:
        served.engine.is_checking = False
        yield served


def outcome(server, path: str, body: dict) -> tuple:
    """What the engine was asked, and what the client was told but for names and times."""
    thinking = path != "/v1/messages" or "thinking" in body
    server.engine.scripts.clear()
    server.say(reply_ids(server.engine.tokenizer, thinking, content="one STOP two"))
    status, told = ask(server, path, body)
    assert status == 200, told
    params = server.request.params
    if body.get("stream"):  # how it is cut follows from the time
        return list(server.request.prompt), "streamed", '"prompt_tokens":' in told
    told = re.sub(r'"(id|item_id|created|created_at|call_id)": ?("[^"]*"|\d+)', "", told)
    return list(server.request.prompt), {**vars(params), "grammar": getattr(params.grammar, "lark", None)}, told


def ask(server, path: str, body: dict) -> tuple[int, str]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


CASES = [(path, field) for path, (_, _, acting) in BODIES.items() for field in acting]


@pytest.mark.parametrize(("path", "field"), CASES)
def test_a_field_acts(server, path, field):
    _, base, acting = BODIES[path]
    base = {**base, **WITH.get(field, {})}
    new, plain = outcome(server, path, {**base, field: acting[field]}), outcome(server, path, base)
    if path == "/v1/responses" and field not in ("model", "metadata", "stream"):
        new, plain = new[:2], plain[:2]  # a response repeats its request
    assert new != plain


@pytest.mark.parametrize("path", BODIES)
def test_the_others_are_silent_and_the_lists_are_whole(server, path):
    body, base, acting = BODIES[path]
    silent = set(body.model_fields) - set(acting) - NEVER
    assert silent <= set(SILENT), "a field that is in neither list"
    plain = outcome(server, path, base)
    for field in silent:
        assert outcome(server, path, {**base, field: SILENT[field]}) == plain, field


@pytest.mark.parametrize("path", BODIES)
def test_null_is_as_if_a_field_were_not_there(path):
    body, base, _ = BODIES[path]
    for name in (name for name, field in body.model_fields.items() if not field.is_required()):
        without = body.model_validate({key: value for key, value in base.items() if key != name})
        assert body.model_validate({**base, name: None}) == without, name
    with pytest.raises(ValueError):
        body.model_validate(dict.fromkeys(base))


@pytest.mark.parametrize("part", [StreamOptions, Thinking, OutputConfig, ReasoningOptions, TextFormat])
def test_null_inside_a_parameter_too(part):
    assert part.model_validate(dict.fromkeys((*part.model_fields, "unknown"))) == part()


def test_counting_takes_what_belongs_to_the_prompt():
    rest = {
        "max_tokens",
        "stop_sequences",
        "temperature",
        "top_p",
        "top_k",
        "stream",
        "metadata",
        "service_tier",
        "thread",
    }
    assert set(CountBody.model_fields) == set(MessagesBody.model_fields) - rest


def test_every_api_has_the_time_limit(tokenizer):
    with serving(tokenizer, timeout_s=60) as limited:
        limited.engine.is_checking = False
        for path, (_, base, _) in BODIES.items():
            outcome(limited, path, base)
            assert limited.request.deadline_s == 60, path


@pytest.mark.parametrize("version", ["2.3", "2.4"])
def test_a_stream_whose_client_has_gone_before_it_began_is_ended(version):
    """No line of the reply runs then, and so none that would end the request."""
    began, ended = [], []

    async def parts():
        began.append(True)
        yield b""

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        raise OSError("gone")

    async def run():
        response = streamed(parts(), lambda: ended.append(True))
        with suppress(ClientDisconnect, OSError):
            await response({"type": "http", "asgi": {"spec_version": version}}, receive, send)

    asyncio.run(run())
    assert ended == [True] and not began
