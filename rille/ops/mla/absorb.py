"""What stands around absorbed attention (`latent_attention`), from a layer's first products to its last.

    cached row = [RMSNorm(latent) | shared]       query = [q_own W_k | q_shared]       y = sigmoid(gate) W_v mixture

In plain PyTorch each is a handful of small calls, and decoding is bound by their number; few rows on a GPU, without
gradients, take one launch each (`absorb_kernels.py`).

Suffixes: N tokens, H heads, R latent channels, K key channels, V value channels; Q channels of the query's latent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rille.ops.mla.cache import LatentCache
from rille.ops.mla.choice import HAS_TRITON
from rille.ops.mla.values import mixed_values
from rille.ops.norm import rms_norm
from rille.packing import Packing

MOST_ROWS = 512  # beyond it library products, which read the weights fewer times, are as few launches' worth
BACKENDS = ("triton", "torch")


def store_rows(
    both_NC: Tensor, gain_R: Tensor, eps: float, cache: LatentCache, packing: Packing, first_NQ: Tensor | None = None,
    first_gain_Q: Tensor | None = None, *, backend: str | None = None,
) -> Tensor | None:  # fmt: skip
    """Write a batch's rows to the cache, and give back the query's latent, normed.

    both_NC [N, R + shared]: a layer's latents and shared keys; the first R channels are normed by `gain_R` [R].
    first_NQ [N, Q], first_gain_Q [Q]: the query's latent and its gain, or None, and the result is None. Rows and norms
    as in `LatentCache.write` and `rms_norm`, and so are the errors. backend: "triton" or "torch"; by default the kernel
    where few rows run on a GPU without gradients.
    """
    if _settle("store_rows", backend, cache, both_NC, gain_R, *(x for x in (first_NQ, first_gain_Q) if x is not None)):
        cache.check(packing)
        from rille.ops.mla import absorb_launch

        return absorb_launch.store_rows(both_NC, gain_R, eps, cache, packing, first_NQ, first_gain_Q)
    rank = gain_R.shape[0]
    cache.write(torch.cat([rms_norm(both_NC[:, :rank], gain_R, eps), both_NC[:, rank:]], dim=-1), packing)
    return None if first_NQ is None else rms_norm(first_NQ, first_gain_Q, eps)


def absorbed_queries(q_NHK: Tensor, key_HKR: Tensor, *, backend: str | None = None) -> Tensor:
    """[N, H, R + shared] in q's dtype: the first K channels of q [N, H, K + shared] times the head's key_HKR [H, K, R],
    and the others as they are. Differentiable. backend as in `store_rows`."""
    if _settle("absorbed_queries", backend, None, q_NHK, key_HKR):
        from rille.ops.mla import absorb_launch

        return absorb_launch.absorbed_queries(q_NHK, key_HKR)
    K = key_HKR.shape[1]
    own_NHR = torch.einsum("nhk,hkr->nhr", q_NHK[..., :K], key_HKR)
    return torch.cat([own_NHR, q_NHK[..., K:]], dim=-1)


def gated_values(
    o_NHR: Tensor, value_HVR: Tensor, gate_NHV: Tensor | None, dtype: torch.dtype, *, backend: str | None = None
) -> Tensor:
    """[N, H, V] in `dtype`, rounded once: `mixed_values` times sigmoid(gate), where there is a gate [N, H, V] (raw). o
    fp32 [N, H, R], value [H, V, R]. Differentiable. backend as in `store_rows`."""
    if _settle("gated_values", backend, None, o_NHR, value_HVR, *([] if gate_NHV is None else [gate_NHV])):
        from rille.ops.mla import absorb_launch

        return absorb_launch.gated_values(o_NHR, value_HVR, gate_NHV, dtype)
    o_NHV = mixed_values(o_NHR, value_HVR)
    return (o_NHV if gate_NHV is None else o_NHV * torch.sigmoid(gate_NHV.to(o_NHV.dtype))).to(dtype)


def _settle(op: str, backend: str | None, cache: LatentCache | None, *tensors: Tensor) -> bool:
    """Whether the kernel runs."""
    if backend is None:  # the device first: to ask for the rest loads Triton, 70 MiB that a CPU has no use for
        return tensors[0].is_cuda and 0 < len(tensors[0]) <= MOST_ROWS and not _obstacle(cache, *tensors)
    if backend not in BACKENDS:
        raise ValueError(f"{op}: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "triton" and (reason := _obstacle(cache, *tensors)):
        raise ValueError(f"{op}: backend 'triton' cannot run: {reason}")
    return backend == "triton"


def _obstacle(cache: LatentCache | None, *tensors: Tensor) -> str:
    """Why the kernels cannot run, or an empty string."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.launching import INTERPRET

    x, weight = tensors[:2]
    if not x.is_cuda and not INTERPRET:
        return f"the tensors are on {x.device.type}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return "the kernels have no gradient"
    known = (torch.float32,) if not x.is_cuda else (torch.bfloat16, torch.float16)
    if weight.dtype not in known:
        return f"the kernels take weights of {known}, not {weight.dtype}"
    if x.shape[-1] > 1024 or weight.shape[-1] > 1024:
        return f"the kernels take rows of up to 1024, these have {x.shape[-1]} and {weight.shape[-1]}"
    if cache is not None and (cache.scales is not None or not cache.pool[0].is_contiguous()):
        return "the kernels take dense pages of rows that are not scaled"
    return ""
