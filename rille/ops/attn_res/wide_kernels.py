"""Wide rows of one site of Attention Residuals in Triton: loops over sources, few registers a source.

The equations and the arguments are those of `mix_kernels`. There each source has registers of its own, so a row of
8192 with nine of them spills; here a source is chosen by number inside a loop and the numbers of all sources share one
register.

Forward: a program runs through the sources of all its rows as one stream, STAGES of them on their way to shared memory
at any time, also across rows: the card never waits for a row to end. With UPDATE the stream has one entry more: p_old
waits in registers for y. A source meets what came before by online softmax.

Backward: three runs over the sources of a row with NORM (h; <g, V_j>; the gradients), two without. Only the first
comes from memory, the others from the cache, for a row of nine sources of 7168 is half of it.

Suffixes: B block of D, a power of two. P sources, a power of two. N tokens, D width, R sources.
"""

import triton
import triton.language as tl

from rille.ops.attn_res.mix_kernels import add2, pick, softmax_of, through_norm, weights_of_score, within


@triton.jit
def chosen(pointers, j):
    """Pointer j of a tuple."""
    at = pointers[0]
    for i in tl.static_range(1, len(pointers)):
        at = tl.where(j == i, pointers[i], at)
    return at


@triton.jit
def wide_forward(
    sources, update, query, gain, norm_gain, out, running, stats, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
    UPDATE: tl.constexpr, NORM: tl.constexpr, STATS: tl.constexpr,
):  # fmt: skip
    """Grid (at most N), each program every so-manieth row."""
    R: tl.constexpr = len(sources)
    ENTRIES: tl.constexpr = R + UPDATE
    DTYPE: tl.constexpr = out.dtype.element_ty
    d_B = tl.arange(0, BLOCK)
    w_B = weights_of_score(query, gain, d_B, D)
    first, programs = tl.program_id(0), tl.num_programs(0)
    top, total = -1.0e30, 0.0  # finite: a difference of infinities is none
    h_B = tl.zeros([BLOCK], tl.float32)
    waits_B = tl.zeros([BLOCK], tl.float32)
    for entry in tl.range(0, tl.cdiv(N - first, programs) * ENTRIES, num_stages=STAGES):
        j = entry % ENTRIES
        row = (first + (entry // ENTRIES) * programs).to(tl.int64)
        if UPDATE:
            at = chosen(sources + (update,), j)
        else:
            at = chosen(sources, j)
        v_B = tl.load(at + row * D + d_B, mask=d_B < D, other=0.0).to(tl.float32)
        if UPDATE:
            summed_B = (waits_B + v_B).to(DTYPE)
            waits_B = v_B
            if j == R:
                tl.store(running + row * D + d_B, summed_B, mask=d_B < D)
            v_B = tl.where(j == R, summed_B.to(tl.float32), v_B)
        square, t = tl.reduce((within(v_B * v_B, LANES, VEC), within(v_B * w_B, LANES, VEC)), 0, add2)
        r = tl.rsqrt(square / D + eps)
        score = t * r
        if STATS:
            of_row = stats + row * (2 * R + NORM) + tl.minimum(j, R - 1)  # y overwrites p_old
            tl.store(of_row, t)
            tl.store(of_row + R, r)
        if UPDATE:
            score = tl.where(j == R - 1, float("-inf"), score)
        if score > top:  # seldom, and a multiplication less for every element otherwise
            kept = tl.exp(top - score)
            h_B *= kept
            total *= kept
            top = score
        e = tl.exp(score - top)
        total += e
        h_B += e * v_B
        if j == ENTRIES - 1:
            finish(
                h_B / total, norm_gain, out + row * D, stats + row * (2 * R + 1) + 2 * R, d_B, eps, D, LANES, VEC,
                NORM, STATS,
            )  # fmt: skip
            # Set, not multiplied by zero: a NaN of one row must not reach the next.
            h_B = tl.zeros([BLOCK], tl.float32)
            top, total = -1.0e30, 0.0


@triton.jit
def finish(
    h_B, norm_gain, out, rstd, d_B, eps, D: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, NORM: tl.constexpr,
    STATS: tl.constexpr,
):  # fmt: skip
    """The mixture to memory, through the norm where there is one. It rounds before its gain and after."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    out_B = h_B.to(DTYPE)
    if NORM:
        wide_B = out_B.to(tl.float32)
        r = tl.rsqrt(tl.sum(within(wide_B * wide_B, LANES, VEC), 0) / D + eps)
        n_B = tl.load(norm_gain + d_B, mask=d_B < D, other=0.0).to(DTYPE).to(tl.float32)
        out_B = ((wide_B * r).to(DTYPE).to(tl.float32) * n_B).to(DTYPE)
        if STATS:
            tl.store(rstd, r)
    tl.store(out + d_B, out_B, mask=d_B < D)


@triton.jit
def wide_backward(
    sources, grads, beside, d_out, query, gain, norm_gain, stats, partial, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, NORM: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """Grid (G), each program every so-manieth row. partial [G, 1 + NORM, D]: dw, the gradient of the norm's gain."""
    R: tl.constexpr = len(sources)
    P: tl.constexpr = triton.next_power_of_2(R)
    DTYPE: tl.constexpr = d_out.dtype.element_ty
    d_B, j_P = tl.arange(0, BLOCK), tl.arange(0, P)
    dw_B = tl.zeros([BLOCK], tl.float32)
    if NORM:
        dgain_B = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0)):
        here_B = row * D + d_B
        of_row = stats + row * (2 * R + NORM)
        g_B = tl.load(d_out + here_B, mask=d_B < D, other=0.0).to(tl.float32)
        t_P, r_P, a_P = softmax_of(of_row, j_P, R)
        if NORM:
            h_B = tl.zeros([BLOCK], tl.float32)
            for j in range(R):
                v_B = tl.load(chosen(sources, j) + here_B, mask=d_B < D, other=0.0)
                h_B += pick(a_P, j_P, j) * v_B.to(tl.float32)
            n_B = tl.load(norm_gain + d_B, mask=d_B < D, other=0.0).to(DTYPE).to(tl.float32)
            r = tl.load(of_row + 2 * R)
            g_B, added_B = through_norm(g_B, h_B, r, n_B, eps, D, LANES, VEC, DTYPE)
            dgain_B += added_B
        da_P = tl.zeros([P], tl.float32)
        for j in range(R):
            v_B = tl.load(chosen(sources, j) + here_B, mask=d_B < D, other=0.0).to(tl.float32)
            da_P = tl.where(j_P == j, tl.sum(within(g_B * v_B, LANES, VEC), 0), da_P)
        along_w_P = a_P * (da_P - tl.sum(a_P * da_P, 0)) * r_P
        along_v_P = -along_w_P * t_P * r_P * r_P / D
        for j in range(R):
            v_B = tl.load(chosen(sources, j) + here_B, mask=d_B < D, other=0.0).to(tl.float32)
            along_w = pick(along_w_P, j_P, j)
            dw_B += along_w * v_B
            dv_B = pick(a_P, j_P, j) * g_B + pick(along_v_P, j_P, j) * v_B
            dv_B += along_w * weights_of_score(query, gain, d_B, D)
            if BESIDE:
                there_B = (d_B < D) & ((BESIDE >> j) % 2 == 1)
                dv_B += tl.load(chosen(beside, j) + here_B, mask=there_B, other=0.0).to(tl.float32)
            tl.store(chosen(grads, j) + here_B, dv_B.to(DTYPE), mask=d_B < D)
    partial_B = partial + tl.program_id(0).to(tl.int64) * ((1 + NORM) * D) + d_B
    tl.store(partial_B, dw_B, mask=d_B < D)
    if NORM:
        tl.store(partial_B + D, dgain_B, mask=d_B < D)
