"""The experts for a few tokens, as in decoding: time goes into reading weights once, and into launches.

    glu                act[p] = A(h) S(h) B(u),   h = W1_e x[token of p],  u = W3_e x[token of p]     e = ids[p]
    down               y[p] = W2_e act[p]
    combine_few        out[n] = sum over a of weights[n, a] y[n A + a]
    combine_norm_few   the same rounded, its RMS norm rounded, times the gain

Pairs p = n A + a stay where they are: nothing is sorted or gathered. An expert's weights are read once for BM of its
pairs, and a pair's sum runs in the same order whichever pairs stand beside it.

`glu_few`, `down_few`: a program belongs to a pair and looks through all ids for those of its expert; the first of every
BM multiplies for all BM and the others end. `glu_listed`, `down_listed`: for more pairs `list_pairs` looks first, once
for all, and a program belongs to an expert. Where a program can hold all weights of its columns it asks for them
before it knows what they meet.

Suffixes: M pairs of a tile, T pairs looked at together, R experts, F, L, K as in `product_kernels.py`.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet
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
    FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (pairs * F / BF). x [N, L] with distant rows, ids [N, A], w13 [E, 2F, L], act [pairs, F]. BK divides L."""
    meet(CHAINED)
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
    SPAN: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (pairs * L / BL). act [pairs, F], w2 [E, L, F], y fp32 [pairs, L]. In a chain `glu_few` stands between what
    wrote the ids and this. A sum that is one step has its weights asked for before act is waited for."""
    across: tl.constexpr = (L + BL - 1) // BL
    p = tl.program_id(0) // across
    expert = tl.load(ids + p).to(tl.int32)
    rank = rank_of(ids, p, expert, SPAN)
    if rank % BM == 0:
        l_L, k_K = tl.program_id(0) % across * BL + tl.arange(0, BL), tl.arange(0, BK)
        inside_L = l_L < L
        w = w2 + expert.to(tl.int64) * (L * F)
        if BK >= F:
            held_LK = tl.load(
                w + l_L[:, None] * F + k_K[None, :], mask=inside_L[:, None] & (k_K < F)[None, :], other=0.0
            )
        pair_M = tile_of(ids, p, expert, rank, PAIRS, BM, SPAN)
        meet(CHAINED)
        if BK >= F:
            there_M = pair_M >= 0
            act_MK = act + pair_M.to(tl.int64)[:, None] * F + k_K[None, :]
            rows_MK = tl.load(act_MK, mask=there_M[:, None] & (k_K < F)[None, :], other=0.0)
            at_ML = y + pair_M.to(tl.int64)[:, None] * L + l_L[None, :]
            tl.store(at_ML, tl.dot(rows_MK, held_LK.T), mask=there_M[:, None] & inside_L[None, :])
        else:
            down_tile(act, w, y, pair_M, l_L, L, F, BM, BL, BK)


@triton.jit
def list_pairs(ids, counts, pairs, PAIRS, E, SPAN: tl.constexpr, ROWS: tl.constexpr, CHAINED: tl.constexpr):
    """Grid (E / ROWS). counts int32 [E]; pairs int32 [E, PAIRS]: those of each expert, in order. SPAN holds all ids."""
    meet(CHAINED)
    e_R, t_T = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, SPAN)
    id_T = tl.load(ids + t_T, mask=t_T < PAIRS, other=-1).to(tl.int32)
    same_RT = (id_T[None, :] == e_R[:, None]).to(tl.int32)
    place_RT = tl.cumsum(same_RT, 1) - same_RT
    mask_RT = (same_RT > 0) & (e_R < E)[:, None]
    tl.store(pairs + e_R[:, None] * PAIRS + place_RT, tl.broadcast_to(t_T[None, :], [ROWS, SPAN]), mask=mask_RT)
    tl.store(counts + e_R, tl.sum(same_RT, 1), mask=e_R < E)


@triton.jit
def listed(counts, pairs, expert, first, PAIRS, BM: tl.constexpr):
    """How many pairs the expert has, and BM of them from `first` on, [M]; -1 where there are no more. Neither load
    waits for the other."""
    m_M = first + tl.arange(0, BM)
    pair_M = tl.load(pairs + expert * PAIRS + m_M, mask=m_M < PAIRS, other=-1)
    count = tl.load(counts + expert)
    return count, tl.where(m_M < count, pair_M, -1)


@triton.jit
def glu_listed(
    x, counts, pairs, w13, act, PAIRS, x_row, CHOICES: tl.constexpr, F: tl.constexpr, L: tl.constexpr,
    BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr,
    FAST: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (E * F / BF). x [N, L] with distant rows, w13 [E, 2F, L], act [pairs, F]. BK divides L."""
    meet(CHAINED)
    across: tl.constexpr = (F + BF - 1) // BF
    expert = tl.program_id(0) // across
    count, pair_M = listed(counts, pairs, expert, 0, PAIRS, BM)
    f_F, k_K = tl.program_id(0) % across * BF + tl.arange(0, BF), tl.arange(0, BK)
    inside_F = f_F < F
    gate_FK = w13 + (expert.to(tl.int64) * (2 * F) + f_F)[:, None] * L + k_K[None, :]
    first = 0
    while first < count:
        there_M = pair_M >= 0
        x_MK = x + (pair_M // CHOICES).to(tl.int64)[:, None] * x_row + k_K[None, :]
        h_MF = tl.zeros([BM, BF], tl.float32)
        u_MF = tl.zeros([BM, BF], tl.float32)
        for k in range(0, L, BK):
            rows_MK = tl.load(x_MK + k, mask=there_M[:, None], other=0.0)
            h_MF = tl.dot(rows_MK, tl.load(gate_FK + k, mask=inside_F[:, None], other=0.0).T, h_MF)
            u_MF = tl.dot(rows_MK, tl.load(gate_FK + (F * L + k), mask=inside_F[:, None], other=0.0).T, u_MF)
        act_MF = glu_forward_of(h_MF, u_MF, A, B, CAPPED, FAST)
        at_MF = act + pair_M.to(tl.int64)[:, None] * F + f_F[None, :]
        tl.store(at_MF, act_MF.to(act.dtype.element_ty), mask=there_M[:, None] & inside_F[None, :])
        first += BM
        if first < count:
            _, pair_M = listed(counts, pairs, expert, first, PAIRS, BM)


@triton.jit
def down_listed(
    act, counts, pairs, w2, y, PAIRS, L: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr,
    BK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (E * L / BL). act [pairs, F], w2 [E, L, F], y fp32 [pairs, L]. In a chain `glu_listed` stands between
    `list_pairs` and this."""
    across: tl.constexpr = (L + BL - 1) // BL
    expert = tl.program_id(0) // across
    count, pair_M = listed(counts, pairs, expert, 0, PAIRS, BM)
    l_L = tl.program_id(0) % across * BL + tl.arange(0, BL)
    meet(CHAINED)
    first = 0
    while first < count:
        down_tile(act, w2 + expert.to(tl.int64) * (L * F), y, pair_M, l_L, L, F, BM, BL, BK)
        first += BM
        if first < count:
            _, pair_M = listed(counts, pairs, expert, first, PAIRS, BM)


@triton.jit
def down_tile(
    act, w, y, pair_M, l_L, L: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr
):
    """y of BM pairs and BL columns; w: the expert's [L, F]."""
    k_K = tl.arange(0, BK)
    there_M, inside_L = pair_M >= 0, l_L < L
    w_LK = w + l_L[:, None] * F + k_K[None, :]
    act_MK = act + pair_M.to(tl.int64)[:, None] * F + k_K[None, :]
    y_ML = tl.zeros([BM, BL], tl.float32)
    for k in range(0, F, BK):
        inside_K = k + k_K < F
        rows_MK = tl.load(act_MK + k, mask=there_M[:, None] & inside_K[None, :], other=0.0)
        weights_LK = tl.load(w_LK + k, mask=inside_L[:, None] & inside_K[None, :], other=0.0)
        y_ML = tl.dot(rows_MK, weights_LK.T, y_ML)
    at_ML = y + pair_M.to(tl.int64)[:, None] * L + l_L[None, :]
    tl.store(at_ML, y_ML, mask=there_M[:, None] & inside_L[None, :])


@triton.jit
def sum_of(y, weights, n, l_L, L: tl.constexpr, CHOICES: tl.constexpr):
    """fp32, in the order of the choices."""
    sum_L = tl.zeros_like(l_L).to(tl.float32)
    for a in tl.static_range(CHOICES):
        y_L = tl.load(y + (n * CHOICES + a) * L + l_L, mask=l_L < L, other=0.0)
        sum_L += tl.load(weights + n * CHOICES + a) * y_L
    return sum_L


@triton.jit
def combine_few(y, weights, out, L: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Grid (N * L / BLOCK). out fp32 [N, L]."""
    meet(CHAINED)
    across: tl.constexpr = (L + BLOCK - 1) // BLOCK
    n = (tl.program_id(0) // across).to(tl.int64)
    l_L = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + n * L + l_L, sum_of(y, weights, n, l_L, L, CHOICES), mask=l_L < L)


@triton.jit
def combine_norm_few(
    y, weights, gain, out, eps, L: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Grid (N). out [N, L], gain [L]; roundings as in `rille.ops.norm`."""
    n, l_L = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    gain_L = tl.load(gain + l_L, mask=l_L < L, other=0.0).to(dtype).to(tl.float32)
    meet(CHAINED)
    u_L = sum_of(y, weights, n, l_L, L, CHOICES).to(dtype).to(tl.float32)
    r = tl.rsqrt(tl.sum(u_L * u_L, 0) / L + eps)
    tl.store(out + n * L + l_L, ((u_L * r).to(dtype).to(tl.float32) * gain_L).to(dtype), mask=l_L < L)
