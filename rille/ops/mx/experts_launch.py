"""Launches of the packed experts' kernels, registered with torch: four for a layer, none of which asks the host.

Axes: N tokens, A choices of each, E experts, L latent, F expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rille.ops.launching import INTERPRET, launch
from rille.ops.moe import permute
from rille.ops.moe.permute import Places, power_of_two
from rille.ops.mx import expert_kernels

ROWS = 64  # of a weight, a program
STEP = 64  # columns of the twins
MOST_PAIRS = 2048  # that one program places


def tile_of(N: int) -> int:
    """Rows of x beside a weight: no expert has more than one from each token that chooses different ones."""
    return 8 if N <= 8 else 16 if N <= 16 else 32


def tiles_bound(pairs: int, E: int, tile: int) -> int:
    """The most tiles that so many pairs can need."""
    return (pairs + min(pairs, E) * (tile - 1)) // tile


@torch.library.custom_op("rille::mx_experts", mutates_args=())
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    cap_gate: float, cap_up: float, capped: bool, twin: bool,
) -> Tensor:  # fmt: skip
    """out [N, L] fp32. x [N, L] with dense rows, the rest dense: ids and weights [N, A], codes and scales uint8.
    twin: the products in plain Triton."""
    (N, A), (E, L), F = ids.shape, w2.shape[:2], 2 * w2.shape[2]
    if not N:
        return torch.empty(N, L, dtype=torch.float32, device=x.device)
    tile = tile_of(N)
    tiles = tiles_bound(N * A, E, tile)
    places, ordered = prepare(x, ids, tile, tiles)
    table = places.pair_of_row, places.expert_of_tile
    act = torch.empty(tiles * tile, F, dtype=x.dtype, device=x.device)
    y = torch.empty(tiles * tile, L, dtype=torch.float32, device=x.device)
    first, second, more = _products(twin)
    glu = dict(A=cap_gate, B=cap_up, CAPPED=capped) | (dict(FAST=not INTERPRET) if more else {})
    launch(
        first, tiles * -(-F // ROWS), (ordered, w13.view(torch.int32), w13_scale, act, *table),
        F=F, L=L, ACTIVE=A, TILE=tile, **glu, **more, num_warps=4,
    )  # fmt: skip
    launch(
        second, tiles * -(-L // ROWS), (act, w2.view(torch.int32), w2_scale, y, *table), L=L, F=F, TILE=tile, **more,
        num_warps=4,
    )  # fmt: skip
    return permute.combine(y, places, weights, N, A, torch.float32)


@experts.register_fake
def _(x, ids, weights, w13, w13_scale, w2, w2_scale, cap_gate, cap_up, capped, twin):
    return x.new_empty(x.shape, dtype=torch.float32)


def prepare(x: Tensor, ids: Tensor, tile: int, tiles: int) -> tuple[Places, Tensor]:
    """Places (without `ends`), and x [N, L] with its columns in the products' order."""
    (N, L), pairs = x.shape, ids.numel()
    scratch, row_of_pair, pair_of_row, expert_of_tile = (
        torch.empty(size, dtype=torch.int32, device=x.device) for size in (pairs, pairs, tiles * tile, tiles)
    )
    ordered = torch.empty(N, L, dtype=x.dtype, device=x.device)
    columns = min(1024, power_of_two(L))
    launch(
        expert_kernels.prepare, 1 + N * -(-L // columns),
        (ids, scratch, row_of_pair, pair_of_row, expert_of_tile, x, ordered, pairs, tiles, x.stride(0)),
        L=L, TILE=tile, COLUMNS=columns, **placing(pairs),
    )  # fmt: skip
    return Places(row_of_pair, pair_of_row, expert_of_tile, scratch), ordered


def placing(pairs: int) -> dict[str, int]:
    """Pairs and other pairs that the placing program compares at a time, and its warps."""
    return dict(BLOCK=max(32, power_of_two(pairs)), SPAN=32 if pairs <= 256 else 8, num_warps=4 if pairs <= 256 else 16)


def _products(twin: bool):
    """Kernels of both products, and what the twins want besides."""
    if twin or INTERPRET:
        return expert_kernels.first_product, expert_kernels.second_product, dict(ROWS=ROWS, STEP=STEP)
    from rille.ops.mx import expert_gluon

    return expert_gluon.first_product, expert_gluon.second_product, {}
