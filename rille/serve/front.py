"""Between the APIs and the engine: conversations become prompts, outputs become pieces of replies. No torch here.

    Ask  ->  render  ->  ids, pictures, grammar  ->  engine.submit  ->  Turn  ->  Piece* Ended

`Front` knows the tokenizer and what the checkpoint can do; a `Turn` is one request under way. Whoever leaves a turn
before its end, by an error or because the client has gone, ends the request in the engine too.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from time import perf_counter, time
from typing import Any

from rille.serve.asking import Ask, Json, check_response_format, check_tools
from rille.serve.dialogue import every_picture_url
from rille.serve.errors import ApiError
from rille.serve.meters import Meters
from rille.serve.replying import ChatReader, Ended, Gathered, Piece, Reader, TextReader
from rille.serve.schema import (
    Finished,
    Handle,
    Output,
    Request,
    SamplingParams,
    ServingEngine,
    TokenOutput,
    TooLarge,
)
from rille.text.chat import EncodedPrompt, Prompt, declared_tools, render
from rille.text.grammar import Grammar, continuations
from rille.text.images import ImageConfig, Images, decode_data_url, preprocess_images
from rille.text.media import expand_media
from rille.text.reply import Event, join_events
from rille.text.vocabulary import MEDIA_PAD, Tokenizer

_LONGEST_BEFORE_TIMEOUT = 0.95  # of the time limit: the engine's clock and ours do not agree to the millisecond


@dataclass(frozen=True)
class Abilities:
    """What a checkpoint can do. names: what clients may call it, the first is its own; max_length: tokens of prompt and
    reply; images: how pictures are prepared, None for a model that cannot see; media_id: the media token."""

    names: tuple[str, ...]
    max_length: int
    images: ImageConfig | None = None
    media_id: int | None = None
    created: int = 0


@dataclass(frozen=True)
class Prepared:
    """A prompt in tokens. grammar_prefix: text of the reply that it holds already."""

    prompt: Prompt
    ids: list[int]
    images: tuple[Images, ...]
    num_stable: int
    grammar_prefix: str


class Front:
    """timeout_s: what is not finished then ends with 408. Every method but `Turn`'s may take long (it renders, encodes,
    compiles): call it from a thread, not from the event loop."""

    def __init__(
        self, engine: ServingEngine, tokenizer: Tokenizer, abilities: Abilities, *, timeout_s: float | None = None
    ) -> None:
        self.engine, self.tokenizer, self.abilities = engine, tokenizer, abilities
        self.timeout_s = timeout_s
        self.meters = Meters(engine, abilities.names[0])
        self._media_id = abilities.media_id if abilities.media_id is not None else tokenizer.specials.get(MEDIA_PAD, -1)

    @property
    def created_at(self) -> str:
        """When the checkpoint was made, as RFC 3339 writes it."""
        return datetime.fromtimestamp(self.abilities.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def check_model(self, name: str | None) -> str:
        """The name that the reply carries. Raises ApiError 404."""
        if name is None:
            return self.abilities.names[0]
        if name not in self.abilities.names:
            known = ", ".join(self.abilities.names)
            raise ApiError(
                404, f"there is no model {name!r} here; there is {known}", code="model_not_found", param="model"
            )
        return name

    # --- conversations ---

    def prepare(self, ask: Ask) -> Prepared:
        """The prompt of a conversation in tokens. Raises ValueError, and TooLarge for more messages than any prompt may
        have tokens."""
        try:
            return self._prepare(ask)
        except ValueError as error:
            raise ValueError(ask.in_its_words(str(error))) from None

    def _prepare(self, ask: Ask) -> Prepared:
        if len(ask.messages) > self.abilities.max_length:  # no need to look at each
            raise TooLarge(
                f"{len(ask.messages):,} messages have more tokens than the context length of "
                f"{self.abilities.max_length:,} here; shorten the conversation"
            )
        check_tools(ask.messages, ask.tools)
        check_response_format(ask.response_format)
        pictures = [self._picture(number, url) for number, url in enumerate(every_picture_url(ask.messages))]
        prompt = render(
            ask.messages,
            tools=ask.tools,
            thinking=ask.thinking,
            effort=ask.effort,
            tool_choice=ask.tool_choice,
            response_format=ask.response_format,
            images=[picture.sizes[0] for picture in pictures] if pictures else None,
            placeholders=False,
        )
        encoded = prompt.encode(self.tokenizer)
        ids, stable = self._expanded(encoded, pictures)
        return Prepared(prompt, ids, tuple(pictures), stable, _begun(ask.messages[-1], prompt))

    def _expanded(self, encoded: EncodedPrompt, pictures: Sequence[Images]) -> tuple[list[int], int]:
        """One media token a row of features; how many ids the next turn shares."""
        if not pictures:
            return encoded.ids, encoded.num_stable
        grids = [grid for picture in pictures for grid in picture.grids.tolist()]
        merge, head = pictures[0].merge, encoded.ids[: encoded.num_stable]
        ids = expand_media(encoded.ids, grids, media_id=self._media_id, merge=merge)
        early = grids[: head.count(self._media_id)]
        return ids, len(expand_media(head, early, media_id=self._media_id, merge=merge))

    def _picture(self, number: int, url: str) -> Images:
        if self.abilities.images is None:
            raise ValueError("messages: this model cannot see (its checkpoint has no vision tower); send no pictures")
        try:
            return preprocess_images([decode_data_url(url)], self.abilities.images)
        except ValueError as error:
            text = str(error).removeprefix("image 0 ")
            raise ValueError(f"messages: picture {number}, counted from 0: {text}") from None

    def begin(self, ask: Ask) -> Turn:
        """Start a reply. Raises ValueError, and `Refused` as the engine does."""
        prepared = self.prepare(ask)
        room = self.room(len(prepared.ids), ask.max_tokens)
        offered = declared_tools(ask.messages, ask.tools)
        try:
            grammar = self._grammar(ask, prepared, offered)
        except ValueError as error:
            raise ValueError(ask.in_its_words(str(error))) from None
        params = SamplingParams(
            **{"logprobs": False, **ask.sampling},
            max_tokens=room,
            grammar=grammar,
            grammar_prefix=prepared.grammar_prefix if grammar is not None else "",
        )
        request = Request(
            prompt=prepared.ids,
            params=params,
            images=prepared.images,
            marks=(prepared.num_stable,) if prepared.num_stable else (),
            deadline_s=self.timeout_s,
        )
        drop = not offered or ask.tool_choice == "none"
        readers = [
            ChatReader(
                self.tokenizer,
                prepared.prompt.channel,
                drop_calls=drop,
                stops=ask.stop,
                stop_ids=params.stop_ids,
                min_tokens=params.min_tokens,
            )
            for _ in range(params.n)
        ]
        return self._submit(request, readers, has_thinking=prepared.prompt.channel == "think")

    def _grammar(self, ask: Ask, prepared: Prepared, offered: Sequence[Mapping[str, Any]]) -> Grammar | None:
        """What may be written; None where anything may."""
        callable_tools = offered
        if ask.tool_name is not None:
            callable_tools = [tool for tool in offered if tool["function"]["name"] == ask.tool_name]
            if not callable_tools:
                raise ValueError(f"tool_choice names {ask.tool_name!r}, and no such tool is declared")
        if not offered and (ask.response_format or {}).get("type", "text") == "text":
            return None
        assert prepared.prompt.channel is not None, "a prompt for a reply leaves a channel open"
        return continuations(
            prepared.prompt.channel,
            callable_tools,
            tool_choice=ask.tool_choice,
            response_format=ask.response_format,
            parallel=ask.parallel,
        )

    # --- plain text ---

    def begin_text(self, ids: Sequence[int], max_tokens: int | None, sampling: Mapping[str, Any]) -> Turn:
        """Continue token ids as plain text. Raises as `begin`."""
        params = SamplingParams(**{"logprobs": False, **sampling}, max_tokens=self.room(len(ids), max_tokens))
        request = Request(prompt=ids, params=params, deadline_s=self.timeout_s)
        return self._submit(request, [TextReader() for _ in range(params.n)], has_thinking=False)

    def room(self, num_prompt: int, wanted: int | None) -> int:
        """Tokens that the reply may have. Raises TooLarge where that is none."""
        left = self.abilities.max_length - num_prompt
        if left < 1 or (wanted or 0) > left:
            asked = f" and the {wanted:,} asked for" if wanted is not None else ""
            raise TooLarge(
                f"the prompt's {num_prompt:,} tokens{asked} are more than the context length of "
                f"{self.abilities.max_length:,} tokens here; shorten the conversation or ask for less"
            )
        return left if wanted is None else wanted

    def _submit(self, request: Request, readers: Sequence[Reader], has_thinking: bool) -> Turn:
        started = perf_counter()
        handle = self.engine.submit(request)
        return Turn(self, handle, readers, len(request.prompt), started, has_thinking)


class Turn:
    """A request under way. Read `pieces` once, or `gather` all of it."""

    def __init__(
        self,
        front: Front,
        handle: Handle,
        readers: Sequence[Reader],
        num_prompt: int,
        started: float,
        has_thinking: bool,
    ) -> None:
        self.num_choices, self.num_prompt, self.has_thinking = len(readers), num_prompt, has_thinking
        self.created = int(time())
        self._front, self._handle, self._readers, self._started = front, handle, readers, started

    async def pieces(self) -> AsyncGenerator[Piece | Ended, None]:
        """Pieces of all choices as they come, each choice with an `Ended` of its own. Raises ApiError where the engine
        fails, or takes too long."""
        over = set[int]()  # choices of which the engine says no more
        meter = self._front.meters.begin(self._started)
        try:
            async for batch in self._handle.batches():
                for index, outputs in _by_choice(batch).items():
                    reader, tokens = self._readers[index], [one for one in outputs if isinstance(one, TokenOutput)]
                    if tokens and not reader.is_stopped:
                        meter.tokens(index, len(tokens))
                        piece = self._piece(index, reader, tokens)
                        if reader.is_stopped:  # what the engine would go on to write nobody reads
                            meter.stops()
                            self._front.engine.abort(self._handle.id, index)
                        yield piece
                    if isinstance(last := outputs[-1], Finished):
                        self._check(last, reader)
                        over.add(index)
                        if events := reader.finish(last):
                            yield Piece(index, tuple(events), ())
                        ended = reader.ended(last)
                        meter.ended(last, ended.usage, reader.is_stopped)
                        yield ended
        finally:
            if len(over) < self.num_choices:
                meter.leaves(sum(reader.is_stopped for index, reader in enumerate(self._readers) if index not in over))
                self.abort()

    def _piece(self, index: int, reader: Reader, tokens: Sequence[TokenOutput]) -> Piece:
        """What came at once makes one piece, up to the token that brings a stop string."""
        events: list[Event] = []
        taken = 0
        for token in tokens:
            events += reader.take(token)
            taken += 1
            if reader.is_stopped:
                break
        return Piece(index, tuple(join_events(events)), tuple(tokens[:taken]))

    def abort(self) -> None:
        """End a turn that nobody will read."""
        self._front.engine.abort(self._handle.id)

    def _check(self, output: Finished, reader: Reader) -> None:
        if reader.is_stopped:  # whatever became of what nobody reads
            return
        if output.reason == "error":
            status = 400 if output.is_refused else 500
            raise ApiError(status, f"this request failed: {output.error or 'the engine says no more'}")
        if output.reason != "abort":
            return
        limit = self._front.timeout_s
        if limit is not None and perf_counter() - self._started >= limit * _LONGEST_BEFORE_TIMEOUT:
            raise ApiError(
                408, f"the request took longer than the {limit:g} s that this server gives one", code="timeout"
            )
        raise ApiError(503, "the server is shutting down", code="unavailable", retry_after_s=10)

    async def gather(self) -> list[Gathered]:
        """All choices, whole."""
        choices = [Gathered(self.has_thinking) for _ in range(self.num_choices)]
        async with aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ended):
                    choices[piece.index].end = piece
                else:
                    choices[piece.index].add(piece)
        return choices


def _by_choice(batch: Sequence[Output]) -> dict[int, list[Output]]:
    """Outputs that came together, by the choice that they belong to."""
    found: dict[int, list[Output]] = {}
    for output in batch:
        found.setdefault(output.index, []).append(output)
    return found


def _begun(last: Json, prompt: Prompt) -> str:
    """Text in the open channel that a partial message has given already."""
    if last.get("role") != "assistant" or not last.get("partial"):
        return ""
    content = last.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content if part.get("type") == "text")
    if prompt.channel == "response":
        return content
    return last.get("reasoning_content") or last.get("reasoning") or ""
