"""Short causal depthwise convolution with SiLU over packed sequences: `short_conv`, and its `PooledTail`."""

import torch
from torch import Tensor

from rille.ops.conv import reference
from rille.ops.conv.arguments import PooledTail, check
from rille.packing import Packing

__all__ = ["PooledTail", "short_conv"]


def short_conv(
    x_NC: Tensor, weight_CW: Tensor, packing: Packing, tail: Tensor | PooledTail | None = None
) -> tuple[Tensor, Tensor | None]:
    """y[n, c] = silu(sum_j weight[c, W-1-j] x[n-j, c]) in each sequence; nothing passes from one sequence to another.

    x [N, C]. weight fp32 [C, W], W >= 1: weight[:, W-1] meets the current token.
    tail: the W-1 raw inputs before each sequence's first row, oldest first, zeros where there were fewer. None (zeros),
        a differentiable tensor [S, W-1, C], or a `PooledTail`, which is read and overwritten in place. It is read
        whatever the packing's history says: whoever owns it clears it.

    Returns y [N, C] in x's dtype, and the last W-1 raw inputs of each sequence [S, W-1, C] in the tail's dtype (x's for
    None), or None with a pool. Where a batch brings fewer than W-1 inputs, the youngest of the old tail stay. Computes
    in fp32, float64 if x is. Raises ValueError for shapes that do not fit.
    Source: Kimi K3 report section 2.1.1.
    """
    check(x_NC, weight_CW, packing, tail)
    if not isinstance(tail, PooledTail):
        return reference.short_conv(x_NC, weight_CW, packing, tail)
    y_NC, final_SPC = reference.short_conv(x_NC, weight_CW, packing, tail.pool.detach()[tail.slots])
    with torch.no_grad():
        tail.pool[tail.slots] = final_SPC
    return y_NC, None
