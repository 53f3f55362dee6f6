"""Where a module's parameters come from: empty, of the model's dtype, or fp32 where the official format has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rille.ops.joint_linear import ROWS, lie_together


@dataclass(frozen=True)
class Allocate:
    """Makes empty parameters; `initialise` or the checkpoint fills them."""

    dtype: torch.dtype
    device: torch.device | str

    def __call__(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(shape, dtype=self.dtype, device=self.device))

    def f32(self, *shape: int, requires_grad: bool = True) -> nn.Parameter:
        """A parameter that stays fp32 in any model."""
        return nn.Parameter(torch.empty(shape, dtype=torch.float32, device=self.device), requires_grad=requires_grad)

    def together(self, columns: int, *heights: int) -> list[nn.Parameter]:
        """Matrices [height, columns] that lie one after another, so that `joint_linear` takes them as one."""
        return [nn.Parameter(part) for part in stack(columns, heights, self.dtype, self.device)]


def lay_together(*parameters: nn.Parameter) -> None:
    """Give matrices back their places in one memory, where a move to another device or dtype has parted them."""
    first = parameters[0]
    if not first.is_cuda or lie_together(parameters):
        return
    parts = stack(first.shape[1], [p.shape[0] for p in parameters], first.dtype, first.device)
    for parameter, part in zip(parameters, parts, strict=True):
        part.copy_(parameter.detach())
        parameter.data = part


def stack(columns: int, heights: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> tuple[Tensor, ...]:
    """Empty matrices in one memory, which goes on with zeros up to a multiple of `ROWS` rows."""
    height = sum(heights)
    rows = torch.empty(-(-height // ROWS) * ROWS, columns, dtype=dtype, device=device)
    rows[height:].zero_()
    return rows[:height].split(list(heights))
