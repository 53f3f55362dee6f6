"""Products of matrices whose result is symmetric: the upper half of the tiles, each written in its place and mirrored.

    OUT = scale L R^T + share C + diagonal I          L, R [P, K], or [K, P] where TALL;   C, OUT [P, P]

A batch of matrices without gaps. A program is one tile (i, j), i <= j, of one matrix; of T x T tiles T (T + 1) / 2 are
computed. L R^T is symmetric where L = R, and where both are symmetric and commute, as polynomials of one matrix do.
Sums are fp32 and rounded once. Inside a tile on the diagonal both halves are computed.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def upper_tile(index, TILES: tl.constexpr):
    """Row and column of tile `index`, counted down the columns of the upper half."""
    j = 0
    for t in tl.static_range(1, TILES):
        j += (index >= t * (t + 1) // 2).to(tl.int32)
    return index - j * (j + 1) // 2, j


@triton.jit
def load_tile(x, first, k, P, K, TALL: tl.constexpr, EVEN: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    """BLOCK of the P rows by DEPTH of K, as it lies: [BLOCK, DEPTH], or [DEPTH, BLOCK] where TALL."""
    p = first + tl.arange(0, BLOCK)
    ks = k + tl.arange(0, DEPTH)
    if TALL:
        at = x + ks[:, None] * P + p[None, :]
        inside = (ks < K)[:, None] & (p < P)[None, :]
    else:
        at = x + p[:, None] * K + ks[None, :]
        inside = (p < P)[:, None] & (ks < K)[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def symmetric_product(
    left, right, added, out, P, K, scale, share, diagonal,
    TALL: tl.constexpr, HAS_ADDED: tl.constexpr, EVEN: tl.constexpr, TILES: tl.constexpr,
    BLOCK: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    EACH: tl.constexpr = TILES * (TILES + 1) // 2
    matrix = (tl.program_id(0) // EACH).to(tl.int64)
    i, j = upper_tile(tl.program_id(0) % EACH, TILES)
    left += matrix * P * K
    right += matrix * P * K
    out += matrix * P * P
    total = tl.zeros([BLOCK, BLOCK], dtype=tl.float32)
    for k in tl.range(0, K, DEPTH):
        a = load_tile(left, i * BLOCK, k, P, K, TALL, EVEN, BLOCK, DEPTH)
        b = load_tile(right, j * BLOCK, k, P, K, TALL, EVEN, BLOCK, DEPTH)
        if TALL:
            total = tl.dot(tl.trans(a), b, total, input_precision="ieee")
        else:
            total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    rows = i * BLOCK + tl.arange(0, BLOCK)
    columns = j * BLOCK + tl.arange(0, BLOCK)
    inside = (rows < P)[:, None] & (columns < P)[None, :]
    total *= scale
    if HAS_ADDED:
        c = added + matrix * P * P + rows[:, None] * P + columns[None, :]
        total += share * tl.load(c, mask=inside, other=0.0).to(tl.float32)
    total += tl.where(rows[:, None] == columns[None, :], diagonal, 0.0)
    result = total.to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * P + columns[None, :], result, mask=inside)
    if i != j:
        inside = (columns < P)[:, None] & (rows < P)[None, :]
        tl.store(out + columns[:, None] * P + rows[None, :], tl.trans(result), mask=inside)
