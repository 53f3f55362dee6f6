"""When guessing pays, from what was seen. No torch here.

    r_i   share of the guesses for sequence i that came true lately
    c     how many came true for each that was expected to, r_i + r_i^2 + .. of each guess, where much was
    B     sequences that decode, F of them with a guess      t(B), t'(n)   seconds of a step without guesses, and with

    guess k tokens where (B + c sum over F of r_i + .. + r_i^k) / t'(tokens) is largest, if that is more than B / t(B)

A guess that is not run is a bet all the same: its tokens come, or others. So text in which the same few tokens meet by
chance costs a look into an index and never a run; a repetition is believed after a token or two. A sequence begins with
what was seen of all others.

A drafter that runs a part of the model to guess is asked only where its guesses shall run; having been too bad it is
tried again after longer and longer times. So are steps with guesses that were measured to be too slow, where guesses
would come true: the first ones compile their kernels.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from rille.serve.sequences import Sequence as Choice


class Line:
    """Least squares, seconds over a size, the newest first. What took much longer than expected counts as MOST times
    that: something else stood in its way."""

    MOST = 4.0

    def __init__(self) -> None:
        self._w = self._n = self._t = self._nn = self._nt = 0.0

    def note(self, size: int, seconds: float) -> None:
        if (known := self.at(size)) is not None:
            seconds = min(seconds, self.MOST * known)
        news = (1.0, size, seconds, size * size, size * seconds)
        sums = (self._w, self._n, self._t, self._nn, self._nt)
        self._w, self._n, self._t, self._nn, self._nt = (0.99 * old + new for old, new in zip(sums, news, strict=True))

    @property
    def is_known(self) -> bool:
        return self._w > 0

    def at(self, size: int) -> float | None:
        """None before anything was noted. Never falls as the size grows."""
        if not self._w:
            return None
        n, t = self._n / self._w, self._t / self._w
        spread = self._nn / self._w - n * n
        slope = max(0.0, (self._nt / self._w - n * t) / spread) if spread > 1e-9 else 0.0
        return max(t + slope * (size - n), 0.02 * t, 1e-9)


@dataclass(slots=True)
class Bet:
    """tokens that are guessed to stand from `place` on. expected: how many would come true; seen: how many have."""

    place: int
    tokens: Sequence[int]
    expected: float
    seen: int = 0


class Odds:
    """most: guesses of one sequence in a step. fixed: guess as many as that wherever there is a guess. padded: a step
    with guesses costs as if every sequence had the most."""

    START = 0.5
    DECAY, DECAY_ALL = 0.75, 0.98  # of one sequence, of all
    HIGH, DECAY_TRUTH = 0.6, 0.9  # of expectations, those at rates above this are compared with what came
    DEAR = 2.0  # steps that a step with guesses costs, before one was measured
    MARGIN = 1.1  # what guessing must promise: it has to wait for the tokens before it
    PROBE_AFTER, PROBE_LATEST = 64, 8_192  # choices until what was too dear is tried again; doubled each time

    def __init__(self, most: int, *, fixed: bool = False, padded: bool = False) -> None:
        self.most, self.fixed, self.padded = most, fixed, padded
        self.overall = self.START
        self._rates: dict[Choice, float] = {}
        self._bets: dict[Choice, Bet] = {}
        self._hoped = self._came = 4.0
        self._plain, self._guessed = Line(), Line()
        self._steps_off, self._probe_after, self._probes = 0, self.PROBE_AFTER, False
        self._declined, self._retry_after = 0, self.PROBE_AFTER

    def rate(self, choice: Choice) -> float:
        return self._rates.get(choice, self.overall)

    def forget(self, choice: Choice) -> None:
        self._rates.pop(choice, None)
        self._bets.pop(choice, None)

    # --- what is seen ---

    def bet(self, choice: Choice, tokens: Sequence[int]) -> None:
        """These are guessed to come next in a sequence; nothing new while an older guess is open."""
        if choice not in self._bets:
            rate = self.rate(choice)
            expected = _expected(rate, len(tokens)) if rate > self.HIGH else 0.0
            self._bets[choice] = Bet(len(choice.chain), tokens, expected)

    def settle(self, choice: Choice) -> bool | None:
        """See how far the guess about a sequence has come true: to its end, or not; None while that is open."""
        ids = choice.chain.ids
        while (bet := self._bets.get(choice)) is not None and bet.place + bet.seen < len(ids):
            is_true = ids[bet.place + bet.seen] == bet.tokens[bet.seen]
            bet.seen += is_true
            self._note(choice, is_true)
            if not is_true or bet.seen == len(bet.tokens):
                del self._bets[choice]
                self._compare(bet.expected, bet.seen)
                return is_true
        return None

    def note(self, choice: Choice, drafted: int, accepted: int) -> None:
        """Of so many guesses that were run so many came true."""
        self._bets.pop(choice, None)
        if self._probes and accepted:  # after a long time without: a new beginning
            self.overall, self._rates[choice] = max(self.overall, self.START), max(self.rate(choice), self.START)
        if (rate := self.rate(choice)) > self.HIGH:
            self._compare(_expected(rate, drafted), accepted)
        for place in range(min(accepted + 1, drafted)):
            self._note(choice, place < accepted)

    def _compare(self, expected: float, came: int) -> None:
        if expected:
            self._hoped = self.DECAY_TRUTH * self._hoped + expected
            self._came = self.DECAY_TRUTH * self._came + came

    def _note(self, choice: Choice, is_true: bool) -> None:
        self._rates[choice] = self.DECAY * self.rate(choice) + (1 - self.DECAY) * is_true
        self.overall = self.DECAY_ALL * self.overall + (1 - self.DECAY_ALL) * is_true

    def note_time(self, rows: int, tokens: int, seconds: float) -> None:
        """A step of one token of each of `rows` sequences, `tokens` with their guesses, took so long."""
        if tokens == rows:
            self._plain.note(rows, seconds)
        else:
            self._guessed.note(rows * (1 + self.most) if self.padded else tokens, seconds)

    # --- what follows from it ---

    def choose(self, rows: int, found: Collection[Choice]) -> int:
        """How many tokens to guess for each of the sequences `found` that have a guess, where `rows` decode."""
        if not found:
            return 0
        if self.fixed:
            return self.most
        plain = self._plain.at(rows) or 1.0
        best, best_gain, expected = 0, self.MARGIN * rows / plain, float(rows)
        rates = [self.rate(choice) for choice in found]
        alive = [1.0] * len(rates)
        for k in range(1, self.most + 1):
            alive = [a * r for a, r in zip(alive, rates, strict=True)]
            expected += sum(alive) * self._came / self._hoped
            tokens = rows * (1 + self.most) if self.padded else rows + len(rates) * k
            gain = expected / (self._guessed.at(tokens) or self.DEAR * plain)
            if gain > best_gain:
                best, best_gain = k, gain
        would_pay = expected / (self.DEAR * plain) > best_gain
        return self.most if not best and would_pay and self._retries() else self._settled(best)

    def _retries(self) -> bool:
        """Guesses would come true, but their steps were too slow: whether to forget that, and measure again."""
        self._declined += 1
        if self._declined < self._retry_after:
            return False
        self._declined, self._retry_after = 0, min(2 * self._retry_after, self.PROBE_LATEST)
        self._guessed = Line()
        return True

    def _settled(self, best: int) -> int:
        if best and self._guessed.is_known:
            self._declined, self._retry_after = 0, self.PROBE_AFTER
        return best

    def choose_dear(self, choices: Collection[Choice]) -> int:
        """As `choose`, for guesses that nobody has made yet."""
        self._probes = False
        if (best := self.choose(len(choices), choices)) or not choices:
            self._steps_off, self._probe_after = 0, self.PROBE_AFTER if best else self._probe_after
            return best
        self._steps_off += 1
        if self._steps_off < self._probe_after:
            return 0
        self._steps_off, self._probe_after = 0, min(2 * self._probe_after, self.PROBE_LATEST)
        self._probes = True
        return 1


def _expected(rate: float, number: int) -> float:
    """How many of so many guesses come true, each only behind the others."""
    return sum(rate**place for place in range(1, number + 1))
