"""Causal attention over packed sequences by PyTorch's fused kernel, one call for all sequences of one length.

The CPU kernel that never forms the score matrix wants equal key and value widths: the narrower side is padded with zero
columns, which change neither a score nor an output column that is kept. No mask is built and no sequence is padded, so
no row of one sequence can touch another.

Axes: N tokens, S sequences of one length T, H heads, K key and V value channels, P = max(K, V).
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rille.packing import Packing

# Up to here evaluation keeps the release's order of operations, which forms the scores: bit for bit on a CPU.
SHORT = 512


def attention(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, packing: Packing, scale: float) -> Tensor:
    wide = torch.promote_types(q_NHK.dtype, torch.float32)
    channels, width = v_NHV.shape[-1], max(q_NHK.shape[-1], v_NHV.shape[-1])
    padded_NHP = [F.pad(x.to(wide), (0, width - x.shape[-1])) for x in (q_NHK, k_NHK, v_NHV)]
    pieces = [x_NHP.split(packing.lengths) for x_NHP in padded_NHP]
    outputs: list[Tensor] = [v_NHV.new_empty(0)] * packing.num_sequences
    for members in _by_length(packing.lengths):
        q_STHP, k_STHP, v_STHP = (torch.stack([piece[s] for s in members]) for piece in pieces)
        for s, o_THP in zip(members, _causal(q_STHP, k_STHP, v_STHP, scale), strict=True):
            outputs[s] = o_THP
    return torch.cat(outputs)[..., :channels] if outputs else v_NHV.to(wide)


def _causal(q_STHP: Tensor, k_STHP: Tensor, v_STHP: Tensor, scale: float) -> Tensor:
    q_SHTP, k_SHTP, v_SHTP = (x.transpose(1, 2) for x in (q_STHP, k_STHP, v_STHP))
    if not torch.is_grad_enabled() and q_SHTP.shape[2] <= SHORT:
        return _written_out(q_SHTP, k_SHTP, v_SHTP, scale).transpose(1, 2)
    return F.scaled_dot_product_attention(q_SHTP, k_SHTP, v_SHTP, is_causal=True, scale=scale).transpose(1, 2)


def _written_out(q_SHTP: Tensor, k_SHTP: Tensor, v_SHTP: Tensor, scale: float) -> Tensor:
    """With the score matrix formed, in the release's order of operations."""
    scores_SHTT = (q_SHTP @ k_SHTP.transpose(2, 3)) * scale
    later_TT = torch.ones(scores_SHTT.shape[2:], dtype=torch.bool, device=q_SHTP.device).triu(1)
    return scores_SHTT.masked_fill(later_TT, -torch.inf).softmax(-1) @ v_SHTP


def _by_length(lengths: tuple[int, ...]) -> list[list[int]]:
    groups: dict[int, list[int]] = {}
    for sequence, length in enumerate(lengths):
        groups.setdefault(length, []).append(sequence)
    return list(groups.values())
