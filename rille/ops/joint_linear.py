"""Several products of one input as one.

Weights that lie one after another in memory (`rille.model.allocate.Allocate.together`) are one taller matrix, and
nothing has to be copied to multiply with it: a decode step is bound by how many kernels it launches, and long batches
read their input once. On a CPU the products stay apart: it has nothing to win, and the order of its sums is the
official model's.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from rille.ops.linear import linear
from rille.ops.registering import op

ROWS = 16  # heights are rounded up to this: kernels read the results with rows at multiples of 32 bytes

Groups = Sequence[Sequence[Tensor]]


def joint_linear(x_ND: Tensor, groups: Groups, *, joint: bool | None = None) -> tuple[Tensor, ...]:
    """For each group of weights [C, D] the products of x with all of them side by side, [N, sum of C], dtype of x.

    All weights are to lie one after another in the order given, `ROWS`-padded at the end. Without gradients all groups
    are one product and the results its columns; with gradients each group is one, so that no gradient has to be put
    together from pieces. joint: whether products may be joined; by default on a GPU.
    """
    if not (x_ND.is_cuda if joint is None else joint):
        return tuple(side_by_side([linear(x_ND, w) for w in group]) for group in groups)
    weights = [w for group in groups for w in group]
    if torch.is_grad_enabled() and (x_ND.requires_grad or any(w.requires_grad for w in weights)):
        return tuple(linear(x_ND, *g) if len(g) == 1 else joint_product(x_ND, list(g), False) for g in groups)
    y_NC = joint_product(x_ND, weights, True)
    heights = [sum([w.shape[0] for w in group]) for group in groups]
    return y_NC.split([*heights, y_NC.shape[1] - sum(heights)], dim=1)[: len(heights)]


def side_by_side(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


@op("rille::joint_product")
def joint_product(x: Tensor, weights: list[Tensor], padded: bool) -> Tensor:
    """x [N, D] with all weights, [N, C]. padded: C is a multiple of `ROWS`; beyond the weights anything may stand."""
    height = sum(w.shape[0] for w in weights)
    height = -(-height // ROWS) * ROWS if padded else height
    stacked = as_one(weights, height)
    if stacked is not None:
        return linear(x, stacked)
    warn_apart()
    apart = [linear(x, w) for w in weights]
    return torch.cat([*apart, x.new_zeros(len(x), height - sum(w.shape[0] for w in weights))], dim=-1)


@joint_product.register_fake
def _(x, weights, padded):
    height = sum(w.shape[0] for w in weights)
    return x.new_empty(x.shape[0], -(-height // ROWS) * ROWS if padded else height)


def as_one(weights: list[Tensor], height: int) -> Tensor | None:
    """[height, D]: the weights and what follows them, where they lie so and the memory goes on that long."""
    first = weights[0]
    D, size, at = first.shape[1], first.element_size(), first.data_ptr()
    for w in weights:
        if w.data_ptr() != at or w.dtype != first.dtype or not w.is_contiguous():
            return None
        at += w.numel() * size
    room = first.untyped_storage().nbytes() // size - first.storage_offset()
    return first.detach().as_strided((height, D), (D, 1)) if height * D <= room else None


@cache
def warn_apart() -> None:
    warnings.warn(
        "projections of one input lie apart in memory and are multiplied one by one, slowly: after moving a model to "
        "another device or dtype, call model.prepare()",
        stacklevel=2,
    )


def save(ctx, inputs, output) -> None:
    x, weights, _ = inputs
    ctx.save_for_backward(x, *weights)


def gradient(ctx, dy):
    x, *weights = ctx.saved_tensors
    heights = [w.shape[0] for w in weights]
    dy = dy[:, : sum(heights)]
    stacked = as_one(weights, sum(heights))
    dx = dy @ (torch.cat(weights) if stacked is None else stacked) if ctx.needs_input_grad[0] else None
    return dx, list((dy.t() @ x).split(heights)), None


joint_product.register_autograd(gradient, setup_context=save)


def lie_together(weights: Sequence[Tensor]) -> bool:
    """Whether `joint_product` takes the weights as one matrix."""
    height = sum(w.shape[0] for w in weights)
    return as_one(list(weights), -(-height // ROWS) * ROWS) is not None
