"""Launches of the permutation's kernels: where pairs stand, tokens to rows, rows to tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton import knobs

from rille.ops.launching import launch
from rille.ops.moe import permute_kernels

INTERPRET = bool(knobs.runtime.interpret)  # asked once: torch.compile cannot trace the question
TILE = 16 if INTERPRET else 128  # rows of a product's tile; small in the interpreter, so that few tokens make many
SPAN = 16 if INTERPRET else 128  # pairs of a block
BLOCK = 4096  # elements of a program that copies


class Places(NamedTuple):
    """Where pairs stand. Rows behind the last expert's are in no tile and hold nothing."""

    row_of_pair: Tensor  # int32 [N A]
    pair_of_row: Tensor  # int32 [tiles TILE]: -1 where none
    expert_of_tile: Tensor  # int32 [tiles]: -1 behind the last
    ends: Tensor  # int32 [E]: the first row behind each expert's, a multiple of TILE


def power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def tiles_bound(pairs: int, E: int) -> int:
    """The most tiles that so many pairs can need: no expert has more than one that is not full."""
    return (pairs + min(pairs, E) * (TILE - 1)) // TILE


def permute(ids: Tensor, E: int) -> Places:
    """ids [N, A] of any integer dtype in [0, E), dense."""
    pairs, block = ids.numel(), power_of_two(E)
    tiles, blocks = tiles_bound(pairs, E), -(-pairs // SPAN)
    sizes = (blocks * E, E, E, pairs, tiles, tiles * TILE)
    counts, total, ends, row_of_pair, expert_of_tile, pair_of_row = (
        ids.new_empty(size, dtype=torch.int32) for size in sizes
    )
    places = Places(row_of_pair, pair_of_row, expert_of_tile, ends)
    if not pairs:
        ends.zero_()
        return places
    k, wide = permute_kernels, min(16, block)
    launch(k.count_pairs, blocks, (ids, counts, pairs), E=E, BLOCK=block, SPAN=SPAN, num_warps=8)
    launch(k.sum_blocks, -(-E // wide), (counts, total, blocks), E=E, SPAN=SPAN, WIDE=wide, num_warps=4)
    launch(
        k.table_of_tiles, -(-tiles // 16), (total, ends, expert_of_tile, pair_of_row, tiles),
        E=E, BLOCK=block, SPAN=16, TILE=TILE, num_warps=4,
    )  # fmt: skip
    rows = (ids, counts, total, ends, row_of_pair, pair_of_row, pairs)
    launch(k.place_pairs, blocks, rows, E=E, SPAN=SPAN, TILE=TILE, num_warps=4)
    return places


def gather(x: Tensor, places: Places, A: int, dtype: torch.dtype) -> Tensor:
    """rows [tiles TILE, D]: the token of each row, zeros where a row of a tile has none. x may have distant rows."""
    D = x.shape[1]
    rows = x.new_empty(places.pair_of_row.shape[0], D, dtype=dtype)
    columns = min(1024, power_of_two(D))
    height = max(1, min(TILE, BLOCK // columns))
    if rows.shape[0]:
        launch(
            permute_kernels.gather_rows, rows.shape[0] // height * -(-D // columns),
            (x, places.pair_of_row, places.expert_of_tile, rows, x.stride(0)),
            D=D, A=A, TILE=TILE, ROWS=height, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return rows


def combine(rows: Tensor, places: Places, weights: Tensor | None, N: int, A: int, dtype: torch.dtype) -> Tensor:
    """out [N, D]: the sum of each token's rows in the order of its choices, weighted where weights [N, A] are given."""
    D = rows.shape[1]
    out = rows.new_empty(N, D, dtype=dtype)
    columns = min(512, power_of_two(D))
    height = max(1, BLOCK // 2 // columns)
    if N:
        launch(
            permute_kernels.combine_rows, -(-N // height) * -(-D // columns),
            (rows, places.row_of_pair, weights, out, N),
            D=D, A=A, ROWS=height, COLUMNS=columns, WEIGH=weights is not None, num_warps=4,
        )  # fmt: skip
    return out
