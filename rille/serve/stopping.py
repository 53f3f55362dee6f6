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

    def feed(self, text: str) -> tuple[str, str | None]:
        """More text: what can be given out now, and the stop string that ended the reply, if one did. Of several the
        one that is complete first, at one place the longest."""
        if not self._stops:
            return text, None
        self._held += text
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            place, stop = min(found, key=lambda pair: (pair[0] + len(pair[1]), -len(pair[1])))
            out, self._held = self._held[:place], ""
            return out, stop
        keep = max(map(self._begun, self._stops))
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out, None

    def _begun(self, stop: str) -> int:
        """How much of a stop string stands at the end of what is held."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """What was held back, for a reply that ended otherwise."""
        out, self._held = self._held, ""
        return out
