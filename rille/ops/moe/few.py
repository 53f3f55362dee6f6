"""Launches of the experts' kernels for a few tokens (`few_kernels.py`), as one op for torch without gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rille.ops.launching import launch
from rille.ops.moe import few_kernels
from rille.ops.moe.permute import power_of_two
from rille.ops.moe.products import Glu

MOST_PAIRS = 1024  # each program looks through all ids
PAIRS_AN_EXPERT = 8  # beyond so many on average, tiles of 128 rows read an expert's weights fewer times
TILE = 16  # pairs of a tile: the least that the tensor cores take
SPANS = (128, 512, 1024)  # ids looked at: few numbers, since each is a kernel of its own
COLUMNS = 32  # of a tile: many programs, each with few bytes to wait for
HELD = 16384  # weights that a program holds at once
OPTIONS = dict(
    num_warps=4, num_stages=4, maxnreg=96
)  # four programs or five on a processor: 112 KB or 160 on their way


def is_few(pairs: int, E: int) -> bool:
    return pairs <= min(MOST_PAIRS, PAIRS_AN_EXPERT * E)


def step(length: int, rows: int) -> int:
    """Of a sum over rows of weights: all of it at once, where a program can hold so many rows."""
    whole = max(16, power_of_two(length))
    return whole if whole * rows <= HELD else 64


@torch.library.custom_op("rille::moe_few", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, gain: Tensor | None, eps: float, cap_gate: float,
    cap_up: float, capped: bool,
) -> Tensor:  # fmt: skip
    """out [N, L] in fp32, or with a gain [L] rounded to x's dtype and normed. x may have distant rows; ids and weights
    [N, A] dense, weights fp32."""
    (N, A), (E, L, F), glu = ids.shape, w2.shape, Glu(cap_gate, cap_up, capped)
    act, y = x.new_empty(N * A, F), torch.empty(N * A, L, dtype=torch.float32, device=x.device)
    out = torch.empty(N, L, dtype=torch.float32 if gain is None else x.dtype, device=x.device)
    if N == 0:
        return out
    k, pairs = few_kernels, N * A
    slots, span = min(pairs, E), next(span for span in SPANS if pairs <= span)
    tile: dict[str, Any] = dict(BM=TILE, SPAN=span, BY_EXPERT=pairs > E, **OPTIONS)
    launch(
        k.glu_few, slots * -(-F // COLUMNS), (x, ids, w13, act, pairs, x.stride(0)), CHOICES=A, F=F, L=L, BF=COLUMNS,
        BK=step(L, 2 * COLUMNS), **tile, **glu.constants(),
    )  # fmt: skip
    launch(
        k.down_few, slots * -(-L // COLUMNS), (act, ids, w2, y, pairs), L=L, F=F, BL=COLUMNS, BK=step(F, COLUMNS),
        **tile,
    )  # fmt: skip
    if gain is None:
        block = min(256, power_of_two(L))
        launch(k.combine_few, N * -(-L // block), (y, weights, out), L=L, CHOICES=A, BLOCK=block, num_warps=2)
    else:
        block = power_of_two(L)
        warps = min(8, max(1, block // 256))
        launch(k.combine_norm_few, N, (y, weights, gain, out, eps), L=L, CHOICES=A, BLOCK=block, num_warps=warps)
    return out


@experts.register_fake
def _(x, ids, weights, w13, w2, gain, eps, cap_gate, cap_up, capped):
    return x.new_empty(x.shape, dtype=torch.float32 if gain is None else x.dtype)
