"""Where a module's parameters come from: empty, of the model's dtype, or fp32 where the official format has it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


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
