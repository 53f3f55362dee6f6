"""Few rows for many packed experts: where they go, in which order their columns lie, and the products in plain Triton.

    places     rows of an expert begin at a multiple of TILE, as in `rille.ops.moe.permute_kernels`, here by one program
    order      column 8 w + c of a row is in place 8 w + 2 (c % 4) + c // 4: n0 n4 n1 n5 n2 n6 n3 n7. A lane takes 32
               places, 8 at a time; 4 lanes' first 8 lie together, then their second 8, and so on: `slot`. Rows are
               padded to whole 128.
    products   the twins of `expert_gluon.py`: same arguments, same order, weights decoded by arithmetic

Suffixes: P pairs (token, choice), Q some of them, R rows; M rows of a weight, K columns of a step, N rows of x.
"""

import triton
import triton.language as tl

from rille.ops.moe.product_kernels import glu_forward_of
from rille.ops.mx.stream_kernels import scale_of, value_of_e2m1


@triton.jit
def place(ids, scratch, row_of_pair, pair_of_row, expert_of_tile, PAIRS, TILES, BLOCK: tl.constexpr,
          SPAN: tl.constexpr, TILE: tl.constexpr):  # fmt: skip
    """By one program. ids [PAIRS], scratch int32 [PAIRS], row_of_pair int32 [PAIRS], pair_of_row int32 [TILES TILE],
    expert_of_tile int32 [TILES]; -1 where there is no pair and behind the last tile."""
    p_P, q_Q = tl.arange(0, BLOCK), tl.arange(0, SPAN)
    inside_P = p_P < PAIRS
    id_P = tl.load(ids + p_P, mask=inside_P, other=-1).to(tl.int32)
    count_P = tl.zeros([BLOCK], tl.int32)
    rank_P = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PAIRS, SPAN):
        id_Q = tl.load(ids + first + q_Q, mask=first + q_Q < PAIRS, other=-2).to(tl.int32)
        same_PQ = id_P[:, None] == id_Q[None, :]
        count_P += tl.sum(same_PQ.to(tl.int32), 1)
        rank_P += tl.sum((same_PQ & (first + q_Q[None, :] < p_P[:, None])).to(tl.int32), 1)
    # an expert's tiles are counted at its first pair
    tl.store(scratch + p_P, tl.where(rank_P == 0, tl.cdiv(count_P, TILE), 0), mask=inside_P)
    for first in range(0, TILES * TILE, BLOCK):
        tl.store(pair_of_row + first + p_P, -1, mask=first + p_P < TILES * TILE)
    for first in range(0, TILES, BLOCK):
        tl.store(expert_of_tile + first + p_P, -1, mask=first + p_P < TILES)
    tl.debug_barrier()
    before_P = tl.zeros([BLOCK], tl.int32)
    for first in range(0, PAIRS, SPAN):
        there_Q = first + q_Q < PAIRS
        id_Q = tl.load(ids + first + q_Q, mask=there_Q, other=0).to(tl.int32)
        tiles_Q = tl.load(scratch + first + q_Q, mask=there_Q, other=0)
        before_P += tl.sum(tl.where(id_Q[None, :] < id_P[:, None], tiles_Q[None, :], 0), 1)
    row_P = before_P * TILE + rank_P
    tl.store(row_of_pair + p_P, row_P, mask=inside_P)
    tl.store(pair_of_row + row_P, p_P, mask=inside_P)
    tl.store(expert_of_tile + row_P // TILE, id_P, mask=inside_P & (rank_P % TILE == 0))


@triton.jit
def prepare(
    ids, scratch, row_of_pair, pair_of_row, expert_of_tile, x, ordered, PAIRS, TILES, x_row, L: tl.constexpr,
    BLOCK: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (1 + N * L / COLUMNS). The first program places, the others copy x [N, L] to ordered [N, L]."""
    if tl.program_id(0) == 0:
        place(ids, scratch, row_of_pair, pair_of_row, expert_of_tile, PAIRS, TILES, BLOCK, SPAN, TILE)
    else:
        across: tl.constexpr = (L + COLUMNS - 1) // COLUMNS
        n = ((tl.program_id(0) - 1) // across).to(tl.int64)
        j = (tl.program_id(0) - 1) % across * COLUMNS + tl.arange(0, COLUMNS)
        to: tl.constexpr = (L + 127) // 128 * 128
        tl.store(ordered + n * to + slot(j), tl.load(x + n * x_row + column_at(j), mask=j < L), mask=j < L)


@triton.jit
def column_at(j):
    """The column in place j."""
    return j // 8 * 8 + j % 8 // 2 + j % 2 * 4


@triton.jit
def place_of(column):
    return column // 8 * 8 + column % 4 * 2 + column % 8 // 4


@triton.jit
def slot(j):
    """Where place j lies in a row."""
    return j // 128 * 128 + j % 32 // 8 * 32 + j % 128 // 32 * 8 + j % 8


@triton.jit
def weights(codes, scales, row, M, k, K: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):
    """Values fp32 [M, K] of rows from `row` on, of M that there are, and the columns at places from k on."""
    m_M, j_K = row + tl.arange(0, ROWS), k + tl.arange(0, STEP)
    there_MK = (m_M < M)[:, None] & (j_K < K)[None, :]
    word_MK = tl.load(codes + m_M[:, None] * (K // 8) + j_K[None, :] // 8, mask=there_MK, other=0)
    byte_MK = tl.load(scales + m_M[:, None] * (K // 32) + j_K[None, :] // 32, mask=there_MK, other=0)
    code_MK = (word_MK >> (column_at(j_K) % 8 * 4)[None, :]) & 15
    return value_of_e2m1(code_MK) * scale_of(byte_MK.to(tl.int32))


@triton.jit
def columns(x, there_N, at_N, k, K: tl.constexpr, STEP: tl.constexpr):
    """Rows of x from place k on, [K, N]."""
    j_K = k + tl.arange(0, STEP)
    return tl.load(x + at_N[None, :] + slot(j_K)[:, None], mask=there_N[None, :] & (j_K < K)[:, None], other=0.0)


@triton.jit
def first_product(
    x, codes, scales, act, pair_of_row, expert_of_tile, F: tl.constexpr, L: tl.constexpr, ACTIVE: tl.constexpr,
    TILE: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * F / ROWS). x [N, L] and act [rows, F] in the order, codes int32 [E, 2F, L / 8], scales
    [E, 2F, L / 32]."""
    blocks: tl.constexpr = (F + ROWS - 1) // ROWS
    row_x: tl.constexpr = (L + 127) // 128 * 128
    row_act: tl.constexpr = (F + 127) // 128 * 128
    tile, row = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS
    expert = tl.load(expert_of_tile + tile)
    if expert >= 0:
        codes += expert.to(tl.int64) * (F * L // 4)
        scales += expert.to(tl.int64) * (F * L // 16)
        up_codes, up_scales = codes + F * (L // 8), scales + F * (L // 32)
        row_N = tile * TILE + tl.arange(0, TILE)
        pair_N = tl.load(pair_of_row + row_N)
        token_N = tl.maximum(pair_N, 0) // ACTIVE * row_x
        h_MN = tl.zeros([ROWS, TILE], tl.float32)
        u_MN = tl.zeros([ROWS, TILE], tl.float32)
        for k in range(0, L, STEP):
            x_KN = columns(x, pair_N >= 0, token_N, k, L, STEP)
            h_MN = tl.dot(weights(codes, scales, row, F, k, L, ROWS, STEP).to(x_KN.dtype), x_KN, h_MN, "ieee")
            u_MN = tl.dot(weights(up_codes, up_scales, row, F, k, L, ROWS, STEP).to(x_KN.dtype), x_KN, u_MN, "ieee")
        act_MN = glu_forward_of(h_MN, u_MN, A, B, CAPPED, FAST)
        f_M = row + tl.arange(0, ROWS)
        there_MN = (f_M < F)[:, None] & (pair_N >= 0)[None, :]
        tl.store(
            act + row_N[None, :] * row_act + slot(place_of(f_M))[:, None],
            act_MN.to(act.dtype.element_ty),
            mask=there_MN,
        )


@triton.jit
def second_product(
    act, codes, scales, y, pair_of_row, expert_of_tile, L: tl.constexpr, F: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * L / ROWS). act [rows, F] in the order, codes int32 [E, L, F / 8], scales [E, L, F / 32], y
    [rows, L] fp32."""
    blocks: tl.constexpr = (L + ROWS - 1) // ROWS
    row_act: tl.constexpr = (F + 127) // 128 * 128
    tile, row = tl.program_id(0) // blocks, tl.program_id(0) % blocks * ROWS
    expert = tl.load(expert_of_tile + tile)
    if expert >= 0:
        codes += expert.to(tl.int64) * (L * F // 8)
        scales += expert.to(tl.int64) * (L * F // 32)
        row_N = tile * TILE + tl.arange(0, TILE)
        there_N = tl.load(pair_of_row + row_N) >= 0
        y_MN = tl.zeros([ROWS, TILE], tl.float32)
        for k in range(0, F, STEP):
            x_KN = columns(act, there_N, row_N * row_act, k, F, STEP)
            y_MN = tl.dot(weights(codes, scales, row, L, k, F, ROWS, STEP).to(x_KN.dtype), x_KN, y_MN, "ieee")
        l_M = row + tl.arange(0, ROWS)
        there_MN = (l_M < L)[:, None] & there_N[None, :]
        tl.store(y + row_N[None, :] * L + l_M[:, None], y_MN, mask=there_MN)
