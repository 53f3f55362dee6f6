"""Launches of the norms' kernels, registered with torch so that compiled models see one op each.

Rows are whole vectors to be normed: x [N, D], and [N * H, V] for the gated form. Rows may lie apart, their elements
not.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from triton import knobs

from rille.ops.launching import chained, launch
from rille.ops.norm import rms_kernels
from rille.ops.registering import op

WIDEST = 16384
TILE = 2048  # elements of a program, in 4 warps; wider rows have more warps


@dataclass(frozen=True)
class Plan:
    """Block of a row, rows of a tile, warps; in the backward pass programs a processor, and registers of a thread so
    that they fit there together."""

    BLOCK: int
    ROWS: int
    warps: int
    programs: int
    registers: int


@cache
def plan(D: int) -> Plan:
    BLOCK = max(16, 1 << (D - 1).bit_length())
    warps = min(16, max(4, BLOCK // 512))
    programs = 2 if warps > 8 else 16 // warps
    return Plan(BLOCK, max(1, TILE // BLOCK), warps, programs, 65536 // (32 * warps * programs))


def interpreting() -> bool:
    return bool(knobs.runtime.interpret)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def tiles(N: int, p: Plan) -> int:
    return -(-N // p.ROWS)


def dense_rows(x: Tensor) -> Tensor:
    """x as it is where its last axis is dense, else a copy."""
    return x if x.stride(-1) == 1 and (x.shape[0] < 2 or x.stride(0) >= x.shape[1]) else x.contiguous()


@op("rille::rms_norm")
def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y [N, D], x + residual [N, D] (empty without), r [N] fp32."""
    (N, D), p = x.shape, plan(x.shape[1])
    y = x.new_empty(N, D)
    total = x.new_empty(N, D) if residual is not None else x.new_empty(0)
    rstd = x.new_empty(N, dtype=torch.float32)
    if N:
        strides = x.stride(0), 0 if residual is None else residual.stride(0)
        launch(
            rms_kernels.rms_forward, tiles(N, p), (x, residual, weight, y, total, rstd, N, *strides, eps),
            D=D, BLOCK=p.BLOCK, ROWS=p.ROWS, ADD=residual is not None, WEIGHT=weight is not None, num_warps=p.warps,
            **chained(x),
        )  # fmt: skip
    return y, total, rstd


@rms_norm.register_fake
def _(x, residual, weight, eps):
    y = x.new_empty(x.shape)
    return y, x.new_empty(x.shape if residual is not None else 0), x.new_empty(x.shape[0], dtype=torch.float32)


@op("rille::rms_norm_backward")
def rms_norm_backward(
    dy: Tensor, d_total: Tensor | None, x: Tensor, weight: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    """dx [N, D] with d_total added; the gain's gradient, fp32 [D] (empty without a gain)."""
    (N, D), p = x.shape, plan(x.shape[1])
    programs = min(tiles(N, p), p.programs * processors(x.device))
    dx = torch.empty(N, D, dtype=x.dtype, device=x.device)
    partial = torch.empty(programs, 0 if weight is None else D, dtype=torch.float32, device=x.device)
    if N:
        launch(
            rms_kernels.rms_backward, programs,
            (dy, d_total, x, weight, rstd, dx, partial, N, dy.stride(0), x.stride(0)), D=D, BLOCK=p.BLOCK,
            ROWS=p.ROWS, ADD=d_total is not None, WEIGHT=weight is not None, num_warps=p.warps, maxnreg=p.registers,
        )  # fmt: skip
    return dx, partial.sum(0)


@rms_norm_backward.register_fake
def _(dy, d_total, x, weight, rstd):
    return x.new_empty(x.shape), x.new_empty(0 if weight is None else x.shape[1], dtype=torch.float32)


def save_rms(ctx, inputs, output) -> None:
    x, residual, weight, _ = inputs
    _, total, rstd = output
    ctx.adds = residual is not None
    ctx.save_for_backward(total if ctx.adds else x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def rms_gradient(ctx, dy, d_total, _):
    x, weight, rstd = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dense_rows(dy)
    d_total = d_total.contiguous() if ctx.adds and d_total is not None else None
    dx, d_weight = rms_norm_backward(dy, d_total, x, weight, rstd)
    return dx, dx if ctx.adds else None, None if weight is None else d_weight.to(weight.dtype), None


rms_norm.register_autograd(rms_gradient, setup_context=save_rms)


@op("rille::gated_rms_norm")
def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """y [N, D] of dtype, r [N] fp32. gate [tokens, heads, D], N of both together, its last axis dense."""
    (N, D), p = o.shape, plan(o.shape[1])
    y, rstd = o.new_empty(N, D, dtype=dtype), o.new_empty(N, dtype=torch.float32)
    if N:
        strides = o.stride(0), gate.stride(0), gate.stride(1)
        launch(
            rms_kernels.gated_forward, tiles(N, p), (o, gate, weight, y, rstd, N, *strides, eps), D=D, BLOCK=p.BLOCK,
            ROWS=p.ROWS, HEADS=gate.shape[1], num_warps=p.warps,
        )  # fmt: skip
    return y, rstd


@gated_rms_norm.register_fake
def _(o, gate, weight, eps, dtype):
    return o.new_empty(o.shape, dtype=dtype), o.new_empty(o.shape[0], dtype=torch.float32)


@op("rille::gated_rms_norm_backward")
def gated_rms_norm_backward(
    dy: Tensor, o: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of o and the gate [N, D], of the gain fp32 [D]."""
    (N, D), p = o.shape, plan(o.shape[1])
    programs = min(tiles(N, p), p.programs * processors(o.device))
    d_o, d_gate = (torch.empty(N, D, dtype=like.dtype, device=o.device) for like in (o, gate))
    partial = torch.empty(programs, D, dtype=torch.float32, device=o.device)
    if N:
        launch(
            rms_kernels.gated_backward, programs,
            (dy, o, gate, weight, rstd, d_o, d_gate, partial, N, dy.stride(0), o.stride(0), gate.stride(0)), D=D,
            BLOCK=p.BLOCK, ROWS=p.ROWS, num_warps=p.warps, maxnreg=p.registers,
        )  # fmt: skip
    return d_o, d_gate, partial.sum(0)


@gated_rms_norm_backward.register_fake
def _(dy, o, gate, weight, rstd):
    return o.new_empty(o.shape), gate.new_empty(gate.shape), o.new_empty(o.shape[1], dtype=torch.float32)


def save_gated(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def gated_gradient(ctx, dy, _):
    o, gate, weight, rstd = ctx.saved_tensors
    if dy is None:
        return None, None, None, None, None
    rows = dense_rows(gate.reshape(-1, gate.shape[2]))
    d_o, d_gate, d_weight = gated_rms_norm_backward(dense_rows(dy), o, rows, weight, rstd)
    return d_o, d_gate.view(gate.shape), d_weight.to(weight.dtype), None, None


gated_rms_norm.register_autograd(gated_gradient, setup_context=save_gated)
