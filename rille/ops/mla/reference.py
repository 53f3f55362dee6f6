"""Multi-head latent attention, literally: one query row at a time.

    o_n = sum over m <= n of softmax_m(scale <q_n, k_m>) v_m           inside one sequence

`attention` has expanded keys and values; in `latent_attention` every head reads the same cached row c_m = [latent |
shared key], which is the key, and whose first `value_width` columns are the value (the up-projections are absorbed into
q and the output by the caller). No rotation anywhere. fp32 (float64 for float64).

Axes: N tokens, H heads, K key and V value channels, R cached row width, T rows that a query may see.
"""

import torch
from torch import Tensor

from rille.packing import Packing


def attention(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, packing: Packing, scale: float) -> Tensor:
    wide = torch.promote_types(q_NHK.dtype, torch.float32)
    rows_HV, start = [], 0
    for length in packing.lengths:
        for last in range(start, start + length):
            seen = slice(start, last + 1)
            scores_HT = scale * torch.einsum("hk,thk->ht", q_NHK[last].to(wide), k_NHK[seen].to(wide))
            rows_HV.append(torch.einsum("ht,thv->hv", torch.softmax(scores_HT, -1), v_NHV[seen].to(wide)))
        start += length
    return torch.stack(rows_HV) if rows_HV else v_NHV.to(wide)


def latent_attention(
    q_NHR: Tensor, cached_TR: list[Tensor], packing: Packing, scale: float, value_width: int
) -> Tensor:
    """cached_TR: for each sequence all rows [consumed + length, R], this batch's included."""
    wide = torch.promote_types(q_NHR.dtype, torch.float32)
    rows_HV, token = [], 0
    for consumed, length, rows_TR in zip(packing.consumed, packing.lengths, cached_TR, strict=True):
        for position in range(consumed, consumed + length):
            seen_TR = rows_TR[: position + 1].to(wide)
            probabilities_HT = torch.softmax(scale * q_NHR[token].to(wide) @ seen_TR.T, -1)
            rows_HV.append(probabilities_HT @ seen_TR[:, :value_width])
            token += 1
    return torch.stack(rows_HV) if rows_HV else q_NHR[..., :value_width].to(wide)
