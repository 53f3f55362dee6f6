"""The gradient of a table of embeddings, literally:

    d table[w] = sum over n with ids[n] = w of dy[n]

summed in fp32 (float64 for float64) and rounded once. Axes: N tokens, W words, D width.
"""

import torch
from torch import Tensor


def gradient(dy_ND: Tensor, ids_N: Tensor, words: int) -> Tensor:
    wide = torch.promote_types(dy_ND.dtype, torch.float32)
    total_WD = torch.zeros(words, dy_ND.shape[1], dtype=wide, device=dy_ND.device)
    return total_WD.index_add_(0, ids_N, dy_ND.to(wide)).to(dy_ND.dtype)
