"""Launches of the MX kernels, registered with torch so that compiled models see one op each.

All tensors are dense, values bfloat16 or fp32, and 32 divides their last axis. `fp8` says which element: E4M3 or E2M1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs

from rille.ops.mx import stream_kernels
from rille.ops.registering import op

GROUPS = 128  # of a program of 4 warps: 32 values in each thread


def interpreting() -> bool:
    return bool(knobs.runtime.interpret)


def run(kernel: Any, *tensors: Tensor, groups: int, fp8: bool) -> None:
    if groups:
        kernel[(-(-groups // GROUPS),)](*tensors, groups, GROUPS=GROUPS, FP8=fp8, num_warps=4)


@op("rille::mx_fake_quantise")
def fake_quantise(w: Tensor, fp8: bool) -> Tensor:
    """The values on the grid [..., I] in w's dtype."""
    out = torch.empty_like(w)
    run(stream_kernels.fake_quantise, w, out, groups=w.numel() // 32, fp8=fp8)
    return out


@fake_quantise.register_fake
def _(w, fp8):
    return torch.empty_like(w)


@op("rille::mx_quantise")
def quantise(w: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    """Codes uint8 [..., I / 2], or with fp8 [..., I], and scales uint8 [..., I / 32]."""
    *rows, columns = w.shape
    codes = torch.empty(*rows, columns if fp8 else columns // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(*rows, columns // 32, dtype=torch.uint8, device=w.device)
    run(stream_kernels.quantise, w, codes, scales, groups=scales.numel(), fp8=fp8)
    return codes, scales


@quantise.register_fake
def _(w, fp8):
    *rows, columns = w.shape
    codes = w.new_empty(*rows, columns if fp8 else columns // 2, dtype=torch.uint8)
    return codes, w.new_empty(*rows, columns // 32, dtype=torch.uint8)


@op("rille::mx_dequantise")
def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype, fp8: bool) -> Tensor:
    """Values [..., I] in dtype from uint8 codes and scales."""
    out = torch.empty(*scales.shape[:-1], 32 * scales.shape[-1], dtype=dtype, device=codes.device)
    run(stream_kernels.dequantise, codes, scales, out, groups=scales.numel(), fp8=fp8)
    return out


@dequantise.register_fake
def _(codes, scales, dtype, fp8):
    return codes.new_empty(*scales.shape[:-1], 32 * scales.shape[-1], dtype=dtype)
