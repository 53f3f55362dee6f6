"""What the model has written, as events while it is being written and as one `Reply` afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any


@dataclass(frozen=True)
class Reasoning:
    """More text of the think channel."""

    text: str


@dataclass(frozen=True)
class Content:
    """More text of the response channel."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool call begins; `index` counts the message's calls from 0, the name is whole."""

    index: int
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More text of a call's arguments; all of a call's pieces joined are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """A tool call is over; `complete` is False where the message ended inside an argument."""

    index: int
    complete: bool


@dataclass(frozen=True)
class Fault:
    """The output broke the format here; what was made of it."""

    text: str


@dataclass(frozen=True)
class End:
    """The message is over."""


Event = Reasoning | Content | CallBegin | CallArguments | CallEnd | Fault | End


@dataclass(frozen=True)
class ToolCall:
    """A call as it was written. arguments: JSON text; complete: it was closed and may be carried out."""

    name: str
    arguments: str
    complete: bool = True


@dataclass(frozen=True)
class Reply:
    """One assistant message. reasoning: None without a think channel; complete: the message was closed."""

    reasoning: str | None = None
    content: str = ""
    calls: tuple[ToolCall, ...] = ()
    name: str | None = None
    complete: bool = True
    faults: tuple[str, ...] = field(default=(), compare=False)

    def to_message(self, call_id: Callable[[int], str] = "call_{}".format) -> dict[str, Any]:
        """The message in the OpenAI form. call_id: id of a call from its place, counted from 1."""
        message: dict[str, Any] = {"role": "assistant"}
        if self.name is not None:
            message["name"] = self.name
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        message["content"] = self.content
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": call_id(place),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(self.calls, start=1)
            ]
        return message


def join_events(events: Iterable[Event]) -> list[Event]:
    """The same events, neighbouring pieces of one text joined: a form that no cutting of the output changes."""
    joined: list[Event] = []
    every = list(events)
    if len(every) < 2:  # as for most single tokens
        return every
    for _, group in groupby(every, key=lambda event: (type(event), getattr(event, "index", None))):
        run = list(group)
        first = run[0]
        if isinstance(first, Reasoning | Content | CallArguments):
            text = "".join(event.text for event in run if isinstance(event, type(first)))
            joined.append(replace(first, text=text))
        else:
            joined += run
    return joined
