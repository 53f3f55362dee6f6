"""Cross-entropy of a linear head, literally.

    logits_n = head x_n                                   log p_n = logits_n[target_n] - logsumexp(logits_n)
    loss     = sum over counted n of -log p_n + z * logsumexp(logits_n)^2

A token whose target is -100 is not counted. fp32 (float64 for float64) from the product on. Axes: N tokens, D width, W
words.
"""

import torch
from torch import Tensor

IGNORED = -100


def linear_cross_entropy(
    x_ND: Tensor, head_WD: Tensor, targets_N: Tensor, z_loss: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss sum, count, log-probabilities [N], 0 where not counted)."""
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    logits_NW = x_ND.to(wide) @ head_WD.to(wide).T
    counted_N = targets_N != IGNORED
    normaliser_N = torch.logsumexp(logits_NW, -1)
    picked_N = logits_NW.gather(1, targets_N.where(counted_N, 0).unsqueeze(1)).squeeze(1)
    log_probs_N = (picked_N - normaliser_N).where(counted_N, 0)
    penalty_N = (z_loss * normaliser_N.square()).where(counted_N, 0)
    return (penalty_N - log_probs_N).sum(), counted_N.sum(), log_probs_N
