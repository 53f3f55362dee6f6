"""One site of Attention Residuals in Triton: mixture, running sum and the norm that follows in one pass each way.

    p = p_old + y                                                   (UPDATE: the last source is made here)
    r_j = rsqrt(mean(V_j^2) + eps)     t_j = <V_j, w>     a = softmax(t_j r_j)     h = sum_j a_j V_j      w = query gain
    x = round(h r) norm_gain           r = rsqrt(mean(h^2) + eps)   (NORM: h itself is not written)

Bound by bytes: forward reads each source once. A program has one row at a time and takes the sources in groups: the
loads of the next group are under way while one is summed up, and one reduction across threads gives both sums of every
source of a group. Groups meet by online softmax. A token leaves t, r (and r of the norm) behind in `stats`.

Backward, for a gradient g of h:

    ds_j = a_j (<g, V_j> - <g, h>)
    dV_j = a_j g + ds_j r_j w - ds_j t_j r_j^3 / D V_j              dw = sum over tokens and sources of ds_j r_j V_j

dV_j needs all <g, V_j> first, and with NORM g is first led through the norm, which takes h, made again from the
sources: two or three runs over the sources of a row, in groups, one ahead. A run goes the other way than the one before
and finds its first group in registers (where all are one group, all of them); the others come from the cache. dw is
summed in registers over the rows of a program, one partial sum a program, added up in order by a second pass: the same
bits every time.

Suffixes: B block of D, a power of two. N tokens, D width, R sources, P the
next power of two, C columns of stats.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet


@triton.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@triton.jit
def add4(a0, a1, a2, a3, b0, b1, b2, b3):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def add8(a0, a1, a2, a3, a4, a5, a6, a7, b0, b1, b2, b3, b4, b5, b6, b7):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7


@triton.jit
def totals(sums):
    """The sum of each tensor of a tuple; powers of two of them share the way through shared memory."""
    n: tl.constexpr = len(sums)
    if n == 1:
        out = (tl.sum(sums[0], 0),)
    elif n == 2:
        out = tl.reduce(sums, 0, add2)
    elif n == 4:
        out = tl.reduce(sums, 0, add4)
    elif n == 8:
        out = tl.reduce(sums, 0, add8)
    elif n > 8:
        out = totals(sums[:8]) + totals(sums[8:])
    elif n > 4:
        out = totals(sums[:4]) + totals(sums[4:])
    else:
        out = totals(sums[:2]) + totals(sums[2:])
    return out


@triton.jit
def within(x_B, LANES: tl.constexpr, VEC: tl.constexpr):
    """[LANES]: the sum of what each thread holds, VEC neighbours a load."""
    repeats: tl.constexpr = x_B.shape[0] // (LANES * VEC)
    return tl.sum(tl.sum(tl.reshape(x_B, [repeats, LANES, VEC]), 2), 0)


@triton.jit
def weights_of_score(query, gain, d_B, D: tl.constexpr):
    q_B = tl.load(query + d_B, mask=d_B < D, other=0.0).to(tl.float32)
    return q_B * tl.load(gain + d_B, mask=d_B < D, other=0.0).to(tl.float32)


@triton.jit
def load_group(
    sources, update, running, start, d_B, D: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Sources FIRST to FIRST + COUNT - 1 of a row. With UPDATE the last of all becomes p_old + y, which is stored."""
    R: tl.constexpr = len(sources)
    out = ()
    for j in tl.static_range(FIRST, FIRST + COUNT):
        if j < R:
            v_B = tl.load(sources[j] + start + d_B, mask=d_B < D, other=0.0)
            if UPDATE and j == R - 1:
                y_B = tl.load(update + start + d_B, mask=d_B < D, other=0.0)
                v_B = (v_B.to(tl.float32) + y_B.to(tl.float32)).to(running.dtype.element_ty)
                tl.store(running + start + d_B, v_B, mask=d_B < D)
            out = out + (v_B,)
    return out


@triton.jit
def mix_forward(
    sources, update, query, gain, norm_gain, out, running, stats, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr,
    VEC: tl.constexpr, UPDATE: tl.constexpr, NORM: tl.constexpr, STATS: tl.constexpr, FEW: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (N / STEP). FEW: there are so few rows that what a row waits for counts, not what the card moves: all that
    does not depend on another load is asked for before the first use, and before any store, which loads do not pass."""
    R: tl.constexpr = len(sources)
    d_B = tl.arange(0, BLOCK)
    first_row = tl.program_id(0).to(tl.int64) * STEP
    for row in range(first_row, tl.minimum(first_row + STEP, N)):
        start = row * D
        dtype: tl.constexpr = out.dtype.element_ty
        if NORM and FEW:
            n_B = tl.load(norm_gain + d_B, mask=d_B < D, other=0.0)
        h_B = mixture(
            sources, update, query, gain, running, stats + row * (2 * R + NORM), start, d_B, eps, D, BLOCK, GROUP,
            LANES, VEC, UPDATE, STATS, FEW, CHAINED,
        )  # fmt: skip
        out_B = h_B.to(dtype)
        if NORM:
            wide_B = out_B.to(tl.float32)
            r = tl.rsqrt(tl.sum(within(wide_B * wide_B, LANES, VEC), 0) / D + eps)
            if not FEW:
                n_B = tl.load(norm_gain + d_B, mask=d_B < D, other=0.0)
            # The norm rounds before its gain, and the product is rounded again.
            out_B = ((wide_B * r).to(dtype).to(tl.float32) * n_B.to(dtype).to(tl.float32)).to(dtype)
            if STATS:
                tl.store(stats + row * (2 * R + 1) + 2 * R, r)
        tl.store(out + start + d_B, out_B, mask=d_B < D)


@triton.jit
def mixture(
    sources, update, query, gain, running, of_row, start, d_B, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    UPDATE: tl.constexpr, STATS: tl.constexpr, FEW: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """h of one row, fp32."""
    R: tl.constexpr = len(sources)
    if FEW:
        w_B = weights_of_score(query, gain, d_B, D)
    meet(CHAINED)
    group = load_group(sources, update, running, start, d_B, D, 0, GROUP, UPDATE)
    if not FEW:
        w_B = weights_of_score(query, gain, d_B, D)
    top, total = float("-inf"), 0.0
    h_B = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, R, GROUP):
        following = group
        if first + GROUP < R:
            following = load_group(sources, update, running, start, d_B, D, first + GROUP, GROUP, UPDATE)
        sums = ()
        for j in tl.static_range(len(group)):
            v_B = group[j].to(tl.float32)
            sums = sums + (within(v_B * v_B, LANES, VEC), within(v_B * w_B, LANES, VEC))
        sums = totals(sums)
        scores, highest = (), top
        for j in tl.static_range(len(group)):
            r = tl.rsqrt(sums[2 * j] / D + eps)
            scores = scores + (sums[2 * j + 1] * r,)
            highest = tl.maximum(highest, scores[j])
            if STATS:
                tl.store(of_row + (first + j), sums[2 * j + 1])
                tl.store(of_row + (R + first + j), r)
        if first > 0:
            kept = tl.exp(top - highest)
            total *= kept
            h_B *= kept
        for j in tl.static_range(len(group)):
            e = tl.exp(scores[j] - highest)
            total += e
            h_B += e * group[j].to(tl.float32)
        top, group = highest, following
    return h_B / total


@triton.jit
def softmax_of(of_row, j_P, R: tl.constexpr):
    """t, r and a of every source from a row's stats, [P]: one register for all sources, not one for each."""
    t_P = tl.load(of_row + j_P, mask=j_P < R, other=0.0)
    r_P = tl.load(of_row + R + j_P, mask=j_P < R, other=0.0)
    score_P = tl.where(j_P < R, t_P * r_P, float("-inf"))
    e_P = tl.exp(score_P - tl.max(score_P, 0))
    return t_P, r_P, e_P / tl.sum(e_P, 0)


@triton.jit
def pick(x_P, j_P, j):
    """Entry j."""
    return tl.sum(tl.where(j_P == j, x_P, 0.0), 0)


@triton.jit
def load_beside(
    beside, start, d_B, D: tl.constexpr, FIRST: tl.constexpr, COUNT: tl.constexpr, BESIDE: tl.constexpr
):  # fmt: skip
    """What is beside the gradients of a group of sources; a number in the place of those with nothing."""
    out = ()
    for j in tl.static_range(FIRST, FIRST + COUNT):
        if j < len(beside):
            if (BESIDE >> j) % 2 == 1:
                out = out + (tl.load(beside[j] + start + d_B, mask=d_B < D, other=0.0),)
            else:
                out = out + (0,)
    return out


@triton.jit
def through_norm(
    g_B, h_B, r, norm_gain_B, eps, D: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, DTYPE: tl.constexpr
):
    """Gradient g of h, and what this row adds to the gradient of the norm's gain.

    g stands upright on h as it was summed, not as it was rounded for the norm: sum_i a_i <g, V_i> = <g, h> is taken off
    every <g, V_j>, and where a V_j is a hundred times smaller than h a rounding of h would be all that is left there.
    """
    dgain_B = g_B * (h_B.to(DTYPE).to(tl.float32) * r).to(DTYPE).to(tl.float32)
    g_B = g_B * norm_gain_B
    along, square = tl.reduce((within(g_B * h_B, LANES, VEC), within(h_B * h_B, LANES, VEC)), 0, add2)
    return r * (g_B - h_B * (along / (square + D * eps))), dgain_B


@triton.jit
def mix_backward(
    sources, grads, beside, d_out, query, gain, norm_gain, stats, partial, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    NORM: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Grid (G), each program a share of the rows. partial [G, 1 + NORM, D]: dw, the gradient of the norm's gain. Bit j
    of BESIDE: the gradient of source j from elsewhere is beside[j] and is added."""
    R: tl.constexpr = len(sources)
    P: tl.constexpr = triton.next_power_of_2(R)
    LAST: tl.constexpr = (R + GROUP - 1) // GROUP - 1  # of the groups
    # Groups of the second run go down after a first one, else up; those of the last run the other way.
    SIGN: tl.constexpr = -1 if NORM else 1
    BOTTOM: tl.constexpr = LAST if NORM else 0
    TOP: tl.constexpr = 0 if NORM else LAST
    DTYPE: tl.constexpr = d_out.dtype.element_ty
    d_B, j_P = tl.arange(0, BLOCK), tl.arange(0, P)
    dw_B = tl.zeros([BLOCK], tl.float32)
    if NORM:
        dgain_B = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0)):
        start = row * D
        of_row = stats + row * (2 * R + NORM)
        g_B = tl.load(d_out + start + d_B, mask=d_B < D, other=0.0)
        group = load_group(sources, d_out, d_out, start, d_B, D, 0, GROUP, False)
        t_P, r_P, a_P = softmax_of(of_row, j_P, R)
        if NORM:
            h_B = tl.zeros([BLOCK], tl.float32)
            for k in tl.static_range(LAST + 1):
                following = group
                if k < LAST:
                    following = load_group(sources, d_out, d_out, start, d_B, D, (k + 1) * GROUP, GROUP, False)
                for i in tl.static_range(len(group)):
                    h_B += pick(a_P, j_P, k * GROUP + i) * group[i].to(tl.float32)
                group = following
            n_B = tl.load(norm_gain + d_B, mask=d_B < D, other=0.0).to(DTYPE).to(tl.float32)
            r = tl.load(of_row + 2 * R)
            g_B, added_B = through_norm(g_B.to(tl.float32), h_B, r, n_B, eps, D, LANES, VEC, DTYPE)
            dgain_B += added_B
        else:
            g_B = g_B.to(tl.float32)
        sums = ()
        for k in tl.static_range(LAST + 1):
            following = group
            if k < LAST:
                following = load_group(
                    sources, d_out, d_out, start, d_B, D, (BOTTOM + SIGN * (k + 1)) * GROUP, GROUP, False
                )  # fmt: skip
            of_group = ()
            for i in tl.static_range(len(group)):
                of_group = of_group + (within(g_B * group[i].to(tl.float32), LANES, VEC),)
            if NORM:
                sums = of_group + sums
            else:
                sums = sums + of_group
            group = following
        # Every load stands before the stores that come ahead of its use: none moves across a store on its own.
        added = load_beside(beside, start, d_B, D, TOP * GROUP, GROUP, BESIDE)
        da = totals(sums)
        da_P = tl.zeros([P], tl.float32)
        for j in tl.static_range(R):
            da_P = tl.where(j_P == j, da[j], da_P)
        along_w_P = a_P * (da_P - tl.sum(a_P * da_P, 0)) * r_P
        along_v_P = -along_w_P * t_P * r_P * r_P / D
        w_B = weights_of_score(query, gain, d_B, D)
        for k in tl.static_range(LAST + 1):
            following, added_next = group, added
            if k < LAST:
                following = load_group(
                    sources, d_out, d_out, start, d_B, D, (TOP - SIGN * (k + 1)) * GROUP, GROUP, False
                )  # fmt: skip
                added_next = load_beside(beside, start, d_B, D, (TOP - SIGN * (k + 1)) * GROUP, GROUP, BESIDE)
            for i in tl.static_range(len(group)):
                v_B = group[i].to(tl.float32)
                along_w = pick(along_w_P, j_P, (TOP - SIGN * k) * GROUP + i)
                dw_B += along_w * v_B
                dv_B = pick(a_P, j_P, (TOP - SIGN * k) * GROUP + i) * g_B + along_w * w_B
                dv_B += pick(along_v_P, j_P, (TOP - SIGN * k) * GROUP + i) * v_B
                if (BESIDE >> ((TOP - SIGN * k) * GROUP + i)) % 2 == 1:
                    dv_B += added[i].to(tl.float32)
                tl.store(grads[(TOP - SIGN * k) * GROUP + i] + start + d_B, dv_B.to(DTYPE), mask=d_B < D)
            group, added = following, added_next
    partial_B = partial + tl.program_id(0).to(tl.int64) * ((1 + NORM) * D) + d_B
    tl.store(partial_B, dw_B, mask=d_B < D)
    if NORM:
        tl.store(partial_B + D, dgain_B, mask=d_B < D)
