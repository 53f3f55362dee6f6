"""Attention Residuals: a learned softmax over finished blocks and the running sum instead of a residual connection."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rille.ops.attn_res import one_phase, reference


def attn_res(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The mixture that a sub-layer reads: softmax over the sources of <RMSNorm(source) * gain, query>, of raw sources.

    sources: R >= 1 tensors [N, D] of one shape and dtype (finished blocks first, the running sum last); query [D] and
    gain [D] of any float dtype. Result [N, D] in the sources' dtype, computed in fp32 (float64 for float64). No
    temperature. Technical report equations 8 to 10.

    Raises ValueError for no sources, or shapes and dtypes that differ.
    """
    _check(sources, query, gain)
    if not torch.is_grad_enabled():  # nothing to save: the release's own order of operations
        return reference.attn_res(sources, query, gain, eps)
    return one_phase.attn_res(sources, query, gain, eps)


def attn_res_weights(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The softmax weights [N, R] of `attn_res` in fp32 (float64 for float64), one row of them sums to 1."""
    _check(sources, query, gain)
    return reference.attn_res_weights(sources, query, gain, eps)


def _check(sources: Sequence[Tensor], query: Tensor, gain: Tensor) -> None:
    if not sources:
        raise ValueError("attn_res: no sources; a site mixes at least the running sum")
    kinds = {(tuple(source.shape), source.dtype) for source in sources}
    if len(kinds) > 1 or sources[0].ndim != 2:
        raise ValueError(f"attn_res: sources must share one shape [N, D] and one dtype, got {sorted(map(str, kinds))}")
    width = sources[0].shape[1:]
    if query.shape != width or gain.shape != width:
        raise ValueError(
            f"attn_res: query {tuple(query.shape)} and gain {tuple(gain.shape)} for sources of width {tuple(width)}"
        )
