"""Launches of the packed experts' kernels, registered with torch: four for a layer, none of which asks the host.

Axes: N tokens, A choices of each, E experts, L latent, F expert width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rille.ops.launching import INTERPRET, launch
from rille.ops.moe import permute
from rille.ops.moe.permute import Places, power_of_two
from rille.ops.mx import expert_kernels
from rille.ops.registering import op

ROWS = 64  # of a weight, a program
STEP = 64  # columns of the twins
REGISTERS = {8: 128, 16: 168, 32: 255}  # of a thread, by rows of x: with 8 four programs share a processor
MOST_PAIRS = 2048  # that one program places


def tile_of(N: int) -> int:
    """Rows of x beside a weight: no expert has more than one from each token that chooses different ones."""
    return 8 if N <= 8 else 16 if N <= 16 else 32


def tiles_bound(pairs: int, E: int, tile: int) -> int:
    """The most tiles that so many pairs can need."""
    return (pairs + min(pairs, E) * (tile - 1)) // tile


@op("rille::mx_experts")
def experts(
    x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w13_scale: Tensor, w2: Tensor, w2_scale: Tensor,
    cap_gate: float, cap_up: float, capped: bool, twin: bool,
) -> Tensor:  # fmt: skip
    """out [N, L] fp32. x [N, L] with dense rows, the rest dense: ids and weights [N, A], codes and scales uint8.
    twin: the products in plain Triton."""
    (N, A), (E, L, _) = ids.shape, w2.shape
    if not N:
        return torch.empty(N, L, dtype=torch.float32, device=x.device)
    tile = tile_of(N)
    tiles = tiles_bound(N * A, E, tile)
    places, ordered = prepare(x, ids, tile, tiles)
    act = first_product(ordered, w13, w13_scale, places, A, tile, (cap_gate, cap_up, capped), twin)
    y = second_product(act, w2, w2_scale, places, tile, twin)
    return permute.combine(y, places, weights, N, A, torch.float32)


@experts.register_fake
def _(x, ids, weights, w13, w13_scale, w2, w2_scale, cap_gate, cap_up, capped, twin):
    return x.new_empty(x.shape, dtype=torch.float32)


def prepare(x: Tensor, ids: Tensor, tile: int, tiles: int) -> tuple[Places, Tensor]:
    """Places (without `ends`), and x [N, L padded] with its columns in the products' order."""
    (N, L), pairs = x.shape, ids.numel()
    scratch, row_of_pair, pair_of_row, expert_of_tile = (
        torch.empty(size, dtype=torch.int32, device=x.device) for size in (pairs, pairs, tiles * tile, tiles)
    )
    ordered = torch.empty(N, padded(L), dtype=x.dtype, device=x.device)
    columns = min(1024, power_of_two(L))
    launch(
        expert_kernels.prepare, 1 + N * -(-L // columns),
        (ids, scratch, row_of_pair, pair_of_row, expert_of_tile, x, ordered, pairs, tiles, x.stride(0)),
        L=L, TILE=tile, COLUMNS=columns, **placing(pairs),
    )  # fmt: skip
    return Places(row_of_pair, pair_of_row, expert_of_tile, scratch), ordered


def first_product(
    ordered: Tensor, codes: Tensor, scales: Tensor, places: Places, A: int, tile: int, glu: tuple[float, float, bool],
    twin: bool,
) -> Tensor:  # fmt: skip
    """act [rows, F padded] in the second product's order; rows without a pair hold nothing. glu: the caps, and whether
    they count."""
    (_, double, half), tiles = codes.shape, len(places.expert_of_tile)
    F, L = double // 2, 2 * half
    more = dict(ROWS=ROWS, STEP=STEP, FAST=not INTERPRET) if twin or INTERPRET else limits(tile)
    act = torch.empty(tiles * tile, padded(F), dtype=ordered.dtype, device=ordered.device)
    tensors = ordered, codes.view(torch.int32), scales, act, places.pair_of_row, places.expert_of_tile
    launch(
        products(twin).first_product, tiles * -(-F // ROWS), tensors, F=F, L=L, ACTIVE=A, TILE=tile, A=glu[0], B=glu[1],
        CAPPED=glu[2], **more, num_warps=4,
    )  # fmt: skip
    return act


def second_product(act: Tensor, codes: Tensor, scales: Tensor, places: Places, tile: int, twin: bool) -> Tensor:
    """y [rows, L] fp32; rows without a pair hold nothing."""
    (_, L, half), tiles = codes.shape, len(places.expert_of_tile)
    F = 2 * half
    more = dict(ROWS=ROWS, STEP=STEP) if twin or INTERPRET else limits(tile)
    y = torch.empty(tiles * tile, L, dtype=torch.float32, device=act.device)
    tensors = act, codes.view(torch.int32), scales, y, places.pair_of_row, places.expert_of_tile
    programs = tiles * -(-L // ROWS)
    launch(products(twin).second_product, programs, tensors, L=L, F=F, TILE=tile, **more, num_warps=4)
    return y


def limits(tile: int) -> dict[str, int]:
    return dict(maxnreg=REGISTERS[tile])


def padded(columns: int) -> int:
    """Numbers from one row of x or of the activation to the next: whole 128, as the order wants."""
    return -(-columns // 128) * 128


def products(twin: bool) -> Any:
    """The module that has the products' kernels."""
    if twin or INTERPRET:
        return expert_kernels
    from rille.ops.mx import expert_gluon

    return expert_gluon


def placing(pairs: int) -> dict[str, int]:
    """Pairs and other pairs that the placing program compares at a time, and its warps."""
    return dict(BLOCK=max(32, power_of_two(pairs)), SPAN=32 if pairs <= 256 else 8, num_warps=4 if pairs <= 256 else 16)
