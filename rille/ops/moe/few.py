"""Launches of the experts' kernels for a few tokens (`alone_kernels.py`, `few_kernels.py`), as one op for torch without
gradients."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from rille.ops.launching import chained, launch
from rille.ops.moe import alone_kernels, few_kernels
from rille.ops.moe.permute import INTERPRET, power_of_two
from rille.ops.moe.products import Glu, divisor
from rille.ops.norm.launch import rms_norm
from rille.ops.registering import op

MOST_PAIRS = 1024  # all ids are looked at together
PAIRS_AN_EXPERT = 8  # beyond so many on average, tiles of 128 rows read an expert's weights fewer times
FEWEST_LISTED = 128  # pairs from which a list of them is worth a launch
TILE = 16  # pairs of a tile: the least that the tensor cores take
SPAN = 16 if INTERPRET else 128  # ids that a program of a pair looks at together
LISTS = 4  # experts whose lists a program makes
COLUMNS = 32  # of a tile: many programs, each with few bytes to wait for
HELD = 16384  # weights that a program holds at once
ALONE = 4  # tokens whose pairs read weights for themselves
GLU_ROWS, DOWN_ROWS = 8, 2  # of weights that a program then has
OPTIONS: dict[str, int] = dict(num_warps=4, num_stages=4)


def is_few(pairs: int, E: int) -> bool:
    return pairs <= min(MOST_PAIRS, PAIRS_AN_EXPERT * E)


def step(F: int) -> int:
    """Of the sum over an expert's width: all of it, where a program can hold its rows of the weights."""
    whole = max(16, power_of_two(F))
    return whole if whole * COLUMNS <= HELD else 64


@op("rille::moe_few")
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, gain: Tensor | None, eps: float, cap_gate: float,
    cap_up: float, capped: bool,
) -> Tensor:  # fmt: skip
    """out [N, L] in fp32, or with a gain [L] rounded to x's dtype and normed. x may have distant rows; ids and weights
    [N, A] dense, weights fp32."""
    (N, A), L, k = ids.shape, w2.shape[1], few_kernels
    act, y = x.new_empty(N * A, w2.shape[2]), torch.empty(N * A, L, dtype=torch.float32, device=x.device)
    out = torch.empty(N, L, dtype=torch.float32 if gain is None else x.dtype, device=x.device)
    if N == 0:
        return out
    glu = Glu(cap_gate, cap_up, capped)
    if are_alone(N, A, *w2.shape[1:]):
        alone(x, ids, weights, w13, w2, act, out, glu)
        return out if gain is None else rms_norm(out, None, gain, eps)[0]
    products = by_list if N * A > FEWEST_LISTED else by_pair
    products(x, ids, w13, w2, act, y, glu)
    block = power_of_two(L)
    if gain is None:
        block = min(256, block)
        sizes = dict(L=L, CHOICES=A, BLOCK=block, num_warps=2)
        launch(k.combine_few, N * -(-L // block), (y, weights, out), **sizes, **chained(x))
    else:
        sizes = dict(L=L, CHOICES=A, BLOCK=block, num_warps=min(8, max(1, block // 256)))
        launch(k.combine_norm_few, N, (y, weights, gain, out, eps), **sizes, **chained(x))
    return out


@experts.register_fake
def _(x, ids, weights, w13, w2, gain, eps, cap_gate, cap_up, capped):
    return x.new_empty(x.shape, dtype=torch.float32 if gain is None else x.dtype)


def are_alone(N: int, A: int, L: int, F: int) -> bool:
    """Whether every pair may read weights for itself, and a program holds those of its rows."""
    fits = GLU_ROWS * power_of_two(L) <= HELD and DOWN_ROWS * A * power_of_two(F) <= HELD
    return N <= ALONE and fits


def alone(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor, act: Tensor, out: Tensor, glu: Glu) -> None:
    """Fill act [pairs, F] and out [N, L]."""
    (N, A), (_, L, F) = ids.shape, w2.shape
    sizes: dict[str, Any] = dict(CHOICES=A, F=F, L=L, num_warps=4)
    k = cast(Any, alone_kernels)
    k.glu_alone[(-(-F // GLU_ROWS), N * A)](
        x, ids, w13, act, x.stride(0), ROWS=GLU_ROWS, BLOCK=max(32, power_of_two(L)), **sizes, **glu.constants(),
        **chained(x, joins=True),
    )  # fmt: skip
    k.down_alone[(-(-L // DOWN_ROWS), N)](
        act, ids, weights, w2, out, ROWS=DOWN_ROWS, BLOCK=max(32, power_of_two(F)), **sizes, **chained(x)
    )


def by_pair(x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, act: Tensor, y: Tensor, glu: Glu) -> None:
    """Fill act [pairs, F] and y [pairs, L]."""
    pairs, A, (_, L, F) = ids.numel(), ids.shape[1], w2.shape
    tile: dict[str, Any] = dict(BM=TILE, SPAN=SPAN, **OPTIONS)
    launch(
        few_kernels.glu_few, pairs * -(-F // COLUMNS), (x, ids, w13, act, pairs, x.stride(0)), CHOICES=A, F=F, L=L,
        BF=COLUMNS, BK=divisor(L), **tile, **glu.constants(), **chained(x, joins=True),
    )  # fmt: skip
    launch(
        few_kernels.down_few, pairs * -(-L // COLUMNS), (act, ids, w2, y, pairs), L=L, F=F, BL=COLUMNS, BK=step(F),
        **tile, **chained(x),
    )  # fmt: skip


def by_list(x: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, act: Tensor, y: Tensor, glu: Glu) -> None:
    """As `by_pair`."""
    pairs, A, (E, L, F) = ids.numel(), ids.shape[1], w2.shape
    counts = torch.empty(E, dtype=torch.int32, device=x.device)
    listed = torch.empty(E, pairs, dtype=torch.int32, device=x.device)
    launch(
        few_kernels.list_pairs, -(-E // LISTS), (ids, counts, listed, pairs, E), SPAN=512 if pairs <= 512 else 1024,
        ROWS=LISTS, num_warps=4, **chained(x, joins=True),
    )  # fmt: skip
    tile: dict[str, Any] = dict(BM=TILE, **OPTIONS, **chained(x))
    launch(
        few_kernels.glu_listed, E * -(-F // COLUMNS), (x, counts, listed, w13, act, pairs, x.stride(0)), CHOICES=A,
        F=F, L=L, BF=COLUMNS, BK=divisor(L), **tile, **glu.constants(),
    )  # fmt: skip
    launch(
        few_kernels.down_listed, E * -(-L // COLUMNS), (act, counts, listed, w2, y, pairs), L=L, F=F, BL=COLUMNS,
        BK=64, **tile,
    )  # fmt: skip
