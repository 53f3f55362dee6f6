"""A step with prompts as numbers whose counts do not depend on it: what a recorded step reads (`rille.serve.prompts`).

    sequences    parts of the step | idle ones, without tokens | padding: the tokens that are left over, as a sequence
    chunks       those of all sequences, 64 tokens each | empty ones
    saves        states that are kept on the way | idle ones

Idle sequences and saves, and the padding, have pages that belong to nobody. On a GPU they may all have the same one,
where they write over each other; ops on a CPU want a slot for each. All numbers lie in one buffer, which one copy takes
to the device. What they are is what `Packing`, `Places`, `TailPlaces` and `Batch` make of a step.

Suffixes: N tokens, S sequences, G groups of KDA layers, M chunks, P kept states, R tokens up to those that lie inside
chunks, W taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rille.ops.kda.arguments import CHUNK
from rille.ops.kda.checkpoints import inside_chunks, slots_by_chunk
from rille.serve.sequences import Part

ALIGNED = 16  # bytes: where each part of the buffer begins, as kernels like addresses
KINDS = {"i8": torch.int64, "i4": torch.int32}


class Shape(NamedTuple):
    """tokens: N, a multiple of 64; rows: parts that there may be; width: pages of a row of the table; saves: P."""

    tokens: int
    rows: int
    width: int
    saves: int

    @property
    def sequences(self) -> int:
        """S: one is idle at least, and the last one is the padding."""
        return self.rows + 2

    @property
    def chunks(self) -> int:
        """M: no sequence has more than one that is not full."""
        return self.tokens // CHUNK + self.rows + 1

    @property
    def between(self) -> int:
        """R."""
        return self.saves * (CHUNK - 1)


class Form:
    """The parts of the buffer of a shape: names, shapes, kinds, places."""

    def __init__(self, shape: Shape, groups: int, taps: int) -> None:
        (N, rows, width, P), S, M = shape, shape.sequences, shape.chunks
        wide = dict(tokens=(N,), sequence_of=(N,), positions=(N,), wanted=(rows,), slots=(groups, S), table=(S, width))
        wide |= dict(first=(S,))
        narrow = dict(starts=(S + 1,), history=(S,), order=(S,), singles=(S,), others=(S,), spans=(M + P, 2))
        if P:
            wide |= dict(kept=(groups, P), index=(M + 5 * P,), tail_rows=(P, taps - 1), tail_sequences=(P,))
            wide |= dict(rest_rows=(shape.between,), rest_first=(P,))
            narrow |= dict(rest_starts=(P + 1,), rest_order=(P,), rest_history=(P,))
        self.shape, self._parts, self.size = shape, {}, 0
        for kind, some in (("i8", wide), ("i4", narrow)):
            for name, sizes in some.items():
                self._parts[name] = kind, sizes, self.size
                self.size += -(-prod(sizes) * int(kind[1]) // ALIGNED) * ALIGNED

    def tensors(self, buffer: Tensor) -> dict[str, Tensor]:
        """Parts of a buffer uint8 [size]."""
        return {
            name: buffer[at : at + prod(sizes) * int(kind[1])].view(KINDS[kind]).view(sizes)
            for name, (kind, sizes, at) in self._parts.items()
        }

    def arrays(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The same on the host."""
        memory: Any = buffer
        return {
            name: np.ndarray(sizes, kind, memory, at) if prod(sizes) else np.empty(sizes, kind)
            for name, (kind, sizes, at) in self._parts.items()
        }


@dataclass(frozen=True)
class Numbers:
    """What the host knows of a step, as in `Packing` and `ChunkMap`; rest: tokens up to each place inside a chunk."""

    lengths: tuple[int, ...]
    consumed: tuple[int, ...]
    per_sequence: tuple[int, ...]
    starts_M: np.ndarray
    lengths_M: np.ndarray
    rest: tuple[int, ...]

    @classmethod
    def bounds(cls, shape: Shape) -> Numbers:
        """For a step that is not known: lengths with the right sum, and somebody who has a history."""
        none, nothing_M = (0,) * (shape.sequences - 1), np.zeros(shape.chunks, np.int64)
        lengths, rest = (shape.tokens, *none), (shape.between, *(0,) * (shape.saves - 1)) if shape.saves else ()
        return cls(lengths, (*none, 1), (shape.chunks, *none), nothing_M, nothing_M, rest)


class Sheet:
    """The buffer of one step on the host, filled. spares: pages that belong to nobody, taken in turn."""

    def __init__(self, form: Form, parts: Sequence[Part], spares: Sequence[int], pinned: bool = False) -> None:
        self.buffer = torch.empty(form.size, dtype=torch.uint8, pin_memory=pinned)
        self.of, self._shape, self._spares = form.arrays(self.buffer.numpy()), form.shape, np.array(spares)
        S = form.shape.sequences
        lengths, consumed = np.zeros(S, np.int64), np.zeros(S, np.int64)
        lengths[: len(parts)], consumed[: len(parts)] = [p.count for p in parts], [p.start for p in parts]
        lengths[-1] = form.shape.tokens - lengths.sum()
        assert lengths[-1] >= 0 and len(parts) <= form.shape.rows, "the step does not fit the shape"
        starts = np.concatenate([[0], np.cumsum(lengths)])
        self._fill_tokens(parts, lengths, consumed, starts)
        per, starts_M, lengths_M = self._fill_chunks(lengths, starts)
        self._fill_memory(parts)
        rest = self._fill_saves(parts, lengths, starts, per) if form.shape.saves else ()
        consumed[-2] = 1  # somebody idle: with a history, so that latents are read from the pages
        self.numbers = Numbers(
            tuple(lengths.tolist()), tuple(consumed.tolist()), tuple(per.tolist()), starts_M, lengths_M, rest
        )

    def _fill_tokens(
        self, parts: Sequence[Part], lengths: np.ndarray, consumed: np.ndarray, starts: np.ndarray
    ) -> None:
        of, S, count = self.of, len(lengths), starts[-2]
        ids = [np.asarray(p.sequence.chain.ids[p.start : p.start + p.count]) for p in parts]
        of["tokens"][:count], of["tokens"][count:] = np.concatenate([*ids, np.empty(0, np.int64)]), 0
        of["sequence_of"][:] = sequence_N = np.repeat(np.arange(S), lengths)
        of["positions"][:] = np.arange(len(sequence_N)) + (consumed - starts[:-1])[sequence_N]
        ends = [n for n, part in enumerate(parts) if part.ends]
        of["wanted"][: len(ends)], of["wanted"][len(ends) :] = starts[1:][ends] - 1, 0
        of["starts"][:], of["history"][:] = starts, consumed
        of["order"][:] = np.argsort(-lengths, kind="stable")
        for name, members in (("singles", lengths == 1), ("others", lengths > 1)):
            (found,) = members.nonzero()
            of[name][: len(found)], of[name][len(found) :] = found, S - 2

    def _fill_chunks(self, lengths: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Chunks of each sequence, the first token and the number of tokens of each chunk."""
        per = -(-lengths // CHUNK)
        self.of["first"][:] = first = np.cumsum(per) - per
        sequence_M = np.repeat(np.arange(len(per)), per)
        done_M = CHUNK * (np.arange(len(sequence_M)) - first[sequence_M])
        starts_M, lengths_M = starts[sequence_M] + done_M, np.minimum(CHUNK, lengths[sequence_M] - done_M)
        spans, there = self.of["spans"], len(sequence_M)
        spans[:there, 0], spans[:there, 1], spans[there:] = starts_M, lengths_M, 0
        return per, starts_M, lengths_M

    def _fill_memory(self, parts: Sequence[Part]) -> None:
        slots_GS, table, n = self.of["slots"], self.of["table"], len(parts)
        slots_GS[:, n:] = self._spare(0, slots_GS.shape[1] - n)
        table[:] = self._spares[0]
        for row, part in enumerate(parts):
            assert part.sequence.holding is not None
            slots_GS[:, row] = part.sequence.holding.state
            pages = [entry.pages[0] for entry in part.sequence.holding.latents]
            table[row, : len(pages)] = pages

    def _spare(self, begin: int, count: int) -> np.ndarray:
        return self._spares[np.arange(begin, begin + count) % len(self._spares)]

    def _fill_saves(
        self, parts: Sequence[Part], lengths: np.ndarray, starts: np.ndarray, per: np.ndarray
    ) -> tuple[int, ...]:
        """Tokens up to each place inside a chunk."""
        of, P, S, M = self.of, self._shape.saves, self._shape.sequences, self._shape.chunks
        kept = [(s, place - part.start) for s, part in enumerate(parts) for place, _ in part.saves]
        k, idle = len(kept), S - 2
        pages_PG = [pages for part in parts for _, pages in part.saves]
        of["kept"][:, :k] = np.array(pages_PG, dtype=np.int64).reshape(k, len(of["kept"])).T
        of["kept"][:, k:] = self._spare(S - len(parts), P - k)
        place_T, sequence_T = np.zeros(P, np.int64), np.full(P, idle)
        if k:
            sequence_T[:k], place_T[:k] = np.array(kept).T
        of["tail_sequences"][:] = sequence_T
        inside_TP = place_T[:, None] - np.arange(of["tail_rows"].shape[1], 0, -1)
        of["tail_rows"][:] = np.where(inside_TP < 0, inside_TP, starts[sequence_T, None] + inside_TP)

        inside = inside_chunks(kept, lengths.tolist())
        first = [0, *np.cumsum(per).tolist()]
        by_chunk, _, *copied = slots_by_chunk(first, kept, inside, P)
        lists = [(by_chunk, P + S, M), (list(range(P)), 0, P), *((some, P + idle, P) for some in copied)]
        of["index"][:] = [number for some, other, room in lists for number in [*some, *[other] * (room - len(some))]]

        counts, begins = np.zeros(P, np.int64), np.zeros(P, np.int64)
        counts[inside] = place_T[inside] % CHUNK
        begins[inside] = (starts[sequence_T] + place_T - counts)[inside]
        of["spans"][M:, 0], of["spans"][M:, 1] = begins, counts
        rows = np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())
        of["rest_rows"][: len(rows)], of["rest_rows"][len(rows) :] = rows, 0
        of["rest_first"][:], of["rest_history"][:] = np.arange(M, M + P), 0
        of["rest_starts"][:] = np.concatenate([[0], np.cumsum(counts)])
        of["rest_order"][:] = np.argsort(-counts, kind="stable")
        return tuple(counts.tolist())
