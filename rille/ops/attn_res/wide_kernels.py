"""The gradient of one site of Attention Residuals for wide rows in Triton: loops over sources, few registers a source.

The equations and the arguments are those of `mix_kernels`. There each source of a group has registers of its own; here
one is chosen by number inside a loop and the numbers of all sources share one register, so that nothing spills. Three
runs over the sources of a row with NORM (h; <g, V_j>; the gradients), two without. Only the first comes from memory,
the others from the cache. A run goes the other way than the one before, two sources are on their way at any time, and a
row's last run loads what the next row begins with: the card never waits for a row to end.

Suffixes: B block of D, a power of two. P sources, a power of two. N tokens, D width, R sources.
"""

import triton
import triton.language as tl

from rille.ops.attn_res.mix_kernels import pick, softmax_of, through_norm, weights_of_score, within


@triton.jit
def chosen(pointers, j):
    """Pointer j of a tuple."""
    at = pointers[0]
    for i in tl.static_range(1, len(pointers)):
        at = tl.where(j == i, pointers[i], at)
    return at


@triton.jit
def turned(i, R: tl.constexpr, UP: tl.constexpr):
    """The source two steps after step i of a run over R sources, which the next run goes through the other way."""
    k = tl.where(i + 2 < R, i + 2, 2 * R - 3 - i)
    return k if UP else R - 1 - k


@triton.jit
def wide_backward(
    sources, grads, beside, d_out, query, gain, norm_gain, stats, partial, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, NORM: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """Grid (G <= N), each program every so-manieth row; at least two sources. partial [G, 1 + NORM, D]: dw, the
    gradient of the norm's gain."""
    R: tl.constexpr = len(sources)
    P: tl.constexpr = triton.next_power_of_2(R)
    DTYPE: tl.constexpr = d_out.dtype.element_ty
    d_B, j_P = tl.arange(0, BLOCK), tl.arange(0, P)
    there_B = d_B < D
    dw_B = tl.zeros([BLOCK], tl.float32)
    if NORM:
        dgain_B = tl.zeros([BLOCK], tl.float32)
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    # The source at work, the one after it, and the gradient of the row: always loaded ahead of the stores before them.
    v_B = tl.load(sources[0] + first * D + d_B, mask=there_B, other=0.0)
    after_B = tl.load(sources[1] + first * D + d_B, mask=there_B, other=0.0)
    next_g_B = tl.load(d_out + first * D + d_B, mask=there_B, other=0.0)
    for row in range(first, N, programs):
        here_B = row * D + d_B
        next_B = tl.minimum(row + programs, N - 1) * D + d_B
        of_row = stats + row * (2 * R + NORM)
        g_B = next_g_B.to(tl.float32)
        t_P, r_P, a_P = softmax_of(of_row, j_P, R)
        if NORM:
            r = tl.load(of_row + 2 * R)
            h_B = tl.zeros([BLOCK], tl.float32)
            for i in range(R):
                loaded_B = tl.load(chosen(sources, turned(i, R, True)) + here_B, mask=there_B, other=0.0)
                h_B += pick(a_P, j_P, i) * v_B.to(tl.float32)
                v_B, after_B = after_B, loaded_B
            n_B = tl.load(norm_gain + d_B, mask=there_B, other=0.0).to(DTYPE).to(tl.float32)
            g_B, added_B = through_norm(g_B, h_B, r, n_B, eps, D, LANES, VEC, DTYPE)
            dgain_B += added_B
        da_P = tl.zeros([P], tl.float32)
        for i in range(R):
            loaded_B = tl.load(chosen(sources, turned(i, R, not NORM)) + here_B, mask=there_B, other=0.0)
            j = R - 1 - i if NORM else i
            da_P = tl.where(j_P == j, tl.sum(within(g_B * v_B.to(tl.float32), LANES, VEC), 0), da_P)
            v_B, after_B = after_B, loaded_B
        along_w_P = a_P * (da_P - tl.sum(a_P * da_P, 0)) * r_P
        along_v_P = -along_w_P * t_P * r_P * r_P / D
        next_g_B = tl.load(d_out + next_B, mask=there_B, other=0.0)
        if BESIDE:
            j = 0 if NORM else R - 1
            added_B = tl.load(chosen(beside, j) + here_B, mask=there_B & ((BESIDE >> j) % 2 == 1), other=0.0)
        for i in range(R):
            j = i if NORM else R - 1 - i
            k = i + 2 - R  # a source of the next row from zero on
            at = chosen(sources, tl.where(k < 0, j + 2 if NORM else j - 2, k))
            loaded_B = tl.load(at + tl.where(k < 0, here_B, next_B), mask=there_B, other=0.0)
            along_w, v32_B = pick(along_w_P, j_P, j), v_B.to(tl.float32)
            dw_B += along_w * v32_B
            dv_B = pick(a_P, j_P, j) * g_B + pick(along_v_P, j_P, j) * v32_B
            dv_B += along_w * weights_of_score(query, gain, d_B, D)
            if BESIDE:
                dv_B += added_B.to(tl.float32)
                j2 = j + 1 if NORM else j - 1
                more_B = there_B & (i + 1 < R) & ((BESIDE >> tl.maximum(j2, 0)) % 2 == 1)
                added_B = tl.load(chosen(beside, j2) + here_B, mask=more_B, other=0.0)
            tl.store(chosen(grads, j) + here_B, dv_B.to(DTYPE), mask=there_B)
            v_B, after_B = after_B, loaded_B
    partial_B = partial + first * ((1 + NORM) * D) + d_B
    tl.store(partial_B, dw_B, mask=there_B)
    if NORM:
        tl.store(partial_B + D, dgain_B, mask=there_B)
