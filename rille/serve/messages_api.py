"""`/v1/messages`: Anthropic's API on the same conversations. No torch here.

    content blocks  ->  messages in the OpenAI form  ->  Ask           pieces  ->  blocks: thinking, text, tool_use

input_tokens are those of the prompt that were computed, cache_read_input_tokens the others. A signature says nothing
here: any is taken back, and thinking without one, or none at all, too. What others have redacted cannot be read and is
left out.
Source: Anthropic's API reference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal
from uuid import uuid4

from rille.serve.asking import Ask, Body, Json, Limit, check_keys, read_effort, read_stops
from rille.serve.errors import ApiError
from rille.serve.front import Front, Turn
from rille.serve.history import from_anthropic
from rille.serve.replying import Ended, Growing
from rille.serve.schema import Usage
from rille.serve.sse import HOLE, Form, event
from rille.text.messages import strict_json
from rille.text.reply import CallArguments, CallBegin, Content, Event, Reasoning

SIGNATURE = "rille"
_TEXTS = {"thinking_delta": "thinking", "text_delta": "text", "input_json_delta": "partial_json"}
_WORDS = {"response_format": "output_config.format", "tool_choice 'required'": "tool_choice 'any' or a tool"}
_ROOM = 200  # levels
_EFFORT_UP_TO = ((4_096, "low"), (16_384, "high"))  # tokens of a thinking budget; above: max


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None
    display: Literal["summarized", "full"] | None = None  # it is always full


class ToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputConfig(Body):
    effort: str | None = None
    format: Json | None = None


class Edit(Body):
    """Of a history: this server takes what it does anyway, which is to keep all thinking."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(Body):
    edits: list[Edit] | None = None


class MessagesBody(Body):
    """thread: a conversation that the server would keep; Anthropic's client begins one by itself, and goes on without
    where it is told so. The last parameters change nothing here, as in `Unheeded`."""

    model: str
    messages: list[Json]
    max_tokens: Limit
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    thread: Json | None = None

    metadata: Json | None = None
    service_tier: str | None = None
    context_management: ContextManagement | None = None
    cache_control: Json | None = None

    def ask(self) -> Ask:
        """Raises ValueError, and ApiError for a thread."""
        if self.thread is not None:
            known = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
            text = "thread: this server keeps no conversations; send all messages each time"
            raise ApiError(400, text, code="unsupported", param="thread", details=known)
        choice, name, parallel = self._choice()
        thinking, effort = self._effort()
        listed = from_anthropic(self.messages, self.system, self.tools)
        return Ask(
            messages=listed.messages,
            tools=listed.tools,
            thinking=thinking,
            effort=effort,
            tool_choice=choice,
            tool_name=name,
            parallel=parallel,
            response_format=self._format(),
            stop=read_stops(self.stop_sequences, "stop_sequences"),
            max_tokens=self.max_tokens,
            sampling=self.given("temperature", "top_p", "top_k"),
            places=listed.places,
            words=_WORDS,
        )

    def _choice(self) -> tuple[str | None, str | None, bool]:
        given = self.tool_choice
        if given is None:
            return None, None, True
        if (given.type == "tool") != (given.name is not None):
            raise ValueError(f"tool_choice of type {given.type!r}: a name goes with the type tool, and only with that")
        kinds = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}
        return kinds[given.type], given.name, not given.disable_parallel_tool_use

    def _effort(self) -> tuple[bool, str | None]:
        """Thinking is off unless asked for, as in Anthropic's API."""
        given, config = self.thinking, self.output_config
        asked = None
        if config is not None and config.effort is not None:
            asked = read_effort(config.effort, "output_config.effort")
        if given is None:
            return False, None
        budget = given.budget_tokens
        if budget is not None and (given.type != "enabled" or budget < 1):
            raise ValueError(
                f"thinking has the type {given.type!r} and budget_tokens {budget}; a budget goes with the type "
                "enabled, and is at least 1"
            )
        if given.type == "disabled":
            return False, None
        if asked is not None or budget is None:
            return asked or (True, "max")
        return True, next((effort for limit, effort in _EFFORT_UP_TO if budget <= limit), "max")

    def _format(self) -> Json | None:
        given = self.output_config.format if self.output_config is not None else None
        if given is None:
            return None
        if given.get("type") != "json_schema" or not isinstance(given.get("schema"), Mapping):
            raise ValueError("output_config.format must be of type json_schema, with a schema")
        check_keys(given, ("type", "schema"), "output_config.format")
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"]}}


class CountBody(Body):
    model: str
    messages: list[Json]
    system: str | list[Json] | None = None
    tools: list[Json] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    cache_control: Json | None = None

    def ask(self) -> Ask:
        """Raises ValueError."""
        return MessagesBody(**self.model_dump(exclude_none=True), max_tokens=1).ask()


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _stop(end: Ended, stops: tuple[str, ...]) -> Json:
    matched = end.matched if end.matched in stops else None
    reasons = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}
    reason = "stop_sequence" if matched is not None and end.reason == "stop" else reasons[end.reason]
    return {"stop_reason": reason, "stop_sequence": matched}


def _message(turn: Turn, model: str) -> Json:
    return {
        "id": f"msg_{uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(Usage(turn.num_prompt, 0, 0)),
    }


async def whole(turn: Turn, model: str, stops: tuple[str, ...]) -> Json:
    """The body of a reply that is not streamed: the blocks that the events of a stream make."""
    writer, blocks = _BlockWriter(), list[_Block]()
    end: Ended | None = None
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Ended):
                end = piece
                continue
            for body in (body for one in piece.events for body in writer.write(one)):
                if body["type"] == "content_block_start":
                    blocks.append(_Block(body["content_block"]))
                elif body["type"] == "content_block_delta":
                    blocks[-1].add(body["delta"])
    assert end is not None, "a turn without an error has an end"
    return {
        **_message(turn, model),
        "content": [block.whole() for block in blocks],
        **_stop(end, stops),
        "usage": _usage(end.usage),
    }


class _Block:
    """One block, as its events make it."""

    def __init__(self, begun: Json) -> None:
        self._begun, self._text = begun, Growing()

    def add(self, delta: Json) -> None:
        if delta["type"] in _TEXTS:
            self._text.add(delta[_TEXTS[delta["type"]]])

    def whole(self) -> Json:
        text = str(self._text)
        match self._begun["type"]:
            case "thinking":
                return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
            case "text":
                return {"type": "text", "text": text}
        return {**self._begun, "input": _arguments(text)}


def _arguments(text: str) -> Any:
    """Arguments that were cut off, or are no JSON, come as a text under one name: nothing is lost."""
    try:
        value = strict_json(text)
        if text.count("[") + text.count("{") > _ROOM:  # what is written lies deeper, in a reply and on the stack
            strict_json("[" * _ROOM + text + "]" * _ROOM)
        return value
    except (ValueError, RecursionError):
        return {"unfinished": text}


def _tool_use(name: str, arguments: Any) -> Json:
    return {"type": "tool_use", "id": f"toolu_{uuid4().hex[:24]}", "name": name, "input": arguments}


async def stream(turn: Turn, model: str, stops: tuple[str, ...]) -> AsyncGenerator[bytes, None]:
    """The same reply as events."""
    yield _named({"type": "message_start", "message": _message(turn, model)})
    writer, written = _BlockWriter(), _Written()
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Ended):
                for one in writer.close():
                    yield _named(one)
                yield _named({"type": "message_delta", "delta": _stop(piece, stops), "usage": _usage(piece.usage)})
                continue
            for one in piece.events:
                for body in writer.write(one):
                    yield written.bytes(body)
    yield _named({"type": "message_stop"})


def _named(body: Json) -> bytes:
    return event(body, body["type"])


class _Written:
    """Events as bytes. What the deltas of one block have in common is made once."""

    def __init__(self) -> None:
        self._block, self._form = (-1, ""), Form({})

    def bytes(self, body: Json) -> bytes:
        delta = body.get("delta")
        if delta is None or (key := _TEXTS.get(delta["type"])) is None:
            return _named(body)
        block = body["index"], key
        if block != self._block:
            self._block = block
            self._form = Form({**body, "delta": {**delta, key: HOLE}}, body["type"])
        return self._form.fill(delta[key])


class _BlockWriter:
    """Which block is open, and what opens, continues and closes it."""

    def __init__(self) -> None:
        self._index = -1
        self._open: str | None = None

    def write(self, one: Event) -> list[Json]:
        match one:
            case Reasoning(text):
                empty = {"type": "thinking", "thinking": "", "signature": ""}
                return [*self._enter("thinking", empty), self._delta({"type": "thinking_delta", "thinking": text})]
            case Content(text):
                opened = self._enter("text", {"type": "text", "text": ""})
                return [*opened, self._delta({"type": "text_delta", "text": text})]
            case CallBegin(_, name):
                return [*self.close(), *self._enter("tool_use", _tool_use(name, {}))]
            case CallArguments(_, text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
        return []

    def _enter(self, kind: str, block: Json) -> list[Json]:
        if self._open == kind:
            return []
        closed = self.close()
        self._open, self._index = kind, self._index + 1
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def close(self) -> list[Json]:
        if self._open is None:
            return []
        signed = []
        if self._open == "thinking":
            signed = [self._delta({"type": "signature_delta", "signature": SIGNATURE})]
        self._open = None
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: Json) -> Json:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def count(front: Front, ask: Ask) -> Json:
    """The body of `/v1/messages/count_tokens`."""
    return {"input_tokens": len(front.prepare(ask).ids)}
