"""Which form of attention runs: by device, shape, and how exact the result must be.

Asked for 32 bits, only forms that never round the output qualify. Asked for 16, the fastest measured form is taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rille.ops.mla import latent, library, packed, reference
from rille.ops.mla.cache import LatentCache
from rille.packing import Packing

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question

Attention = Callable[[Tensor, Tensor, Tensor, Packing, float], Tensor]
FORMS: dict[str, Attention] = {
    "reference": reference.attention,
    "torch": packed.attention,
    "flash": library.flash,
    "cudnn": library.cudnn,
}
BACKENDS = ("triton", *FORMS)
LATENT_BACKENDS = ("triton", "torch")


def choose_backend(q: Tensor, v: Tensor, packing: Packing, scale: float, dtype: torch.dtype) -> tuple[str, str]:
    """The backend of `attention` for q [N, H, K], v [N, H, V] and a result of dtype and, in words, why."""
    if not q.is_cuda:
        return "torch", f"the tensors are on {q.device.type}"
    if dtype == q.dtype and (reason := library_is_faster(q, v, packing)):
        return "cudnn", reason
    reason = without_triton(q, v, scale)
    return ("triton", "CUDA tensors of a supported shape") if not reason else ("torch", reason)


def library_is_faster(q: Tensor, v: Tensor, packing: Packing) -> str:
    """Where cuDNN, whose output has 16 bits, was measured to be faster (README.md), or an empty string.

    Forward with backward at 192 / 128 channels: a batch of one length, or so many heads that the calls, one a sequence,
    hide behind the work. Forward alone ours is as fast, and with a gate, which PyTorch applies to cuDNN's output.
    """
    if library.unsupported(q) or (q.shape[2], v.shape[2]) != (192, 128):
        return ""
    one_length, learns = len(set(packing.lengths)) == 1, torch.is_grad_enabled() and q.requires_grad
    if learns and (one_length or q.shape[1] >= 64):
        return "a result of 16 bits with gradients, where cuDNN was measured to be faster"
    return ""


def choose_latent_backend(q: Tensor, cache: LatentCache, value_width: int, scale: float) -> tuple[str, str]:
    """As `choose_backend`, for `latent_attention`."""
    if not q.is_cuda:
        return "torch", f"the tensors are on {q.device.type}"
    reason = without_latent_triton(q, cache, value_width, scale)
    return ("triton", "CUDA tensors of a supported shape") if not reason else ("torch", reason)


def without_triton(q: Tensor, v: Tensor, scale: float) -> str:
    """Why the packed kernels cannot run, or an empty string."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.mla import launch

    return launch.unsupported(q, v, scale)


def without_latent_triton(q: Tensor, cache: LatentCache, value_width: int, scale: float) -> str:
    """Why the latent kernels cannot run, or an empty string."""
    if not HAS_TRITON:
        return "triton is not installed"
    if torch.is_grad_enabled() and q.requires_grad:
        return "gradients of the absorbed form have no kernel"
    from rille.ops.mla import decode_launch

    return decode_launch.unsupported(q, cache, value_width, scale)


def settle(op: str, backend: str | None, known: tuple[str, ...], chosen: tuple[str, str], obstacle: Any) -> str:
    """The forced backend where `obstacle(backend)` names no reason against it, else the chosen one."""
    if backend is None:
        name, reason = chosen
        if name == "torch" and not reason.startswith("the tensors are on"):
            warn_once(f"{op}: backend {name!r} runs on a GPU: {reason}")
        return name
    if backend not in known:
        raise ValueError(f"{op}: unknown backend {backend!r}; there are {', '.join(known)}")
    if reason := obstacle(backend):
        raise ValueError(f"{op}: backend {backend!r} cannot run: {reason}")
    return backend


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def attend(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, packing: Packing, scale: float, dtype: torch.dtype,
    backend: str | None,
) -> Tensor:  # fmt: skip
    """The result [N, H, V] in dtype, times sigmoid(gate) where there is a gate."""

    def obstacle(name: str) -> str:
        if name == "triton":
            return without_triton(q, v, scale)
        return library.unsupported(q) if name in ("flash", "cudnn") else ""

    read = dtype if gate is None else torch.promote_types(q.dtype, torch.float32)  # the gate reads what is not rounded
    backend = settle("attention", backend, BACKENDS, choose_backend(q, v, packing, scale, read), obstacle)
    if backend == "triton":
        from rille.ops.mla import launch

        return launch.attention(q, k, v, gate, packing, scale, dtype)
    o = FORMS[backend](q, k, v, packing, scale)
    if gate is not None:
        wide = torch.promote_types(o.dtype, torch.float32)
        o = o.to(wide) * torch.sigmoid(gate.to(wide))
    return o.to(dtype)


def attend_latents(
    q: Tensor, cache: LatentCache, packing: Packing, scale: float, value_width: int, backend: str | None
) -> Tensor:
    def obstacle(name: str) -> str:
        return without_latent_triton(q, cache, value_width, scale) if name == "triton" else ""

    chosen = choose_latent_backend(q, cache, value_width, scale)
    if settle("latent_attention", backend, LATENT_BACKENDS, chosen, obstacle) == "torch":
        return latent.latent_attention(q, cache, packing, scale, value_width)
    from rille.ops.mla import decode_launch

    return decode_launch.latent_attention(q, cache, packing, scale, value_width)
