"""Attention Residuals at one site, literally (technical report equations 8 to 10).

    s_j = sum_d V_j[d] rsqrt(mean(V_j^2) + eps) gain[d] query[d]        for each source V_j of a token
    a   = softmax over the sources                                      (no 1/sqrt(D))
    out = sum_j a_j V_j                                                 (the raw sources, not the normed ones)

All in fp32 (float64 for float64), one rounding at the end. Axes: R residual sources, N tokens, D width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def attn_res(sources_ND: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    weights_NR, stacked_NRD = _weigh(sources_ND, query_D, gain_D, eps)
    return torch.einsum("nr,nrd->nd", weights_NR, stacked_NRD).to(sources_ND[0].dtype)


def attn_res_weights(sources_ND: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> Tensor:
    return _weigh(sources_ND, query_D, gain_D, eps)[0]


def _weigh(sources_ND: Sequence[Tensor], query_D: Tensor, gain_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The softmax weights [N, R] and the sources [N, R, D] side by side, as the release stacks them."""
    wide = torch.promote_types(sources_ND[0].dtype, torch.float32)
    stacked_NRD = torch.stack([source_ND.to(wide) for source_ND in sources_ND], dim=1)
    normed_NRD = stacked_NRD * torch.rsqrt(stacked_NRD.square().mean(-1, keepdim=True) + eps)
    scores_NR = (normed_NRD * (gain_D.to(wide) * query_D.to(wide))).sum(-1)
    return torch.softmax(scores_NR, dim=1), stacked_NRD
