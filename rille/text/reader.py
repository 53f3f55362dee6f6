"""An assistant's message, read by one state machine that only tags move.

    control tokens and text  ->  tags  ->  a stack of open elements  ->  events

A tag that belongs elsewhere closes what is open on the way there, so that a model which skips a tag (opens `response`
inside think, or `tools` without having closed think) still lands in the right channel. `start` only says where text
belongs that comes before the first tag; without it such text waits for that tag. Markup never reaches a text: whatever
breaks the format becomes a `Fault` that says what was made of it.
Source: the grammar of `rille.text.chat`.
"""

from __future__ import annotations

from typing import Literal

from rille.text.arguments import ArgumentsWriter
from rille.text.markup import read_tag
from rille.text.reply import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    End,
    Event,
    Fault,
    Reasoning,
    Reply,
    ToolCall,
    join_events,
)
from rille.text.vocabulary import CLOSE, END_OF_MESSAGE, OPEN, SEP

_PARENT = {
    "message": None,
    "think": "message",
    "response": "message",
    "tools": "message",
    "call": "tools",
    "argument": "call",
    "json": "call",
}
_UNDECIDED = "undecided text"  # before the first tag, channel not known
_LOST = "a dropped element"  # it cannot stand where it stands


class MessageReader:
    """Takes control tokens and text in turn; `take_events` gives what became known, `reply` all of it."""

    def __init__(self, start: Literal["think", "response"] | None, drop_calls: bool):
        self.done = False
        self._drop_calls = drop_calls
        self._stack: list[str] = ["message", start or _UNDECIDED]
        self._fresh = True  # nothing was read yet
        self._header: list[str] | None = None  # of the tag that is being read
        self._header_kind = OPEN
        self._waiting: list[str] = []  # text before the first tag, or outside of every element
        self._in_stray_content = False
        self._arguments: ArgumentsWriter | None = None  # of the open call; None if it is dropped
        self._num_calls = 0
        self._closed = False
        self._name: str | None = None
        self._has_think = start == "think"
        self._has_reasoning = False
        self._is_late = False  # something came behind the end
        self._events: list[Event] = []
        self._taken: list[Event] = []

    def text(self, text: str) -> None:
        """Text; an empty one changes nothing."""
        if not text or self._is_over():
            return
        if self._header is not None:
            self._header.append(text)
        else:
            self._fresh = False
            self._deliver(text)

    def control(self, name: str) -> None:
        """One of the four control tokens."""
        if self._is_over():
            return
        if name == SEP:
            self._separate()
            return
        self._drop_header()
        if name == END_OF_MESSAGE:
            self._closed = True
            self._end()
        else:
            self._header, self._header_kind = [], name

    def other_special(self, name: str, ends: bool) -> None:
        """Another special token, which has no place in a message; `ends` if generation stops there."""
        if self._is_over():
            return
        self._fault(f"special token {name} in the output")
        if ends:
            self._drop_header()
            self._end()

    def finish(self) -> None:
        """Nothing more comes."""
        if self.done:
            return
        self._drop_header()
        self._settle("response")
        self._report_strays()
        if self._arguments is not None and self._stack[-1] == "argument":
            self._write_arguments(self._arguments.held())

    def take_events(self) -> list[Event]:
        """The events since the last call, joined."""
        events = join_events(self._events)
        self._taken += events
        self._events = []
        return events

    def reply(self) -> Reply:
        """The message as far as it was read."""
        events = [*self._taken, *self._events]
        arguments: dict[int, list[str]] = {event.index: [] for event in events if isinstance(event, CallBegin)}
        for event in events:
            if isinstance(event, CallArguments):
                arguments[event.index].append(event.text)
        complete = {event.index for event in events if isinstance(event, CallEnd) and event.complete}
        return Reply(
            reasoning="".join(e.text for e in events if isinstance(e, Reasoning)) if self._has_think else None,
            content="".join(e.text for e in events if isinstance(e, Content)),
            calls=tuple(
                ToolCall(e.name, "".join(arguments[e.index]), e.index in complete)
                for e in events
                if isinstance(e, CallBegin)
            ),
            name=self._name,
            complete=self._closed,
            faults=tuple(e.text for e in events if isinstance(e, Fault)),
        )

    def _is_over(self) -> bool:
        """After the end: whatever comes is ignored, and that is said once."""
        if self.done and not self._is_late:
            self._is_late = True
            self._fault("output behind the end of the message was ignored")
        return self.done

    # --- tags ---

    def _separate(self) -> None:
        if self._header is None:
            self._fault("a separator outside of a tag")
            return
        header, self._header = "".join(self._header), None
        parsed = read_tag(header)
        if parsed is None or parsed[0] not in _PARENT:
            self._fault(f"unknown tag {header!r}")
        elif self._header_kind == CLOSE:
            self._close(parsed[0])
        else:
            self._open(*parsed)

    def _drop_header(self) -> None:
        if self._header is not None:
            self._fault(f"a tag was cut off: {''.join(self._header)!r}")
            self._header = None

    def _open(self, tag: str, attributes: dict[str, str]) -> None:
        fresh, self._fresh = self._fresh, False
        if fresh and tag in ("message", self._stack[-1]):
            # The output repeats what the prompt has opened, or is a whole message.
            self._stack = [] if tag == "message" else ["message"]
            self._has_think = False
        elif tag == "message":
            self._fault("another message begins here; it is ignored")
            self._end()
            return
        self._settle("response" if tag == "think" else "think")
        self._report_strays()
        parent = _PARENT[tag]
        if tag == "call" and "message" in self._stack and parent not in self._stack:
            self._fault("a call outside of tools")
            self._unwind("message")
            self._stack.append("tools")
        if parent is not None and parent not in self._stack:
            self._fault(f"{tag} outside of {parent} is dropped")
            self._stack.append(_LOST)
            return
        self._unwind(parent)
        self._stack.append(tag)
        self._enter(tag, attributes)

    def _close(self, tag: str) -> None:
        self._fresh = False
        is_channel = tag in ("think", "response")
        self._settle(tag if is_channel else "response", enter=is_channel)
        self._report_strays()
        if self._stack and self._stack[-1] == _LOST and tag not in self._stack:
            self._stack.pop()
        elif tag not in self._stack:
            self._fault(f"{tag} is closed but not open")
        else:
            self._unwind(tag)
            self._leave(proper=True)
            self._closed = self._closed or tag == "message"

    def _unwind(self, tag: str | None) -> None:
        """Close what is open inside of an element."""
        while self._stack and self._stack[-1] != tag:
            self._fault(f"{self._stack[-1]} was not closed")
            self._leave(proper=False)

    def _end(self) -> None:
        self._settle("response")
        self._report_strays()
        self._unwind(None)
        self.done = True
        self._emit(End())

    def _settle(self, channel: str, enter: bool = False) -> None:
        """The first tag tells in which channel the text before it was."""
        if not self._stack or self._stack[-1] != _UNDECIDED:
            return
        text, self._waiting = "".join(self._waiting), []
        self._stack.pop()
        if text or enter:
            self._stack.append(channel)
            self._enter(channel, {})
        if text:
            self._deliver(text)

    # --- elements ---

    def _enter(self, tag: str, attributes: dict[str, str]) -> None:
        if tag == "message":
            self._name = attributes.get("name")
            if attributes.get("role") != "assistant":
                self._fault(f"a message of role {attributes.get('role')!r}")
                self._end()
        elif tag == "think":
            if self._has_reasoning:
                self._fault("a second think channel; its text is appended")
            self._has_think = True
        elif tag == "call":
            self._begin_call(attributes)
        elif self._arguments is not None and tag == "argument":
            self._begin_argument(attributes)
        elif self._arguments is not None and tag == "json":
            if self._arguments.is_raw or not self._arguments.is_empty:
                self._fault("arguments are given twice; these are dropped")
                self._stack[-1] = _LOST
            else:
                self._arguments.begin_raw()

    def _begin_call(self, attributes: dict[str, str]) -> None:
        name = attributes.get("tool")
        self._arguments = None
        if not name:
            self._fault("a call without a tool is dropped")
        elif self._drop_calls:
            self._fault(f"a call of {name!r} is dropped: the request declares no tools")
        else:
            self._num_calls += 1
            if attributes.get("index") != str(self._num_calls):
                self._fault(f"call {self._num_calls} has the index {attributes.get('index')!r}")
            self._arguments = ArgumentsWriter(self._fault)
            self._emit(CallBegin(self._num_calls - 1, name))

    def _begin_argument(self, attributes: dict[str, str]) -> None:
        assert self._arguments is not None
        if "key" not in attributes or self._arguments.is_raw:
            self._fault("an argument without a key, or beside a whole text, is dropped")
            self._stack[-1] = _LOST
            return
        self._write_arguments(self._arguments.begin(attributes["key"], attributes.get("type", "")))

    def _leave(self, proper: bool) -> None:
        tag = self._stack.pop()
        if self._arguments is None:
            return
        if tag == "argument":
            self._write_arguments(self._arguments.end())
        if tag in ("argument", "json") and not proper:
            self._arguments.is_broken = True
        if tag == "call":
            self._write_arguments(self._arguments.close())
            self._emit(CallEnd(self._num_calls - 1, not self._arguments.is_broken))
            self._arguments = None

    def _deliver(self, text: str) -> None:
        """Text in the innermost open element."""
        top = self._stack[-1] if self._stack else _LOST
        if top == "think":
            self._has_reasoning = True
            self._emit(Reasoning(text))
        elif top == "response":
            self._emit(Content(text))
        elif top in ("argument", "json"):
            if self._arguments is not None:
                self._write_arguments(self._arguments.text(text))
        elif top == "message":
            self._deliver_stray(text)
        else:
            self._waiting.append(text)

    def _deliver_stray(self, text: str) -> None:
        """Text between channels: white space is nothing, anything else is taken as content."""
        if not self._in_stray_content:
            text = text.lstrip()
            if not text:
                return
            self._in_stray_content = True
            self._fault("text outside of a channel; taken as content")
        self._emit(Content(text))

    def _report_strays(self) -> None:
        self._in_stray_content = False
        text, self._waiting = "".join(self._waiting), []
        if text.strip():
            self._fault(f"text outside of an argument or behind the message was dropped: {text!r}")

    # --- events ---

    def _write_arguments(self, text: str) -> None:
        if text:
            self._emit(CallArguments(self._num_calls - 1, text))

    def _fault(self, text: str) -> None:
        self._emit(Fault(text))

    def _emit(self, event: Event) -> None:
        self._events.append(event)
