"""Routing and the expert product of Stable LatentMoE, literally and token by token.

    s = sigmoid(W_r x)                        (made by the caller, fp32)
    T = the `top` largest of s + bias         (the bias selects and does nothing else)
    w = s_T / (sum s_T + 1e-20) * scale
    y = sum over e in T of w_e W2_e act(W1_e x, W3_e x)

The histogram of Quantile Balancing counts, for each expert, how many tokens need a bias r = cutoff - s in each of B
equal bins of [b_min - 1, b_max + 1].

Technical report equations 11 and 13, appendix D. Axes: N tokens, E experts, A active experts a token, L latent, F
expert width, B bins.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def route(scores_NE: Tensor, bias_E: Tensor, top: int) -> tuple[Tensor, Tensor]:
    biased_NE, order_NE = torch.sort(scores_NE.detach() + bias_E.detach(), dim=1, descending=True, stable=True)
    picked_NA = order_NE[:, :top].sort(dim=1).values
    by_weight_NA = scores_NE.detach().gather(1, picked_NA).argsort(dim=1, descending=True, stable=True)
    last = scores_NE.shape[1] == top
    cutoff_N = biased_NE.new_full(biased_NE.shape[:1], -torch.inf) if last else biased_NE[:, top]
    return picked_NA.gather(1, by_weight_NA), cutoff_N


def route_weights(scores_NE: Tensor, ids_NA: Tensor, scale: float, renormalise: bool) -> Tensor:
    weights_NA = scores_NE.gather(1, ids_NA)
    if renormalise:
        weights_NA = weights_NA / (weights_NA.sum(-1, keepdim=True) + 1e-20)
    return weights_NA * scale


def required_bias_histogram(scores_NE: Tensor, cutoff_N: Tensor, bias_E: Tensor, bins: int) -> Tensor:
    """int64 [E, B]: how many tokens need a bias in each bin to choose the expert. bias_E: the one of the cutoffs."""
    with torch.no_grad():
        low, width = bin_range(bias_E, bins)
        required_NE = cutoff_N[:, None] - scores_NE
        bin_NE = ((required_NE - low) / width).floor().long().clamp_(0, bins - 1)
        offset_E = torch.arange(bias_E.shape[0], device=bias_E.device) * bins
        return counted((bin_NE + offset_E).flatten(), bias_E.shape[0] * bins).view(-1, bins)


def counted(numbers: Tensor, size: int) -> Tensor:
    """int64 [size]: how often each of 0 .. size - 1 is there. torch.bincount makes the host wait for the largest."""
    return numbers.new_zeros(size).scatter_add_(0, numbers, torch.ones_like(numbers))


def bin_range(bias_E: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """Where the bins of the histogram begin, and their width."""
    low, high = bias_E.min() - 1, bias_E.max() + 1
    return low, (high - low) / bins


def expert_glu(
    x_NL: Tensor,
    ids_NA: Tensor,
    weights_NA: Tensor,
    w13_EGL: Tensor,
    w2_ELF: Tensor,
    activation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    wide = torch.promote_types(x_NL.dtype, torch.float32)
    rows_L = []
    for x_L, experts, weights_A in zip(x_NL, ids_NA.tolist(), weights_NA.to(wide), strict=True):
        y_L = x_L.new_zeros(x_L.shape, dtype=wide)
        for expert, weight in zip(experts, weights_A, strict=True):
            gate_F, up_F = (w13_EGL[expert] @ x_L).chunk(2)
            y_L = y_L + weight * (w2_ELF[expert] @ activation(gate_F, up_F)).to(wide)
        rows_L.append(y_L)
    return torch.stack(rows_L) if rows_L else x_NL.to(wide)
