"""The largest attention logit of every head, a block of query rows at a time: what QK-clip looks at.

    s_h = max over n, m <= n of the same sequence of scale <q_n, k_m>

Axes: N tokens, H heads, K channels, T tokens of one sequence, C rows of a block.
"""

import torch
from torch import Tensor

from rille.packing import Packing

ROWS = 512


def largest_logits(q_NHK: Tensor, k_NHK: Tensor, packing: Packing, scale: float) -> Tensor:
    wide = torch.promote_types(q_NHK.dtype, torch.float32)
    largest_H = torch.full(q_NHK.shape[1:2], -torch.inf, dtype=wide, device=q_NHK.device)
    for q_THK, k_THK in zip(q_NHK.split(packing.lengths), k_NHK.split(packing.lengths), strict=True):
        q_HTK, k_HKT = q_THK.transpose(0, 1), k_THK.permute(1, 2, 0)
        for start in range(0, len(q_THK), ROWS):
            end = min(start + ROWS, len(q_THK))
            scores_HCT = (q_HTK[:, start:end] @ k_HKT[..., :end]).to(wide) * scale
            later_CT = torch.ones(scores_HCT.shape[1:], dtype=torch.bool, device=q_NHK.device).triu(start + 1)
            largest_H = torch.maximum(largest_H, scores_HCT.masked_fill(later_CT, -torch.inf).amax((1, 2)))
    return largest_H
