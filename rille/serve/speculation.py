"""Guessing tokens ahead and taking those that come true, without changing what is written.

    drafts d_1 .. d_k       one forward over the last token and the drafts gives p_0 .. p_k
    sure of themselves      draw x_i from p_i as ever; go on while x_i = d_{i+1}
    drawn from q_i          take d_{i+1} with probability min(1, p_i / q_i); else draw from (p_i - q_i)+ and stop

Both leave the distribution of the reply as it was (Leviathan et al., arXiv 2211.17192, the second; the first is the
case of a q that is one token, with the draw shared, so that a seed gives the same reply with drafts and without).

How many are guessed, and whether any, follows from what came true (`rille.serve.odds`).

Suffixes: K drafts, W vocabulary, D width.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
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

    def cut(self, limit: int) -> Draft:
        """Its first tokens."""
        q_KW = None if self.probabilities is None else self.probabilities[:limit]
        return self if len(self.tokens) <= limit else Draft(self.tokens[:limit], q_KW)


class Drafter(Protocol):
    """Guesses for the sequences of an engine.

    reads_hidden: whether `observe` wants the trunk's final hidden states [n, D] of the rows that were run, from
    position `start` on, with the token that follows each of them. propose: at most `limit` guesses for what follows all
    that is known of a sequence; without `reads_hidden` it is asked whether guesses will run or not, also while the next
    token is being drawn already, before every step or less often (`rille.serve.watch`). forget: it has ended, or begins
    again.
    """

    reads_hidden: bool

    def propose(self, sequence: Choice, limit: int) -> Draft: ...
    def observe(self, sequence: Choice, start: int, hidden_ND: Tensor, following: Sequence[int]) -> None: ...
    def forget(self, sequence: Choice) -> None: ...


@dataclass(slots=True)
class _Text:
    """seen: a number for an n-gram -> where it ended last. done: tokens that were looked at; keys: the n-grams before
    that place, which `seen` has not."""

    seen: dict[int, int] = field(default_factory=dict)
    done: int = 0
    keys: list[int] = field(default_factory=list)


class NgramDrafter:
    """Prompt lookup: what followed the last time that the last `longest` tokens (or fewer, at least `shortest`) were
    there."""

    reads_hidden = False

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram drafter: lengths {shortest} to {longest}; want 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest
        self._factors = [pow(0x9E3779B97F4A7C15, n, 2**64) for n in range(1, longest + 1)]
        self._multipliers = np.array(self._factors, dtype=np.uint64)
        self._texts: dict[Choice, _Text] = {}

    def propose(self, sequence: Choice, limit: int) -> Draft:
        ids = sequence.chain.ids
        text = self._texts.setdefault(sequence, _Text())
        if text.done != len(ids):
            self._index(text, ids)
        for key in reversed(text.keys):
            if (at := text.seen.get(key)) is not None:
                return Draft(self._copied(ids, at, limit))
        return Draft()

    def _index(self, text: _Text, ids: array[int]) -> None:
        """Note what stands before every place up to the end, that one excepted; much that is new all at once."""
        if text.done and len(ids) - text.done < 12:
            for end in range(text.done + 1, len(ids) + 1):
                text.seen.update(dict.fromkeys(text.keys, end - 1))
                text.keys = self._keys(ids, end)
        else:
            self._index_all(text, ids)
        text.done = len(ids)

    def _index_all(self, text: _Text, ids: array[int]) -> None:
        first = max(text.done - self.longest, 0)
        numbers = np.frombuffer(ids, dtype=np.uint64)[first:-1]
        keys = numbers * self._multipliers[0]
        for n in range(1, min(self.longest, len(numbers)) + 1):
            if n > 1:
                keys = keys[1:] + numbers[: 1 - n] * self._multipliers[n - 1]
            if n >= self.shortest:
                text.seen.update(zip(keys.tolist(), range(first + n, len(ids)), strict=True))
        text.keys = self._keys(ids, len(ids))

    def _keys(self, ids: array[int], end: int) -> list[int]:
        """Numbers for the n-grams before a place, the shortest first; two with one number cost a wrong guess."""
        total, keys = 0, []
        for n in range(1, min(self.longest, end) + 1):
            total += ids[end - n] * self._factors[n - 1]
            if n >= self.shortest:
                keys.append(total & (2**64 - 1))
        return keys

    def _copied(self, ids: Sequence[int], at: int, limit: int) -> tuple[int, ...]:
        """What stands from `at` on; where that reaches the end it repeats itself."""
        period = len(ids) - at
        return tuple(ids[at + i % period] for i in range(limit))

    def observe(self, sequence: Choice, start: int, hidden_ND: Tensor, following: Sequence[int]) -> None:
        pass

    def forget(self, sequence: Choice) -> None:
        self._texts.pop(sequence, None)


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
