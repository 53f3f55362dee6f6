"""Attention Residuals of a block of layers in two phases, in Triton.

The finished blocks V_j do not change while a block of layers runs. So one pass scores them for all Q sites of it:

    s_qj = <V_j, w_q> r_j    m_q = max_j s_qj    l_q = sum_j exp(s_qj - m_q)    o_q = sum_j exp(s_qj - m_q) V_j / l_q

and each site q then reads o_q instead of them, and its running sum p:

    p = p_old + y     s = <p, w_q> r     m = max(m_q, s)     a = exp(s - m) / (exp(m_q - m) l_q + exp(s - m))
    h = (1 - a) o_q + a p                x = round(h r_h) norm_gain

Backward a site leads the gradient of x through the norm to g = dh and gives

    ds = a (1 - a) <g, p - o_q>     dp = a g + ds dp(s)     do_q = (1 - a) g     dlse_q = -ds

with lse_q = m_q + log l_q, and one pass over the finished blocks, of which nothing was kept but scores, brings the
gradients of all sites to them: with b_qj = exp(s_qj - m_q) / l_q

    ds_qj = b_qj (<do_q, V_j> - <do_q, o_q> + dlse_q)
    dV_j  = sum_q b_qj do_q + ds_qj r_j w_q - ds_qj s_qj r_j^2 / D V_j               dw_q = sum of ds_qj r_j V_j

There V_j and the sum dV_j stay in registers while the sites pass by: each is read or written once for Q sites.

do_q is rounded, and where one V_k is a hundred times larger than another, <rounding, V_k> hides what the small one
gives. So the site's own <do_q, o_q>, in fp32, comes along: sum_j b_qj <do_q, V_j> must equal it, and what is missing
goes to the sources by their share b_qj^2 |V_j|^2 of such an error.

Suffixes: B block of D, a power of two; M tokens of a tile, E columns of a tile. N tokens, D width, R finished blocks, Q
sites.
"""

import triton
import triton.language as tl

from rille.ops.attn_res.mix_kernels import add2, load_group, through_norm, totals, within


@triton.jit
def first_forward(
    sources, w, out, scores, roots, tops, N, Q, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Grid (N). w [Q, D] fp32, out [Q, N, D], scores [N, R, Q], roots [N, R], tops [Q, N, 2] (m and l)."""
    R: tl.constexpr = len(sources)
    d_B = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    group = load_group(sources, out, out, row * D, d_B, D, 0, R, False)
    sums = ()
    for j in tl.static_range(R):
        v_B = group[j].to(tl.float32)
        sums = sums + (within(v_B * v_B, LANES, VEC),)
    sums = totals(sums)
    r = ()
    for j in tl.static_range(R):
        r = r + (tl.rsqrt(sums[j] / D + eps),)
        tl.store(roots + row * R + j, r[j])
    for first in range(0, Q, GROUP):
        found = ()
        for i in tl.static_range(GROUP):
            w_B = tl.load(w + (first + i) * D + d_B, mask=(d_B < D) & (first + i < Q), other=0.0)
            for j in tl.static_range(R):
                found = found + (within(group[j].to(tl.float32) * w_B, LANES, VEC),)
        found = totals(found)
        for i in tl.static_range(GROUP):
            if first + i < Q:
                of_site = scores + row * R * Q + first + i
                top = found[i * R] * r[0]
                for j in tl.static_range(R):
                    tl.store(of_site + j * Q, found[i * R + j] * r[j])
                    top = tl.maximum(top, found[i * R + j] * r[j])
                total = 0.0
                for j in tl.static_range(R):
                    total += tl.exp(found[i * R + j] * r[j] - top)
                o_B, share = tl.zeros([BLOCK], tl.float32), 1.0 / total
                for j in tl.static_range(R):
                    o_B += tl.exp(found[i * R + j] * r[j] - top) * share * group[j].to(tl.float32)
                at = row + (first + i) * N
                tl.store(tops + 2 * at, top)
                tl.store(tops + 2 * at + 1, total)
                tl.store(out + at * D + d_B, o_B.to(out.dtype.element_ty), mask=d_B < D)


@triton.jit
def first_again(
    sources, out, scores, tops, N, Q, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (N): out [Q, N, D] once more, from the scores. No sums: a stream."""
    R: tl.constexpr = len(sources)
    d_B = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    group = load_group(sources, out, out, row * D, d_B, D, 0, R, False)
    for q in range(Q):
        at = row + q * N
        top, share = tl.load(tops + 2 * at), 1.0 / tl.load(tops + 2 * at + 1)
        o_B = tl.zeros([BLOCK], tl.float32)
        for j in tl.static_range(R):
            b = tl.exp(tl.load(scores + (row * R + j) * Q + q) - top) * share
            o_B += b * group[j].to(tl.float32)
        tl.store(out + at * D + d_B, o_B.to(out.dtype.element_ty), mask=d_B < D)


@triton.jit
def site_forward(
    partial, update, finished, tops, w, norm_gain, out, running, saved, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, UPDATE: tl.constexpr,
    SAVE: tl.constexpr,
):  # fmt: skip
    """Grid (N). saved [N, 5]: t and r of p, a, 1 - a, r of the norm."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    d_B = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    here_B = row * D + d_B
    p_B = tl.load(partial + here_B, mask=d_B < D, other=0.0)
    if UPDATE:
        y_B = tl.load(update + here_B, mask=d_B < D, other=0.0)
    o_B = tl.load(finished + here_B, mask=d_B < D, other=0.0).to(tl.float32)
    w_B = tl.load(w + d_B, mask=d_B < D, other=0.0)
    n_B = tl.load(norm_gain + d_B, mask=d_B < D, other=0.0).to(DTYPE).to(tl.float32)
    top, total = tl.load(tops + 2 * row), tl.load(tops + 2 * row + 1)
    if UPDATE:
        p_B = (p_B.to(tl.float32) + y_B.to(tl.float32)).to(DTYPE)
        tl.store(running + here_B, p_B, mask=d_B < D)
    p_B = p_B.to(tl.float32)
    square, t = tl.reduce((within(p_B * p_B, LANES, VEC), within(p_B * w_B, LANES, VEC)), 0, add2)
    r = tl.rsqrt(square / D + eps)
    highest = tl.maximum(top, t * r)
    old, new = tl.exp(top - highest) * total, tl.exp(t * r - highest)
    a, rest = new / (old + new), old / (old + new)
    out_B = (rest * o_B + a * p_B).to(DTYPE).to(tl.float32)
    r_norm = tl.rsqrt(tl.sum(within(out_B * out_B, LANES, VEC), 0) / D + eps)
    # The norm rounds before its gain, and the product is rounded again.
    tl.store(out + here_B, ((out_B * r_norm).to(DTYPE).to(tl.float32) * n_B).to(DTYPE), mask=d_B < D)
    if SAVE:
        tl.store(saved + row * 5, t)
        tl.store(saved + row * 5 + 1, r)
        tl.store(saved + row * 5 + 2, a)
        tl.store(saved + row * 5 + 3, rest)
        tl.store(saved + row * 5 + 4, r_norm)


@triton.jit
def site_backward(
    partial, finished, d_out, beside, w, norm_gain, saved, d_partial, d_tops, sums, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Grid (G), each program every so-manieth row. finished holds o_q and receives do_q. d_tops [N, 2]: dlse_q and
    <do_q, o_q>. sums [G, 2, D]: dw of p and the gradient of the norm's gain."""
    DTYPE: tl.constexpr = d_out.dtype.element_ty
    d_B = tl.arange(0, BLOCK)
    dw_B, dgain_B = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), N, tl.num_programs(0)):
        here_B = row * D + d_B
        g_B = tl.load(d_out + here_B, mask=d_B < D, other=0.0).to(tl.float32)
        p_B = tl.load(partial + here_B, mask=d_B < D, other=0.0)
        o_B = tl.load(finished + here_B, mask=d_B < D, other=0.0)
        if BESIDE:
            added_B = tl.load(beside + here_B, mask=d_B < D, other=0.0)
        n_B = tl.load(norm_gain + d_B, mask=d_B < D, other=0.0).to(DTYPE).to(tl.float32)
        t, r = tl.load(saved + row * 5), tl.load(saved + row * 5 + 1)
        a, rest = tl.load(saved + row * 5 + 2), tl.load(saved + row * 5 + 3)
        h_B = rest * o_B.to(tl.float32) + a * p_B.to(tl.float32)
        r_norm = tl.load(saved + row * 5 + 4)
        g_B, of_gain_B = through_norm(g_B, h_B, r_norm, n_B, eps, D, LANES, VEC, DTYPE)
        dgain_B += of_gain_B
        with_p, with_o = within(g_B * p_B.to(tl.float32), LANES, VEC), within(g_B * o_B.to(tl.float32), LANES, VEC)
        with_p, with_o = tl.reduce((with_p, with_o), 0, add2)
        ds = a * rest * (with_p - with_o)
        along_w = ds * r
        w_B = tl.load(w + d_B, mask=d_B < D, other=0.0)
        dw_B += along_w * p_B.to(tl.float32)
        dp_B = a * g_B + along_w * w_B - (along_w * t * r * r / D) * p_B.to(tl.float32)
        if BESIDE:
            dp_B += added_B.to(tl.float32)
        tl.store(d_partial + here_B, dp_B.to(DTYPE), mask=d_B < D)
        tl.store(finished + here_B, (rest * g_B).to(DTYPE), mask=d_B < D)
        tl.store(d_tops + row * 2, -ds)
        tl.store(d_tops + row * 2 + 1, rest * with_o)
    of_program_B = sums + tl.program_id(0).to(tl.int64) * (2 * D) + d_B
    tl.store(of_program_B, dw_B, mask=d_B < D)
    tl.store(of_program_B + D, dgain_B, mask=d_B < D)


@triton.jit
def first_backward(
    sources, grads, beside, d_out, d_tops, w, scores, roots, tops, along, N, Q, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Grid (N). d_out [Q, N, D]: do_q. along [N, R, Q]: ds_qj r_j, of which dw is made. Bit j of BESIDE: the gradient
    of source j from elsewhere is beside[j] and is added."""
    R: tl.constexpr = len(sources)
    DTYPE: tl.constexpr = d_out.dtype.element_ty
    d_B = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    here_B = row * D + d_B
    group = load_group(sources, d_out, d_out, row * D, d_B, D, 0, R, False)
    r, square, along_v, dv = (), (), (), ()
    for j in tl.static_range(R):
        r = r + (tl.load(roots + row * R + j),)
        square = square + (tl.maximum(1.0 / (r[j] * r[j]) - eps, 0.0),)
        along_v = along_v + (tl.full([], 0.0, tl.float32),)
        if (BESIDE >> j) % 2 == 1:
            dv = dv + (tl.load(beside[j] + here_B, mask=d_B < D, other=0.0).to(tl.float32),)
        else:
            dv = dv + (tl.zeros([BLOCK], tl.float32),)
    for q in range(Q):
        at = row + q * N
        g_B = tl.load(d_out + at * D + d_B, mask=d_B < D, other=0.0).to(tl.float32)
        w_B = tl.load(w + q * D + d_B, mask=d_B < D, other=0.0)
        top, share = tl.load(tops + 2 * at), 1.0 / tl.load(tops + 2 * at + 1)
        dlse, whole = tl.load(d_tops + 2 * at), tl.load(d_tops + 2 * at + 1)
        sums, b, s = (), (), ()
        for j in tl.static_range(R):
            sums = sums + (within(g_B * group[j].to(tl.float32), LANES, VEC),)
            s = s + (tl.load(scores + (row * R + j) * Q + q),)
            b = b + (tl.exp(s[j] - top) * share,)
        sums = totals(sums)
        missing, spread = whole, 0.0
        for j in tl.static_range(R):
            missing -= b[j] * sums[j]
            spread += b[j] * b[j] * square[j]
        missing = tl.where(spread > 0, missing / spread, 0.0)
        turned, summed = (), ()
        for j in tl.static_range(R):
            ds = b[j] * (sums[j] + missing * b[j] * square[j] - whole + dlse)
            along_w = ds * r[j]
            tl.store(along + (row * R + j) * Q + q, along_w)
            turned = turned + (along_v[j] - ds * s[j],)
            summed = summed + (dv[j] + b[j] * g_B + along_w * w_B,)
        along_v, dv = turned, summed
    for j in tl.static_range(R):
        whole_B = dv[j] + along_v[j] * (r[j] * r[j] / D) * group[j].to(tl.float32)
        tl.store(grads[j] + here_B, whole_B.to(DTYPE), mask=d_B < D)


@triton.jit
def weight_sums(
    sources, along, sums, N, Q, TILES,
    D: tl.constexpr, BM: tl.constexpr, BE: tl.constexpr, BQ: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """Grid (D / BE, G): sums [G, Q, D], of every TILES tiles of BM tokens one: sum over tokens and sources of along V.

    A factor is split into two of 8 bits each, so that bf16 products see 16 of its bits; sources of another dtype are
    multiplied in fp32 (UPCAST).
    """
    R: tl.constexpr = len(sources)
    NARROW: tl.constexpr = tl.bfloat16
    e_E = tl.program_id(0) * BE + tl.arange(0, BE)
    q_Q = tl.arange(0, BQ)
    sum_QE = tl.zeros([BQ, BE], tl.float32)
    for j in tl.static_range(R):
        for tile in range(TILES):
            m_M = (tl.program_id(1).to(tl.int64) * TILES + tile) * BM + tl.arange(0, BM)
            there_ME = (m_M[:, None] < N) & (e_E[None, :] < D)
            there_MQ = (m_M[:, None] < N) & (q_Q[None, :] < Q)
            v_ME = tl.load(sources[j] + m_M[:, None] * D + e_E[None, :], mask=there_ME, other=0.0)
            c_MQ = tl.load(along + (m_M[:, None] * R + j) * Q + q_Q[None, :], mask=there_MQ, other=0.0)
            if UPCAST:
                sum_QE = tl.dot(c_MQ.T, v_ME.to(tl.float32), sum_QE, input_precision="ieee")
            else:
                high_MQ = c_MQ.to(NARROW)
                sum_QE = tl.dot(high_MQ.T, v_ME, sum_QE)
                sum_QE = tl.dot((c_MQ - high_MQ.to(tl.float32)).to(NARROW).T, v_ME, sum_QE)
    at_QE = (tl.program_id(1) * Q + q_Q)[:, None] * D + e_E[None, :]
    tl.store(sums + at_QE, sum_QE, mask=(q_Q[:, None] < Q) & (e_E[None, :] < D))
