"""Launches of the figures' kernels, registered with torch so that compiled models see one op."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rille.ops.figures import row_kernels
from rille.ops.launching import INTERPRET, chained
from rille.ops.registering import op

BLOCK = 64 if INTERPRET else 2048  # logits of a part: 16 programs for a row of 32,768


def parts_of(W: int) -> int:
    return -(-W // BLOCK)


@op("rille::token_figures")
def token_figures(
    logits: Tensor, tokens: Tensor | None, heats: Tensor | None, numbers: Tensor | None, least: float
) -> tuple[Tensor, Tensor]:
    """Tokens int64 [N], figures float64 [3, N]. logits with a dense last axis; heats, numbers float64 [N], dense."""
    (N, W), device = logits.shape, logits.device
    parts, wide = parts_of(W), torch.float64
    tops, sums = (torch.empty(N, parts, dtype=torch.float32, device=device) for _ in range(2))
    places = torch.empty(N, parts, dtype=torch.int32, device=device)
    masses = None if heats is None else torch.empty(N, parts, dtype=wide, device=device)
    found = torch.empty(N, dtype=torch.int64, device=device)
    figures = torch.empty(3, N, dtype=wide, device=device)
    if N == 0:
        return found, figures
    some, row, k = (tops, places, sums, masses), logits.stride(0), cast(Any, row_kernels)
    early = chained(logits)
    k.part_kernel[(parts, N)](logits, heats, *some, row, W, parts, BLOCK=BLOCK, num_warps=4, **early)
    k.row_kernel[(N,)](
        logits, tokens, heats, numbers, *some, found, figures, row, N, parts, W, least,
        BLOCK=max(2, 1 << (parts - 1).bit_length()), PART=BLOCK, num_warps=1 if heats is None else 4, **early,
    )  # fmt: skip
    return found, figures


@token_figures.register_fake
def _(logits, tokens, heats, numbers, least):
    N = logits.shape[0]
    return logits.new_empty(N, dtype=torch.int64), logits.new_empty(3, N, dtype=torch.float64)
