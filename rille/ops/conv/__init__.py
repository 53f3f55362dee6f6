"""Short causal depthwise convolution with SiLU over packed sequences: `short_conv`, and its `PooledTail`.

`reference.py` is the definition; `kernels.py` are the kernels, launched by `launch.py`.
"""

import warnings
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from rille.ops.conv import reference
from rille.ops.conv.arguments import PooledTail, TailPlaces, check, check_slots
from rille.ops.settling import without_autocast
from rille.packing import Packing

__all__ = ["PooledTail", "TailPlaces", "choose_backend", "short_conv"]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
BACKENDS = ("triton", "reference")
MOST_TOKENS = 65_535 * 32  # a card's grid has so many programs along its second axis, each of which has 32 rows


def short_conv(
    x_NC: Tensor,
    weight_CW: Tensor,
    packing: Packing,
    tail: Tensor | PooledTail | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y[n, c] = silu(sum_j weight[c, W-1-j] x[n-j, c]) within each sequence; nothing passes from one sequence to
    another.

    x [N, C]. weight fp32 [C, W], W >= 1: weight[:, W-1] meets the current token. tail: the W-1 raw inputs before each
    sequence's first row, oldest first, zeros where there were fewer: zeros (None), a differentiable tensor [S, W-1, C],
    or a `PooledTail`, which is read and overwritten in place whatever the packing's history says, and takes tails from
    the way through the batch (`TailPlaces`). backend: "triton" or "reference"; by default what `choose_backend` says.

    Returns y [N, C] in x's dtype and the last W-1 raw inputs of each sequence [S, W-1, C] (rows of the old tail stay
    where the batch brings fewer than W-1), or None with a pool. Computes in fp32, float64 if x is. The gradient is
    deterministic. Raises ValueError for shapes that do not fit, for tensors that are no floats or lie on several
    devices, for slots with gaps inside, and for a backend that cannot run. Source: Kimi K3 report section 2.1.1.
    """
    check(x_NC, weight_CW, packing, tail)
    name, wants_gradient = settle(backend, x_NC, weight_CW), x_NC.requires_grad or weight_CW.requires_grad
    if not isinstance(tail, PooledTail):
        return apply(x_NC, weight_CW, packing, tail, name)
    check_slots(tail.pool)
    tail.keep(x_NC)
    if name == "triton" and not (torch.is_grad_enabled() and wants_gradient):
        from rille.ops.conv import launch

        x_NC, weight_CW = launch.dense_rows(x_NC), weight_CW.detach().contiguous()
        return launch.short_conv_pooled(x_NC, weight_CW, *where(packing), tail.pool, tail.slots), None
    y_NC, final_SPC = apply(x_NC, weight_CW, packing, tail.pool.detach()[tail.slots], name)
    with torch.no_grad():
        tail.pool[tail.slots] = final_SPC
    return y_NC, None


def apply(
    x_NC: Tensor, weight_CW: Tensor, packing: Packing, tail_SPC: Tensor | None, name: str
) -> tuple[Tensor, Tensor]:
    if name == "reference":
        return without_autocast(reference.short_conv)(x_NC, weight_CW, packing, tail_SPC)
    from rille.ops.conv import launch

    tail_SPC = None if tail_SPC is None else tail_SPC.contiguous()
    return launch.short_conv(launch.dense_rows(x_NC), weight_CW.contiguous(), *where(packing), tail_SPC)


def where(packing: Packing) -> tuple[Tensor, Tensor]:
    return packing.starts, packing.sequence_of


def choose_backend(x_NC: Tensor, weight_CW: Tensor) -> tuple[str, str]:
    """The backend for these inputs and, in words, why."""
    if x_NC.device.type != "cuda":
        return "reference", f"the tensors are on {x_NC.device.type}"
    reason = obstacle(x_NC, weight_CW)
    return ("triton", "CUDA tensors of a supported shape") if reason is None else ("reference", reason)


def obstacle(x_NC: Tensor, weight_CW: Tensor) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    if x_NC.device.type != "cuda" and not interpreting():
        return f"the tensors are on {x_NC.device.type}"
    if x_NC.dtype not in (torch.bfloat16, torch.float16, torch.float32) or weight_CW.dtype != torch.float32:
        return f"the kernels take x in bf16, fp16 or fp32 and an fp32 weight, not {x_NC.dtype} and {weight_CW.dtype}"
    if weight_CW.shape[1] > 4:
        return f"the kernels know at most 4 taps, the weight has {weight_CW.shape[1]}"
    if x_NC.shape[0] > MOST_TOKENS:
        return f"the kernels take at most {MOST_TOKENS:,} tokens at once, not {x_NC.shape[0]:,}"
    return None


def interpreting() -> bool:
    from rille.ops.conv import launch

    return launch.interpreting()


def settle(backend: str | None, x_NC: Tensor, weight_CW: Tensor) -> str:
    if backend is None:
        name, reason = choose_backend(x_NC, weight_CW)
        if name == "reference" and x_NC.device.type == "cuda":
            warn_once(f"short_conv: the reference runs on a GPU, slowly: {reason}")
        return name
    if backend not in BACKENDS:
        raise ValueError(f"short_conv: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    reason = None if backend == "reference" else obstacle(x_NC, weight_CW)
    if reason is not None:
        raise ValueError(f"short_conv: backend {backend!r} cannot run: {reason}")
    return backend


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
