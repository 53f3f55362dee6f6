"""Checkpoints: states that sequences leave in slots of a pool on their way through a batch, after any of their tokens.

    at a chunk's end     every 64 tokens from the sequence's first one in the batch, and at its last: the pass over
                         chunks writes the state as it comes by (`PooledState.checkpoints`)
    between              the state at the chunk's beginning, moved on by the tokens up to the place, at most 63; those
                         of all places are the sequences of one further, short call (`PooledState.between`)

The pass is what it would be without: no output changes by a bit. A state that is kept is the one that a batch leaves
which ends there: the same chunks, the last one cut short.

Suffixes: N packed tokens, S sequences, M chunks, P states that are kept, Q of them between, B of those in a first
chunk, R tokens up to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rille.ops.kda.arguments import CHUNK, Between, Gate, Kda, PooledState, State
from rille.packing import Packing, moved


@dataclass(frozen=True, eq=False)
class Places:
    """Where the sequences of a batch leave states, whatever the slots: made once a batch, for the pools of all layers.

    count: P. index int64, parts: into the slots of the kept states [P], then those of the sequences [S], then a -1; one
    for each chunk, then `bases`, `slots`, `sources` and `targets` of `Between`. rows, packing: as there.
    """

    count: int
    index: Tensor
    parts: tuple[int, ...]
    rows: Tensor
    packing: Packing

    @classmethod
    def of(cls, packing: Packing, places: Sequence[Sequence[int]]) -> Places:
        """places: for each sequence after how many of its tokens in this batch a state is kept, rising. Raises
        ValueError for places that do not rise or that lie outside of the sequence."""
        for s, (some, length) in enumerate(zip(places, packing.lengths, strict=True)):
            if list(some) != sorted(set(some)) or not all(0 < tokens <= length for tokens in some):
                raise ValueError(f"kda checkpoints: {list(some)} of sequence {s} must rise and lie in 1..{length}")
        kept = [(s, tokens) for s, some in enumerate(places) for tokens in some]
        inside = [p for p, (s, tokens) in enumerate(kept) if tokens % CHUNK and tokens < packing.lengths[s]]
        start = np.cumsum((0, *packing.lengths))
        spans = [(start[s] + tokens // CHUNK * CHUNK, start[s] + tokens) for s, tokens in (kept[p] for p in inside)]
        rows_R = np.concatenate([np.empty(0, np.int64), *(np.arange(*span) for span in spans)])
        parts = slots_by_chunk(packing, kept, inside)
        return cls(
            len(kept),
            moved(torch.tensor(sum(parts, []), dtype=torch.int64), packing.device),
            tuple(map(len, parts)),
            moved(torch.from_numpy(rows_R), packing.device),
            Packing.of([end - begin for begin, end in spans], device=packing.device),
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
        checkpoints_M, *slots = table[self.index].split(self.parts)
        return checkpoints_M, Between(self.rows, self.packing, *slots) if self.packing.num_tokens else None


def slots_by_chunk(packing: Packing, kept: list[tuple[int, int]], inside: list[int]) -> list[list[int]]:
    """`Places.index` in parts. inside: which of the kept states lie between the ends of chunks. The first of them in a
    chunk takes the state at the chunk's beginning in its own slot, unless that is kept itself."""
    first = np.cumsum((0, *packing.chunks(CHUNK).per_sequence)).tolist()
    own, nowhere = len(kept), len(kept) + packing.num_sequences
    ends = [(p, *place) for p, place in enumerate(kept) if p not in set(inside)]
    after = {first[s] + (tokens - 1) // CHUNK: p for p, s, tokens in ends}
    bases, copied = [], []
    for p in inside:
        s, tokens = kept[p]
        if tokens < CHUNK:
            copied.append((own + s, p))
            bases.append(p)
        else:
            bases.append(after.setdefault(first[s] + tokens // CHUNK - 1, p))
    by_chunk = [after.get(m, nowhere) for m in range(first[-1])]
    return [by_chunk, bases, inside, [source for source, _ in copied], [target for _, target in copied]]


def keeping(run: Kda) -> Kda:
    """Let a form that keeps states at the ends of chunks keep those between as well."""

    def kda(
        q_NHK: Tensor,
        k_NHK: Tensor,
        v_NHV: Tensor,
        z_NHK: Tensor,
        b_NH: Tensor,
        gate: Gate,
        packing: Packing,
        state: State,
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(state, PooledState) or state.between is None:
            return run(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
        some, pool = state.between, state.pool
        if some.sources.numel():
            pool[some.targets] = pool[some.sources]
        result = run(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
        k_RHK, v_RHV, z_RHK, b_RH = (x[some.rows] for x in (k_NHK, v_NHV, z_NHK, b_NH))
        # nobody reads what these tokens give, so keys stand in for their queries
        _, kept_QHVK = run(k_RHK, k_RHK, v_RHV, z_RHK, b_RH, gate, some.packing, pool[some.bases])
        assert kept_QHVK is not None, "only a pool keeps the final states"
        pool[some.slots] = kept_QHVK.to(pool.dtype)
        return result

    return kda
