"""Muon's step: momentum, Newton-Schulz, weights, for all matrices of one shape at once.

`reference.py` is the definition, `plain.py` the same in batches; `muon_kernels.py` are the kernels around the products,
launched by `launch.py`.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from rille.ops.muon import plain, reference
from rille.ops.settling import warn_once

__all__ = ["Matrices", "choose_backend", "muon_step"]

HAS_TRITON = find_spec("triton") is not None
BACKENDS = ("triton", "plain", "reference")


class Matrices(NamedTuple):
    """B matrices [B, P, Q] of one dtype, any distance apart: views of a weight, its gradient and its momentum."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor


def muon_step(
    batch: Sequence[Matrices],
    momentum: float,
    keep: float,
    step: float,
    *,
    eps: float = 1e-7,
    dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> None:
    """B = mu B + G;  U = G + mu B;  O = NewtonSchulz(U);  W = keep W - step O, in place; all of a batch as one product.

    mu is `momentum`, B a piece's momentum. dtype, eps: of the products and of the norm, see `newton_schulz`. The
    gradients are only read. backend: "triton", "plain" or "reference" (which knows no dtype); by default what
    `choose_backend` says.

    Raises ValueError for pieces that differ in shape or dtype, and for a backend that cannot run.
    """
    kinds = {(tuple(x.shape[1:]), x.dtype) for piece in batch for x in piece}
    if len(kinds) != 1 or any(len(piece.weight) != len(x) for piece in batch for x in piece):
        raise ValueError(f"muon_step: want one shape and dtype of all matrices, got {sorted(map(str, kinds))}")
    chosen = _settle(backend, batch)
    if chosen == "reference":
        return reference.muon_step(batch, momentum, keep, step, eps)
    if chosen == "plain":
        return plain.muon_step(batch, momentum, keep, step, eps, dtype)
    from rille.ops.muon import launch

    return launch.muon_step(batch, momentum, keep, step, eps, dtype)


def choose_backend(batch: Sequence[Matrices]) -> tuple[str, str]:
    """The backend for these matrices and, in words, why."""
    first = batch[0].weight
    reason = _obstacle(batch) if first.is_cuda else f"the tensors are on {first.device.type}"
    return ("triton", "CUDA tensors in fp32") if reason is None else ("plain", reason)


def _obstacle(batch: Sequence[Matrices]) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.launching import INTERPRET

    first = batch[0].weight
    if not first.is_cuda and not INTERPRET:
        return f"the tensors are on {first.device.type}"
    if first.dtype != torch.float32:
        return f"the kernels take fp32, not {first.dtype}"
    if not all(x[0].is_contiguous() for piece in batch for x in piece if len(x)):
        return "a matrix has gaps between its rows"
    return None


def _settle(backend: str | None, batch: Sequence[Matrices]) -> str:
    if backend is None:
        name, reason = choose_backend(batch)
        if name == "plain" and batch[0].weight.is_cuda:
            warn_once(f"muon_step: plain PyTorch runs on a GPU, slowly: {reason}")
        return name
    if backend not in BACKENDS:
        raise ValueError(f"muon_step: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    reason = _obstacle(batch) if backend == "triton" else None
    if reason is not None:
        raise ValueError(f"muon_step: backend {backend!r} cannot run: {reason}")
    return backend
