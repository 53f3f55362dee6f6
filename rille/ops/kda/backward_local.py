"""Last kernel of the KDA backward: one program a chunk and head, from the states and their gradients to dq, dk, dz, db.

The equations are those of `chunk_backward.py`. A chunk has two halves, a and b, of two tiles of 16 rows each. In a half
`up` = 2^x, `down` = 2^-x with x = G - G at the border between its tiles; t0..t3 are the decays of the four tiles. Then

    dq_b    = up (dA_bb (k down)_b + 2^t2 (dA_ba (k c)_a + 2^(t0+t1) dO_b S))             c = 2^(G31-G) = 2^t1 down
    dk_row  : the same with dAk for dA and -dV for dO
    dk_col_b = down (dA_bb^T (q up)_b + dAk_bb^T (k up)_b + 2^t3 U_b D)

    dq_a    = up (dA_aa (k down)_a + 2^t0 dO_a S)
    dk_col_a = down (dA_aa^T (q up)_a + dAk_aa^T (k up)_a
                     + 2^t1 (dA_ba^T (q r)_b + dAk_ba^T (k r)_b + 2^(t2+t3) U_a D))       r = 2^(G-G31) = 2^t2 up

dG = q dq + k (dk_row - dk_col) is what passes a token less what comes to its end there, and most of it cancels in the
sums over tokens that give dg. So the diagonal of dA, which is in both, is added after dG is formed, and dG takes the
factors as they were rounded for the products: q up and k down inside a half, q r and k c between the halves. Then a
pair of tokens is the same number in the row of one and in the column of the other. What a token leaves in the state
after the chunk, k down 2^t3 U D, is no pair: it is taken with k down as it is, in dG as in what passes the whole chunk.

dA, dAk are masked before the products, so that zeros meet only finite factors, and brought to magnitude 32 at most
before 2^115 meets them; everything that follows is in those units up to the end.

All of it is computed transposed, [channels, rows], one half at a time. Then the left operands of the products with dA
and dAk are tiles that were just computed, in the registers where a left operand has to lie, and a channel's factors are
scalars of a thread. A sum over value channels of two tiles row by row is the diagonal of their product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.kda.backward_direct import local_channels_directly, store_db
from rille.ops.kda.backward_kernels import NO_TOKEN, bounded_decay, factor, times_ones, transposed
from rille.ops.kda.intra import LOG2E, exp2, operand, reciprocal


@triton.jit
def diagonal(x, SIZE: tl.constexpr):
    """[SIZE] along the rows of x [SIZE, SIZE]."""
    i = tl.arange(0, SIZE)
    return tl.sum(tl.where(i[:, None] == i[None, :], x, 0.0), 1)


@triton.jit
def blocks(x):
    """aa, ba, bb of x [64, 64]; the block ab is zero."""
    x = tl.permute(tl.reshape(x, [2, 32, 2, 32]), (1, 3, 0, 2))
    left, right = tl.split(x)
    aa, ba = tl.split(left)
    _, bb = tl.split(right)
    return aa, ba, bb


@triton.jit
def row_halves(x):
    """The first and the last 32 numbers of x [64]."""
    return tl.split(tl.trans(tl.reshape(x, [2, 32])))


@triton.jit
def gate_slope(x, rate, lower_bound, INTERPRET: tl.constexpr):
    """Derivative of lower_bound sigmoid(rate x) by x. 1 - sigmoid is the exponential times the sigmoid: a difference
    would lose what a gate that is nearly shut has left."""
    below = exp2(tl.minimum(x * (rate * -LOG2E), 126.0), INTERPRET)
    opened = reciprocal(1.0 + below, INTERPRET)
    return (lower_bound * rate) * (opened * (opened * below))


@triton.jit
def local_kernel(
    q_ptr,  # [N, H, K], with any stride between tokens; k, z too
    k_ptr,
    z_ptr,
    v_ptr,  # [N, H, V]; do too; dv without gaps
    do_ptr,
    dv_ptr,
    A_log_ptr,  # fp32 [H]
    dt_bias_ptr,  # fp32 [H, K]
    spans_ptr,  # int32 [M, 2]
    ones_ptr,  # [3, 32, 32]: identity, anchors of a half, sums over the row and later ones; the last two transposed
    u_ptr,  # [M, H, C, V]
    states_ptr,  # [M, H, V, K]: before each chunk
    dstates_ptr,  # [M, H, V, K]: gradient of the state after each chunk
    totals_ptr,  # fp32 [M, H, 4, K]
    norms_ptr,  # fp32 [M, H, 4, C]
    dq_ptr,  # [N, H, K]
    dk_ptr,  # [N, H, K]
    dz_ptr,  # [N, H, K]
    db_ptr,  # [N, H]
    dbias_ptr,  # fp32 [M, H, K]: this chunk's part of ddt_bias
    drate_ptr,  # fp32 [M, H, K]: this chunk's part of dA_log, channel by channel
    q_stride,
    k_stride,
    z_stride,
    v_stride,
    do_stride,
    lower_bound,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BOUNDED: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    C: tl.constexpr = tl.constexpr(64)
    program = tl.program_id(0)
    h = program % H
    start = tl.load(spans_ptr + 2 * (program // H))
    count = tl.load(spans_ptr + 2 * (program // H) + 1)
    row = tl.arange(0, C)
    value = tl.arange(0, BV)
    valid = row < count
    held = valid[:, None]
    token = start.to(tl.int64)
    out = program.to(tl.int64)
    v_ptr += token * v_stride + h * V
    do_ptr += token * do_stride + h * V
    dv_ptr += token * (H * V) + h * V
    u_ptr += out * (C * V)
    q_ptr += token * q_stride + h * K
    k_ptr += token * k_stride + h * K
    z_ptr += token * z_stride + h * K
    dq_ptr += token * (H * K) + h * K
    dk_ptr += token * (H * K) + h * K
    dz_ptr += token * (H * K) + h * K
    db_ptr += token * H + h
    states_ptr += out * (V * K)
    dstates_ptr += out * (V * K)
    totals_ptr += out * (4 * K)
    norms_ptr += out * (4 * C)
    dbias_ptr += out * K
    drate_ptr += out * K
    da = tl.zeros((C, C), tl.float32)
    dak = tl.zeros((C, C), tl.float32)
    along = tl.zeros((C, C), tl.float32)
    for block in tl.static_range(V // BV):
        at = block * BV + value[None, :]
        do = tl.load(do_ptr + row[:, None] * do_stride + at, mask=held, other=0.0)
        u = tl.load(u_ptr + row[:, None] * V + at)
        do = operand(do, OPERAND, INTERPRET)
        u = operand(u, OPERAND, INTERPRET)
        da = tl.dot(do, tl.trans(u), da)
        dv = tl.load(dv_ptr + row[:, None] * (H * V) + at, mask=held, other=0.0)
        dv = operand(dv, OPERAND, INTERPRET)
        dak = tl.dot(dv, tl.trans(u), dak)
        v = tl.load(v_ptr + row[:, None] * v_stride + at, mask=held, other=0.0)
        along = tl.dot(dv, tl.trans(operand(v, OPERAND, INTERPRET)), along)

    tl.store(norms_ptr + 3 * C + row, diagonal(along, C))
    tl.debug_barrier()  # other threads will read it
    i, j = row[:, None], row[None, :]
    beta = tl.load(norms_ptr + 2 * C + row)[None, :]
    da = tl.where(i >= j, da, 0.0) * beta
    dak = tl.where(i > j, -dak, 0.0) * beta
    size = tl.max(tl.max(tl.maximum(tl.abs(da), tl.abs(dak)), 1), 0)
    unit = tl.maximum(size, 1e-20) * 0.03125
    per_unit = 1.0 / unit
    own_a, own_b = row_halves(diagonal(da, C) * per_unit)
    da_aa, da_ba, da_bb = blocks((tl.where(i > j, da, 0.0) * per_unit).to(OPERAND))
    dak_aa, dak_ba, dak_bb = blocks((dak * per_unit).to(OPERAND))
    rate = exp2(tl.load(A_log_ptr + h).to(tl.float32) * LOG2E, INTERPRET)
    if BOUNDED:
        local_channels(
            own_a, own_b, da_aa, da_ba, da_bb, dak_aa, dak_ba, dak_bb, unit, q_ptr, k_ptr, z_ptr,
            do_ptr, dv_ptr, rate, dt_bias_ptr + h * K, ones_ptr, u_ptr, states_ptr, dstates_ptr, totals_ptr, norms_ptr,
            dq_ptr, dk_ptr, dz_ptr, db_ptr, dbias_ptr, drate_ptr, count, q_stride, k_stride, z_stride, do_stride,
            lower_bound, scale, H, K, V, BV, OPERAND, INTERPRET,
        )  # fmt: skip
    else:
        local_channels_directly(
            own_a, own_b, da_aa, da_ba, da_bb, dak_aa, dak_ba, dak_bb, unit, q_ptr, k_ptr, z_ptr,
            do_ptr, dv_ptr, rate, dt_bias_ptr + h * K, ones_ptr, u_ptr, states_ptr, dstates_ptr, totals_ptr, norms_ptr,
            dq_ptr, dk_ptr, dz_ptr, db_ptr, dbias_ptr, drate_ptr, count, q_stride, k_stride, z_stride, do_stride, scale,
            H, K, V, BV, OPERAND, INTERPRET,
        )  # fmt: skip


@triton.jit
def local_channels(
    own_a, own_b, da_aa, da_ba, da_bb, dak_aa, dak_ba, dak_bb, unit, q_ptr, k_ptr, z_ptr,
    do_ptr, dv_ptr, rate, dt_bias_ptr, ones_ptr, u_ptr, states_ptr, dstates_ptr, totals_ptr, norms_ptr, dq_ptr, dk_ptr,
    dz_ptr, db_ptr, dbias_ptr, drate_ptr, count, q_stride, k_stride, z_stride, do_stride, lower_bound, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dq, dk, dz, db and the parameters' gradients. Tiles are [K, 32]."""
    C: tl.constexpr = tl.constexpr(64)
    R: tl.constexpr = tl.constexpr(32)
    row = tl.arange(0, R)
    value = tl.arange(0, BV)
    channel = tl.arange(0, K)
    in_a, in_b = (row < count)[:, None], (row + R < count)[:, None]
    at_a, at_b = row[:, None], row[:, None] + R
    ones = row[:, None] * R + row[None, :] + ones_ptr
    identity, anchors, later = tl.load(ones), tl.load(ones + R * R), tl.load(ones + 2 * R * R)
    bias = tl.load(dt_bias_ptr + channel)[:, None]
    at_totals = totals_ptr + channel
    t0, t1 = tl.load(at_totals)[:, None], tl.load(at_totals + K)[:, None]
    t2, t3 = tl.load(at_totals + 2 * K)[:, None], tl.load(at_totals + 3 * K)[:, None]
    d1, d2 = exp2(t1, INTERPRET), exp2(t2, INTERPRET)
    per_unit = 1.0 / unit
    at_norms = norms_ptr + row
    k_norm_a, k_norm_b = tl.load(at_norms + C)[None, :], tl.load(at_norms + C + R)[None, :]

    # What passes the whole chunk.
    carried = tl.zeros((K,), tl.float32)
    for block in tl.static_range(V // BV):
        at_state = (block * BV + value)[:, None] * K + channel[None, :]
        state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
        dstate = operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET)
        carried += diagonal(tl.dot(state, dstate), K)
    carried = carried[:, None] * (exp2(t0 + t1 + t2 + t3, INTERPRET) * per_unit)

    # Half a as far as half b needs it.
    z = tl.load(z_ptr + at_a * z_stride + channel[None, :], mask=in_a, other=NO_TOKEN)
    g = bounded_decay(transposed(z, identity, INTERPRET) + bias, rate, lower_bound, INTERPRET)
    x_a = times_ones(g, anchors, 2, OPERAND, INTERPRET)
    k = tl.load(k_ptr + at_a * k_stride + channel[None, :], mask=in_a, other=0.0)
    k_a = transposed(k, identity, INTERPRET) * k_norm_a
    k_c = factor(k_a * exp2(tl.minimum(t1 - x_a, 0.0), INTERPRET), OPERAND, INTERPRET)

    # Half b.
    z = tl.load(z_ptr + at_b * z_stride + channel[None, :], mask=in_b, other=NO_TOKEN)
    g = bounded_decay(transposed(z, identity, INTERPRET) + bias, rate, lower_bound, INTERPRET)
    x = times_ones(g, anchors, 2, OPERAND, INTERPRET)
    up, down = exp2(x, INTERPRET), exp2(-x, INTERPRET)
    k = tl.load(k_ptr + at_b * k_stride + channel[None, :], mask=in_b, other=0.0)
    k_b = transposed(k, identity, INTERPRET) * k_norm_b
    dq = tl.zeros((K, R), tl.float32)
    dk = tl.zeros((K, R), tl.float32)
    end = tl.zeros((K, R), tl.float32)
    for block in tl.static_range(V // BV):
        at_V = block * BV + value[None, :]
        at_state = (block * BV + value)[:, None] * K + channel[None, :]
        if V > BV:
            state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
            dstate = operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET)
        do = tl.load(do_ptr + at_b * do_stride + at_V, mask=in_b, other=0.0)
        dv = tl.load(dv_ptr + at_b * (H * V) + at_V, mask=in_b, other=0.0)
        u = tl.load(u_ptr + at_b * V + at_V)
        dq = tl.dot(state, tl.trans(operand(do, OPERAND, INTERPRET)), dq)
        dk = tl.dot(state, tl.trans(operand(dv, OPERAND, INTERPRET)), dk)
        end = tl.dot(tl.trans(dstate), tl.trans(operand(u, OPERAND, INTERPRET)), end)
    k_down = factor(k_b * down, OPERAND, INTERPRET)
    from_start = exp2(t0 + t1 + t2, INTERPRET) * per_unit
    dq = tl.dot(k_down, tl.trans(operand(da_bb, OPERAND, INTERPRET)), dq * from_start)
    dk = tl.dot(k_down, tl.trans(operand(dak_bb, OPERAND, INTERPRET)), dk * -from_start)
    q = tl.load(q_ptr + at_b * q_stride + channel[None, :], mask=in_b, other=0.0)
    q_norm = tl.load(at_norms + R)[None, :]
    q = transposed(q, identity, INTERPRET) * (q_norm * scale)
    q_up, k_up = factor(q * up, OPERAND, INTERPRET), factor(k_b * up, OPERAND, INTERPRET)
    dG = q_up.to(tl.float32) * dq + k_up.to(tl.float32) * dk
    q_r, k_r = factor(q * up * d2, OPERAND, INTERPRET), factor(k_b * up * d2, OPERAND, INTERPRET)
    from_a = tl.dot(k_c, tl.trans(operand(da_ba, OPERAND, INTERPRET)))
    dG += q_r.to(tl.float32) * from_a
    dq = (dq + from_a * d2) * up + own_b[None, :] * k_b
    from_a = tl.dot(k_c, tl.trans(operand(dak_ba, OPERAND, INTERPRET)))
    dG += k_r.to(tl.float32) * from_a
    dk = (dk + from_a * d2) * up + own_b[None, :] * q
    read = tl.sum(q * dq, 0)[None, :] * unit
    dq = (q_norm * scale * unit) * dq - (q_norm * read / scale) * q
    at_K = channel[None, :] + at_b * (H * K)
    tl.store(dq_ptr + at_K, tl.trans(dq.to(dq_ptr.dtype.element_ty)), mask=in_b)
    end *= exp2(t3, INTERPRET) * per_unit * tl.load(at_norms + 2 * C + R)[None, :]
    kept = k_b * down * end
    carried += tl.sum(kept, 1)[:, None]
    inside = tl.dot(q_up, operand(da_bb, OPERAND, INTERPRET))
    inside = tl.dot(k_up, operand(dak_bb, OPERAND, INTERPRET), inside)
    dG -= k_down.to(tl.float32) * inside + kept
    end += inside
    dk += end * down
    known = tl.sum(k_b * dk, 0) * unit
    store_db(known, at_norms + 2 * C + R, db_ptr + (row + R) * H, row + R < count)
    dk = k_norm_b * (unit * dk - k_b * known[None, :])
    tl.store(dk_ptr + at_K, tl.trans(dk.to(dk_ptr.dtype.element_ty)), mask=in_b)
    dg_b = times_ones(dG, later, 3, OPERAND, INTERPRET)
    after = tl.sum(dG, 1)[:, None]

    # Half a.
    up, down = exp2(x_a, INTERPRET), exp2(-x_a, INTERPRET)
    dq = tl.zeros((K, R), tl.float32)
    dk = tl.zeros((K, R), tl.float32)
    end = tl.zeros((K, R), tl.float32)
    for block in tl.static_range(V // BV):
        at_V = block * BV + value[None, :]
        at_state = (block * BV + value)[:, None] * K + channel[None, :]
        if V > BV:
            state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
            dstate = operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET)
        do = tl.load(do_ptr + at_a * do_stride + at_V, mask=in_a, other=0.0)
        dv = tl.load(dv_ptr + at_a * (H * V) + at_V, mask=in_a, other=0.0)
        u = tl.load(u_ptr + at_a * V + at_V)
        dq = tl.dot(state, tl.trans(operand(do, OPERAND, INTERPRET)), dq)
        dk = tl.dot(state, tl.trans(operand(dv, OPERAND, INTERPRET)), dk)
        end = tl.dot(tl.trans(dstate), tl.trans(operand(u, OPERAND, INTERPRET)), end)
    k_down = factor(k_a * down, OPERAND, INTERPRET)
    from_start = exp2(t0, INTERPRET) * per_unit
    dq = tl.dot(k_down, tl.trans(operand(da_aa, OPERAND, INTERPRET)), dq * from_start)
    dk = tl.dot(k_down, tl.trans(operand(dak_aa, OPERAND, INTERPRET)), dk * -from_start)
    q = tl.load(q_ptr + at_a * q_stride + channel[None, :], mask=in_a, other=0.0)
    q_norm = tl.load(at_norms)[None, :]
    q = transposed(q, identity, INTERPRET) * (q_norm * scale)
    q_up, k_up = factor(q * up, OPERAND, INTERPRET), factor(k_a * up, OPERAND, INTERPRET)
    dG = q_up.to(tl.float32) * dq + k_up.to(tl.float32) * dk
    dq = dq * up + own_a[None, :] * k_a
    dk = dk * up + own_a[None, :] * q
    read = tl.sum(q * dq, 0)[None, :] * unit
    dq = (q_norm * scale * unit) * dq - (q_norm * read / scale) * q
    at_K = channel[None, :] + at_a * (H * K)
    tl.store(dq_ptr + at_K, tl.trans(dq.to(dq_ptr.dtype.element_ty)), mask=in_a)
    end *= exp2(t1 + t2 + t3, INTERPRET) * per_unit * tl.load(at_norms + 2 * C)[None, :]
    kept = k_a * down * end
    carried += tl.sum(kept, 1)[:, None]
    inside = tl.dot(q_up, operand(da_aa, OPERAND, INTERPRET))
    inside = tl.dot(k_up, operand(dak_aa, OPERAND, INTERPRET), inside)
    dG -= k_down.to(tl.float32) * inside + kept
    end += inside
    to_b = tl.dot(q_r, operand(da_ba, OPERAND, INTERPRET))
    to_b = tl.dot(k_r, operand(dak_ba, OPERAND, INTERPRET), to_b)
    dG -= k_c.to(tl.float32) * to_b
    dk += (end + to_b * d1) * down
    known = tl.sum(k_a * dk, 0) * unit
    store_db(known, at_norms + 2 * C, db_ptr + row * H, row < count)
    dk = k_norm_a * (unit * dk - k_a * known[None, :])
    tl.store(dk_ptr + at_K, tl.trans(dk.to(dk_ptr.dtype.element_ty)), mask=in_a)
    dg_a = times_ones(dG, later, 3, OPERAND, INTERPRET) + (after + carried)
    dg_b += carried

    # The gate.
    z = tl.load(z_ptr + at_a * z_stride + channel[None, :], mask=in_a, other=0.0)
    z = transposed(z, identity, INTERPRET) + bias
    dz = tl.where(tl.trans(in_a), dg_a * unit, 0.0) * gate_slope(z, rate, lower_bound, INTERPRET)
    tl.store(dz_ptr + at_K, tl.trans(dz.to(dz_ptr.dtype.element_ty)), mask=in_a)
    dbias, drate = tl.sum(dz, 1), tl.sum(dz * z, 1)
    z = tl.load(z_ptr + at_b * z_stride + channel[None, :], mask=in_b, other=0.0)
    z = transposed(z, identity, INTERPRET) + bias
    dz = tl.where(tl.trans(in_b), dg_b * unit, 0.0) * gate_slope(z, rate, lower_bound, INTERPRET)
    at_K = channel[None, :] + at_b * (H * K)
    tl.store(dz_ptr + at_K, tl.trans(dz.to(dz_ptr.dtype.element_ty)), mask=in_b)
    tl.store(dbias_ptr + channel, dbias + tl.sum(dz, 1))
    tl.store(drate_ptr + channel, drate + tl.sum(dz * z, 1))
