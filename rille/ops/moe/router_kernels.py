"""The router in Triton: scores, choice, weights, and what balancing counts, in one pass over the logits.

    s = sigmoid(z)      T = top-A of s + bias, equal ones by lower id      w = s_T / (sum s_T + 1e-20) * scale
    cutoff = the (A+1)-th of s + bias      histogram[e, bin(cutoff - s_e)] += 1      load[e] += e in T

A program is one warp, so that no reduction leaves it; it takes tiles of ROWS tokens in turns. Scores are ordered as
integers, as which floats order as they do numerically with NaN above all (a token of NaN chooses something, and its
weights say so). Each of the A passes takes the largest key, the lowest id that has it, and strikes it out. Counts are
integers added atomically: the same in any order.

Backward: ds = scale (dw - sum(dw s) / S) / S with S = sum s_T + 1e-20, dz = ds s (1 - s), scattered to zeros.

Suffixes: R rows of a tile, B block of the E experts, K block of the A choices (powers of two).
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet

LOWEST = tl.constexpr(-(2**31))  # below the key of -inf
LOWEST_PAIR = tl.constexpr(-(2**63))


@triton.jit
def ordered(x):
    """int32 keys that order as floats do, or the floats' bits back from the keys."""
    return x ^ ((x >> 31) & 0x7FFFFFFF)


@triton.jit
def score_of(z, SCORED: tl.constexpr):
    return z if SCORED else 1.0 / (1.0 + tl.exp(-z))


@triton.jit
def router_forward(
    logits, bias, ids, weights, chosen, cutoff, load, histogram, edges, N, logits_row, scale,
    E: tl.constexpr, A: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr, CHOICES: tl.constexpr,
    ROWS: tl.constexpr, RENORMALISE: tl.constexpr, SCORED: tl.constexpr, PAIRED: tl.constexpr = False,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (P). ids int64, weights, chosen (their scores) [N, A]; load int64 [E] or None; histogram int32 [E, BINS]
    (one batch stays below 2^31), not counted where BINS is 0; edges [2] or None: the lowest and the highest edge of the
    bins, for `histogram_gluon.py`, which counts them then. SCORED: the logits are scores. PAIRED: for few rows, where
    reductions are waited for: key and id are one number of 64 bits, of which the largest is sought; nothing is
    counted."""
    e_B, a_K = tl.arange(0, BLOCK), tl.arange(0, CHOICES)
    bias_B = tl.load(bias + e_B, mask=e_B < E, other=0.0)
    low = tl.min(tl.where(e_B < E, bias_B, float("inf")), 0) - 1.0
    high = tl.max(tl.where(e_B < E, bias_B, float("-inf")), 0) + 1.0
    meet(CHAINED)
    if edges is not None:
        tl.store(edges, low, mask=tl.program_id(0) == 0)
        tl.store(edges + 1, high, mask=tl.program_id(0) == 0)
    if load is not None:
        load_B = tl.zeros([BLOCK], tl.int32)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(N, ROWS), tl.num_programs(0)):
        n_R = tile * ROWS + tl.arange(0, ROWS)
        inside_RB = (n_R < N)[:, None] & (e_B < E)[None, :]
        z_RB = tl.load(logits + n_R[:, None] * logits_row + e_B[None, :], mask=inside_RB, other=0.0)
        s_RB = score_of(z_RB, SCORED)
        left_RB = ordered((s_RB + bias_B[None, :]).to(tl.int32, bitcast=True))
        left_RB = tl.where(inside_RB, left_RB, LOWEST)
        ids_RK = tl.zeros([ROWS, CHOICES], tl.int32)
        if PAIRED:
            pair_RB = (left_RB.to(tl.int64) << 32) | (BLOCK - 1 - e_B)[None, :].to(tl.int64)
            for a in range(A):
                largest_R = tl.max(pair_RB, 1)
                id_R = BLOCK - 1 - (largest_R & 0xFFFFFFFF).to(tl.int32)
                ids_RK = tl.where(a_K[None, :] == a, id_R[:, None], ids_RK)
                pair_RB = tl.where(pair_RB == largest_R[:, None], LOWEST_PAIR, pair_RB)
            highest_R = (tl.max(pair_RB, 1) >> 32).to(tl.int32)
        else:
            for a in range(A):
                largest_R = tl.max(left_RB, 1)
                id_R = tl.min(tl.where(left_RB == largest_R[:, None], e_B[None, :], BLOCK), 1)
                ids_RK = tl.where(a_K[None, :] == a, id_R[:, None], ids_RK)
                left_RB = tl.where(e_B[None, :] == id_R[:, None], LOWEST, left_RB)
            highest_R = tl.max(left_RB, 1)
        cutoff_R = ordered(highest_R).to(tl.float32, bitcast=True)
        if A == E:
            cutoff_R = tl.full([ROWS], float("-inf"), tl.float32)
        pair_RK = n_R[:, None] * A + a_K[None, :]
        inside_RK = (n_R < N)[:, None] & (a_K < A)[None, :]
        z_RK = tl.load(logits + n_R[:, None] * logits_row + ids_RK, mask=inside_RK, other=0.0)
        s_RK = tl.where(inside_RK, score_of(z_RK, SCORED), 0.0)
        w_RK = s_RK * scale
        if RENORMALISE:
            w_RK = s_RK / (tl.sum(s_RK, 1) + 1e-20)[:, None] * scale
        tl.store(ids + pair_RK, ids_RK.to(tl.int64), mask=inside_RK)
        tl.store(chosen + pair_RK, s_RK, mask=inside_RK)
        tl.store(weights + pair_RK, w_RK, mask=inside_RK)
        tl.store(cutoff + n_R, cutoff_R, mask=n_R < N)
        if load is not None:
            load_B += tl.sum((inside_RB & (left_RB == LOWEST)).to(tl.int32), 0)
        if BINS > 0:
            above_RB = tl.math.div_rn((cutoff_R[:, None] - s_RB) - low, tl.math.div_rn(high - low, BINS * 1.0))
            bin_RB = tl.floor(tl.minimum(tl.maximum(above_RB, 0.0), BINS - 1.0)).to(tl.int32)
            one_RB = tl.full([ROWS, BLOCK], 1, tl.int32)
            tl.atomic_add(histogram + (e_B[None, :] * BINS + bin_RB), one_RB, mask=inside_RB, sem="relaxed")
    if load is not None:
        tl.atomic_add(load + e_B, load_B.to(tl.int64), mask=(e_B < E) & (load_B > 0), sem="relaxed")


@triton.jit
def router_backward(
    d_weights, ids, chosen, d_logits, N, scale, E: tl.constexpr, A: tl.constexpr, CHOICES: tl.constexpr,
    ROWS: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """Grid (N / ROWS). d_logits [N, E] holds zeros."""
    n_R = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a_K = tl.arange(0, CHOICES)
    inside_RK = (n_R < N)[:, None] & (a_K < A)[None, :]
    pair_RK = n_R[:, None] * A + a_K[None, :]
    s_RK = tl.load(chosen + pair_RK, mask=inside_RK, other=0.0)
    d_RK = tl.load(d_weights + pair_RK, mask=inside_RK, other=0.0) * scale
    if RENORMALISE:
        sum_R1 = (tl.sum(s_RK, 1) + 1e-20)[:, None]
        d_RK = (d_RK - tl.sum(d_RK * (s_RK / sum_R1), 1)[:, None]) / sum_R1
    id_RK = tl.load(ids + pair_RK, mask=inside_RK, other=0)
    tl.store(d_logits + n_R[:, None] * E + id_RK, d_RK * s_RK * (1.0 - s_RK), mask=inside_RK)
