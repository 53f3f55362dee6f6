"""Routing to experts and the experts' product (Stable LatentMoE, technical report section 2.3).

`reference.py` is the definition, `select.py` and `grouped.py` the same in plain PyTorch; `router.py` and `function.py`
launch the kernels.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear

from rille.ops.linear import is_few, wide_linear
from rille.ops.moe import grouped, reference, select
from rille.ops.moe.reference import bin_range, required_bias_histogram
from rille.ops.norm import rms_norm
from rille.ops.settling import settle
from rille.ops.situ import situ_glu, swiglu

__all__ = [
    "ExpertOperands", "Routed", "Routing", "bin_range", "choose_backend", "choose_router_backend", "expert_glu",
    "expert_glu_normed", "required_bias_histogram", "route", "route_logits", "route_weights", "router_logits",
]  # fmt: skip

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts a token uses, and how near the next one was."""

    ids: Tensor  # int64 [N, A]: in no promised order, the same for a token in any batch
    cutoff: Tensor  # fp32 [N]: the (A+1)-th largest biased score (Quantile Balancing's alpha), -inf when A = E


@dataclass(frozen=True, eq=False)
class Routed:
    """A routing with its weights, and what balancing counts."""

    ids: Tensor  # int64 [N, A], as in `Routing`
    weights: Tensor  # fp32 [N, A]; the only field with a gradient
    cutoff: Tensor  # fp32 [N]
    load: Tensor  # int64 [E]: tokens of each expert; empty where it is not to be counted
    histogram: Tensor  # int64 [E, bins]: `required_bias_histogram`; no columns where nothing is to be counted


@dataclass(frozen=True, eq=False)
class ExpertOperands:
    """What the product needs of E experts. The activation maps gate [., F] and up [., F] to [., F]; the kernels know
    `swiglu` and `functools.partial(situ_glu, cap_gate=..., cap_up=...)`."""

    w13: Tensor  # [E, 2F, L]: gate rows, then up rows
    w2: Tensor  # [E, L, F]
    activation: Callable[[Tensor, Tensor], Tensor]


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x W' in fp32 (float64 for float64): x [N, D], weight [E, D] of one dtype, result [N, E].

    bf16 on a GPU is multiplied as it is: the products are exact in fp32 and summed there, as if both had
    been cast. In its gradient the logits' gradient is rounded to bf16 for the two products.
    """
    if is_few(x, weight):
        return wide_linear(x, weight)
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and HAS_TRITON:
        from rille.ops.moe import router

        if not torch.is_grad_enabled():
            return router.logits(x, weight)
        return cast(Tensor, router.Logits.apply(x, weight))
    wide = torch.promote_types(x.dtype, torch.float32)
    return linear(x.to(wide), weight.to(wide))


def route(scores: Tensor, bias: Tensor, top: int, *, backend: str | None = None) -> Routing:
    """Choose each token's `top` experts by scores + bias (technical report equation 13).

    scores [N, E] fp32, the sigmoid of the router's logits; bias [E]. The bias only selects: no gradient reaches it or
    the scores from here (`route_weights` carries the gradient). Equal biased scores go to the lower id, so a token's
    choice never depends on its neighbours in the batch. backend: "triton" or "select"; by default the kernel where it
    can run on a GPU.

    Raises ValueError unless 1 <= top <= E and the bias has E entries, and for a backend that cannot run.
    """
    _check_route("route", scores, bias, top)
    if settle("route", backend, "select", lambda: _router_obstacle(scores, bias), scores) == "select":
        return Routing(*select.route(scores, bias, top))
    from rille.ops.moe import router

    ids, _, _, cutoff, _, _ = router.router(_dense(scores.detach()), bias.detach(), top, 1.0, False, 0, True)
    return Routing(ids, cutoff)


def route_weights(scores: Tensor, ids: Tensor, scale: float = 1.0, renormalise: bool = True) -> Tensor:
    """Weights [N, A] of the chosen experts: raw scores, over their sum + 1e-20 if `renormalise`, times `scale`.

    scores [N, E] fp32, ids [N, A] int64. Differentiable in the scores. A few small PyTorch calls on any device:
    `route_logits` is what a layer runs.
    """
    return reference.route_weights(scores, ids, scale, renormalise)


def route_logits(
    logits: Tensor, bias: Tensor, top: int, scale: float = 1.0, renormalise: bool = True, bins: int = 0,
    *, loaded: bool = True, backend: str | None = None,
) -> Routed:  # fmt: skip
    """Sigmoid, `route`, `route_weights` and the counts of balancing, in one pass over the logits with the kernel.

    logits [N, E] fp32, bias [E] fp32. bins: columns of the histogram, 0 where nothing is to be counted (evaluation,
    recomputation). loaded: whether the load is counted. Differentiable in the logits through the weights. backend:
    "triton" or "select".

    Raises ValueError as `route` does.
    """
    _check_route("route_logits", logits, bias, top)
    if settle("route_logits", backend, "select", lambda: _router_obstacle(logits, bias), logits) == "triton":
        from rille.ops.moe import router

        found = router.router(_dense(logits), bias.detach(), top, scale, renormalise, bins, False, loaded)
        ids, weights, _, cutoff, load, histogram = found
        return Routed(ids, weights, cutoff, load, histogram)
    scores = torch.sigmoid(logits)
    ids, cutoff = select.route(scores, bias, top)
    load = reference.counted(ids.flatten(), scores.shape[1]) if loaded else ids.new_empty(0)
    counted = required_bias_histogram(scores.detach(), cutoff, bias, bins) if bins else ids.new_empty(len(bias), 0)
    return Routed(ids, reference.route_weights(scores, ids, scale, renormalise), cutoff, load, counted)


def expert_glu(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertOperands, *, backend: str | None = None
) -> Tensor:
    """Weighted sum of each token's experts, E_e(x) = W2_e act(W1_e x, W3_e x) (technical report equation 11).

    x [N, L], ids [N, A] int64 in [0, E), weights [N, A] fp32. The products run in x's dtype, which the operands share;
    the outputs are weighted and summed in fp32 (float64 for float64) in the order of the choices. Result [N, L] in
    fp32. Differentiable in x, weights and the operands; repeats bit for bit. Experts without tokens get a zero
    gradient. backend: "triton" or "grouped"; by default what `choose_backend` says. The kernels never ask the device
    for a number and keep x, ids and weights for the backward pass, nothing as wide as an expert; ids outside [0, E)
    are undefined there.

    Raises ValueError when shapes or dtypes do not agree, and for a backend that cannot run.
    """
    _check_experts(x, ids, weights, experts)
    name = settle("expert_glu", backend, "grouped", lambda: _experts_obstacle(x, experts), x)
    return _expert_sum(name, x, ids, weights, experts, False)


def _expert_sum(name: str, x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertOperands, rounded: bool) -> Tensor:
    """`expert_glu` by the backend of that name; rounded: in x's dtype."""
    if name == "grouped":
        total = grouped.expert_glu(x, ids, weights, experts.w13, experts.w2, experts.activation)
        return total.to(x.dtype) if rounded else total
    from rille.ops.moe import few, function

    form, caps = function.form_of(x.shape[1], experts.w2.shape[2]), caps_of(experts.activation)
    assert caps is not None
    operands = (_dense(x), ids.contiguous(), weights.contiguous(), experts.w13, experts.w2)
    if _are_few(x, ids, weights, experts):
        total = few.experts(*operands, None, 0.0, *caps)
        return total.to(x.dtype) if rounded else total
    return function.experts(*operands, *caps, form, rounded)[0]


def expert_glu_normed(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertOperands, gain: Tensor, eps: float,
    *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """`expert_glu` rounded to x's dtype, then `rille.ops.norm.rms_norm` with `gain` [L]: [N, L] in x's dtype.

    For a few tokens without gradients the sum over a token's experts, the rounding and the norm are one kernel. Else,
    and for errors, as the two ops.
    """
    _check_experts(x, ids, weights, experts)
    if gain.shape != x.shape[1:]:
        raise ValueError(f"expert_glu_normed: gain of shape {tuple(gain.shape)} for a last axis of {x.shape[1]}")
    name = settle("expert_glu", backend, "grouped", lambda: _experts_obstacle(x, experts), x)
    if name == "grouped" or not _are_few(x, ids, weights, experts, gain):
        return rms_norm(_expert_sum(name, x, ids, weights, experts, True), gain, eps)
    from rille.ops.moe import few

    caps = caps_of(experts.activation)
    assert caps is not None
    return few.experts(_dense(x), ids.contiguous(), weights.contiguous(), experts.w13, experts.w2, gain, eps, *caps)


def _are_few(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertOperands, *others: Tensor) -> bool:
    """Whether the kernels for a few tokens take these."""
    from rille.ops.moe import few

    read = (x, weights, experts.w13, experts.w2, *others)
    differentiated = torch.is_grad_enabled() and any(t.requires_grad for t in read)
    return few.is_few(ids.numel(), len(experts.w13)) and not differentiated


def choose_backend(x: Tensor, experts: ExpertOperands) -> tuple[str, str]:
    """The backend of `expert_glu` for these operands and, in words, why."""
    reason = _experts_obstacle(x, experts) if x.is_cuda else f"the tensors are on {x.device.type}"
    return ("triton", "CUDA tensors of a supported shape") if reason is None else ("grouped", reason)


def choose_router_backend(scores: Tensor, bias: Tensor) -> tuple[str, str]:
    """The backend of `route` and `route_logits` for scores or logits [N, E] and, in words, why."""
    reason = _router_obstacle(scores, bias) if scores.is_cuda else f"the tensors are on {scores.device.type}"
    return ("triton", "CUDA tensors of a supported shape") if reason is None else ("select", reason)


def caps_of(activation: Callable[[Tensor, Tensor], Tensor]) -> tuple[float, float, bool] | None:
    """(cap of the gate, of the up part, whether they count) of an activation that the kernels know."""
    if activation is swiglu:
        return 1.0, 1.0, False
    known: Any = activation
    if isinstance(activation, partial) and known.func is situ_glu and not known.args:
        keywords = known.keywords
        if set(keywords) == {"cap_gate", "cap_up"}:
            return float(keywords["cap_gate"]), float(keywords["cap_up"]), True
    return None


def _experts_obstacle(x: Tensor, experts: ExpertOperands) -> str | None:
    """Why the kernels cannot run, or None."""
    reason = _device_obstacle(x, torch.bfloat16)
    if reason is not None:
        return reason
    L, F = x.shape[1], experts.w2.shape[2]
    if L % 16 or F % 8:
        return f"the kernels take latent widths that 16 divides and expert widths that 8 divides, not {L} and {F}"
    if not (experts.w13.is_contiguous() and experts.w2.is_contiguous()):
        return "the experts' weights have gaps between rows"
    if caps_of(experts.activation) is None:
        return f"the kernels know swiglu and situ_glu with two caps, not {experts.activation}"
    return None


def _router_obstacle(scores: Tensor, bias: Tensor) -> str | None:
    reason = _device_obstacle(scores, torch.float32)
    if reason is None and bias.dtype != torch.float32:
        reason = f"the kernel takes a bias of fp32, not {bias.dtype}"
    if reason is None:
        from rille.ops.moe import router

        if scores.shape[1] > router.MOST_EXPERTS:
            reason = f"the kernel takes up to {router.MOST_EXPERTS} experts, these are {scores.shape[1]}"
    return reason


def _device_obstacle(x: Tensor, dtype: torch.dtype) -> str | None:
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.moe.permute import INTERPRET

    if not x.is_cuda and not INTERPRET:
        return f"the tensors are on {x.device.type}"
    wanted = dtype if x.is_cuda else torch.float32  # the interpreter's products of bf16 are wrong
    return None if x.dtype == wanted else f"the kernels take {wanted}, not {x.dtype}"


def _dense(x: Tensor) -> Tensor:
    """x as it is where its last axis is dense, else a copy."""
    return x if x.stride(-1) == 1 and (x.shape[0] < 2 or x.stride(0) >= x.shape[1]) else x.contiguous()


def _check_route(op: str, scores: Tensor, bias: Tensor, top: int) -> None:
    if not 1 <= top <= scores.shape[1]:
        raise ValueError(f"{op}: top {top} of {scores.shape[1]} experts")
    if bias.shape != scores.shape[1:]:
        raise ValueError(f"{op}: bias of shape {tuple(bias.shape)} for {scores.shape[1]} experts")


def _check_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertOperands) -> None:
    (count, double_width, latent), (_, _, width) = experts.w13.shape, experts.w2.shape
    if double_width != 2 * width or experts.w2.shape != (count, latent, width) or x.shape[1:] != (latent,):
        raise ValueError(
            f"expert_glu: x {tuple(x.shape)}, w13 {tuple(experts.w13.shape)}, w2 {tuple(experts.w2.shape)} do not fit "
            "[N, L], [E, 2F, L], [E, L, F]"
        )
    if ids.shape != weights.shape or ids.shape[0] != x.shape[0]:
        raise ValueError(f"expert_glu: ids {tuple(ids.shape)} and weights {tuple(weights.shape)} for {len(x)} tokens")
    if not x.dtype == experts.w13.dtype == experts.w2.dtype:
        raise ValueError(
            f"expert_glu: x {x.dtype}, w13 {experts.w13.dtype} and w2 {experts.w2.dtype} must be one dtype"
        )
