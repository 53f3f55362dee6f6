"""Attention of gated MLA: expanded for training and prefill, absorbed over the latent cache for decoding."""

import torch
from torch import Tensor

from rille.ops.mla import choice, largest
from rille.ops.mla.absorb import absorbed_queries, gated_values, store_rows
from rille.ops.mla.cache import LatentCache
from rille.ops.mla.choice import choose_backend, choose_latent_backend
from rille.ops.mla.values import mixed_values
from rille.packing import Packing

__all__ = ["LatentCache", "absorbed_queries", "attention", "choose_backend", "choose_latent_backend"]
__all__ += ["gated_attention", "gated_values", "largest_logits", "latent_attention", "mixed_values", "store_rows"]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    packing: Packing,
    scale: float,
    *,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Causal softmax attention inside each sequence of a batch without history.

    q, k [N, H, K], v [N, H, V] of one dtype; result [N, H, V] in `dtype`, by default fp32 (float64 for float64): the
    output gate reads it unrounded (technical report section 2.1.2). scale multiplies <q, k>; K3: (128 + 64)^-0.5.
    Differentiable, with gradients whose bits repeat.

    backend: "triton" (16-bit operands, K up to 192, V up to 128), "torch", "reference" (row by row); "flash" and
    "cudnn" are PyTorch's own kernels, which round the output to the operands' dtype. By default what `choose_backend`
    says.

    Raises ValueError when the batch has consumed tokens (their keys are not here), shapes and dtypes do not agree, or
    a backend is unknown or cannot run.
    """
    _check("attention", q, k, v, packing)
    dtype = torch.promote_types(q.dtype, torch.float32) if dtype is None else dtype
    return choice.attend(q, k, v, None, packing, scale, dtype, backend)


def gated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    packing: Packing,
    scale: float,
    *,
    backend: str | None = None,
) -> Tensor:
    """`attention`, times sigmoid(gate): the output stage of gated MLA (technical report section 2.1.2, equation 7).

    gate [N, H, V] raw, before the sigmoid. The product is fp32 (float64 for float64) and rounded once, to the gate's
    dtype. Otherwise as `attention`; differentiable in the gate too.
    """
    _check("gated_attention", q, k, v, packing)
    if gate.shape != v.shape:
        raise ValueError(f"gated_attention: gate {tuple(gate.shape)} for v {tuple(v.shape)}; want one of its shape")
    return choice.attend(q, k, v, gate, packing, scale, gate.dtype, backend)


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> None:
    if any(packing.consumed):
        raise ValueError(f"{op}: sequences with history {packing.consumed}; use latent_attention with their cache")
    fits = q.shape == k.shape and q.shape[:2] == v.shape[:2] and q.dtype == k.dtype == v.dtype
    if not fits or q.shape[0] != packing.num_tokens:
        raise ValueError(
            f"{op}: q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype}, v {tuple(v.shape)} {v.dtype} "
            f"for {packing.num_tokens} tokens; want [N, H, K], [N, H, K], [N, H, V]"
        )


def latent_attention(
    q: Tensor, cache: LatentCache, packing: Packing, scale: float, value_width: int, *, backend: str | None = None
) -> Tensor:
    """Attention of absorbed queries over cached rows: a row is the key, its first `value_width` columns the value.

    q [N, H, R]; the cache already holds this batch's rows (`LatentCache.write` first). A token at position p of its
    sequence (history + offset) sees rows 0..p. Result [N, H, value_width] in fp32 (float64 for float64). Not
    differentiable in the pool through `write`.

    backend: "triton" (rows of q's 16-bit dtype or e4m3, no gradient; lengths are read on the device, so that a CUDA
    graph may replay it) or "torch"; by default what `choose_latent_backend` says.

    Raises ValueError when R, the token count or value_width do not fit, a sequence is longer than its pages, or a
    backend is unknown or cannot run.
    """
    cache.check(packing)
    width = cache.pool.shape[-1]
    if q.shape[0] != packing.num_tokens or q.shape[-1] != width or not 0 < value_width <= width:
        raise ValueError(
            f"latent_attention: q {tuple(q.shape)}, rows of width {width}, value_width {value_width} "
            f"for {packing.num_tokens} tokens"
        )
    return choice.attend_latents(q, cache, packing, scale, value_width, backend)


@torch.no_grad()
def largest_logits(q: Tensor, k: Tensor, packing: Packing, scale: float) -> Tensor:
    """The largest causal logit scale * <q, k> of each head, [H] in fp32 (float64 for float64); -inf without tokens.

    q, k [N, H, K] of one dtype, a batch without history. Costs the score product of `attention` once more. QK-clip
    (`rille.optim.qk_clip`) looks at it. No gradient.

    Raises ValueError for history, and shapes and dtypes that do not agree.
    """
    if any(packing.consumed) or q.shape != k.shape or q.dtype != k.dtype or q.shape[0] != packing.num_tokens:
        raise ValueError(
            f"largest_logits: q {tuple(q.shape)} {q.dtype}, k {tuple(k.shape)} {k.dtype} for {packing.num_tokens} "
            f"tokens and a history of {packing.consumed}; want two [N, H, K] and no history"
        )
    return largest.largest_logits(q, k, packing, scale)
