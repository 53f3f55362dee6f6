"""Absorbed attention over a paged latent cache: all new queries of a sequence against its cached rows at once.

Sequences are taken one by one: their rows are gathered from the pages, the scores of the batch's queries are one
product, and the causal bound compares positions (row t is seen from position p when t <= p). Rows beyond a sequence's
length are not gathered, so whatever the pool holds there stays out.

Axes: N tokens, H heads, R cached row width, V value columns; in one sequence Q new queries and T cached rows.
"""

import torch
from torch import Tensor

from rille.ops.mla.cache import LatentCache
from rille.packing import Packing


def latent_attention(q_NHR: Tensor, cache: LatentCache, packing: Packing, scale: float, value_width: int) -> Tensor:
    wide = torch.promote_types(q_NHR.dtype, torch.float32)
    outputs_QHV = []
    for sequence, q_QHR in enumerate(q_NHR.to(wide).split(packing.lengths)):
        if q_QHR.shape[0]:
            total = packing.consumed[sequence] + packing.lengths[sequence]
            rows_TR = cache.gather(sequence, total).to(wide)
            outputs_QHV.append(_one_sequence(q_QHR, rows_TR, packing.consumed[sequence], scale, value_width))
    return torch.cat(outputs_QHV) if outputs_QHV else q_NHR[..., :value_width].to(wide)


def _one_sequence(q_QHR: Tensor, rows_TR: Tensor, consumed: int, scale: float, value_width: int) -> Tensor:
    queries, heads, width = q_QHR.shape
    scores_QHT = (scale * q_QHR.reshape(-1, width) @ rows_TR.T).view(queries, heads, -1)
    if queries > 1:
        positions = torch.arange(len(rows_TR), device=q_QHR.device)
        hidden_QT = positions > positions[consumed:, None]
        scores_QHT = scores_QHT.masked_fill(hidden_QT[:, None], -torch.inf)
    probabilities_QHT = torch.softmax(scores_QHT, -1)
    return (probabilities_QHT.flatten(0, 1) @ rows_TR[:, :value_width]).view(queries, heads, value_width)
