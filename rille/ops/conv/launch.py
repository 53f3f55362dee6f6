"""Launches of the short convolution's kernels, registered with torch so that compiled models see one op.

`short_conv` is differentiable in x, the weight and the tails; `short_conv_pooled` reads a pool and moves it on, for
calls that want no gradient.

Suffixes: N packed tokens, S sequences, C channels, W taps.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from rille.ops.conv import kernels
from rille.ops.launching import launch
from rille.ops.registering import op

FORWARD_ROWS = 32
CHANNELS = 256  # of a program's tile: 8 of each thread in a row of the forward tile
BACKWARD_CHANNELS = 512
BACKWARD_ROWS = 128  # rows a program walks: W - 1 rows of halo and 4 W bytes of partial sums for this many


def cdiv(n: int, by: int) -> int:
    return -(-n // by)


def interpreting() -> bool:
    return bool(knobs.runtime.interpret)


def backward_rows(N: int) -> int:
    """Rows of a program: a power of two, so that few variants are compiled."""
    return min(BACKWARD_ROWS, max(4, 1 << max(N - 1, 0).bit_length()))


@op("rille::short_conv")
def short_conv(
    x: Tensor, weight: Tensor, starts: Tensor, sequence_of: Tensor, tails: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y [N, C] and the final tails [S, W-1, C] in the dtype of the tails, x's if None. x's rows may lie apart."""
    (N, C), W, S = x.shape, weight.shape[1], starts.shape[0] - 1
    y = torch.empty(N, C, dtype=x.dtype, device=x.device)
    final = torch.empty(S, W - 1, C, dtype=x.dtype if tails is None else tails.dtype, device=x.device)
    run_forward(x, weight, y, starts, sequence_of, tails, None)
    run_move(x, W, starts, tails, None, final)
    return y, final


@short_conv.register_fake
def _(x, weight, starts, sequence_of, tails):
    S, W = starts.shape[0] - 1, weight.shape[1]
    final = x if tails is None else tails
    return x.new_empty(x.shape), final.new_empty(S, W - 1, x.shape[1])


def run_forward(
    x: Tensor,
    weight: Tensor,
    y: Tensor,
    starts: Tensor,
    sequence_of: Tensor,
    tails: Tensor | None,
    slots: Tensor | None,
) -> None:
    (N, C), W = x.shape, weight.shape[1]
    if N == 0:
        return
    grid = (cdiv(C, CHANNELS), cdiv(N, FORWARD_ROWS))
    tail_slot = 0 if tails is None else tails.stride(0)
    launch(
        kernels.forward, grid, (x, weight, y, starts, sequence_of, tails, slots, N, x.stride(0), tail_slot),
        C=C, W=W, HAS_TAIL=tails is not None, POOLED=slots is not None, ROWS=FORWARD_ROWS, CHANNELS=CHANNELS,
        FAST=not interpreting(), num_warps=4,
    )  # fmt: skip


def run_move(x: Tensor, W: int, starts: Tensor, tails: Tensor | None, slots: Tensor | None, final: Tensor) -> None:
    C, S = x.shape[1], starts.shape[0] - 1
    if S == 0 or W == 1:
        return
    strides = x.stride(0), 0 if tails is None else tails.stride(0), final.stride(0)
    launch(
        kernels.move_tails, (cdiv(C, CHANNELS), S), (x, starts, tails, slots, final, *strides),
        C=C, W=W, HAS_TAIL=tails is not None, POOLED=slots is not None, CHANNELS=CHANNELS, num_warps=4,
    )  # fmt: skip


@op("rille::short_conv_pooled", mutated=("pool",))
def short_conv_pooled(
    x: Tensor, weight: Tensor, starts: Tensor, sequence_of: Tensor, pool: Tensor, slots: Tensor
) -> Tensor:
    """y [N, C]; the pool moves on."""
    y = x.new_empty(x.shape)
    run_forward(x, weight, y, starts, sequence_of, pool, slots)
    run_move(x, weight.shape[1], starts, pool, slots, pool)
    return y


@short_conv_pooled.register_fake
def _(x, weight, starts, sequence_of, pool, slots):
    return x.new_empty(x.shape)


@op("rille::short_conv_backward")
def short_conv_backward(
    dy: Tensor, d_final: Tensor | None, x: Tensor, weight: Tensor, starts: Tensor, sequence_of: Tensor,
    tails: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx [N, C] in x's dtype, dweight fp32 [C, W], gradient of the tails (empty if there are none)."""
    (N, C), W, S = x.shape, weight.shape[1], starts.shape[0] - 1
    rows = backward_rows(N)
    dx = torch.empty(N, C, dtype=x.dtype, device=x.device)
    d_tails = torch.empty_like(tails) if tails is not None else x.new_empty(0)
    partial = torch.empty(cdiv(N, rows), W, C, dtype=torch.float32, device=x.device)
    tail_slot = 0 if tails is None else tails.stride(0)
    if N:
        given = (x, weight, dy, dx, partial, starts, sequence_of, x if tails is None else tails, N)
        launch(
            kernels.backward, (cdiv(C, BACKWARD_CHANNELS), partial.shape[0]),
            (*given, x.stride(0), dy.stride(0), tail_slot),
            C=C, W=W, HAS_TAIL=tails is not None, ROWS=rows, CHANNELS=BACKWARD_CHANNELS,
            FAST=not interpreting(), num_warps=4,
        )  # fmt: skip
    if S and W > 1 and (tails is not None or d_final is not None):
        given = (x, weight, dy, dx, starts, x if tails is None else tails, d_tails, d_final)
        launch(
            kernels.tail_gradient, (cdiv(C, CHANNELS), S), (*given, x.stride(0), dy.stride(0)),
            C=C, W=W, HAS_TAIL=tails is not None, HAS_FINAL=d_final is not None, CHANNELS=CHANNELS,
            FAST=not interpreting(), num_warps=4,
        )  # fmt: skip
    return dx, partial.sum(0).T.contiguous(), d_tails


@short_conv_backward.register_fake
def _(dy, d_final, x, weight, starts, sequence_of, tails):
    d_tails = x.new_empty(0) if tails is None else tails.new_empty(tails.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_tails


def save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def gradient(ctx, dy, d_final):
    x, weight, starts, sequence_of, tails = ctx.saved_tensors
    dy = torch.zeros_like(x) if dy is None else dense_rows(dy)
    d_final = None if d_final is None or d_final.numel() == 0 else d_final.contiguous()
    dx, d_weight, d_tails = short_conv_backward(dy, d_final, x, weight, starts, sequence_of, tails)
    return dx, d_weight, None, None, d_tails if tails is not None else None


short_conv.register_autograd(gradient, setup_context=save)


def dense_rows(x: Tensor) -> Tensor:
    """x as it is where its last axis is dense, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
