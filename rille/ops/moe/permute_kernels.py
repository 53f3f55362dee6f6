"""Where each (token, choice) pair stands among its expert's rows: a counting sort without a word to the host.

    pair p = n A + a      rows of expert e: start_e ...      start_e = sum over e' < e of round up(count_e', TILE)

Every expert's rows start at a multiple of TILE, so a tile of TILE rows belongs to one expert, may be read and written
whole, and the table of tiles has a static bound. Rows that fill up an expert hold no pair: `pair_of_row` is -1 there.
Pairs of an expert stand in the order of the pairs. Four steps: counts of each block of pairs, their running sums for
each expert, the experts' ends and the table, the places.

`gather_rows` copies tokens to rows; `combine_rows` brings rows back, summed over a token's choices in their order.

Suffixes: T pairs of a block (or tiles of the table), B block of the E experts, R rows, C columns.
"""

import triton
import triton.language as tl


@triton.jit
def count_pairs(ids, counts, PAIRS, E: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr):
    """Grid (blocks). counts int32 [blocks, E]."""
    e_B = tl.arange(0, BLOCK)
    count_B = tl.zeros([BLOCK], tl.int32)
    for part in range(0, SPAN, 16):
        p_T = tl.program_id(0) * SPAN + part + tl.arange(0, 16)
        id_T = tl.load(ids + p_T, mask=p_T < PAIRS, other=-1).to(tl.int32)
        count_B += tl.sum((id_T[:, None] == e_B[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0).to(tl.int64) * E + e_B, count_B, mask=e_B < E)


@triton.jit
def sum_blocks(counts, total, BLOCKS, E: tl.constexpr, SPAN: tl.constexpr, WIDE: tl.constexpr):
    """Grid (E / WIDE). counts [blocks, E] becomes what stands before each block; total int32 [E]."""
    e_B = tl.program_id(0) * WIDE + tl.arange(0, WIDE)
    before_B = tl.zeros([WIDE], tl.int32)
    for first in range(0, BLOCKS, SPAN):
        b_T = (first + tl.arange(0, SPAN)).to(tl.int64)
        inside_TB = (b_T < BLOCKS)[:, None] & (e_B < E)[None, :]
        at_TB = counts + b_T[:, None] * E + e_B[None, :]
        count_TB = tl.load(at_TB, mask=inside_TB, other=0)
        tl.store(at_TB, before_B[None, :] + tl.cumsum(count_TB, 0) - count_TB, mask=inside_TB)
        before_B += tl.sum(count_TB, 0)
    tl.store(total + e_B, before_B, mask=e_B < E)


@triton.jit
def table_of_tiles(
    total, ends, expert_of_tile, pair_of_row, TILES, E: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Grid (TILES / SPAN). ends int32 [E]: the first row behind each expert; expert_of_tile int32, -1 behind them;
    pair_of_row int32 [TILES TILE]: -1, until pairs are placed."""
    e_B = tl.arange(0, BLOCK)
    tiles_B = tl.cdiv(tl.load(total + e_B, mask=e_B < E, other=0), TILE)
    end_B = tl.cumsum(tiles_B, 0)
    if tl.program_id(0) == 0:
        tl.store(ends + e_B, end_B * TILE, mask=e_B < E)
    t_T = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    expert_T = tl.sum((end_B[None, :] <= t_T[:, None]).to(tl.int32), 1)
    tl.store(expert_of_tile + t_T, tl.where(expert_T < E, expert_T, -1), mask=t_T < TILES)
    row_TR = t_T.to(tl.int64)[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tl.store(pair_of_row + row_TR, tl.full([SPAN, TILE], -1, tl.int32), mask=(t_T < TILES)[:, None])


@triton.jit
def place_pairs(
    ids, counts, total, ends, row_of_pair, pair_of_row, PAIRS, E: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr
):
    """Grid (blocks). row_of_pair int32 [PAIRS]; pair_of_row int32 [rows] holds -1."""
    p_T = tl.program_id(0) * SPAN + tl.arange(0, SPAN)
    inside_T = p_T < PAIRS
    id_T = tl.load(ids + p_T, mask=inside_T, other=-1).to(tl.int32)
    # the same ids again along the other axis: how many of the same expert stand before me in the block
    other_T = tl.load(ids + p_T, mask=inside_T, other=-1).to(tl.int32)
    before_TT = (id_T[:, None] == other_T[None, :]) & (p_T[:, None] > p_T[None, :])
    rank_T = tl.sum(before_TT.to(tl.int32), 1)
    base_T = tl.load(counts + tl.program_id(0).to(tl.int64) * E + id_T, mask=inside_T, other=0)
    size_T = tl.cdiv(tl.load(total + id_T, mask=inside_T, other=0), TILE) * TILE
    row_T = tl.load(ends + id_T, mask=inside_T, other=0) - size_T + base_T + rank_T
    tl.store(row_of_pair + p_T, row_T, mask=inside_T)
    tl.store(pair_of_row + row_T, p_T, mask=inside_T)


@triton.jit
def gather_rows(
    x, pair_of_row, expert_of_tile, rows, x_row, D: tl.constexpr, A: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks * D / COLUMNS). rows [bound, D] in its own dtype; zeros where a row has no pair."""
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    first = tl.program_id(0) // across * ROWS
    if tl.load(expert_of_tile + first // TILE) >= 0:
        r_R = first.to(tl.int64) + tl.arange(0, ROWS)
        c_C = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
        pair_R = tl.load(pair_of_row + r_R)
        token_R = (pair_R // A).to(tl.int64)
        there_RC = (pair_R >= 0)[:, None] & (c_C < D)[None, :]
        x_RC = tl.load(x + token_R[:, None] * x_row + c_C[None, :], mask=there_RC, other=0.0)
        tl.store(rows + r_R[:, None] * D + c_C[None, :], x_RC.to(rows.dtype.element_ty), mask=(c_C < D)[None, :])


@triton.jit
def combine_rows(
    rows, row_of_pair, weights, out, N, D: tl.constexpr, A: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    WEIGH: tl.constexpr,
):  # fmt: skip
    """Grid (N / ROWS * D / COLUMNS). out [N, D] = sum over a of (weights[n, a]) rows[row_of_pair[n, a]], in fp32."""
    across: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    n_R = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c_C = tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)
    inside_RC = (n_R < N)[:, None] & (c_C < D)[None, :]
    sum_RC = tl.zeros([ROWS, COLUMNS], tl.float32)
    for a in tl.static_range(A):
        row_R = tl.load(row_of_pair + n_R * A + a, mask=n_R < N, other=0).to(tl.int64)
        y_RC = tl.load(rows + row_R[:, None] * D + c_C[None, :], mask=inside_RC, other=0.0).to(tl.float32)
        if WEIGH:
            y_RC *= tl.load(weights + n_R * A + a, mask=n_R < N, other=0.0)[:, None]
        sum_RC += y_RC
    tl.store(out + n_R[:, None] * D + c_C[None, :], sum_RC.to(out.dtype.element_ty), mask=inside_RC)
