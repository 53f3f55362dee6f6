"""`/v1/chat/completions`: OpenAI's chat, with `reasoning_content`, and Moonshot's `thinking` and `partial`. No torch
here.

    thinking {type, effort, keep}  over  reasoning_effort          both absent: thinking, with all the effort there is

Source: OpenAI's API reference; Moonshot's API and its vendor verifier for what is refused.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Literal
from uuid import uuid4

from rille.serve.asking import (
    Ask,
    Body,
    Json,
    Limit,
    SamplingBody,
    UsageIn,
    read_effort,
    read_stops,
    read_tool_choice,
    read_top_logprobs,
)
from rille.serve.front import Front, Turn
from rille.serve.replying import Ended, Gathered, Piece, total
from rille.serve.schema import Usage
from rille.serve.spelling import entry
from rille.serve.sse import DONE, HOLE, Form, event
from rille.text.reply import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning


class Thinking(Body):
    type: Literal["enabled", "disabled"] | None = None
    effort: str | None = None
    keep: Literal["all"] | None = None  # the thinking of earlier turns always stays in the prompt


class ChatBody(SamplingBody):
    messages: list[Json]
    tools: list[Any] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    reasoning_effort: str | None = None
    thinking: Thinking | None = None
    max_tokens: Limit | None = None
    max_completion_tokens: Limit | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    modalities: list[Literal["text"]] | None = None
    verbosity: Literal["medium"] | None = None  # the model knows no other

    def ask(self) -> Ask:
        """Raises ValueError."""
        choice, name = read_tool_choice(self.tool_choice)
        thinking, effort = self._effort()
        sampling = self.sampling()
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs: true only")
        sampling["logprobs"] = bool(self.logprobs)
        sampling["top_logprobs"] = read_top_logprobs(self.top_logprobs or 0)
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return Ask(
            messages=[with_known_role(message) for message in self.messages],
            tools=self.tools,
            thinking=thinking,
            effort=effort,
            tool_choice=choice,
            tool_name=name,
            parallel=self.parallel_tool_calls is not False,
            response_format=self.response_format,
            stop=read_stops(self.stop),
            max_tokens=min(limits, default=None),
            sampling=sampling,
        )

    def _effort(self) -> tuple[bool, str | None]:
        thinking, effort = (True, "max") if self.reasoning_effort is None else read_effort(self.reasoning_effort)
        given = self.thinking
        if given is not None and given.type is not None:
            thinking = given.type == "enabled"
        if given is not None and given.effort is not None:
            thinking_too, effort = read_effort(given.effort, "thinking.effort")
            thinking = thinking and thinking_too
        return thinking, effort if effort is not None else "max"


def with_known_role(message: Json) -> Json:
    """OpenAI's newer word for the system."""
    return {**message, "role": "system"} if message.get("role") == "developer" else message


def usage_body(usage: Usage, reasoning: int) -> Json:
    """cached_tokens stands where OpenAI's clients look for it and where Moonshot's do."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning},
    }


def usage_so_far(prompt: int, written: int) -> Json:
    """What a stream knows on its way."""
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}


def new_call_id() -> str:
    return f"call_{uuid4().hex[:24]}"


async def whole(front: Front, turn: Turn, model: str, wants_logprobs: bool) -> Json:
    """The body of a reply that is not streamed."""
    choices = await turn.gather()
    usage, reasoning = total(choice.end for choice in choices if choice.end is not None)
    return {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion",
        "created": turn.created,
        "model": model,
        "choices": [_choice(front, index, choice, wants_logprobs) for index, choice in enumerate(choices)],
        "usage": usage_body(usage, reasoning),
    }


def _choice(front: Front, index: int, choice: Gathered, wants_logprobs: bool) -> Json:
    assert choice.end is not None, "a gathered choice has ended"
    message: Json = {"role": "assistant", "content": choice.content}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.calls:
        message["content"] = choice.content or None
        message["tool_calls"] = [
            {"id": new_call_id(), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.calls
        ]
    tokens = [entry(front.tokenizer, token) for token in choice.tokens] if wants_logprobs else None
    return {
        "index": index,
        "message": message,
        "logprobs": {"content": tokens} if wants_logprobs else None,
        "finish_reason": choice.end.reason,
    }


class _Chunks:
    """Chunks of one stream. What those of a text have in common is made once. tail: what each ends with; with `varies`
    that is what was counted last."""

    def __init__(self, head: Json, tail: Json, varies: bool = False) -> None:
        self._head, self._tail, self._varies = head, tail, varies
        self._forms: dict[tuple[int, str], Form] = {}

    def count(self, prompt: int, written: int) -> None:
        """So many tokens there are by now."""
        if self._varies:
            self._tail = {"usage": usage_so_far(prompt, written)}

    def chunk(self, index: int, delta: Json, reason: str | None = None, logprobs: Json | None = None) -> bytes:
        return event(self._body(index, delta, reason, logprobs))

    def text(self, index: int, key: str, text: str) -> bytes:
        """A chunk whose delta has a text under this key, and nothing else."""
        if self._varies:
            return self.chunk(index, {key: text})
        if (form := self._forms.get((index, key))) is None:
            form = self._forms[index, key] = Form(self._body(index, {key: HOLE}, None, None))
        return form.fill(text)

    def _body(self, index: int, delta: Json, reason: str | None, logprobs: Json | None) -> Json:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **self._tail}

    def of(self, piece: Piece, logprobs: Json | None) -> Iterator[bytes]:
        """Chunks of what was said; with the first of them go the log-probabilities."""
        for one in piece.events:
            if logprobs is None and isinstance(one, Content):
                yield self.text(piece.index, "content", one.text)
            elif logprobs is None and isinstance(one, Reasoning):
                yield self.text(piece.index, "reasoning_content", one.text)
            elif delta := _delta(one):
                yield self.chunk(piece.index, delta, logprobs=logprobs)
                logprobs = None
        if logprobs is not None:
            yield self.chunk(piece.index, {}, logprobs=logprobs)


async def stream(
    front: Front, turn: Turn, model: str, wants_logprobs: bool, usage_in: UsageIn
) -> AsyncGenerator[bytes, None]:
    """The same reply as chunks."""
    head: Json = {
        "id": f"chatcmpl-{uuid4().hex}",
        "object": "chat.completion.chunk",
        "created": turn.created,
        "model": model,
    }
    chunks = _Chunks(head, {} if usage_in == "none" else {"usage": None}, varies=usage_in == "every")
    written = 0
    opening: Json = {"role": "assistant", "content": "", **({"reasoning_content": ""} if turn.has_thinking else {})}
    chunks.count(turn.num_prompt, 0)
    for index in range(turn.num_choices):
        yield chunks.chunk(index, opening)
    ends: list[Ended] = []
    async with aclosing(turn.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Ended):
                ends.append(piece)
                yield chunks.chunk(piece.index, {}, piece.reason)
                continue
            written += len(piece.tokens)
            chunks.count(turn.num_prompt, written)
            for part in chunks.of(piece, _piece_logprobs(front, piece) if wants_logprobs else None):
                yield part
    if usage_in != "none":
        usage, reasoning = total(ends)
        yield event({**head, "choices": [], "usage": usage_body(usage, reasoning)})
    yield DONE


def _piece_logprobs(front: Front, piece: Piece) -> Json | None:
    return {"content": [entry(front.tokenizer, token) for token in piece.tokens]} if piece.tokens else None


def _delta(one: Event) -> Json | None:
    match one:
        case Reasoning(text):
            return {"reasoning_content": text}
        case Content(text):
            return {"content": text}
        case CallBegin(index, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": new_call_id(), "type": "function", "function": function}]}
        case CallArguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallEnd():
            return None
        case _:
            raise AssertionError(f"{one} is not for clients")
