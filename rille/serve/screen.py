"""What a conversation looks like in a terminal: events as they come, each channel in its own style.

Text of a model or a tool may hold any character; those that would steer the terminal are shown, not obeyed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from rille.serve.dialogue import ChatEvent, Finished, OutOfRounds, ToolResult
from rille.text.reply import CallArguments, CallBegin, CallEnd, Content, Reasoning

MAX_SHOWN = 600  # characters of a tool's result on the screen
DIM, CALL, WRONG = "dim", "cyan", "red"
# Control characters but tab and line feed become their pictures.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
_VISIBLE |= dict.fromkeys(range(128, 160), 0xFFFD)


class Screen:
    """interactive: everything on standard output; otherwise only answers, and the rest on standard error."""

    def __init__(self, interactive: bool):
        self.interactive = interactive
        self._answers = Console(file=sys.stdout, highlight=False)
        self._remarks = self._answers if interactive else Console(file=sys.stderr, highlight=False)
        self._channel: type | None = None  # of the text that stands on the last line
        self._ends_line = True
        self._has_warned = False
        self._turn: list[Finished] = []  # its replies so far

    def show(self, event: ChatEvent) -> None:
        match event:
            case Reasoning(text):
                self._stream(Reasoning, text, self._remarks, DIM)
            case Content(text):
                self._stream(Content, text, self._answers, None)
            case CallBegin(_, name):
                self._finish_line()
                self._stream(CallBegin, f"-> {name}(", self._remarks, CALL)
            case CallArguments(_, text):
                self._stream(CallBegin, text, self._remarks, CALL)
            case CallEnd(_, complete):
                self._stream(CallBegin, ")\n" if complete else " ... cut off\n", self._remarks, CALL)
            case ToolResult(_, text, failed):
                self.note(f"<- {shorten(text)}", WRONG if failed else DIM)
            case Finished():
                self._finish(event)
            case OutOfRounds(rounds):
                self._turn = []
                self.note(f"stopped after {rounds} rounds of tool calls (--max-rounds); say something to go on", WRONG)

    def note(self, text: str, style: str = DIM) -> None:
        """A line about the conversation."""
        self._finish_line()
        self._write(self._remarks, text + "\n", style)

    def error(self, text: str) -> None:
        self.note(" ".join(text.split()), WRONG)

    def break_off(self) -> None:
        """The reply was stopped."""
        self._finish_line()
        self._turn = []
        self.note("stopped; what was said stays in the conversation")

    def replay(self, messages: Sequence[dict[str, Any]]) -> None:
        """Say which conversation this is: its size and its last exchange."""
        self.note(f"{len(messages)} messages")
        for message in [m for m in messages if m["role"] in ("user", "assistant")][-2:]:
            if text := plain_text(message.get("content")):
                self.note(f"{'> ' if message['role'] == 'user' else ''}{shorten(text)}")

    def _stream(self, channel: type, text: str, console: Console, style: str | None) -> None:
        if channel is not self._channel:
            self._finish_line()
            self._channel = channel
        self._write(console, text, style)
        if text:
            self._ends_line = text.endswith("\n")

    def _finish_line(self) -> None:
        if not self._ends_line:
            console = self._answers if self._channel is Content else self._remarks
            self._write(console, "\n", None)
        self._channel, self._ends_line = None, True

    def _write(self, console: Console, text: str, style: str | None) -> None:
        console.out(text.translate(_VISIBLE), style=style, end="")
        console.file.flush()

    def _finish(self, event: Finished) -> None:
        self._finish_line()
        if event.reason != "end":
            why = " (--max-new-tokens)" if event.reason == "limit" else ""
            self.note(f"stopped after {event.new:,} tokens{why}")
        if event.faults:
            self.note(f"the reply broke the chat format ({len(event.faults)}): {shorten(event.faults[0], 200)}")
        if event.faults and not event.reply.complete and not self._has_warned:
            self._has_warned = True
            self.note("(a checkpoint that was only trained on plain text does not know that format)")
        self._turn.append(event)
        goes_on = event.reason == "end" and event.reply.calls
        if self.interactive and not goes_on:
            self._sum_up()

    def _sum_up(self) -> None:
        """One line for all replies of a turn."""
        new, read, seconds = (sum(getattr(e, name) for e in self._turn) for name in ("new", "read", "seconds"))
        kept = f", {self._turn[-1].kept:,} remembered" if self._turn[-1].kept else ""
        self.note(f"[{new:,} tokens, {new / max(seconds, 1e-9):.0f} tokens/s; {read:,} read{kept}]")
        self._turn = []


def shorten(text: str, limit: int = MAX_SHOWN) -> str:
    return text if len(text) <= limit else f"{text[:limit]} ... {len(text) - limit:,} more characters"


def plain_text(content: Any) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return " ".join(part["text"] if part["type"] == "text" else "[picture]" for part in content)
    return content or ""
