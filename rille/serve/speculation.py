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
from dataclasses import dataclass
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


class NgramDrafter:
    """Prompt lookup: what followed the last time that the last `longest` tokens (or fewer, at least `shortest`) were
    there. As long as the text goes on as it did there, the guess goes on from there too.

    A search reads the text once and keeps nothing: some 2 us, and 0.2 more for each 1,000 tokens. An index of n-grams
    would have to take in every token of every sequence, and most of them repeat nothing.
    """

    reads_hidden = False
    SIGHTINGS = 256  # of the last token, so many are compared, the newest first

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ValueError(f"n-gram drafter: lengths {shortest} to {longest}; want 1 <= shortest <= longest")
        self.longest, self.shortest = longest, shortest
        self._found: dict[Choice, tuple[int, int]] = {}  # where a guess came from, and how long the text was then

    def propose(self, sequence: Choice, limit: int) -> Draft:
        ids = sequence.chain.ids
        at = self._followed(sequence, ids) or self._searched(ids)
        if not at:
            self._found.pop(sequence, None)
            return Draft()
        self._found[sequence] = at, len(ids)
        return Draft(self._copied(ids, at, limit))

    def _followed(self, sequence: Choice, ids: array[int]) -> int:
        """Where the last guess goes on, if all that was written since stands there; else 0."""
        at, length = self._found.get(sequence, (0, 0))
        if not at:
            return 0
        news = ids[length:]
        return at + len(news) if ids[at : at + len(news)] == news else 0

    def _searched(self, ids: array[int]) -> int:
        """The place behind the newest of the longest n-grams that stand at the end too; 0 where there is none."""
        text = np.frombuffer(ids, dtype=np.int64)
        places = (text[:-1] == text[-1]).nonzero()[0]
        most, found = self.shortest - 1, 0
        for place in places[: -1 - self.SIGHTINGS : -1].tolist():
            n = 1
            while n < self.longest and n <= place and ids[place - n] == ids[-1 - n]:
                n += 1
            if n > most:
                most, found = n, place + 1
                if n == self.longest:
                    break
        return found

    def _copied(self, ids: array[int], at: int, limit: int) -> tuple[int, ...]:
        """What stands from `at` on; where that reaches the end it repeats itself."""
        period = len(ids) - at
        if limit <= period:
            return tuple(ids[at : at + limit])
        return tuple(ids[at + i % period] for i in range(limit))

    def observe(self, sequence: Choice, start: int, hidden_ND: Tensor, following: Sequence[int]) -> None:
        pass

    def forget(self, sequence: Choice) -> None:
        self._found.pop(sequence, None)


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
        if not rest_W.sum() > 0:  # only where q is no distribution: nothing that came from it counts
            rest_W = p_W
        return [*tokens, pick(rest_W, uniform(row.seed, row.choice, row.place, b"rest"))]
    row = rows[len(draft.tokens)]
    return [*tokens, pick(p_RW[len(draft.tokens)], uniform(row.seed, row.choice, row.place))]


def pick(mass_W: Tensor, u: float) -> int:
    """The first token at which the running sum of the masses exceeds u times their sum."""
    running_W = mass_W.cumsum(-1)
    place = int((running_W <= u * running_W[-1]).sum())
    return min(place, int(mass_W.nonzero()[-1]))
