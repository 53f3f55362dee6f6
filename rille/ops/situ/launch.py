"""Launches of the gated activations' kernels, registered with torch so that compiled models see one op.

Tensors are [N, F]; rows may lie apart, as those of a product that holds gate and up side by side do. Without caps the
unit is SwiGLU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from rille.ops.launching import chained, launch
from rille.ops.registering import op
from rille.ops.situ import glu_kernels

BLOCK = 1024  # elements of a program of 4 warps: one 16-byte load of a tensor in each thread


def interpreting() -> bool:
    return bool(knobs.runtime.interpret)


def layout(*tensors: Tensor) -> tuple[int, int]:
    """Rows and columns to run over: one row of everything where all tensors are dense."""
    N, F = tensors[0].shape
    return (1, N * F) if all(x.is_contiguous() for x in tensors) else (N, F)


def programs(rows: int, columns: int) -> int:
    return rows * -(-columns // BLOCK)


@op("rille::glu")
def glu(gate: Tensor, up: Tensor, cap_gate: float, cap_up: float, capped: bool) -> Tensor:
    """The activation [N, F]; caps are ignored where not capped."""
    out = gate.new_empty(gate.shape)
    if out.numel():
        rows, columns = layout(gate, up)
        launch(
            glu_kernels.glu_forward, programs(rows, columns),
            (gate, up, out, columns, gate.stride(0), up.stride(0)), A=cap_gate, B=cap_up, CAPPED=capped, BLOCK=BLOCK,
            FAST=not interpreting(), num_warps=4, **chained(gate),
        )  # fmt: skip
    return out


@glu.register_fake
def _(gate, up, cap_gate, cap_up, capped):
    return gate.new_empty(gate.shape)


@op("rille::glu_backward")
def glu_backward(
    dy: Tensor, gate: Tensor, up: Tensor, cap_gate: float, cap_up: float, capped: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of gate and up [N, F]."""
    d_gate, d_up = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (gate, up))
    if dy.numel():
        rows, columns = layout(dy, gate, up)
        launch(
            glu_kernels.glu_backward, programs(rows, columns),
            (dy, gate, up, d_gate, d_up, columns, dy.stride(0), gate.stride(0), up.stride(0)), A=cap_gate, B=cap_up,
            CAPPED=capped, BLOCK=BLOCK, FAST=not interpreting(), num_warps=4,
        )  # fmt: skip
    return d_gate, d_up


@glu_backward.register_fake
def _(dy, gate, up, cap_gate, cap_up, capped):
    return gate.new_empty(gate.shape), up.new_empty(up.shape)


def save(ctx, inputs, output) -> None:
    gate, up, *ctx.caps = inputs
    ctx.save_for_backward(gate, up)


def gradient(ctx, dy):
    d_gate, d_up = glu_backward(dense_rows(dy), *ctx.saved_tensors, *ctx.caps)
    return d_gate, d_up, None, None, None


glu.register_autograd(gradient, setup_context=save)


def dense_rows(x: Tensor) -> Tensor:
    """x as it is where its last axis is dense, else a copy."""
    return x if x.stride(-1) == 1 and (x.shape[0] < 2 or x.stride(0) >= x.shape[1]) else x.contiguous()
