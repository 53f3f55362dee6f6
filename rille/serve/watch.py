"""Whose next tokens are looked up before a step: not everybody's, or many sequences would pay for it. No torch here.

    a guess stands                    looked up in the next round
    nothing was found, or not true    after 1, 2, 4, .. steps, at most 64 and at most the number of sequences
    guesses run                       the next round comes before the next step, and after a long time without, all are
                                      looked up in it
    none was worth a run              after an eighth of the steps since any was, at most 32 and at most half of the
                                      number of sequences

So those of whom nothing is to be expected cost about one look a step together, however many they are, and those who
repeat themselves among many who do not cost little more; all of them are looked up at one time, since only together
they may be worth a step. One alone is looked up before every step, which the device's work hides. Between two rounds a
step does not differ from one without guesses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rille.serve.sequences import Sequence as Choice


class Watch:
    """Steps are counted in calls of `due`. Each sequence has one turn to come: whoever is told of it says what follows
    (`soon`, `later`, or `rests`, which may), and of a round as a whole `pause` or `go_on`."""

    LATEST, LONGEST = 64, 32  # steps to the next look at one, to the next round
    LONG = 16  # steps without guesses

    def __init__(self) -> None:
        self._now = self._last = self._next = self._ran = 0  # steps: now; of rounds, the last one and the next one, and
        # the last one whose guesses ran
        self._gaps: dict[Choice, int] = {}  # of all that are watched: steps to the last look
        self._turns: dict[int, list[Choice]] = {}

    def enter(self, choices: Iterable[Choice]) -> None:
        """Those that are new are looked up in the next round."""
        for choice in choices:
            if choice not in self._gaps:
                self._gaps[choice] = 0
                self.soon(choice)

    def due(self) -> Sequence[Choice]:
        """Those to look up now. One that decodes no longer is forgotten, until it enters again."""
        self._now += 1
        if self._now < self._next:
            return ()
        steps, self._last = range(self._last + 1, self._now + 1), self._now
        there = [choice for step in steps for choice in self._turns.pop(step, ()) if choice in self._gaps]
        decoding = [choice for choice in there if choice.holding is not None and choice.num_left == 1]
        if len(decoding) < len(there):
            for choice in {*there} - {*decoding}:
                self.forget(choice)
        return decoding

    def pause(self) -> None:
        """No guess of this round is worth a run: the longer that is so the later is the next one."""
        self._next = self._now + min((self._now - self._ran) // 8, self.LONGEST, len(self._gaps) // 2)

    def go_on(self) -> None:
        """Guesses of this round run. If none did for long, others may have begun to repeat themselves too: a step waits
        for its tokens now anyway, so all are looked up."""
        if self._now - self._ran > self.LONG:
            self._turns = {self._now + 1: list(self._gaps)}
        self._ran = self._now

    def soon(self, choice: Choice) -> None:
        """Look again in the next round."""
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
