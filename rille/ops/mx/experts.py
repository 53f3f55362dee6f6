"""Routed experts whose weights stay packed: the product of `rille.ops.moe.expert_glu` from MXFP4 codes and scales.

    u = sum over e in T of w_e W2_e act(W1_e x, W3_e x)          W = code * 2^(scale byte - 127), groups of 32 columns

Few tokens read far more weights than they multiply, so the packed bytes are the time: the kernels decode on the way
into the tensor cores (`expert_gluon.py`). Many tokens, and every other device, take the weights dequantised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rille.ops import moe
from rille.ops.mx import HAS_TRITON, blocks, dequantise_mxfp4
from rille.ops.settling import warn_once

__all__ = ["PackedExperts", "check_packed", "choose_packed_backend", "packed_expert_glu"]

BACKENDS = ("triton", "dequantised")
HIGHEST_SCALE = 160  # byte, 2^33; the kernels hold weights times 2^-32 in bf16
MOST_TOKENS = 256  # from here on multiplying takes longer than reading


@dataclass(frozen=True, eq=False)
class PackedExperts:
    """E experts as the release packs them, all uint8 and dense: two codes a byte, a scale byte for 32 columns."""

    w13: Tensor  # [E, 2F, L / 2]: gate rows, then up rows
    w13_scale: Tensor  # [E, 2F, L / 32]
    w2: Tensor  # [E, L, F / 2]
    w2_scale: Tensor  # [E, L, F / 32]
    activation: Callable[[Tensor, Tensor], Tensor]  # as in `rille.ops.moe.ExpertOperands`


def packed_expert_glu(
    x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts, *, backend: str | None = None
) -> Tensor:
    """Weighted sum of each token's packed experts (technical report equation 11), for serving: no gradient.

    x [N, L], ids [N, A] int64 in [0, E), weights [N, A] fp32; result [N, L] in fp32, summed in the order of the
    choices, the same bits every time. backend: "triton" or "dequantised"; by default what `choose_packed_backend` says.
    The kernels take up to 256 tokens and 2048 choices in bf16, read a chosen expert once where no more than 32 tokens
    choose it, and never ask the device for a number; ids outside [0, E) are undefined there. They round x, the weights
    (exactly) and the activation to bf16 and nothing else. "dequantised" holds all experts' values in x's dtype while it
    runs, and rounds as `expert_glu` does.

    Raises ValueError when shapes or dtypes do not agree, where a gradient is wanted, for a backend that cannot run.
    `check_packed` looks at the scales, once, when weights are loaded.
    """
    _check_call(x, ids, weights, experts)
    if _settle(backend, x, ids, experts) == "dequantised":
        return moe.expert_glu(x, ids, weights, _dequantised(experts, x.dtype))
    from rille.ops.mx import experts_launch

    caps = moe.caps_of(experts.activation)
    assert caps is not None
    packed = experts.w13, experts.w13_scale, experts.w2, experts.w2_scale
    return experts_launch.experts(_dense(x), ids.contiguous(), weights.contiguous(), *packed, *caps, False)


def check_packed(experts: PackedExperts) -> None:
    """Raise ValueError for packed tensors that do not fit each other, and for scale bytes above 160 (2^33): the product
    could not hold them, and 255 is NaN. Reads the scales, so it belongs to loading."""
    _check_packed_shapes(experts)
    for name in ("w13_scale", "w2_scale"):
        scale = getattr(experts, name)
        if scale.numel() and int(scale.max()) > HIGHEST_SCALE:
            raise ValueError(
                f"packed experts: {name} has a byte of {int(scale.max())}, more than {HIGHEST_SCALE} (a scale of "
                f"2^{HIGHEST_SCALE - blocks.BIAS}); dequantise these weights"
            )


def choose_packed_backend(x: Tensor, ids: Tensor, experts: PackedExperts) -> tuple[str, str]:
    """The backend of `packed_expert_glu` for these operands and, in words, why."""
    if not x.is_cuda:
        return "dequantised", f"the tensors are on {x.device.type}"
    reason = _obstacle(x, ids, experts)
    return ("triton", "CUDA tensors of a supported shape") if reason is None else ("dequantised", reason)


def _dequantised(experts: PackedExperts, dtype: torch.dtype) -> moe.ExpertOperands:
    """All experts' values. On a GPU by the kernel alone, which asks the host nothing."""

    def values(codes: Tensor, scale: Tensor) -> Tensor:
        if codes.is_cuda and HAS_TRITON and dtype in (torch.bfloat16, torch.float32):
            from rille.ops.mx import stream

            return stream.dequantise(codes, scale, dtype, False)
        return dequantise_mxfp4(codes, scale, dtype)

    w13, w2 = values(experts.w13, experts.w13_scale), values(experts.w2, experts.w2_scale)
    return moe.ExpertOperands(w13, w2, experts.activation)


def _obstacle(x: Tensor, ids: Tensor, experts: PackedExperts) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.mx import experts_launch

    if not x.is_cuda and not experts_launch.INTERPRET:
        return f"the tensors are on {x.device.type}"
    wanted = torch.bfloat16 if x.is_cuda else torch.float32  # the interpreter's products of bf16 are wrong
    if x.dtype != wanted:
        return f"the kernels take {wanted}, not {x.dtype}"
    if len(x) > MOST_TOKENS or ids.numel() > experts_launch.MOST_PAIRS:
        return (
            f"the kernels take up to {MOST_TOKENS} tokens and {experts_launch.MOST_PAIRS} choices, not {len(x)} and "
            f"{ids.numel()}"
        )
    if moe.caps_of(experts.activation) is None:
        return f"the kernels know swiglu and situ_glu with two caps, not {experts.activation}"
    return None


def _settle(backend: str | None, x: Tensor, ids: Tensor, experts: PackedExperts) -> str:
    if backend is None:
        name, reason = choose_packed_backend(x, ids, experts)
        if x.is_cuda and name == "dequantised" and len(x) <= MOST_TOKENS:
            warn_once(f"packed_expert_glu: the weights are dequantised for a few tokens, slowly: {reason}")
        return name
    if backend not in BACKENDS:
        raise ValueError(f"packed_expert_glu: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    reason = None if backend == "dequantised" else _obstacle(x, ids, experts)
    if reason is not None:
        raise ValueError(f"packed_expert_glu: backend {backend!r} cannot run: {reason}")
    return backend


def _dense(x: Tensor) -> Tensor:
    """x as it is where its last axis is dense, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_packed_shapes(experts: PackedExperts) -> None:
    E, L, half = experts.w2.shape
    F, columns = 2 * half, 2 * experts.w13.shape[-1]
    want = (E, 2 * F, L // 2), (E, 2 * F, L // blocks.GROUP), (E, L, half), (E, L, F // blocks.GROUP)
    tensors = experts.w13, experts.w13_scale, experts.w2, experts.w2_scale
    if L % blocks.GROUP or F % blocks.GROUP or tuple(tuple(t.shape) for t in tensors) != want or columns != L:
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors)
        raise ValueError(
            f"packed experts: {shapes} do not fit [E, 2F, L / 2], [E, 2F, L / 32], [E, L, F / 2], [E, L, F / 32] with "
            "L and F multiples of 32"
        )
    if any(t.dtype != torch.uint8 or not t.is_contiguous() for t in tensors):
        raise ValueError(f"packed experts: want dense uint8, not {', '.join(str(t.dtype) for t in tensors)}")


def _check_call(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> None:
    _check_packed_shapes(experts)
    if x.shape[1:] != experts.w2.shape[1:2] or ids.shape != weights.shape or len(ids) != len(x):
        raise ValueError(
            f"packed_expert_glu: x {tuple(x.shape)}, ids {tuple(ids.shape)} and weights {tuple(weights.shape)} for "
            f"experts of latent width {experts.w2.shape[1]}; want [N, L], [N, A], [N, A]"
        )
    if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
        raise ValueError("packed_expert_glu: packed weights have no gradient; train dequantised ones")
