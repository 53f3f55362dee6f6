"""Where a reply ends: stop ids, stop strings, the longest length. No torch here.

A stop string may begin in one token and end in another, so text that could be its beginning is held back until it is
decided. What is given out never has any part of a stop string that ended the reply.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The text of a reply, given out as far as no stop string can begin in what is left."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def feed(self, text: str, counts: bool = True) -> tuple[str, str | None]:
        """More text: what can be given out now, and the stop string that ended the reply, if one did. Of several the
        one that is complete first, at one place the longest. counts: False where it is too early for an end; one that
        is complete by then is text like any other, one that has only begun may still be completed."""
        if not self._stops:
            return text, None
        early, self._held = len(self._held), self._held + text
        if counts and (found := [(place, stop) for stop in self._stops if (place := self._place(stop, early)) >= 0]):
            place, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), -len(pair[1])))
            out, self._held = self._held[:place], ""
            return out, stop
        keep = max(map(self._begun, self._stops))
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out, None

    def _place(self, stop: str, early: int) -> int:
        """Where a stop string stands that was not complete in the first `early` characters; -1: nowhere."""
        return self._held.find(stop, max(0, early - len(stop) + 1))

    def _begun(self, stop: str) -> int:
        """How much of a stop string stands at the end of what is held."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """What was held back, for a reply that ended otherwise."""
        out, self._held = self._held, ""
        return out
