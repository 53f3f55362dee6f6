"""The experts for a few tokens, as in decoding: time goes into reading weights once, and into launches.

    glu_few        act[p] = A(h) S(h) B(u),   h = W1_e x[token of p],  u = W3_e x[token of p]     e = ids[p]
    down_few       y[p] = W2_e act[p]
    combine_few    out[n] = sum over a of weights[n, a] y[n A + a]

Pairs p = n A + a stay where they are: nothing is sorted, gathered or counted beforehand. The program of a pair looks
through all ids for those of its expert; the first of every BM of them multiplies for all BM and the others end. So an
expert's weights are read once for BM pairs, and a pair's sum runs in the same order whichever pairs stand beside it.

Suffixes: M pairs of a tile, T pairs looked at together, F, L, K as in `product_kernels.py`.
"""

import triton
import triton.language as tl

from rille.ops.moe.product_kernels import glu_forward_of


@triton.jit
def rank_of(ids, p, expert, SPAN: tl.constexpr):
    """How many pairs before p have its expert."""
    rank = 0
    for first in range(0, p, SPAN):
        j_T = first + tl.arange(0, SPAN)
        id_T = tl.load(ids + j_T, mask=j_T < p, other=-1).to(tl.int32)
        rank += tl.sum((id_T == expert).to(tl.int32), 0)
    return rank


@triton.jit
def tile_of(ids, p, expert, rank, PAIRS, BM: tl.constexpr, SPAN: tl.constexpr):
    """The BM pairs of the expert from p on, [BM]; -1 where there are no more."""
    t_M = tl.arange(0, BM)
    pair_M = tl.full([BM], -1, tl.int32)
    seen = rank
    for first in range(p // SPAN * SPAN, PAIRS, SPAN):
        j_T = first + tl.arange(0, SPAN)
        id_T = tl.load(ids + j_T, mask=(j_T < PAIRS) & (j_T >= p), other=-1).to(tl.int32)
        same_T = (id_T == expert).to(tl.int32)
        place_T = seen + tl.cumsum(same_T, 0) - same_T - rank
        match_MT = (same_T > 0)[None, :] & (place_T[None, :] == t_M[:, None])
        pair_M += tl.sum(tl.where(match_MT, j_T[None, :] + 1, 0), 1)
        seen += tl.sum(same_T, 0)
    return pair_M


@triton.jit
def glu_few(
    x, ids, w13, act, PAIRS, x_row, CHOICES: tl.constexpr, F: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    BF: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Grid (pairs * F / BF). x [N, L] with distant rows, ids [N, A], w13 [E, 2F, L], act [pairs, F]. BK divides L."""
    across: tl.constexpr = (F + BF - 1) // BF
    p = tl.program_id(0) // across
    expert = tl.load(ids + p).to(tl.int32)
    rank = rank_of(ids, p, expert, SPAN)
    if rank % BM == 0:
        pair_M = tile_of(ids, p, expert, rank, PAIRS, BM, SPAN)
        f_F = tl.program_id(0) % across * BF + tl.arange(0, BF)
        k_K = tl.arange(0, BK)
        there_M, inside_F = pair_M >= 0, f_F < F
        x_MK = x + (pair_M // CHOICES).to(tl.int64)[:, None] * x_row + k_K[None, :]
        gate_FK = w13 + (expert.to(tl.int64) * (2 * F) + f_F)[:, None] * L + k_K[None, :]
        h_MF = tl.zeros([BM, BF], tl.float32)
        u_MF = tl.zeros([BM, BF], tl.float32)
        for k in range(0, L, BK):
            rows_MK = tl.load(x_MK + k, mask=there_M[:, None], other=0.0)
            h_MF = tl.dot(rows_MK, tl.load(gate_FK + k, mask=inside_F[:, None], other=0.0).T, h_MF)
            u_MF = tl.dot(rows_MK, tl.load(gate_FK + (F * L + k), mask=inside_F[:, None], other=0.0).T, u_MF)
        act_MF = glu_forward_of(h_MF, u_MF, A, B, CAPPED, FAST)
        at_MF = act + pair_M.to(tl.int64)[:, None] * F + f_F[None, :]
        tl.store(at_MF, act_MF.to(act.dtype.element_ty), mask=there_M[:, None] & inside_F[None, :])


@triton.jit
def down_few(
    act, ids, w2, y, PAIRS, L: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr,
    SPAN: tl.constexpr,
):  # fmt: skip
    """Grid (pairs * L / BL). act [pairs, F], w2 [E, L, F], y fp32 [pairs, L]."""
    across: tl.constexpr = (L + BL - 1) // BL
    p = tl.program_id(0) // across
    expert = tl.load(ids + p).to(tl.int32)
    rank = rank_of(ids, p, expert, SPAN)
    if rank % BM == 0:
        pair_M = tile_of(ids, p, expert, rank, PAIRS, BM, SPAN)
        l_L = tl.program_id(0) % across * BL + tl.arange(0, BL)
        k_K = tl.arange(0, BK)
        there_M, inside_L = pair_M >= 0, l_L < L
        act_MK = act + pair_M.to(tl.int64)[:, None] * F + k_K[None, :]
        w_LK = w2 + (expert.to(tl.int64) * L + l_L)[:, None] * F + k_K[None, :]
        y_ML = tl.zeros([BM, BL], tl.float32)
        for k in range(0, F, BK):
            inside_K = k + k_K < F
            rows_MK = tl.load(act_MK + k, mask=there_M[:, None] & inside_K[None, :], other=0.0)
            y_ML = tl.dot(rows_MK, tl.load(w_LK + k, mask=inside_L[:, None] & inside_K[None, :], other=0.0).T, y_ML)
        at_ML = y + pair_M.to(tl.int64)[:, None] * L + l_L[None, :]
        tl.store(at_ML, y_ML, mask=there_M[:, None] & inside_L[None, :])


@triton.jit
def combine_few(y, weights, out, L: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N * L / BLOCK). out fp32 [N, L], summed in the order of the choices."""
    across: tl.constexpr = (L + BLOCK - 1) // BLOCK
    n = (tl.program_id(0) // across).to(tl.int64)
    l_L = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    sum_L = tl.zeros([BLOCK], tl.float32)
    for a in tl.static_range(CHOICES):
        y_L = tl.load(y + (n * CHOICES + a) * L + l_L, mask=l_L < L, other=0.0)
        sum_L += tl.load(weights + n * CHOICES + a) * y_L
    tl.store(out + n * L + l_L, sum_L, mask=l_L < L)
