"""The language-model head and its cross-entropy in one op that never holds the logits of all tokens.

`reference.py` is the definition, `chunked.py` the op in plain PyTorch, `fused.py` what replaces its parts on the card.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from rille.ops.cross_entropy import chunked
from rille.ops.cross_entropy.reference import IGNORED
from rille.ops.settling import settle

__all__ = ["IGNORED", "CrossEntropy", "choose_backend", "linear_cross_entropy"]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
CHUNK = 1024  # tokens, in plain PyTorch


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """Sums, not means: a step divides by the count of all its micro-batches and ranks."""

    loss_sum: Tensor  # scalar fp32 (float64 for float64), nats; the only field with a gradient
    count: Tensor  # scalar int64: tokens whose target is not -100
    log_probs: Tensor  # [N] of loss_sum's dtype: log p(target), 0 where the target is -100; without the z-loss


def linear_cross_entropy(
    x: Tensor,
    head: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    z_loss: float = 0.0,
    *,
    backend: str | None = None,
) -> CrossEntropy:
    """Sum over tokens of -log softmax(head x)[target] + z_loss * logsumexp(head x)^2.

    x [N, D] (after the final norm) and head [W, D] of one float dtype, targets [N] int64 in [0, W), or -100 for tokens
    that do not count. `chunk` tokens of logits exist at a time (chunk * W fp32 numbers); by default 1024, or what fills
    2.5 GiB and is at most 8192 with the kernels. Differentiable in x and head through loss_sum; the gradients are made
    in the forward pass, when x or head wants one: under `torch.no_grad()` one product of three is left. backend:
    "triton" or "chunked"; by default what `choose_backend` says.

    Raises ValueError for shapes and dtypes that do not agree, chunk < 1, a backend that cannot run, and on the CPU
    (where this is not compiled) for a target outside [0, W).
    """
    if x.shape[1:] != head.shape[1:] or targets.shape != x.shape[:1] or x.dtype != head.dtype:
        raise ValueError(
            f"linear_cross_entropy: x {tuple(x.shape)} {x.dtype}, head {tuple(head.shape)} {head.dtype}, targets "
            f"{tuple(targets.shape)}; want [N, D], [W, D] of one dtype, [N]"
        )
    if chunk is not None and chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk {chunk}, want at least 1 token")
    # On a device the gather asserts, and looking would stall it; a compiled graph cannot branch on values.
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        _check_targets(targets, head.shape[0])
    form, default = chunked.PLAIN, CHUNK
    if settle("linear_cross_entropy", backend, "chunked", lambda: _obstacle(x, head), x) == "triton":
        from rille.ops.cross_entropy import fused

        form, default, targets = fused.FUSED, fused.chunk_for(head.shape[0]), targets.contiguous()
    loss_sum, log_probs = chunked.linear_cross_entropy(x, head, targets, z_loss, chunk or default, form)
    return CrossEntropy(loss_sum, (targets != IGNORED).sum(), log_probs)


def choose_backend(x: Tensor, head: Tensor) -> tuple[str, str]:
    """The backend for these operands and, in words, why."""
    reason = _obstacle(x, head) if x.is_cuda else f"the tensors are on {x.device.type}"
    return ("triton", "CUDA tensors of a supported dtype") if reason is None else ("chunked", reason)


def _obstacle(x: Tensor, head: Tensor) -> str | None:
    """Why the kernel cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.cross_entropy import fused

    if not x.is_cuda and not fused.interpreting():
        return f"the tensors are on {x.device.type}"
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernel takes bf16, fp16 or fp32, not {x.dtype}"
    return None


def _check_targets(targets: Tensor, words: int) -> None:
    wrong = targets[((targets < 0) & (targets != IGNORED)) | (targets >= words)]
    if len(wrong):
        raise ValueError(
            f"linear_cross_entropy: {len(wrong)} targets outside [0, {words}), the first is {int(wrong[0])}; "
            f"use {IGNORED} for tokens that do not count"
        )
