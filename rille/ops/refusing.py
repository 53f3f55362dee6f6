"""What ops ask of their tensors before anything runs. A kernel believes what it is told: a shape that is too small, a
tensor of another device or a slot that no pool has would be somebody else's memory. So each is a ValueError first.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

FLOATS = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


def refuse_shapes(op: str, expected: Mapping[str, tuple[Tensor, tuple[int, ...]]]) -> None:
    """Raise ValueError with both shapes for a tensor that has another one than is expected."""
    for name, (x, shape) in expected.items():
        if tuple(x.shape) != shape:
            raise ValueError(f"{op}: {name} has shape {tuple(x.shape)}, expected {shape}")


def refuse_kinds(op: str, floats: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Raise ValueError where one of `floats` holds no floats of 16 to 64 bits, or where not all lie on one device."""
    if not {x.dtype for x in floats.values()} <= FLOATS:
        wrong = ", ".join(f"{name} is {x.dtype}" for name, x in floats.items() if x.dtype not in FLOATS)
        raise ValueError(f"{op}: {wrong}; expected float64, float32, float16 or bfloat16")
    named = {**floats, **others}
    if len({x.device for x in named.values()}) > 1:
        places = ", ".join(f"{name} on {x.device}" for name, x in named.items())
        raise ValueError(f"{op}: tensors must share one device, not {places}")


def refuse_slots(op: str, slots: Tensor, count: int, kept: Tensor | None = None, idle: bool = False) -> None:
    """Raise ValueError for slots of one batch that are no int64 (idle: or int32), that name one row of a pool twice, or
    that no pool of `count` rows has. kept: more of them, negative ones naming no row; idle: so do those of `slots`.
    Numbers are read where that costs no wait, on the CPU, and where no compiler traces."""
    kinds = (torch.int64, torch.int32) if idle else (torch.int64,)
    for x in (slots,) if kept is None else (slots, kept):
        if not isinstance(x, Tensor) or x.dtype not in kinds:
            what = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{op}: slots are {what}; expected a tensor of {' or '.join(map(str, kinds))}")
    if slots.device.type != "cpu" or torch.compiler.is_compiling():
        return
    numbers = slots.flatten().tolist()
    taken = [n for n in numbers if n >= 0] if idle else numbers
    if kept is not None and kept.device.type == "cpu":
        taken = taken + [n for n in kept.flatten().tolist() if n >= 0]
    if len(set(taken)) != len(taken):
        raise ValueError(f"{op}: slots {taken} name one slot twice; each sequence needs its own")
    if any(not 0 <= n < count for n in taken):
        raise ValueError(f"{op}: slots {taken} are not all among the pool's {count}, 0 to {count - 1}")
