"""QK-clip (Kimi K2 report, algorithm 1; kept in K3, section 3): a limit on attention logits, set through the weights.

For each head h of MLA with its largest logit s_h of a step and the threshold t (K2: 100):

    f_h = min(1, t / s_h)

    own rows of W_q        times sqrt(f_h)         a head's part of the query
    key rows of W_kv       times sqrt(f_h)         what it meets
    shared rows of W_q     times f_h               what meets the shared key, which all heads read and nobody may scale

Every logit of the head is then f_h times what it was; other heads and all values stay as they are. KDA needs none of
it: its queries and keys are normalised.

Axes: H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def qk_clip(query: Tensor, key_value: Tensor, largest_H: Tensor, key_dim: int, threshold: float = 100.0) -> Tensor:
    """Scale the rows of an MLA layer's up-projections in place, after the optimiser's step; returns f [H].

    query [H * (key_dim + shared), rank or width]: each head's own rows, then those for the shared key. key_value
    [H * (key_dim + values), rank]: key rows, then value rows. largest_H: the largest scaled logit of each head in the
    step (`rille.ops.mla.largest_logits`, the maximum over batches and ranks); below the threshold, -inf included,
    nothing moves. Nothing waits for the device.

    Raises ValueError for a threshold that is not above 0 and rows that H heads do not share evenly.
    """
    heads = len(largest_H)
    if not threshold > 0:
        raise ValueError(f"qk_clip: threshold {threshold}; it must be above 0")
    for name, weight in (("query", query), ("key_value", key_value)):
        if not heads or weight.shape[0] % heads or weight.shape[0] // heads < key_dim:
            raise ValueError(f"qk_clip: {name} {tuple(weight.shape)} for {heads} heads with {key_dim} key rows each")
    f_H = threshold / largest_H.clamp(min=threshold)
    f_H11 = f_H.to(query.dtype)[:, None, None]
    by_head = query.view(heads, -1, query.shape[-1])
    by_head[:, :key_dim] *= f_H11.sqrt()
    by_head[:, key_dim:] *= f_H11
    key_value.view(heads, -1, key_value.shape[-1])[:, :key_dim] *= f_H11.sqrt()
    return f_H
