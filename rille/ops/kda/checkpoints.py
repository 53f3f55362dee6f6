"""Checkpoints: states that sequences leave in slots of a pool on their way through a batch, after any of their tokens.

    at a chunk's end     every 64 tokens from the sequence's first one in the batch, and at its last: the pass over
                         chunks writes the state as it comes by (`PooledState.checkpoints`)
    between              the state at the chunk's beginning, moved on by the tokens up to the place, at most 63; those
                         of all places are the sequences of a second, short pass (`PooledState.between`)

The first pass is what it would be without: no output changes by a bit. A state that is kept is the one that a batch
leaves which ends there: the same chunks, the last one cut short.

Suffixes: S sequences, M chunks, P states that are kept, Q of them between, R tokens up to those.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rille.ops.kda.arguments import CHUNK, Between
from rille.packing import Packing, moved


@dataclass(frozen=True, eq=False)
class Places:
    """Where the sequences of a batch leave states, whatever the slots: made once a batch, for the pools of all layers.

    count: P. index int64, parts: into the slots of the kept states [P], then those of the sequences [S], then a -1; one
    for each chunk, then for `slots`, `before` and `after` of `Between`. The others: as there.
    """

    count: int
    index: Tensor
    parts: tuple[int, ...]
    rows: Tensor
    packing: Packing
    spans: Tensor
    first: Tensor

    @classmethod
    def of(cls, packing: Packing, places: Sequence[Sequence[int]]) -> Places:
        """places: for each sequence after how many of its tokens in this batch a state is kept, rising. Raises
        ValueError for places that do not rise or that lie outside of the sequence, or another number of lists."""
        if len(places) != packing.num_sequences:
            raise ValueError(f"kda checkpoints: {len(places)} lists of places for {packing.num_sequences} sequences")
        for s, (some, length) in enumerate(zip(places, packing.lengths, strict=True)):
            if list(some) != sorted(set(some)) or not all(0 < tokens <= length for tokens in some):
                raise ValueError(f"kda checkpoints: {list(some)} of sequence {s} must rise and lie in 1..{length}")
        kept = [(s, tokens) for s, some in enumerate(places) for tokens in some]
        inside = inside_chunks(kept, packing.lengths)
        start, device = np.cumsum((0, *packing.lengths)).tolist(), packing.device
        spans = [(start[s] + tokens // CHUNK * CHUNK, tokens % CHUNK) for s, tokens in (kept[p] for p in inside)]
        rows_R = np.concatenate([np.empty(0, np.int64), *(np.arange(at, at + count) for at, count in spans)])
        spans_M2, spans_Q2 = packing.chunks(CHUNK).spans, torch.tensor(spans, dtype=torch.int32).view(-1, 2)
        first = np.cumsum((0, *packing.chunks(CHUNK).per_sequence)).tolist()
        parts = slots_by_chunk(first, kept, inside, len(kept))
        return cls(
            len(kept),
            moved(torch.tensor(sum(parts, []), dtype=torch.int64), device),
            tuple(map(len, parts)),
            moved(torch.from_numpy(rows_R), device),
            Packing.of([count for _, count in spans], device=device),
            torch.cat([spans_M2, moved(spans_Q2, device)]),
            torch.arange(len(spans_M2), len(spans_M2) + len(spans), device=device),
        )

    def at(self, slots_S: Tensor, kept_P: Tensor) -> tuple[Tensor, Between | None]:
        """`checkpoints` and `between` of a `PooledState`. slots_S: those of the sequences; kept_P int64: those of the
        kept states, in the order of sequences and places. All differ; that is checked where it costs no wait, on the
        CPU. Raises ValueError otherwise, and for another number of slots."""
        if kept_P.shape != (self.count,):
            raise ValueError(f"kda checkpoints: slots of shape {tuple(kept_P.shape)} for {self.count} places")
        table = torch.cat([kept_P, slots_S, slots_S.new_full((1,), -1)])
        if table.device.type == "cpu" and table.unique().numel() != table.numel():
            raise ValueError(f"kda checkpoints: slots {kept_P.tolist()} beside {slots_S.tolist()} name one slot twice")
        checkpoints_M, slots_Q, *copied = table[self.index].split(self.parts)
        if not self.packing.num_tokens:
            return checkpoints_M, None
        before, after = (copied[0], copied[1]), (copied[2], copied[3])
        return checkpoints_M, Between(self.rows, self.packing, self.spans, self.first, slots_Q, before, after)


def inside_chunks(kept: Sequence[tuple[int, int]], lengths: Sequence[int]) -> list[int]:
    """Which of the places (a sequence, and after how many of its tokens) lie between the ends of chunks."""
    return [p for p, (s, tokens) in enumerate(kept) if tokens % CHUNK and tokens < lengths[s]]


def slots_by_chunk(
    first: Sequence[int], kept: Sequence[tuple[int, int]], inside: Sequence[int], own: int
) -> list[list[int]]:
    """`Places.index` in parts. first: chunk of each sequence, and their number; own: where the slots of the sequences
    begin, behind those of the kept states. inside: as in `inside_chunks`. The first of them in a chunk takes the state
    at the chunk's beginning in its own slot, unless that is kept itself."""
    nowhere = own + len(first) - 1
    ends = [(p, *place) for p, place in enumerate(kept) if p not in set(inside)]
    taken = {first[s] + (tokens - 1) // CHUNK: p for p, s, tokens in ends}
    before, after = [], []
    for p in inside:
        s, tokens = kept[p]
        if tokens < CHUNK:
            before.append((own + s, p))
        elif (source := taken.setdefault(first[s] + tokens // CHUNK - 1, p)) != p:
            after.append((source, p))
    by_chunk = [taken.get(m, nowhere) for m in range(first[-1])]
    copied = [[pair[end] for pair in pairs] for pairs in (before, after) for end in (0, 1)]
    return [by_chunk, list(inside), *copied]
