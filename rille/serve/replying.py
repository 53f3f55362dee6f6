"""From an engine's outputs to what a client is told, piece by piece. No torch here.

    TokenOutput*  ->  parser  ->  stop strings of the answer  ->  Piece*  Ended

A whole answer is the joined pieces, so that streaming and not streaming cannot differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from rille.serve.schema import Finished, TokenOutput, Usage
from rille.serve.stopping import StopStrings
from rille.text.chat import Channel
from rille.text.parser import Parser
from rille.text.reply import CallArguments, CallBegin, Content, End, Event, Fault, Reasoning
from rille.text.vocabulary import Tokenizer

FinishReason = Literal["stop", "length", "tool_calls"]

_SILENT, _IN_CALL = (Fault, End), (CallBegin, CallArguments)


@dataclass(frozen=True)
class Piece:
    """What became known of choice `index`: events without faults and ends, and the tokens that brought them (none at
    the end)."""

    index: int
    events: tuple[Event, ...]
    tokens: tuple[TokenOutput, ...]


@dataclass(frozen=True)
class Ended:
    """Choice `index` is over. matched: the stop string or id; reasoning_tokens: a part of the completion's."""

    index: int
    reason: FinishReason
    usage: Usage
    reasoning_tokens: int
    matched: int | str | None


class Reader(Protocol):
    """Makes events of one choice's tokens. is_stopped: a stop string ended it, what comes is ignored."""

    is_stopped: bool

    def take(self, output: TokenOutput) -> list[Event]: ...
    def finish(self, finished: Finished) -> list[Event]: ...
    def ended(self, finished: Finished) -> Ended: ...


class TextReader:
    """Plain text: the engine cuts it at stop strings itself."""

    is_stopped = False

    def take(self, output: TokenOutput) -> list[Event]:
        return [Content(output.text)] if output.text else []

    def finish(self, finished: Finished) -> list[Event]:
        return [Content(finished.text)] if finished.text else []

    def ended(self, finished: Finished) -> Ended:
        reason = "length" if finished.reason == "length" else "stop"
        return Ended(finished.index, reason, finished.usage, 0, finished.matched)


class ChatReader:
    """One assistant message. The stop strings are looked for in the answer alone: not in the thinking, nor in calls.

    stop_ids, min_tokens: as in `SamplingParams`; a word among the stop ids ends the text and is no part of it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        channel: Channel | None,
        *,
        drop_calls: bool,
        stops: Sequence[str],
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
    ):
        self.is_stopped = False
        self._stop_words = frozenset(stop_ids) - frozenset(tokenizer.specials.values())
        self._min_tokens = min_tokens
        self._tokenizer = tokenizer
        self._parser = Parser(tokenizer, start=channel, drop_calls=drop_calls)
        self._strings = StopStrings(stops)
        self._matched: str | None = None
        self._num_tokens = self._num_reasoning = self._num_silent = 0
        self._has_calls = self._in_call = False

    def take(self, output: TokenOutput) -> list[Event]:
        self._num_tokens += 1
        events = self._read(output.token)
        self._count_reasoning(events)
        return self._pass_on(events)

    def _read(self, token: int) -> list[Event]:
        if token in self._stop_words:
            return []
        if token not in self._tokenizer:  # a model may have more words
            return self._parser.feed_unknown()
        return self._parser.feed_ids([token])

    def _count_reasoning(self, events: Sequence[Event]) -> None:
        """A token without an event may hold a part of a character: it counts where the next ones do."""
        if not events:
            self._num_silent += 1
            return
        if isinstance(events[0], Reasoning):
            self._num_reasoning += self._num_silent + 1
        self._num_silent = 0

    def _pass_on(self, events: Iterable[Event]) -> list[Event]:
        passed: list[Event] = []
        for event in events:
            if self.is_stopped:
                break
            if isinstance(event, Content):
                passed += self._content(event.text)
            elif not isinstance(event, _SILENT):
                passed += self._held()
                self._has_calls = self._has_calls or isinstance(event, CallBegin)
                self._in_call = isinstance(event, _IN_CALL)
                passed.append(event)
        return passed

    def _content(self, text: str) -> list[Event]:
        out, self._matched = self._strings.feed(text, self._num_tokens >= self._min_tokens)
        self.is_stopped = self._matched is not None
        return [Content(out)] if out else []

    def _held(self) -> list[Event]:
        out = self._strings.finish()
        return [Content(out)] if out else []

    def finish(self, finished: Finished) -> list[Event]:
        if self.is_stopped:
            return []
        return [*self._pass_on(self._parser.finish()), *([] if self.is_stopped else self._held())]

    def ended(self, finished: Finished) -> Ended:
        usage, matched = finished.usage, finished.matched
        if self.is_stopped:
            usage = Usage(usage.prompt_tokens, usage.cached_tokens, self._num_tokens)
            matched = self._matched
        reason = "length" if finished.reason == "length" and not self.is_stopped else "stop"
        if reason == "stop" and self._has_calls and not self._in_call:  # a word may stop a call in its middle
            reason = "tool_calls"
        return Ended(finished.index, reason, usage, self._num_reasoning, matched)


class Growing:
    """A text that comes in pieces, a token each perhaps: joined where it is read, not at each of them."""

    def __init__(self) -> None:
        self._pieces: list[str] = []

    def add(self, piece: str) -> None:
        self._pieces.append(piece)

    def __str__(self) -> str:
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]


@dataclass
class Call:
    """A call as far as it was written."""

    name: str
    written: Growing = field(default_factory=Growing)

    @property
    def arguments(self) -> str:
        return str(self.written)


class Gathered:
    """The pieces of one choice, joined. reasoning: None where the prompt did not open thinking and none came."""

    def __init__(self, has_thinking: bool = False):
        self._has_thinking = has_thinking
        self._thought, self._said = Growing(), Growing()
        self.calls: list[Call] = []
        self.tokens: list[TokenOutput] = []
        self.end: Ended | None = None

    @property
    def reasoning(self) -> str | None:
        return str(self._thought) if self._has_thinking else None

    @property
    def content(self) -> str:
        return str(self._said)

    def add(self, piece: Piece) -> None:
        self.tokens += piece.tokens
        for event in piece.events:
            match event:
                case Reasoning(text):
                    self._has_thinking = True
                    self._thought.add(text)
                case Content(text):
                    self._said.add(text)
                case CallBegin(_, name):
                    self.calls.append(Call(name))
                case CallArguments(index, text):
                    self.calls[index].written.add(text)


def total(ends: Iterable[Ended]) -> tuple[Usage, int]:
    """Usage of all choices of one prompt and their reasoning tokens. The prompt is counted once, so what the others had
    from the first choice's reading was computed all the same."""
    ends = list(ends)
    prompt, cached = ends[0].usage.prompt_tokens, min(end.usage.cached_tokens for end in ends)
    written = sum(end.usage.completion_tokens for end in ends)
    return Usage(prompt, cached, written), sum(end.reasoning_tokens for end in ends)
