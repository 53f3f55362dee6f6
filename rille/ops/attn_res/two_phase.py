"""Attention Residuals for all sites of a block in two phases (Attention Residuals paper, algorithm 1).

The finished blocks do not change while a block runs, so all Q sites of the block score them in one pass; each site
later adds the running sum p by online softmax:

    phase 1, once:    m1 = max_j s_j     l1 = sum_j exp(s_j - m1)     o1 = sum_j exp(s_j - m1) V_j
    phase 2, a site:  m  = max(m1, s_p)
                      h  = (exp(m1 - m) o1 + exp(s_p - m) p) / (exp(m1 - m) l1 + exp(s_p - m))

Exact, not an approximation. fp32 (float64 for float64), plain autograd: the pattern for the kernels. The first site of
a block has no running sum (its sum has just become the last finished block).

Axes: R finished blocks, Q sites, N tokens, D width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class FinishedBlocks:
    """What the sites of one block need of the finished blocks."""

    output: Tensor  # [Q, N, D]: o1, not yet divided
    maximum: Tensor  # [Q, N]: m1
    total: Tensor  # [Q, N]: l1


def first_phase(blocks_ND: Sequence[Tensor], queries_QD: Tensor, gains_QD: Tensor, eps: float) -> FinishedBlocks:
    """Score the R >= 1 finished blocks [N, D] with the Q sites' queries and gains [Q, D]."""
    wide = torch.promote_types(blocks_ND[0].dtype, torch.float32)
    stacked_RND = torch.stack([block_ND.to(wide) for block_ND in blocks_ND])
    scores_QRN = torch.einsum("qd,rnd->qrn", queries_QD.to(wide) * gains_QD.to(wide), stacked_RND)
    scores_QRN = scores_QRN * torch.rsqrt(stacked_RND.square().mean(-1) + eps)
    maximum_QN = scores_QRN.amax(1)
    terms_QRN = torch.exp(scores_QRN - maximum_QN.unsqueeze(1))
    return FinishedBlocks(torch.einsum("qrn,rnd->qnd", terms_QRN, stacked_RND), maximum_QN, terms_QRN.sum(1))


def second_phase(
    finished: FinishedBlocks, site: int, partial_ND: Tensor | None, query_D: Tensor, gain_D: Tensor, eps: float
) -> Tensor:
    """The mixture of one site, fp32 [N, D]: the finished blocks and the running sum, None at the block's first site."""
    output_ND, total_N, m1_N = finished.output[site], finished.total[site], finished.maximum[site]
    if partial_ND is None:
        return output_ND / total_N.unsqueeze(1)
    p_ND = partial_ND.to(output_ND.dtype)
    w_D = query_D.to(p_ND.dtype) * gain_D.to(p_ND.dtype)
    score_N = (p_ND @ w_D) * torch.rsqrt(p_ND.square().mean(-1) + eps)
    m_N = torch.maximum(m1_N, score_N)
    old_N, new_N = torch.exp(m1_N - m_N), torch.exp(score_N - m_N)
    return (old_N.unsqueeze(1) * output_ND + new_N.unsqueeze(1) * p_ND) / (old_N * total_N + new_N).unsqueeze(1)
