"""`/v1/responses`: OpenAI's newer API on the same conversations. No torch here.

    input items  ->  messages  ->  Ask           pieces  ->  output items: reasoning, message, function_call

Nothing is kept between requests: the whole history comes each time, and `previous_response_id` is refused.
Source: OpenAI's API reference.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from rille.serve.asking import Ask, Body, Json, Limit, Unheeded, read_effort, read_tool_choice
from rille.serve.chat_api import new_call_id
from rille.serve.errors import ApiError
from rille.serve.front import Turn
from rille.serve.history import from_responses
from rille.serve.replying import Ended, Growing
from rille.serve.schema import Usage
from rille.serve.sse import HOLE, Form, event
from rille.text.reply import CallArguments, CallBegin, Content, Event, Reasoning

_ENCRYPTED = "reasoning.encrypted_content"  # who asks for it wants thinking that can be sent back; here any can

_WORDS = {"messages": "input", "response_format": "text.format"}

Summary = Literal["auto", "concise", "detailed"]  # there are none: reasoning comes as it is


class ReasoningOptions(Body):
    effort: str | None = None
    summary: Summary | None = None
    generate_summary: Summary | None = None


class StreamOptions(Body):
    """The usage is in the last event in any case."""

    include_obfuscation: bool | None = None  # we never pad


class TextFormat(Body):
    format: Json | None = None
    verbosity: Literal["medium"] | None = None  # the model knows no other


class ResponsesBody(Unheeded):
    """`include` can ask for nothing that does not come anyway, and `stream_options` for nothing at all; a response
    repeats the `metadata`."""

    model: str | None = None
    input: str | list[Any]
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    text: TextFormat | None = None
    max_output_tokens: Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    previous_response_id: str | None = None
    conversation: str | Json | None = None
    background: Literal[False] | None = None
    truncation: Literal["disabled"] | None = None

    stream_options: StreamOptions | None = None
    include: list[str] | None = None

    def ask(self) -> Ask:
        """Raises ValueError."""
        for name in ("previous_response_id", "conversation"):
            if getattr(self, name) is not None:
                raise ValueError(f"{name}: this server keeps no conversations; send all of the input each time")
        if others := sorted({*(self.include or ())} - {_ENCRYPTED}):
            raise ValueError(f"include: this server has no {others[0]!r}; it takes {_ENCRYPTED}, and thinking is open")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream: true only")
        listed = from_responses(self.input, self.instructions, self.tools)
        choice, name = read_tool_choice(self.tool_choice)
        thinking, effort = True, "max"
        if self.reasoning is not None and self.reasoning.effort is not None:
            thinking, effort = read_effort(self.reasoning.effort, "reasoning.effort")
        return Ask(
            messages=listed.messages,
            tools=listed.tools,
            thinking=thinking,
            effort=effort,
            tool_choice=choice,
            tool_name=name,
            parallel=self.parallel_tool_calls is not False,
            response_format=self._format(),
            max_tokens=self.max_output_tokens,
            sampling=self.given("temperature", "top_p"),
            places=listed.places,
            words=_WORDS,
        )

    def _format(self) -> Json | None:
        """The format lies flat here."""
        given = self.text.format if self.text is not None else None
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}

    def echo(self) -> Json:
        """What a response repeats of its request."""
        given = self.model_dump(exclude_none=True)
        names = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata")
        return {
            **{name: given.get(name) for name in names},
            "tools": given.get("tools", []),
            "tool_choice": given.get("tool_choice", "auto"),
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "reasoning": given.get("reasoning"),
            "text": given.get("text", {"format": {"type": "text"}}),
            "truncation": "disabled",
            "store": False,
            "previous_response_id": None,
        }


@dataclass
class Response:
    """The answer as it grows. `events` makes the items and what is told of them; whole, only the items count."""

    turn: Turn
    model: str
    echo: Json
    items: list[Json] = field(default_factory=list)
    id: str = field(default_factory=lambda: f"resp_{uuid4().hex}")
    _open: str | None = None
    _written: Growing = field(default_factory=Growing)  # of the open item
    _number: int = 0

    def body(self, status: str, end: Ended | None = None, error: Json | None = None) -> Json:
        self._fill()
        cut = status == "incomplete"
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.turn.created,
            "status": status,
            "model": self.model,
            "output": self.items,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": _usage(end.usage, end.reasoning_tokens) if end is not None else None,
            **self.echo,
        }

    async def events(self) -> AsyncGenerator[Json, None]:
        """Everything that is told, in order."""
        yield self.numbered("response.created", response=self.body("in_progress"))
        yield self.numbered("response.in_progress", response=self.body("in_progress"))
        async with aclosing(self.turn.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ended):
                    status = "incomplete" if piece.reason == "length" else "completed"
                    for told in self._close(status):
                        yield told
                    yield self.numbered(f"response.{status}", response=self.body(status, piece))
                    continue
                for one in piece.events:
                    for told in self._write(one):
                        yield told

    def numbered(self, kind: str, **parts: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **parts}

    def _of_item(self, kind: str, **parts: Any) -> Json:
        place: Json = {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        if self._open != "function_call":
            place["content_index"] = 0
        return self.numbered(kind, **place, **parts)

    def _write(self, one: Event) -> Iterator[Json]:
        match one:
            case Reasoning(text):
                yield from self._enter("reasoning", {"summary": [], "content": []})
                self._written.add(text)
                yield self._of_item("response.reasoning_text.delta", delta=text)
            case Content(text):
                yield from self._enter("message", {"role": "assistant", "content": []})
                self._written.add(text)
                yield self._of_item("response.output_text.delta", delta=text, logprobs=[])
            case CallBegin(_, name):
                yield from self._close("completed")
                call = {"call_id": new_call_id(), "name": name, "arguments": ""}
                yield from self._enter("function_call", call)
            case CallArguments(_, text):
                self._written.add(text)
                yield self._of_item("response.function_call_arguments.delta", delta=text)

    def _enter(self, kind: str, item: Json) -> Iterator[Json]:
        if self._open == kind:
            return
        yield from self._close("completed")
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self.items.append({"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **item})
        self._open, self._written = kind, Growing()
        shown = {**item, "id": self.items[-1]["id"], "type": kind, "status": "in_progress"}
        yield self.numbered("response.output_item.added", output_index=len(self.items) - 1, item=shown)
        if kind == "function_call":
            return
        part: Json = {"type": "reasoning_text", "text": ""}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.items[-1]["content"] = [part]
        yield self._of_item("response.content_part.added", part=dict(part))

    def _fill(self) -> None:
        """Give the open item the text that it has by now."""
        if self._open == "function_call":
            self.items[-1]["arguments"] = str(self._written)
        elif self._open is not None:
            self.items[-1]["content"][0]["text"] = str(self._written)

    def _close(self, status: str) -> Iterator[Json]:
        if self._open is None:
            return
        self._fill()
        item = self.items[-1]
        item["status"] = status
        if self._open == "function_call":
            arguments = item["arguments"]
            yield self._of_item("response.function_call_arguments.done", arguments=arguments, name=item["name"])
        else:
            part = item["content"][0]
            if self._open == "reasoning":
                yield self._of_item("response.reasoning_text.done", text=part["text"])
            else:
                yield self._of_item("response.output_text.done", text=part["text"], logprobs=[])
            yield self._of_item("response.content_part.done", part=part)
        yield self.numbered("response.output_item.done", output_index=len(self.items) - 1, item=item)
        self._open = None


def _usage(usage: Usage, reasoning: int) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def whole(response: Response) -> Json:
    """The body of a reply that is not streamed: what the last event holds."""
    last: Json = {}
    async with aclosing(response.events()) as events:
        async for told in events:
            last = told
    return last["response"]


class _Written:
    """Events as bytes. What the deltas of one item have in common is made once."""

    def __init__(self) -> None:
        self._item, self._form = ("", ""), Form({})

    def bytes(self, told: Json) -> bytes:
        if "delta" not in told:
            return event(told, told["type"])
        item = told["item_id"], told["type"]
        if item != self._item:
            self._item = item
            self._form = Form({**told, "sequence_number": HOLE, "delta": HOLE}, told["type"])
        return self._form.fill(told["sequence_number"], told["delta"])


async def stream(response: Response) -> AsyncGenerator[bytes, None]:
    """The same reply as events; one that fails says so in its last event."""
    written = _Written()
    try:
        async with aclosing(response.events()) as events:
            async for told in events:
                yield written.bytes(told)
    except ApiError as error:
        failed = response.body("failed", error={"code": error.code or "server_error", "message": str(error)})
        yield written.bytes(response.numbered("response.failed", response=failed))
