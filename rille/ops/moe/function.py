"""The experts and the router as one op each for torch, forward and backward.

    rows = x[token of row]      y = experts' products      out_n = sum over a of weights[n, a] y[row of (n, a)]

Backward keeps x, the weights and the places, nothing as wide as an expert: gate and up are multiplied again. With
dy = d_out gathered and rounded to the products' dtype, d = dy W2 gives <act, d> for the weights before the weight
itself enters; then d w goes on.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rille.ops.moe import permute, products, router_kernels
from rille.ops.moe.permute import Places, interpreting, power_of_two
from rille.ops.moe.products import Glu

FORMS = {
    "fused": (products.fused_forward, products.fused_backward),
    "library": (products.library_forward, products.library_backward),
}


@torch.library.custom_op("rille::moe_experts", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, cap_gate: float, cap_up: float, capped: bool,
    form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [N, L] in fp32, and the parts of `Places`. ids and weights [N, A] dense, weights fp32."""
    (N, A), glu = ids.shape, Glu(cap_gate, cap_up, capped)
    places = permute.permute(ids, len(w13))
    rows = permute.gather(x, places, A, x.dtype)
    y = FORMS[form][0](rows, w13, w2, places, glu)
    out = permute.combine(y, places, weights, N, A, torch.float32)
    return out, places.row_of_pair, places.pair_of_row, places.expert_of_tile, places.ends


@experts.register_fake
def _(x, ids, weights, w13, w2, cap_gate, cap_up, capped, form):
    E, tiles = w13.shape[0], permute.tiles_bound(ids.numel(), w13.shape[0])
    sizes = (ids.numel(), tiles * permute.tile_rows(), tiles, E)
    return x.new_empty(x.shape, dtype=torch.float32), *(x.new_empty(n, dtype=torch.int32) for n in sizes)


@torch.library.custom_op("rille::moe_experts_backward", mutates_args=())
def experts_backward(
    d_out: Tensor, x: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, places: list[Tensor], cap_gate: float,
    cap_up: float, capped: bool, form: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, weights (fp32), w13 and w2. d_out [N, L] of any distance between rows."""
    (N, A), glu, where = weights.shape, Glu(cap_gate, cap_up, capped), Places(*places)
    rows, dy = permute.gather(x, where, A, x.dtype), permute.gather(d_out, where, A, x.dtype)
    dx_rows, along, dw13, dw2 = FORMS[form][1](rows, dy, w13, w2, weights, where, glu)
    dx = permute.combine(dx_rows, where, None, N, A, x.dtype)
    return dx, along[where.row_of_pair].view(N, A), dw13, dw2


@experts_backward.register_fake
def _(d_out, x, weights, w13, w2, places, cap_gate, cap_up, capped, form):
    return x.new_empty(x.shape), weights.new_empty(weights.shape), w13.new_empty(w13.shape), w2.new_empty(w2.shape)


def save_experts(ctx, inputs, output) -> None:
    x, _, weights, w13, w2, *ctx.settings = inputs
    ctx.save_for_backward(x, weights, w13, w2, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def experts_gradient(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 9
    x, weights, w13, w2, *places = ctx.saved_tensors
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    dx, dweights, dw13, dw2 = experts_backward(d_out, x, weights, w13, w2, places, *ctx.settings)
    return dx, None, dweights, dw13, dw2, None, None, None, None


experts.register_autograd(experts_gradient, setup_context=save_experts)


@torch.library.custom_op("rille::moe_router", mutates_args=())
def router(
    logits: Tensor, bias: Tensor, top: int, scale: float, renormalise: bool, bins: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """ids int64, weights, their scores [N, A]; cutoff [N]; load int64 [E]; histogram int64 [E, bins]. Floats fp32."""
    (N, E), device = logits.shape, logits.device
    ids = torch.empty(N, top, dtype=torch.int64, device=device)
    weights, chosen = (torch.empty(N, top, dtype=torch.float32, device=device) for _ in range(2))
    cutoff = torch.empty(N, dtype=torch.float32, device=device)
    load = torch.zeros(E, dtype=torch.int64, device=device)
    histogram = torch.zeros(E, bins, dtype=torch.int64, device=device)
    block = power_of_two(E)
    height = max(1, 512 // block)
    if N:
        launch: Any = router_kernels.router_forward[(min(-(-N // height), router_programs(device)),)]
        launch(
            logits, bias, ids, weights, chosen, cutoff, load, histogram, N, logits.stride(0), scale, E=E, A=top,
            BINS=bins, BLOCK=block, CHOICES=power_of_two(top), ROWS=height, RENORMALISE=renormalise, num_warps=1,
        )  # fmt: skip
    return ids, weights, chosen, cutoff, load, histogram


@router.register_fake
def _(logits, bias, top, scale, renormalise, bins):
    N, E = logits.shape
    pairs = [logits.new_empty((N, top), dtype=kind) for kind in (torch.int64, torch.float32, torch.float32)]
    counts = [logits.new_empty(shape, dtype=torch.int64) for shape in ((E,), (E, bins))]
    return *pairs, logits.new_empty(N, dtype=torch.float32), *counts


@torch.library.custom_op("rille::moe_router_backward", mutates_args=())
def router_backward(d_weights: Tensor, ids: Tensor, chosen: Tensor, E: int, scale: float, renormalise: bool) -> Tensor:
    """The gradient of the logits, fp32 [N, E]."""
    N, A = ids.shape
    d_logits = torch.zeros(N, E, dtype=torch.float32, device=ids.device)
    if N:
        launch: Any = router_kernels.router_backward[(-(-N // 32),)]
        launch(
            d_weights, ids, chosen, d_logits, N, scale, E=E, A=A, CHOICES=power_of_two(A), ROWS=32,
            RENORMALISE=renormalise, num_warps=4,
        )  # fmt: skip
    return d_logits


@router_backward.register_fake
def _(d_weights, ids, chosen, E, scale, renormalise):
    return d_weights.new_empty((ids.shape[0], E), dtype=torch.float32)


def save_router(ctx, inputs, output) -> None:
    logits, _, _, *ctx.settings, _ = inputs
    ctx.experts = logits.shape[1]
    ids, _, chosen, *rest = output
    ctx.save_for_backward(ids, chosen)
    ctx.mark_non_differentiable(ids, chosen, *rest)
    ctx.set_materialize_grads(False)


def router_gradient(ctx, _, d_weights, *rest):
    if d_weights is None:
        return (None,) * 6
    ids, chosen = ctx.saved_tensors
    d_logits = router_backward(d_weights.contiguous(), ids, chosen, ctx.experts, *ctx.settings)
    return d_logits, None, None, None, None, None


router.register_autograd(router_gradient, setup_context=save_router)


def router_programs(device: torch.device) -> int:
    if device.type != "cuda" or interpreting():
        return 3
    return 24 * torch.cuda.get_device_properties(device).multi_processor_count


class Logits(torch.autograd.Function):
    """x [N, D] W' [E, D] -> fp32 [N, E] from bf16 operands: the same products and sums as in fp32 throughout, on the
    tensor cores. The gradient of the logits is rounded to bf16 for the two products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.t(), out_dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d = grad_outputs[0].to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad
        return d @ weight if wants_x else None, d.t() @ x if wants_weight else None
