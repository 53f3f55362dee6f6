"""Launches of the experts' kernels for a few tokens (`few_kernels.py`), as one op for torch without gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from rille.ops.launching import launch
from rille.ops.moe import few_kernels
from rille.ops.moe.permute import INTERPRET, power_of_two
from rille.ops.moe.products import Glu, divisor

MOST_PAIRS = 1024  # each program looks through all ids
PAIRS_AN_EXPERT = 8  # beyond so many on average, tiles of 128 rows read an expert's weights fewer times
TILE = 16  # pairs of a tile: the least that the tensor cores take
COLUMNS = 32  # of a tile: many programs, each with few bytes to wait for
SPAN = 16 if INTERPRET else 128  # ids looked at together


def is_few(pairs: int, E: int) -> bool:
    return pairs <= min(MOST_PAIRS, PAIRS_AN_EXPERT * E)


@torch.library.custom_op("rille::moe_few", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, cap_gate: float, cap_up: float, capped: bool
) -> Tensor:
    """out [N, L] in fp32. x may have distant rows; ids and weights [N, A] dense, weights fp32."""
    (N, A), (_, L, F), glu = ids.shape, w2.shape, Glu(cap_gate, cap_up, capped)
    act, y = x.new_empty(N * A, F), torch.empty(N * A, L, dtype=torch.float32, device=x.device)
    out = torch.empty(N, L, dtype=torch.float32, device=x.device)
    if N == 0:
        return out
    k, pairs, tile = few_kernels, N * A, dict(BM=TILE, SPAN=SPAN, num_warps=4, num_stages=4)
    launch(
        k.glu_few, pairs * -(-F // COLUMNS), (x, ids, w13, act, pairs, x.stride(0)), CHOICES=A, F=F, L=L, BF=COLUMNS,
        BK=divisor(L), **tile, **glu.constants(),
    )  # fmt: skip
    launch(k.down_few, pairs * -(-L // COLUMNS), (act, ids, w2, y, pairs), L=L, F=F, BL=COLUMNS, BK=64, **tile)
    block = min(256, power_of_two(L))
    launch(k.combine_few, N * -(-L // block), (y, weights, out), L=L, CHOICES=A, BLOCK=block, num_warps=2)
    return out


@experts.register_fake
def _(x, ids, weights, w13, w2, cap_gate, cap_up, capped):
    return x.new_empty(x.shape, dtype=torch.float32)
