"""Work of the packed kernels: tiles of one sequence each, the longest first, and block sizes for head widths.

A program that walks the keys of a query tile does more the further down its sequence the tile lies; one that walks the
queries of a key tile less. Started in falling order, the short ones fill the gaps at the end. Host numbers only; the
tables are made once a batch and kept by its `Packing`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rille.packing import Packing, moved

L2_SHARE = 24 * 2**20  # bytes of keys and values that heads at work together may have in a cache of 50 MB


class Blocks(NamedTuple):
    """What a program holds (`own` rows), what it fetches at a time (`other` rows), warps, and blocks under way."""

    own: int
    other: int
    warps: int
    stages: int


FORWARD = Blocks(128, 64, 8, 3)
QUERIES = Blocks(128, 64, 8, 3)
KEYS = Blocks(128, 32, 8, 2)


def query_tiles(packing: Packing, rows: int) -> Tensor:
    """int32 [tiles, 4]: start of the sequence, first row inside it, its length, 0; most keys first."""
    return _kept(packing, "queries", rows)


def key_tiles(packing: Packing, rows: int) -> Tensor:
    """As `query_tiles`, most queries first."""
    return _kept(packing, "keys", rows)


def _kept(packing: Packing, side: str, rows: int) -> Tensor:
    name = ("mla tiles", side, rows)
    if name not in packing.derived:
        table_T4 = np.array(list(_tiles(packing.lengths, rows)), dtype=np.int32).reshape(-1, 4)
        work_T = table_T4[:, 1] if side == "queries" else table_T4[:, 2] - table_T4[:, 1]
        order_T = np.argsort(-work_T.astype(np.int64), kind="stable")
        packing.derived[name] = moved(torch.from_numpy(table_T4[order_T]), packing.device)
    return packing.derived[name]


def _tiles(lengths: tuple[int, ...], rows: int):
    start = 0
    for length in lengths:
        for first in range(0, length, rows):
            yield start, first, length, 0
        start += length


def heads_together(H: int, longest: int, bytes_a_row: int) -> int:
    """How many heads run at a time: as many as keep the rows that they share in the L2 cache."""
    return max(1, min(H, L2_SHARE // max(1, longest * bytes_a_row)))


def parts(width: int) -> tuple[int, int]:
    """Two powers of two that cover a head's channels with little over: 192 = 128 + 64, 96 = 64 + 32, 64 = 64 + 0."""
    first = max(16, 1 << (width.bit_length() - 1))
    rest = width - first
    second = 0 if rest <= 0 else max(16, 1 << (rest - 1).bit_length())
    return (2 * first, 0) if second >= first else (first, second)


def cover(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())
