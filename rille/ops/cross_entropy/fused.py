"""The chunked head and loss on the card: matrix products by the library, everything between them in one kernel.

Operands of 16 bits are multiplied as they are and accumulated in fp32: the logits leave the product in fp32, and the
products of all chunks add up in an fp32 gradient of the head. Axes: C tokens of a chunk, D width, W words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs

from rille.ops.cross_entropy import score_kernels
from rille.ops.cross_entropy.chunked import PLAIN, Form
from rille.ops.cross_entropy.reference import IGNORED
from rille.ops.registering import op

WARPS = 8
BLOCK = 4096  # words of one step: 16 in each thread
CHUNK_BYTES, LONGEST_CHUNK = 5 << 29, 8192  # of fp32 logits at a time: 4096 tokens of 163,840 words


def interpreting() -> bool:
    return bool(knobs.runtime.interpret)


def chunk_for(W: int) -> int:
    """Tokens of a chunk: long enough that reading and writing the head's gradient once a chunk does not matter."""
    return max(128, min(LONGEST_CHUNK, CHUNK_BYTES // (4 * W) // 128 * 128))


@op("rille::score_logits", mutated=("logits",))
def score_logits(
    logits: Tensor, targets: Tensor, z_loss: float, gradient: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Losses and log-probabilities [C], fp32. With gradient `gradient_in(logits, dtype)` is the logits' gradient."""
    (C, W), device = logits.shape, logits.device
    losses, log_probs = (torch.empty(C, dtype=torch.float32, device=device) for _ in range(2))
    dlogits = gradient_in(logits, dtype)
    if C:
        VEC = 16 // logits.element_size()
        block = min(BLOCK, max(32 * WARPS * VEC, 1 << (W - 1).bit_length()))
        launch: Any = score_kernels.score[(C,)]
        launch(
            logits, dlogits, targets, losses, log_probs, W, logits.stride(0), dlogits.stride(0), z_loss,
            IGNORED=IGNORED, BLOCK=block, LANES=32 * WARPS, VEC=VEC, GRADIENT=gradient, num_warps=WARPS,
        )  # fmt: skip
    return losses, log_probs


@score_logits.register_fake
def _(logits, targets, z_loss, gradient, dtype):
    losses = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return losses, torch.empty_like(losses)


def gradient_in(logits_CW: Tensor, dtype: torch.dtype) -> Tensor:
    """The first half of each row of fp32 logits as 16-bit numbers, or the rows as they are."""
    return logits_CW.view(dtype)[:, : logits_CW.shape[1]]


def logits_of(x_CD: Tensor, head_WD: Tensor) -> Tensor:
    if x_CD.dtype == torch.float32 or not x_CD.is_cuda:
        return x_CD.float() @ head_WD.float().T
    return torch.mm(x_CD, head_WD.T, out_dtype=torch.float32)


def score(
    logits_CW: Tensor, targets_C: Tensor, z_loss: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    wide = logits_CW.dtype
    losses_C, log_probs_C = score_logits(logits_CW, targets_C, z_loss, dtype is not None, dtype or wide)
    return losses_C, log_probs_C, None if dtype is None else gradient_in(logits_CW, dtype)


def add_product(sum_WD: Tensor, a_WC: Tensor, b_CD: Tensor) -> None:
    if sum_WD.dtype == a_WC.dtype or not a_WC.is_cuda:
        PLAIN.add_product(sum_WD, a_WC, b_CD)
    else:
        torch.addmm(sum_WD, a_WC, b_CD, out_dtype=sum_WD.dtype, out=sum_WD)


FUSED = Form(operand=lambda head_WD, wide: head_WD, logits=logits_of, score=score, add_product=add_product)
