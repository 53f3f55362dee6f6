"""The experts as one op for torch, forward and backward.

    rows = x[token of row]      y = experts' products      out_n = sum over a of weights[n, a] y[row of (n, a)]

Backward keeps x, the weights and the places, nothing as wide as an expert: gate and up are multiplied again. With
dy = d_out gathered and rounded to the products' dtype, d = dy W2 gives <act, d> for the weights before the weight
itself enters; then d w goes on.

`form` says whose products: "fused" are ours with the activation in the epilogue, "library" torch's grouped product with
the activation apart.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rille.ops.moe import permute, products
from rille.ops.moe.permute import Places
from rille.ops.moe.products import Glu
from rille.ops.registering import op

FORMS = {
    "fused": (products.fused_forward, products.fused_backward),
    "library": (products.library_forward, products.library_backward),
}


def form_of(L: int, F: int) -> str:
    """Narrow experts are bound by bytes, which fusing saves; wide ones by the tensor cores, which torch's product feeds
    better."""
    return "library" if L >= products.WIDE and F >= products.WIDE else "fused"


@op("rille::moe_experts")
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, cap_gate: float, cap_up: float, capped: bool,
    form: str, rounded: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """out [N, L] in fp32, or `rounded` to x's dtype, and the parts of `Places`. ids and weights [N, A] dense, weights
    fp32."""
    (N, A), glu = ids.shape, Glu(cap_gate, cap_up, capped)
    if w13.data_ptr() % 16 or w2.data_ptr() % 16:
        raise ValueError("expert_glu: the experts' weights begin at an address that 16 does not divide")
    places = permute.permute(ids, len(w13))
    rows = permute.gather(x, places, A, x.dtype)
    y = FORMS[form][0](rows, w13, w2, places, glu)
    out = permute.combine(y, places, weights, N, A, x.dtype if rounded else torch.float32)
    return out, places.row_of_pair, places.pair_of_row, places.expert_of_tile, places.ends


@experts.register_fake
def _(x, ids, weights, w13, w2, cap_gate, cap_up, capped, form, rounded=False):
    E, tiles = w13.shape[0], permute.tiles_bound(ids.numel(), w13.shape[0])
    sizes = (ids.numel(), tiles * permute.TILE, tiles, E)
    out = x.new_empty(x.shape, dtype=x.dtype if rounded else torch.float32)
    return out, *(x.new_empty(n, dtype=torch.int32) for n in sizes)


@op("rille::moe_experts_backward")
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
    x, _, weights, w13, w2, *ctx.settings, _ = inputs
    ctx.save_for_backward(x, weights, w13, w2, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def experts_gradient(ctx, d_out, *_):
    if d_out is None:
        return (None,) * 10
    x, weights, w13, w2, *places = ctx.saved_tensors
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    dx, dweights, dw13, dw2 = experts_backward(d_out, x, weights, w13, w2, places, *ctx.settings)
    return dx, None, dweights, dw13, dw2, None, None, None, None, None


experts.register_autograd(experts_gradient, setup_context=save_experts)
