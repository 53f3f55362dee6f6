"""What `short_conv` is called with: the pool of tails, and the checks on shapes.

Suffixes: N packed tokens, S sequences, C channels, W taps, P = W - 1 inputs before the current one.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rille.packing import Packing


@dataclass(frozen=True, eq=False)
class PooledTail:
    """Tails that live in a pool, read and overwritten in place; no gradient passes through a pool.

    pool [slots, W-1, C], oldest input first; axis 0 may have any stride. slots int64 [S]: where each sequence's tail
    lies. Slots of one batch differ; that is checked where it costs no wait, on the CPU.
    """

    pool: Tensor
    slots: Tensor

    def __post_init__(self) -> None:
        if self.slots.device.type == "cpu" and self.slots.unique().numel() != self.slots.numel():
            raise ValueError(f"conv tail: slots {self.slots.tolist()} name one slot twice; each sequence needs its own")


def check(x_NC: Tensor, weight_CW: Tensor, packing: Packing, tail: Tensor | PooledTail | None) -> None:
    """Raise ValueError with both shapes where one does not fit x [N, C] and weight [C, W]."""
    if x_NC.ndim != 2 or weight_CW.ndim != 2 or weight_CW.shape[1] < 1:
        shapes = f"x {tuple(x_NC.shape)} and weight {tuple(weight_CW.shape)}"
        raise ValueError(f"short_conv: {shapes} must be [N, C] and [C, W] with W >= 1")
    (C, W), S = weight_CW.shape, packing.num_sequences
    expected: dict[str, tuple[Tensor, tuple[int, ...]]] = {"x": (x_NC, (packing.num_tokens, C))}
    if isinstance(tail, Tensor):
        expected["tail"] = (tail, (S, W - 1, C))
    elif tail is not None:
        expected["tail.pool"] = (tail.pool, (tail.pool.shape[0], W - 1, C))
        expected["tail.slots"] = (tail.slots, (S,))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"short_conv: {name} has shape {tuple(tensor.shape)}, expected {shape}")
