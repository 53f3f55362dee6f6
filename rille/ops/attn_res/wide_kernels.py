"""The gradient of one site of Attention Residuals for wide rows in Triton: loops over sources, few registers a source.

The equations and the arguments are those of `mix_kernels`. There each source of a group has registers of its own; here
one is chosen by number inside a loop and the numbers of all sources share one register, so that nothing spills.

A mixture makes two runs over the sources of a row (<g, V_j>; the gradients), the second one down, from the cache. Two
sources are on their way at any time, and a row's last run loads what the next row begins with: the card never waits for
a row to end. A site with its norm makes three runs, h before the others, and loads where it needs: h and the sums for
the norm's gain fill the registers, loads ahead spilled and were slower.

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
def wide_backward(
    sources, grads, beside, d_out, query, gain, norm_gain, stats, partial, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, NORM: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """Without NORM. Grid (G <= N), each program every so-manieth row; at least two sources. partial [G, 1, D]: dw."""
    tl.static_assert(not NORM)
    R: tl.constexpr = len(sources)
    P: tl.constexpr = triton.next_power_of_2(R)
    DTYPE: tl.constexpr = d_out.dtype.element_ty
    d_B, j_P = tl.arange(0, BLOCK), tl.arange(0, P)
    there_B = d_B < D
    dw_B = tl.zeros([BLOCK], tl.float32)
    first, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    # The source at work, the one after it, and the gradient of the row: always loaded ahead of the stores before them.
    v_B = tl.load(sources[0] + first * D + d_B, mask=there_B, other=0.0)
    after_B = tl.load(sources[1] + first * D + d_B, mask=there_B, other=0.0)
    next_g_B = tl.load(d_out + first * D + d_B, mask=there_B, other=0.0)
    for row in range(first, N, programs):
        here_B = row * D + d_B
        next_B = tl.minimum(row + programs, N - 1) * D + d_B
        g_B = next_g_B.to(tl.float32)
        t_P, r_P, a_P = softmax_of(stats + row * (2 * R), j_P, R)
        da_P = tl.zeros([P], tl.float32)
        for j in range(R):
            k = tl.where(j + 2 < R, j + 2, 2 * R - 3 - j)  # two steps on, where the run turns round at its end
            loaded_B = tl.load(chosen(sources, k) + here_B, mask=there_B, other=0.0)
            da_P = tl.where(j_P == j, tl.sum(within(g_B * v_B.to(tl.float32), LANES, VEC), 0), da_P)
            v_B, after_B = after_B, loaded_B
        along_w_P = a_P * (da_P - tl.sum(a_P * da_P, 0)) * r_P
        along_v_P = -along_w_P * t_P * r_P * r_P / D
        next_g_B = tl.load(d_out + next_B, mask=there_B, other=0.0)
        if BESIDE:
            there = there_B & ((BESIDE >> (R - 1)) % 2 == 1)
            added_B = tl.load(chosen(beside, R - 1) + here_B, mask=there, other=0.0)
        for i in range(R):
            j = R - 1 - i
            k = i + 2 - R  # a source of the next row from zero on
            at = chosen(sources, tl.where(k < 0, j - 2, k))
            loaded_B = tl.load(at + tl.where(k < 0, here_B, next_B), mask=there_B, other=0.0)
            along_w, v32_B = pick(along_w_P, j_P, j), v_B.to(tl.float32)
            dw_B += along_w * v32_B
            dv_B = pick(a_P, j_P, j) * g_B + pick(along_v_P, j_P, j) * v32_B
            dv_B += along_w * weights_of_score(query, gain, d_B, D)
            if BESIDE:
                dv_B += added_B.to(tl.float32)
                more_B = there_B & (j > 0) & ((BESIDE >> tl.maximum(j - 1, 0)) % 2 == 1)
                added_B = tl.load(chosen(beside, j - 1) + here_B, mask=more_B, other=0.0)
            tl.store(chosen(grads, j) + here_B, dv_B.to(DTYPE), mask=there_B)
            v_B, after_B = after_B, loaded_B
    tl.store(partial + first * D + d_B, dw_B, mask=there_B)


@triton.jit
def wide_site_backward(
    sources, grads, beside, d_out, query, gain, norm_gain, stats, partial, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, NORM: tl.constexpr,
    BESIDE: tl.constexpr,
):  # fmt: skip
    """With NORM. Grid (G), each program every so-manieth row. partial [G, 2, D]: dw, gradient of the norm's gain."""
    tl.static_assert(NORM)
    R: tl.constexpr = len(sources)
    P: tl.constexpr = triton.next_power_of_2(R)
    DTYPE: tl.constexpr = d_out.dtype.element_ty
    d_B, j_P = tl.arange(0, BLOCK), tl.arange(0, P)
    dw_B, dgain_B = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0)):
        here_B = row * D + d_B
        of_row = stats + row * (2 * R + 1)
        g_B = tl.load(d_out + here_B, mask=d_B < D, other=0.0).to(tl.float32)
        t_P, r_P, a_P = softmax_of(of_row, j_P, R)
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
    partial_B = partial + tl.program_id(0).to(tl.int64) * (2 * D) + d_B
    tl.store(partial_B, dw_B, mask=d_B < D)
    tl.store(partial_B + D, dgain_B, mask=d_B < D)
