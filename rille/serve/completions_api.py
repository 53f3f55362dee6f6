"""`/v1/completions`: plain text or token ids, continued. Tokenise and detokenise. No torch here.

Several prompts may come in one request; choice j of prompt i has the index i n + j.
Source: OpenAI's API reference; vLLM's `/tokenize` and `/detokenize`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, Any
from uuid import uuid4

from pydantic import Field

from rille.serve.asking import Ask, Body, Json, Limit, SamplingBody, UsageIn, read_stops, read_top_logprobs
from rille.serve.chat_api import usage_body, usage_so_far, with_known_role
from rille.serve.front import Front, Turn
from rille.serve.replying import Ended, Gathered, Piece, total
from rille.serve.schema import Usage
from rille.serve.spelling import Lists
from rille.serve.sse import DONE, HOLE, Form, event
from rille.text.reply import Content

MAX_PROMPTS = 256


class CompletionBody(SamplingBody):
    # In this order: of thousands of ids none need be looked at as something else first.
    prompt: Annotated[str | list[int] | list[list[int]] | list[str], Field(union_mode="left_to_right")]
    max_tokens: Limit = 16
    logprobs: int | None = None
    echo: bool | None = None
    return_token_ids: bool | None = None

    def prompts(self, front: Front) -> list[list[int]]:
        """Token ids of each prompt. Raises ValueError."""
        given = self.prompt
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not 0 < len(given) <= MAX_PROMPTS:
            raise ValueError(f"prompt has {len(given)} prompts; it must have 1 to {MAX_PROMPTS}")
        if self.echo and self.logprobs is not None:
            raise ValueError("echo does not go with logprobs: there are none of the prompt's tokens")
        return [front.tokenizer.encode(one) if isinstance(one, str) else _ids(one) for one in given]

    def begin(self, front: Front) -> Completions:
        """Start all prompts, or none. Raises as `Front.begin`."""
        prompts, sampling = self.prompts(front), self.sampling()
        sampling["stop"] = read_stops(self.stop)
        sampling["logprobs"] = self.logprobs is not None
        sampling["top_logprobs"] = read_top_logprobs(self.logprobs or 0, "logprobs")
        echoes = [front.tokenizer.decode(ids) if self.echo else "" for ids in prompts]
        turns: list[Turn] = []
        is_whole = False
        try:
            for ids in prompts:
                turns.append(front.begin_text(ids, self.max_tokens, sampling))
            is_whole = True
        finally:
            if not is_whole:
                for turn in turns:
                    turn.abort()
        return Completions(turns, echoes, self.logprobs is not None, bool(self.return_token_ids))


class Completions:
    """All prompts of one request. echoes: what each choice's text begins with."""

    def __init__(
        self, turns: Sequence[Turn], echoes: Sequence[str], wants_logprobs: bool, wants_ids: bool = False
    ) -> None:
        self.turns, self.echoes, self.wants_logprobs, self.wants_ids = turns, echoes, wants_logprobs, wants_ids
        self.num_each = turns[0].num_choices

    def abort(self) -> None:
        """End what nobody will read."""
        for turn in self.turns:
            turn.abort()

    async def pieces(self) -> AsyncGenerator[Piece | Ended, None]:
        """Of all turns as they come, with the indices of the whole request."""
        if len(self.turns) == 1:  # nothing to bring together, and a queue costs as much as all before it
            async with aclosing(self.turns[0].pieces()) as pieces:
                async for piece in pieces:
                    yield piece
            return
        queue: asyncio.Queue[Piece | Ended | int] = asyncio.Queue()

        async def read(place: int, turn: Turn) -> None:
            first = place * self.num_each
            try:
                async with aclosing(turn.pieces()) as pieces:
                    async for piece in pieces:
                        queue.put_nowait(replace(piece, index=first + piece.index) if first else piece)
            finally:
                queue.put_nowait(place)

        tasks = [asyncio.ensure_future(read(place, turn)) for place, turn in enumerate(self.turns)]
        try:
            left = len(tasks)
            while left:
                piece = await queue.get()
                if isinstance(piece, int):
                    left -= 1
                    await tasks[piece]  # raises what it has raised
                else:
                    yield piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def usage(self, ends: dict[int, Ended]) -> Usage:
        """Of all prompts together."""
        each = [
            total(ends[place * self.num_each + choice] for choice in range(self.num_each))[0]
            for place in range(len(self.turns))
        ]
        return Usage(
            sum(usage.prompt_tokens for usage in each),
            sum(usage.cached_tokens for usage in each),
            sum(usage.completion_tokens for usage in each),
        )


def _ids(given: Any) -> list[int]:
    assert isinstance(given, list), "the body's form is checked"
    return given


def _head(completions: Completions, model: str) -> Json:
    created = completions.turns[0].created
    return {"id": f"cmpl-{uuid4().hex}", "object": "text_completion", "created": created, "model": model}


async def whole(front: Front, completions: Completions, model: str) -> Json:
    """The body of a reply that is not streamed."""
    gathered = [Gathered() for _ in range(len(completions.turns) * completions.num_each)]
    ends: dict[int, Ended] = {}
    async with aclosing(completions.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Ended):
                ends[piece.index] = piece
            else:
                gathered[piece.index].add(piece)
    choices = [
        {
            "index": index,
            "text": completions.echoes[index // completions.num_each] + choice.content,
            "logprobs": Lists(front.tokenizer).of(choice.tokens) if completions.wants_logprobs else None,
            "finish_reason": ends[index].reason,
            **({"token_ids": [token.token for token in choice.tokens]} if completions.wants_ids else {}),
        }
        for index, choice in enumerate(gathered)
    ]
    return {**_head(completions, model), "choices": choices, "usage": usage_body(completions.usage(ends), 0)}


class _Chunks:
    """Chunks of one stream. What those without log-probabilities have in common is made once a choice. tail: what each
    ends with; with `varies` that is what was counted last."""

    def __init__(self, head: Json, tail: Json, wants_ids: bool, varies: bool = False) -> None:
        self._head, self._tail, self._wants_ids, self._varies = head, tail, wants_ids, varies
        self._forms: dict[int, Form] = {}

    def count(self, prompt: int, written: int) -> None:
        """So many tokens there are by now."""
        if self._varies:
            self._tail = {"usage": usage_so_far(prompt, written)}

    def chunk(self, index: int, text: str, reason: str | None = None) -> bytes:
        return event(self._body(index, text, reason=reason))

    def of(self, index: int, text: str, logprobs: Json | None, ids: list[int]) -> bytes:
        """A chunk of what was said."""
        if logprobs is not None or self._varies:
            return event(self._body(index, text, ids, logprobs))
        if (form := self._forms.get(index)) is None:
            form = self._forms[index] = Form(self._body(index, HOLE, HOLE))
        return form.fill(text, ids) if self._wants_ids else form.fill(text)

    def _body(
        self, index: int, text: str, ids: Any = None, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        choice |= {"token_ids": ids} if self._wants_ids and ids is not None else {}
        return {**self._head, "choices": [choice], **self._tail}


async def stream(front: Front, completions: Completions, model: str, usage_in: UsageIn) -> AsyncGenerator[bytes, None]:
    """The same reply as chunks."""
    head = _head(completions, model)
    tail = {} if usage_in == "none" else {"usage": None}
    chunks = _Chunks(head, tail, completions.wants_ids, varies=usage_in == "every")
    read, written = sum(turn.num_prompt for turn in completions.turns), 0
    lists: dict[int, Lists] = {}
    ends: dict[int, Ended] = {}
    chunks.count(read, written)
    for place, echo in enumerate(completions.echoes):
        for choice in range(completions.num_each if echo else 0):
            yield chunks.chunk(place * completions.num_each + choice, echo)
    async with aclosing(completions.pieces()) as pieces:
        async for piece in pieces:
            if isinstance(piece, Ended):
                ends[piece.index] = piece
                yield chunks.chunk(piece.index, "", piece.reason)
                continue
            written += len(piece.tokens)
            chunks.count(read, written)
            text = "".join(one.text for one in piece.events if isinstance(one, Content))
            logprobs = None
            if completions.wants_logprobs and piece.tokens:
                logprobs = lists.setdefault(piece.index, Lists(front.tokenizer)).of(piece.tokens)
            ids = [token.token for token in piece.tokens]
            if text or logprobs or (ids and completions.wants_ids):
                yield chunks.of(piece.index, text, logprobs, ids)
    if usage_in != "none":
        yield event({**head, "choices": [], "usage": usage_body(completions.usage(ends), 0)})
    yield DONE


class TokenizeBody(Body):
    """A text, or a conversation as it would be rendered."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Json] | None = None
    tools: list[Any] | None = None
    add_special_tokens: bool | None = None  # a text has none here, whatever is asked

    def ids(self, front: Front) -> list[int]:
        """Raises ValueError."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt or messages: give one of them")
        if self.prompt is not None:
            if self.tools is not None:
                raise ValueError("tools go with messages; a prompt is a text as it is")
            return front.tokenizer.encode(self.prompt)
        messages = [with_known_role(message) for message in self.messages or []]
        return front.prepare(Ask(messages=messages, tools=self.tools)).ids


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[int]
