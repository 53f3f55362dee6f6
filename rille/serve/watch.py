"""Whose next tokens are looked up before a step: not everybody's, or many sequences would pay for it. No torch here.

    a guess stands                    looked up before the next step
    nothing was found, or not true    after 1, 2, 4, .. steps, at most 64 and at most the number of sequences

So those of whom nothing is to be expected cost about one look a step together, however many they are; one alone is
looked up before every step, which the device's work hides. Nobody looks at those whose turn it is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from rille.serve.sequences import Sequence as Choice


class Watch:
    """Steps are counted in calls of `due`. Each sequence has one turn to come: whoever is told of it says what follows
    (`soon`, `later`, or `rests`, which may)."""

    LATEST = 64  # steps to the next look

    def __init__(self) -> None:
        self._now = 0
        self._gaps: dict[Choice, int] = {}  # of all that are watched: steps to the last look
        self._turns: dict[int, list[Choice]] = {}

    def enter(self, choices: Iterable[Choice]) -> None:
        """Those that are new are looked up before the next step."""
        for choice in choices:
            if choice not in self._gaps:
                self._gaps[choice] = 0
                self.soon(choice)

    def due(self) -> list[Choice]:
        """Those to look up now. One that decodes no longer is forgotten, until it enters again."""
        self._now += 1
        there = [choice for choice in self._turns.pop(self._now, ()) if choice in self._gaps]
        decoding = [choice for choice in there if choice.holding is not None and choice.num_left == 1]
        if len(decoding) < len(there):
            for choice in {*there} - {*decoding}:
                self.forget(choice)
        return decoding

    def soon(self, choice: Choice) -> None:
        """Look again before the next step."""
        self._turns.setdefault(self._now + 1, []).append(choice)

    def later(self, choice: Choice) -> None:
        """There is nothing to guess: wait longer than last time. Not for all of them at once."""
        gap = self._gaps[choice] = self._longer(choice)
        self._turns.setdefault(self._now + gap - choice.order % max(1, gap // 2), []).append(choice)

    def rests(self, choice: Choice) -> bool:
        """A guess has failed: `later`, unless that would be the next step, for which it can be looked up now."""
        if (gap := self._longer(choice)) > 1:
            self.later(choice)
            return True
        self._gaps[choice] = gap
        return False

    def trust(self, choice: Choice) -> None:
        """A guess came true to its end: the waits begin anew."""
        if choice in self._gaps:
            self._gaps[choice] = 0

    def forget(self, choice: Choice) -> None:
        self._gaps.pop(choice, None)

    def _longer(self, choice: Choice) -> int:
        return min(max(1, 2 * self._gaps[choice]), self.LATEST, len(self._gaps))
