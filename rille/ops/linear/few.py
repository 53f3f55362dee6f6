"""Launches of the product of a few rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rille.ops.launching import chained, launch
from rille.ops.linear import few_kernels

FEW = 4  # rows that meet the weights one by one
HELD = 2048  # channels of a row of weights that a program holds


def sizes(rows: int, C: int, D: int) -> dict[str, int]:
    """Columns of a program: few, so that every processor has work, and more where there is enough of it."""
    block = max(32, 1 << (D - 1).bit_length())
    columns = 4 if C <= 1024 else 8 if C <= 8192 else 16
    columns = min(columns, max(1, 16384 // min(block, HELD)))
    return dict(BLOCK=min(block, HELD), COLUMNS=columns, ROWS=1 << (rows - 1).bit_length(), num_warps=4)


def tile(D: int) -> dict[str, int]:
    return dict(BLOCK=max(32, 1 << (D - 1).bit_length()), COLUMNS=32, ROWS=16, num_warps=4)


def linear(
    x: Tensor, weight: Tensor, onto: Tensor | None, dtype: torch.dtype, gain: Tensor | None = None, eps: float = 0.0
) -> Tensor:
    """[N, C] in dtype. onto: with a dense last axis. gain [D]: x is rounded to the weight's dtype and normed first, up
    to `FEW` rows of up to `HELD`."""
    (N, D), C = x.shape, weight.shape[0]
    y = torch.empty(N, C, dtype=dtype, device=x.device)
    if onto is not None and onto.stride(1) != 1:
        onto = onto.contiguous()
    numbers = (N, C, x.stride(0), 0 if onto is None else onto.stride(0))
    early = chained(x, joins=onto is not None)  # what is added comes from another stream
    if N <= FEW:
        s = sizes(N, C, D)
        arguments = (x, weight, gain, onto, y, *numbers, eps)
        launch(few_kernels.few_product, -(-C // s["COLUMNS"]), arguments, D=D, **s, **early)
    else:
        assert gain is None, "no tile of rows is normed on its way"
        s = tile(D)
        kernel: Any = few_kernels.tile_product[(-(-C // s["COLUMNS"]), -(-N // s["ROWS"]))]
        kernel(x, weight, onto, y, *numbers, D=D, **s, **early)
    return y
