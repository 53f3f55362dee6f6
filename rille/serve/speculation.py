"""Guessing tokens ahead and taking those that come true, without changing what is written.

    drafts d_1 .. d_k       one forward over the last token and the drafts gives p_0 .. p_k
    sure of themselves      draw x_i from p_i as ever; go on while x_i = d_{i+1}
    drawn from q_i          take d_{i+1} with probability min(1, p_i / q_i); else draw from (p_i - q_i)+ and stop

Both leave the distribution of the reply as it was (Leviathan et al., arXiv 2211.17192, the second; the first is the
case of a q that is one token, with the draw shared, so that a seed gives the same reply with drafts and without).

How many are guessed follows from what was measured: with f the share of sequences for which there is a guess, a the
share of guesses that come true at a place, B sequences in the batch and t(n) the time of a step of n tokens, k is
where (1 + f a_1 + f a_1 a_2 + ...) / t(B (k + 1)) is largest, which may be 0: a step that guesses cannot be launched
ahead, so it must promise a little more than one that does not.

Suffixes: K drafts, W vocabulary, D width.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rille.model.memory import Memory
from rille.model.model import K3
from rille.serve.sampler import Row, uniform
from rille.serve.sequences import Sequence as Choice


@dataclass(frozen=True)
class Draft:
    """tokens: the guesses. probabilities [K, W]: what they were drawn from; None: the drafter is sure of itself."""

    tokens: tuple[int, ...] = ()
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """Guesses for the sequences of an engine.

    reads_hidden: whether `observe` wants the trunk's final hidden states [n, D] of the rows that were run, from
    position `start` on, with the token that follows each of them. propose: at most `limit` guesses for what follows all
    that is known of a sequence. forget: it has ended, or begins again.
    """

    reads_hidden: bool

    def propose(self, sequence: Choice, limit: int) -> Draft: ...
    def observe(self, sequence: Choice, start: int, hidden_ND: Tensor, following: Sequence[int]) -> None: ...
    def forget(self, sequence: Choice) -> None: ...


class NgramDrafter:
    """Prompt lookup: what followed the last time that the last `longest` tokens (or fewer, at least `shortest`) were
    there."""

    reads_hidden = False

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram drafter: lengths {shortest} to {longest}; want 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest
        self._factors = [pow(0x9E3779B97F4A7C15, n, 2**64) for n in range(longest, 0, -1)]
        self._seen: dict[Choice, dict[int, int]] = {}
        self._done: dict[Choice, int] = {}

    def propose(self, sequence: Choice, limit: int) -> Draft:
        ids = sequence.chain.ids
        seen = self._seen.setdefault(sequence, {})
        self._index(seen, ids, self._done.get(sequence, 0))
        self._done[sequence] = len(ids)
        for n in range(min(self.longest, len(ids)), self.shortest - 1, -1):
            at = seen.get(self._key(ids[len(ids) - n :]))
            if at is not None:
                return Draft(self._copied(ids, at, limit))
        return Draft()

    def _index(self, seen: dict[int, int], ids: array[int], done: int) -> None:
        """Note what stands before every place from `done` on, the end excepted; a long prompt all at once."""
        if len(ids) - done < 64:
            for end in range(done, len(ids)):
                for n in range(self.shortest, min(self.longest, end) + 1):
                    seen[self._key(ids[end - n : end])] = end
            return
        first = max(done - self.longest, 0)
        numbers = np.frombuffer(ids, dtype=np.int64)[first:-1].astype(np.uint64)
        for n in range(self.shortest, self.longest + 1):
            count = len(numbers) - n + 1
            if count > 0:
                windows = np.lib.stride_tricks.sliding_window_view(numbers, n)
                keys = windows @ np.array(self._factors[-n:], dtype=np.uint64)
                seen.update(zip(keys.tolist(), range(first + n, first + n + count), strict=True))

    def _key(self, tokens: Sequence[int]) -> int:
        """A number for an n-gram; two with one number cost a wrong guess."""
        return sum(map(mul, tokens, self._factors[-len(tokens) :])) & (2**64 - 1)

    def _copied(self, ids: Sequence[int], at: int, limit: int) -> tuple[int, ...]:
        """What stands from `at` on; where that reaches the end it repeats itself."""
        period = len(ids) - at
        return tuple(ids[at + i % period] for i in range(limit))

    def observe(self, sequence: Choice, start: int, hidden_ND: Tensor, following: Sequence[int]) -> None:
        pass

    def forget(self, sequence: Choice) -> None:
        self._seen.pop(sequence, None)
        self._done.pop(sequence, None)


class MtpDrafter:
    """The model's multi-token-prediction layer (`rille.model.mtp`), which reads the trunk's hidden states and borrows
    its embedding and head. A sequence that goes on from the cache begins afresh here: that costs guesses, not truth."""

    reads_hidden = True

    def __init__(self, model: K3) -> None:
        """Raises ValueError for a model without an MTP layer."""
        model.new_draft_memory()
        self._model = model
        self._memory: dict[Choice, Memory] = {}
        self._unread: dict[Choice, tuple[list[Tensor], list[int]]] = {}
        self._read: dict[Choice, int] = {}

    def observe(self, sequence: Choice, start: int, hidden_ND: Tensor, following: Sequence[int]) -> None:
        if start != self._read.get(sequence):
            self.forget(sequence)
        self._read[sequence] = start + len(following)
        hidden, tokens = self._unread.setdefault(sequence, ([], []))
        hidden.append(hidden_ND)
        tokens += following

    def propose(self, sequence: Choice, limit: int) -> Draft:
        hidden, tokens = self._unread.pop(sequence, ([], []))
        if not tokens:
            return Draft()
        if sequence not in self._memory:
            self._memory[sequence] = self._model.new_draft_memory()
        guesses, _ = self._model.draft(
            torch.cat(hidden), torch.tensor(tokens), self._memory[sequence], count=max(limit, 1)
        )
        return Draft(tuple(guesses[0, :limit].tolist()))

    def forget(self, sequence: Choice) -> None:
        for kept in (self._memory, self._unread, self._read):
            kept.pop(sequence, None)


def accept(p_RW: Tensor, draft: Draft, rows: Sequence[Row]) -> list[int]:
    """The tokens that follow, by rejection: those of the draft that came true and one more. p_RW float64 [K + 1, W]:
    what each place is drawn from; draft.probabilities must be there."""
    assert draft.probabilities is not None
    tokens: list[int] = []
    for row, p_W, q_W, guess in zip(
        rows, p_RW, draft.probabilities.double().to(p_RW.device), draft.tokens, strict=False
    ):
        taken = uniform(row.seed, row.choice, row.place, b"accept")
        if taken * float(q_W[guess]) < float(p_W[guess]):
            tokens.append(guess)
            continue
        rest_W = (p_W - q_W).clamp(min=0)
        return [*tokens, pick(rest_W, uniform(row.seed, row.choice, row.place, b"rest"))]
    row = rows[len(draft.tokens)]
    return [*tokens, pick(p_RW[len(draft.tokens)], uniform(row.seed, row.choice, row.place))]


def pick(mass_W: Tensor, u: float) -> int:
    """The first token at which the running sum of the masses exceeds u times their sum."""
    running_W = mass_W.cumsum(-1)
    place = int((running_W <= u * running_W[-1]).sum())
    return min(place, int(mass_W.nonzero()[-1]))


class DraftLength:
    """How many tokens to guess, from what was measured. fixed: always the most."""

    DECAY = 0.95
    MARGIN = 1.03  # what guessing must promise
    PROBE_AFTER, PROBE_LATEST = 64, 8_192  # steps without drafts until they are tried again; twice as many each time

    def __init__(self, most: int, *, fixed: bool = False) -> None:
        self.most, self.fixed = most, fixed
        self.rates = [0.5] * most  # of drafts that came true at a place, among those whose predecessors did
        self.found = 1.0  # share of sequences for which there was a guess
        self._steps_off, self._probe_after = 0, self.PROBE_AFTER
        self._probes = False
        # Sums of a weighted least-squares line, seconds over tokens.
        self._w = self._n = self._t = self._nn = self._nt = 0.0

    def choose(self, batch: int) -> int:
        """For a step in which so many sequences decode."""
        if self.fixed:
            return self.most
        base, slope = self._line()
        best, best_gain, expected, alive = 0, self.MARGIN / (base + slope * batch), 1.0, self.found
        for k in range(1, self.most + 1):
            alive *= self.rates[k - 1]
            expected += alive
            gain = expected / (base + slope * batch * (k + 1))
            if gain > best_gain:
                best, best_gain = k, gain
        self._probes = False
        if best:
            self._steps_off, self._probe_after = 0, self.PROBE_AFTER
            return best
        self._steps_off += 1
        if self._steps_off < self._probe_after:
            return 0
        self._steps_off, self._probe_after = 0, min(2 * self._probe_after, self.PROBE_LATEST)
        self._probes = True
        return 1

    def note_found(self, share: float) -> None:
        """There was a guess for this share of the sequences that decode."""
        self.found = 0.9 * self.found + 0.1 * share

    def note(self, drafted: int, accepted: int) -> None:
        """Of so many guesses of one sequence so many came true. One that did after a long time without is a new
        beginning."""
        if self._probes and accepted:
            self.found, self.rates = max(self.found, 0.5), [max(rate, 0.5) for rate in self.rates]
        for place in range(min(accepted + 1, drafted)):
            self.rates[place] = self.DECAY * self.rates[place] + (1 - self.DECAY) * (place < accepted)

    def note_time(self, tokens: int, seconds: float) -> None:
        """A step that only decodes, of so many tokens, took so long."""
        self._w, self._n, self._t, self._nn, self._nt = (
            0.99 * old + new
            for old, new in (
                (self._w, 1.0),
                (self._n, tokens),
                (self._t, seconds),
                (self._nn, tokens * tokens),
                (self._nt, tokens * seconds),
            )
        )

    def _line(self) -> tuple[float, float]:
        """Seconds of a step and of each of its tokens; before anything was measured tokens cost nothing."""
        if not self._w:
            return 1.0, 0.0
        n, t = self._n / self._w, self._t / self._w
        spread = self._nn / self._w - n * n
        slope = max(0.0, (self._nt / self._w - n * t) / spread) if spread > 1e-9 else 0.0
        return max(t - slope * n, 0.02 * t, 1e-9), slope
