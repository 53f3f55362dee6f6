"""Launches of the kernels around the products: two for each piece before them, one after."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
from torch import Tensor

from rille.ops.launching import launch
from rille.ops.muon import muon_kernels
from rille.ops.newton_schulz import normalised

if TYPE_CHECKING:
    from rille.ops.muon import Matrices

PART = 16_384  # numbers of a program: 3584 programs for 512 experts of 256 x 448
BLOCK = 2048  # four 16-byte loads of a tensor in each thread of 4 warps
OPTIONS = {"PART": PART, "BLOCK": BLOCK}


def muon_step(
    batch: Sequence[Matrices], momentum: float, keep: float, step: float, eps: float, dtype: torch.dtype | None
) -> None:
    """See `rille.ops.muon.muon_step`."""
    first = batch[0].weight
    sizes, size = [len(piece.weight) for piece in batch], first[0].numel()
    parts = -(-size // PART)
    x_BPQ = first.new_empty(sum(sizes), *first.shape[1:], dtype=dtype)
    sums = first.new_empty(sum(sizes), parts)
    for piece, x, rows in zip(batch, x_BPQ.split(sizes), sums.split(sizes), strict=True):
        push(piece, x, rows, (size, parts), momentum, eps)
    o_BPQ = normalised(x_BPQ).contiguous()
    for piece, o in zip(batch, o_BPQ.split(sizes), strict=True):
        pull(piece, o, (size, parts), keep, step)


def push(piece: Matrices, x: Tensor, sums: Tensor, extent: tuple[int, int], momentum: float, eps: float) -> None:
    """Momentum of a piece, and the normalised direction into x."""
    if not len(x):
        return
    size, parts = extent
    programs, gaps = len(x) * parts, (piece.gradient.stride(0), piece.momentum.stride(0))
    moving = piece.gradient, piece.momentum, sums
    launch(muon_kernels.advance, programs, (*moving, *gaps, size, parts, momentum), **OPTIONS, num_warps=4)
    arguments = *moving, x, *gaps, size, parts, momentum, eps
    every = triton.next_power_of_2(parts)
    launch(muon_kernels.normalise, programs, arguments, **OPTIONS, ALL_PARTS=every, num_warps=4)


def pull(piece: Matrices, o: Tensor, extent: tuple[int, int], keep: float, step: float) -> None:
    """The step of a piece's weights along o."""
    if len(o):
        arguments = piece.weight, o, piece.weight.stride(0), *extent, keep, step
        launch(muon_kernels.descend, len(o) * extent[1], arguments, **OPTIONS, num_warps=4)
