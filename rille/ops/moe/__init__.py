"""Routing to experts and the experts' product (Stable LatentMoE, technical report section 2.3)."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from rille.ops.moe import grouped, reference, select


@dataclass(frozen=True, eq=False)
class Routing:
    """Which experts a token uses, and how near the next one was."""

    ids: Tensor  # int64 [N, A]: in no promised order, the same for a token in any batch
    cutoff: Tensor  # fp32 [N]: the (A+1)-th largest biased score (Quantile Balancing's alpha), -inf when A = E


@dataclass(frozen=True, eq=False)
class ExpertOperands:
    """What the product needs of E experts. The activation maps gate [., F] and up [., F] to [., F]."""

    w13: Tensor  # [E, 2F, L]: gate rows, then up rows
    w2: Tensor  # [E, L, F]
    activation: Callable[[Tensor, Tensor], Tensor]


def route(scores: Tensor, bias: Tensor, top: int) -> Routing:
    """Choose each token's `top` experts by scores + bias (technical report equation 13).

    scores [N, E] fp32, the sigmoid of the router's logits; bias [E]. The bias only selects: no gradient reaches it or
    the scores from here (`route_weights` carries the gradient). Equal biased scores go to the lower id, so a token's
    choice never depends on its neighbours in the batch.

    Raises ValueError unless 1 <= top <= E and the bias has E entries.
    """
    if not 1 <= top <= scores.shape[1]:
        raise ValueError(f"route: top {top} of {scores.shape[1]} experts")
    if bias.shape != scores.shape[1:]:
        raise ValueError(f"route: bias of shape {tuple(bias.shape)} for {scores.shape[1]} experts")
    return Routing(*select.route(scores, bias, top))


def route_weights(scores: Tensor, ids: Tensor, scale: float = 1.0, renormalise: bool = True) -> Tensor:
    """Weights [N, A] of the chosen experts: raw scores, over their sum + 1e-20 if `renormalise`, times `scale`.

    scores [N, E] fp32, ids [N, A] int64. Differentiable in the scores.
    """
    return reference.route_weights(scores, ids, scale, renormalise)


def expert_glu(x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertOperands) -> Tensor:
    """Weighted sum of each token's experts, E_e(x) = W2_e act(W1_e x, W3_e x) (technical report equation 11).

    x [N, L], ids [N, A] int64 in [0, E), weights [N, A] fp32. The products run in x's dtype, which the operands share;
    the outputs are weighted and summed in fp32 (float64 for float64) in the order of the choices. Result [N, L] in
    fp32. Differentiable in x, weights and the operands; repeats bit for bit. Experts without tokens get a zero
    gradient.

    Raises ValueError when shapes or dtypes do not agree.
    """
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
    return grouped.expert_glu(x, ids, weights, experts.w13, experts.w2, experts.activation)
