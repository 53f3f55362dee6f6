"""The experts for a few tokens, as in decoding: time goes into reading weights once, and into launches.

    glu_few            act[p] = A(h) S(h) B(u),   h = W1_e x[token of p],  u = W3_e x[token of p]     e = ids[p]
    down_few           y[p] = W2_e act[p]
    combine_few        out[n] = sum over a of weights[n, a] y[n A + a]
    combine_norm_few   the same rounded, its RMS norm rounded, times the gain

Pairs p = n A + a stay where they are: nothing is sorted, gathered or counted beforehand. A program belongs to an expert
(where pairs are more than experts) or to a pair, and looks through all ids for the pairs of its expert; of several
programs of pairs that share one the first multiplies for all, BM at a time, and the others end. So an expert's weights
are read once, and a pair's sum runs in the same order whichever pairs stand beside it. Where a program can hold all
weights of its columns it asks for them as soon as it knows that it has work, and puts its pairs together meanwhile.

Suffixes: M pairs of a tile, T ids looked at together, F, L, K as in `product_kernels.py`.
"""

import triton
import triton.language as tl

from rille.ops.moe.product_kernels import glu_forward_of

TOGETHER = tl.constexpr(128)  # ids that find their places in a tile together


@triton.jit
def work_of(ids, slot, PAIRS, SPAN: tl.constexpr, BY_EXPERT: tl.constexpr):
    """The program's expert, and how many pairs have it: 0 where another program does the work. SPAN holds all pairs."""
    t_T = tl.arange(0, SPAN)
    id_T = tl.load(ids + t_T, mask=t_T < PAIRS, other=-1).to(tl.int32)
    expert = slot if BY_EXPERT else tl.load(ids + slot).to(tl.int32)
    weight_T = tl.where(t_T < slot, 1 if BY_EXPERT else SPAN + 1, 1)  # an earlier pair makes the sum too large
    count = tl.sum(tl.where(id_T == expert, weight_T, 0), 0)
    return expert, tl.where(count <= SPAN, count, 0)


@triton.jit
def tile_of(ids, expert, first, PAIRS, BM: tl.constexpr, SPAN: tl.constexpr):
    """BM pairs of the expert behind the `first` ones, [M]; -1 where there are no more. SPAN ids are looked at
    together."""
    pair_M = tl.full([BM], -1, tl.int32)
    seen = -first
    for start in tl.range(0, PAIRS, SPAN, num_stages=1):
        j_T = start + tl.arange(0, SPAN)
        same_T = (tl.load(ids + j_T, mask=j_T < PAIRS, other=-1).to(tl.int32) == expert).to(tl.int32)
        place_T = seen + tl.cumsum(same_T, 0) - same_T
        match_MT = (same_T > 0)[None, :] & (place_T[None, :] == tl.arange(0, BM)[:, None])
        pair_M += tl.sum(tl.where(match_MT, j_T[None, :] + 1, 0), 1)
        seen += tl.sum(same_T, 0)
    return pair_M


@triton.jit
def glu_few(
    x, ids, w13, act, PAIRS, x_row, CHOICES: tl.constexpr, F: tl.constexpr, L: tl.constexpr, BM: tl.constexpr,
    BF: tl.constexpr, BK: tl.constexpr, SPAN: tl.constexpr, BY_EXPERT: tl.constexpr, A: tl.constexpr, B: tl.constexpr,
    CAPPED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (pairs or experts, the fewer * F / BF). x [N, L] with distant rows, ids [N, A], w13 [E, 2F, L], act
    [pairs, F]."""
    across: tl.constexpr = (F + BF - 1) // BF
    expert, count = work_of(ids, tl.program_id(0) // across, PAIRS, SPAN, BY_EXPERT)
    if count > 0:
        f_F, k_K = tl.program_id(0) % across * BF + tl.arange(0, BF), tl.arange(0, BK)
        inside_F = f_F < F
        gate_FK = w13 + (expert.to(tl.int64) * (2 * F) + f_F)[:, None] * L + k_K[None, :]
        if BK >= L:
            held_FK = inside_F[:, None] & (k_K < L)[None, :]
            gate_weights_FK = tl.load(gate_FK, mask=held_FK, other=0.0)
            up_weights_FK = tl.load(gate_FK + F * L, mask=held_FK, other=0.0)
        for first in tl.range(0, count, BM, num_stages=1):
            pair_M = tile_of(ids, expert, first, PAIRS, BM, min(SPAN, TOGETHER))
            there_M = pair_M >= 0
            x_MK = x + (pair_M // CHOICES).to(tl.int64)[:, None] * x_row + k_K[None, :]
            if BK >= L:
                rows_MK = tl.load(x_MK, mask=there_M[:, None] & (k_K < L)[None, :], other=0.0)
                h_MF = tl.dot(rows_MK, gate_weights_FK.T)
                u_MF = tl.dot(rows_MK, up_weights_FK.T)
            else:
                h_MF = tl.zeros([BM, BF], tl.float32)
                u_MF = tl.zeros([BM, BF], tl.float32)
                for k in range(0, L, BK):
                    inside_K = k + k_K < L
                    held_FK = inside_F[:, None] & inside_K[None, :]
                    rows_MK = tl.load(x_MK + k, mask=there_M[:, None] & inside_K[None, :], other=0.0)
                    h_MF = tl.dot(rows_MK, tl.load(gate_FK + k, mask=held_FK, other=0.0).T, h_MF)
                    u_MF = tl.dot(rows_MK, tl.load(gate_FK + (F * L + k), mask=held_FK, other=0.0).T, u_MF)
            act_MF = glu_forward_of(h_MF, u_MF, A, B, CAPPED, FAST)
            at_MF = act + pair_M.to(tl.int64)[:, None] * F + f_F[None, :]
            tl.store(at_MF, act_MF.to(act.dtype.element_ty), mask=there_M[:, None] & inside_F[None, :])


@triton.jit
def down_few(
    act, ids, w2, y, PAIRS, L: tl.constexpr, F: tl.constexpr, BM: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr,
    SPAN: tl.constexpr, BY_EXPERT: tl.constexpr,
):  # fmt: skip
    """Grid (pairs or experts, the fewer * L / BL). act [pairs, F], w2 [E, L, F], y fp32 [pairs, L]."""
    across: tl.constexpr = (L + BL - 1) // BL
    expert, count = work_of(ids, tl.program_id(0) // across, PAIRS, SPAN, BY_EXPERT)
    if count > 0:
        l_L, k_K = tl.program_id(0) % across * BL + tl.arange(0, BL), tl.arange(0, BK)
        inside_L = l_L < L
        w_LK = w2 + (expert.to(tl.int64) * L + l_L)[:, None] * F + k_K[None, :]
        if BK >= F:
            weights_LK = tl.load(w_LK, mask=inside_L[:, None] & (k_K < F)[None, :], other=0.0)
        for first in tl.range(0, count, BM, num_stages=1):
            pair_M = tile_of(ids, expert, first, PAIRS, BM, min(SPAN, TOGETHER))
            there_M = pair_M >= 0
            act_MK = act + pair_M.to(tl.int64)[:, None] * F + k_K[None, :]
            if BK >= F:
                y_ML = tl.dot(tl.load(act_MK, mask=there_M[:, None] & (k_K < F)[None, :], other=0.0), weights_LK.T)
            else:
                y_ML = tl.zeros([BM, BL], tl.float32)
                for k in range(0, F, BK):
                    inside_K = k + k_K < F
                    rows_MK = tl.load(act_MK + k, mask=there_M[:, None] & inside_K[None, :], other=0.0)
                    w = tl.load(w_LK + k, mask=inside_L[:, None] & inside_K[None, :], other=0.0)
                    y_ML = tl.dot(rows_MK, w.T, y_ML)
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
def combine_few(y, weights, out, L: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N * L / BLOCK). out fp32 [N, L]."""
    across: tl.constexpr = (L + BLOCK - 1) // BLOCK
    n = (tl.program_id(0) // across).to(tl.int64)
    l_L = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + n * L + l_L, sum_of(y, weights, n, l_L, L, CHOICES), mask=l_L < L)


@triton.jit
def combine_norm_few(y, weights, gain, out, eps, L: tl.constexpr, CHOICES: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (N). out [N, L], gain [L]; roundings as in `rille.ops.norm`."""
    n, l_L = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    u_L = sum_of(y, weights, n, l_L, L, CHOICES).to(dtype).to(tl.float32)
    r = tl.rsqrt(tl.sum(u_L * u_L, 0) / L + eps)
    gain_L = tl.load(gain + l_L, mask=l_L < L, other=0.0).to(dtype).to(tl.float32)
    tl.store(out + n * L + l_L, ((u_L * r).to(dtype).to(tl.float32) * gain_L).to(dtype), mask=l_L < L)
