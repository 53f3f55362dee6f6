"""What `short_conv` is called with: the pool of tails, and the checks on shapes.

Suffixes: N packed tokens, S sequences, T tails that are kept, C channels, W taps, P = W - 1 inputs before the current
one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rille.ops.refusing import refuse_kinds, refuse_shapes, refuse_slots
from rille.packing import Packing, moved


@dataclass(frozen=True, eq=False)
class PooledTail:
    """Tails that live in a pool, read and overwritten in place; no gradient passes through a pool.

    pool [slots, W-1, C], oldest input first; axis 0 may have any stride. slots int64 [S]: where each sequence's tail
    lies. Slots of one batch differ; that, and whether the pool has them, is checked where it costs no wait, on the CPU.
    places, kept int64 [T], if given: where sequences leave tails on their way, and the slots that receive them, in the
    order of sequences and places.
    """

    pool: Tensor
    slots: Tensor
    places: TailPlaces | None = None
    kept: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.places is None) != (self.kept is None):
            raise ValueError("conv tail: places on the way and the slots that keep them come together or not at all")
        refuse_slots("conv tail", self.slots, self.pool.shape[0], self.kept)

    def keep(self, x_NC: Tensor) -> None:
        """Write the tails of all places; they need the old ones, which the convolution then moves on."""
        if self.places is None or self.kept is None:
            return
        rows_TP = self.places.rows
        new_TPC = x_NC.detach()[rows_TP.clamp(min=0)].to(self.pool.dtype)
        old_TPC = self.pool[self.slots[self.places.sequences, None], rows_TP.clamp(max=-1)]
        self.pool[self.kept] = torch.where(rows_TP[..., None] < 0, old_TPC, new_TPC)


@dataclass(frozen=True, eq=False)
class TailPlaces:
    """Where the sequences of a batch leave tails, whatever the slots: made once a batch, for the pools of all layers.

    rows int64 [T, P]: the inputs before each place, as tokens of the batch; where the batch has fewer of the sequence,
    rows of its old tail, counted from its end: -1 is the newest. sequences int64 [T].
    """

    rows: Tensor
    sequences: Tensor

    @classmethod
    def of(cls, packing: Packing, places: Sequence[Sequence[int]], W: int) -> TailPlaces:
        """places: for each sequence after how many of its tokens in this batch a tail is kept. Raises ValueError for
        places outside of the sequence."""
        if len(places) != packing.num_sequences:
            raise ValueError(f"conv tails: {len(places)} lists of places for {packing.num_sequences} sequences")
        for s, (some, length) in enumerate(zip(places, packing.lengths, strict=True)):
            if not all(0 < tokens <= length for tokens in some):
                raise ValueError(f"conv tails: {list(some)} of sequence {s} must lie in 1..{length}")
        sequence_T = np.repeat(np.arange(len(places)), [len(some) for some in places])
        place_T = np.array([tokens for some in places for tokens in some], dtype=np.int64)
        inside_TP = place_T[:, None] + np.arange(1 - W, 0)
        start_T = np.cumsum((0, *packing.lengths))[sequence_T]
        rows_TP = np.where(inside_TP < 0, inside_TP, start_T[:, None] + inside_TP)
        return cls(*(moved(torch.from_numpy(x.astype(np.int64)), packing.device) for x in (rows_TP, sequence_T)))


def check(x_NC: Tensor, weight_CW: Tensor, packing: Packing, tail: Tensor | PooledTail | None) -> None:
    """Raise ValueError with both shapes where one does not fit x [N, C] and weight [C, W], and for tensors that are no
    floats or that lie on several devices."""
    if x_NC.ndim != 2 or weight_CW.ndim != 2 or weight_CW.shape[1] < 1:
        shapes = f"x {tuple(x_NC.shape)} and weight {tuple(weight_CW.shape)}"
        raise ValueError(f"short_conv: {shapes} must be [N, C] and [C, W] with W >= 1")
    (C, W), S = weight_CW.shape, packing.num_sequences
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {"x": (x_NC, (packing.num_tokens, C))}
    floats, indices = {"x": x_NC, "weight": weight_CW}, {"packing": packing.starts}
    if isinstance(tail, Tensor):
        expected["tail"], floats["tail"] = (tail, (S, W - 1, C)), tail
    elif isinstance(tail, PooledTail):
        expected["tail.pool"], floats["tail.pool"] = (tail.pool, (tail.pool.shape[0], W - 1, C)), tail.pool
        expected["tail.slots"], indices["tail.slots"] = (tail.slots, (S,)), tail.slots
        if tail.places is not None and tail.kept is not None:
            rows, sequences = tail.places.rows, tail.places.sequences
            expected["tail.places.rows"] = (rows, (sequences.shape[0], W - 1))
            expected["tail.kept"], indices["tail.kept"] = (tail.kept, tuple(sequences.shape)), tail.kept
    elif tail is not None:
        raise ValueError(f"short_conv: tail is a {type(tail).__name__}; give a tensor, a PooledTail or None")
    refuse_shapes("short_conv", expected)
    refuse_kinds("short_conv", floats, indices)


def check_slots(pool: Tensor) -> None:
    """Raise ValueError where a slot's inputs do not lie one after another; slots may lie any distance apart."""
    if not pool[:1].is_contiguous():
        _, P, C = pool.shape
        raise ValueError(f"conv tail: a pool of strides {pool.stride()} needs a slot's {P} inputs of {C} without gaps")
