"""The last kernel of the KDA backward for the softplus gate, whose decay has no bound: `local_channels` of
`backward_local.py` with no factor above 1. Right and slow, it is the twin of `backward_softplus_gluon.py`, and what
widths that one has not take.

The equations are the same. What has no safe origin are pairs of tokens within one tile of 16 rows, whose factor
2^(x_i - x_j) is formed for each pair and channel, a column of the four tiles at a time:

    dq_i += dA_ij k_j 2^(xi-xj)            dk_col_j = sum_i (dA_ij q_i + dAk_ij k_i) 2^(xi-xj)
    dk_row_i += dAk_ij k_j 2^(xi-xj)

Between the two tiles of a half their border is an origin from which both factors are at most 1, between the halves it
is theirs, and what comes from the state before the chunk or goes to the one after has the chunk's ends.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.kda.backward_kernels import NO_TOKEN, times_ones, transposed
from rille.ops.kda.intra import LOG2E, SHUT, exp2, log2_decay, operand, reciprocal


@triton.jit
def store_db(known, at_beta, at, held):
    """db of a half's rows: sum_V dV U = (sum_K k dk + sum_V dV v) / 2, of which the second lies a chunk after beta."""
    twice = known + tl.load(at_beta + 64)
    tl.store(at, (twice * (0.5 - 0.5 * tl.load(at_beta))).to(at.dtype.element_ty), mask=held)


@triton.jit
def last_logit(rate):
    """Logits above it are cut off: rate softplus(x) = SHUT ln 2, solved for x."""
    bits = SHUT / rate
    rest = tl.where(bits < 1e-3, bits * 0.6931471805599453, 1.0 - tl.exp2(-bits))
    return (bits + tl.log2(rest)) * 0.6931471805599453


@triton.jit
def at_most_one(exponent, INTERPRET: tl.constexpr):
    return exp2(tl.minimum(exponent, 0.0), INTERPRET)


@triton.jit
def pairs_of_tiles(da, dak, q, k, x, K: tl.constexpr, INTERPRET: tl.constexpr):
    """dq, dk_row, dk_col [K, 32] of the pairs inside each tile; da, dak: of a half, zero from the diagonal up."""
    q, k, x = tl.reshape(q, [K, 2, 16]), tl.reshape(k, [K, 2, 16]), tl.reshape(x, [K, 2, 16])
    tile = tl.arange(0, 2)
    same = (tile[:, None] == tile[None, :])[:, None, :, None]
    da = tl.sum(tl.where(same, tl.reshape(da.to(tl.float32), [2, 16, 2, 16]), 0.0), axis=2)
    dak = tl.sum(tl.where(same, tl.reshape(dak.to(tl.float32), [2, 16, 2, 16]), 0.0), axis=2)
    row = tl.arange(0, 16)[None, None, :]
    dq = tl.zeros((K, 2, 16), tl.float32)
    dk_row = tl.zeros((K, 2, 16), tl.float32)
    dk_col = tl.zeros((K, 2, 16), tl.float32)
    for j in range(16):
        k_j = tl.sum(tl.where(row == j, k, 0.0), axis=2)[:, :, None]
        x_j = tl.sum(tl.where(row == j, x, 0.0), axis=2)[:, :, None]
        da_j = tl.sum(tl.where(row == j, da, 0.0), axis=2)[None, :, :]
        dak_j = tl.sum(tl.where(row == j, dak, 0.0), axis=2)[None, :, :]
        decay = at_most_one(x - x_j, INTERPRET)
        dq += da_j * (k_j * decay)
        dk_row += dak_j * (k_j * decay)
        dk_col += tl.where(row == j, tl.sum((da_j * q + dak_j * k) * decay, axis=2)[:, :, None], 0.0)
    return tl.reshape(dq, [K, 32]), tl.reshape(dk_row, [K, 32]), tl.reshape(dk_col, [K, 32])


@triton.jit
def half_directly(
    q, k, x, da, dak, beta, to_start, to_end, per_unit, held, at, do_ptr, dv_ptr, u_ptr, states_ptr, dstates_ptr,
    do_stride, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dq, dk, dG [K, 32] of a half from itself, the state before and the one after; and what each token gives to the
    one after. dG leaves that out: only later tokens decay it, and a sum that took it back would keep its rounding."""
    value, channel = tl.arange(0, BV), tl.arange(0, K)
    second = (tl.arange(0, 32) >= 16)[None, :]
    dq = tl.zeros((K, 32), tl.float32)
    dk = tl.zeros((K, 32), tl.float32)
    end = tl.zeros((K, 32), tl.float32)
    for block in tl.static_range(V // BV):
        at_V = block * BV + value[None, :]
        at_state = (block * BV + value)[:, None] * K + channel[None, :]
        state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
        dstate = operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET)
        do = tl.load(do_ptr + at * do_stride + at_V, mask=held, other=0.0)
        dv = tl.load(dv_ptr + at * (H * V) + at_V, mask=held, other=0.0)
        u = tl.load(u_ptr + at * V + at_V)
        dq = tl.dot(state, tl.trans(operand(do, OPERAND, INTERPRET)), dq)
        dk = tl.dot(state, tl.trans(operand(dv, OPERAND, INTERPRET)), dk)
        end = tl.dot(tl.trans(dstate), tl.trans(operand(u, OPERAND, INTERPRET)), end)
    start = at_most_one(x + to_start, INTERPRET) * per_unit
    dq *= start
    dk *= -start
    end *= at_most_one(to_end - x, INTERPRET) * per_unit * beta[None, :]
    dG = q * dq + k * dk

    up = tl.where(second, at_most_one(x, INTERPRET), 0.0)
    down = tl.where(second, 0.0, at_most_one(-x, INTERPRET))
    k_down = operand(k * down, OPERAND, INTERPRET)
    q_up, k_up = operand(q * up, OPERAND, INTERPRET), operand(k * up, OPERAND, INTERPRET)
    row_q = tl.dot(k_down, tl.trans(operand(da, OPERAND, INTERPRET)))
    row_k = tl.dot(k_down, tl.trans(operand(dak, OPERAND, INTERPRET)))
    column = tl.dot(q_up, operand(da, OPERAND, INTERPRET))
    column = tl.dot(k_up, operand(dak, OPERAND, INTERPRET), column)
    dG += q_up.to(tl.float32) * row_q + k_up.to(tl.float32) * row_k - k_down.to(tl.float32) * column
    in_q, in_k, in_column = pairs_of_tiles(da, dak, q, k, x, K, INTERPRET)
    dG += q * in_q + k * (in_k - in_column)
    return dq + row_q * up + in_q, dk + row_k * up + in_k + end + column * down + in_column, dG, k * end


@triton.jit
def through_gate(
    dg, z_ptr, dz_ptr, held, at, bias, rate, z_stride, identity, channel,
    H: tl.constexpr, K: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Stores dz of a half; its sums over rows, and those of dg times the decay: the parts of dt_bias and A_log."""
    z = tl.load(z_ptr + at * z_stride + channel[None, :], mask=held, other=0.0)
    z = transposed(z, identity, INTERPRET)
    dg = tl.where(tl.trans(held) & (z + bias <= last_logit(rate)), dg, 0.0)
    dz = dg * (-rate * reciprocal(1.0 + exp2(tl.minimum((z + bias) * -LOG2E, 126.0), INTERPRET), INTERPRET))
    tl.store(dz_ptr + channel[None, :] + at * (H * K), tl.trans(dz.to(dz_ptr.dtype.element_ty)), mask=held)
    decay = log2_decay(z, bias, rate, 0.0, False, INTERPRET) * 0.6931471805599453
    return tl.sum(dz, 1), tl.sum(dg * decay, 1)


@triton.jit
def local_channels_directly(
    own_a, own_b, da_aa, da_ba, da_bb, dak_aa, dak_ba, dak_bb, unit, q_ptr, k_ptr, z_ptr,
    do_ptr, dv_ptr, rate, dt_bias_ptr, ones_ptr, u_ptr, states_ptr, dstates_ptr, totals_ptr, norms_ptr, dq_ptr, dk_ptr,
    dz_ptr, db_ptr, dbias_ptr, drate_ptr, count, q_stride, k_stride, z_stride, do_stride, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dq, dk, dz, db and the parameters' gradients. Tiles are [K, 32]."""
    R: tl.constexpr = tl.constexpr(32)
    row, channel = tl.arange(0, R), tl.arange(0, K)
    at_a, at_b = row[:, None], row[:, None] + R
    in_a, in_b = at_a < count, at_b < count
    ones = row[:, None] * R + row[None, :] + ones_ptr
    identity, anchors, later = tl.load(ones), tl.load(ones + R * R), tl.load(ones + 2 * R * R)
    bias = tl.load(dt_bias_ptr + channel)[:, None]
    at_totals = totals_ptr + channel
    t0, t1 = tl.load(at_totals)[:, None], tl.load(at_totals + K)[:, None]
    t2, t3 = tl.load(at_totals + 2 * K)[:, None], tl.load(at_totals + 3 * K)[:, None]
    per_unit = 1.0 / unit
    norms = norms_ptr + row
    beta_a, beta_b = tl.load(norms + 4 * R), tl.load(norms + 5 * R)
    q_norm_a, q_norm_b = tl.load(norms)[None, :], tl.load(norms + R)[None, :]
    k_norm_a, k_norm_b = tl.load(norms + 2 * R)[None, :], tl.load(norms + 3 * R)[None, :]

    z = tl.load(z_ptr + at_a * z_stride + channel[None, :], mask=in_a, other=NO_TOKEN)
    g = log2_decay(transposed(z, identity, INTERPRET), bias, rate, 0.0, False, INTERPRET)
    x_a = times_ones(g, anchors, 3, OPERAND, INTERPRET)
    z = tl.load(z_ptr + at_b * z_stride + channel[None, :], mask=in_b, other=NO_TOKEN)
    g = log2_decay(transposed(z, identity, INTERPRET), bias, rate, 0.0, False, INTERPRET)
    x_b = times_ones(g, anchors, 3, OPERAND, INTERPRET)
    q_a = tl.load(q_ptr + at_a * q_stride + channel[None, :], mask=in_a, other=0.0)
    q_b = tl.load(q_ptr + at_b * q_stride + channel[None, :], mask=in_b, other=0.0)
    k_a = tl.load(k_ptr + at_a * k_stride + channel[None, :], mask=in_a, other=0.0)
    k_b = tl.load(k_ptr + at_b * k_stride + channel[None, :], mask=in_b, other=0.0)
    q_a = transposed(q_a, identity, INTERPRET) * (q_norm_a * scale)
    q_b = transposed(q_b, identity, INTERPRET) * (q_norm_b * scale)
    k_a = transposed(k_a, identity, INTERPRET) * k_norm_a
    k_b = transposed(k_b, identity, INTERPRET) * k_norm_b

    dq_a, dk_a, dG_a, ended_a = half_directly(
        q_a, k_a, x_a, da_aa, dak_aa, beta_a, t0, t1 + t2 + t3, per_unit, in_a, at_a,
        do_ptr, dv_ptr, u_ptr, states_ptr, dstates_ptr, do_stride, H, K, V, BV, OPERAND, INTERPRET,
    )  # fmt: skip
    dq_b, dk_b, dG_b, ended_b = half_directly(
        q_b, k_b, x_b, da_bb, dak_bb, beta_b, t0 + t1 + t2, t3, per_unit, in_b, at_b,
        do_ptr, dv_ptr, u_ptr, states_ptr, dstates_ptr, do_stride, H, K, V, BV, OPERAND, INTERPRET,
    )  # fmt: skip

    # Between the halves.
    c, r = at_most_one(t1 - x_a, INTERPRET), at_most_one(x_b + t2, INTERPRET)
    k_c = operand(k_a * c, OPERAND, INTERPRET)
    q_r, k_r = operand(q_b * r, OPERAND, INTERPRET), operand(k_b * r, OPERAND, INTERPRET)
    from_a = tl.dot(k_c, tl.trans(operand(da_ba, OPERAND, INTERPRET)))
    dG_b += q_r.to(tl.float32) * from_a
    dq_b += from_a * r
    from_a = tl.dot(k_c, tl.trans(operand(dak_ba, OPERAND, INTERPRET)))
    dG_b += k_r.to(tl.float32) * from_a
    dk_b += from_a * r
    to_b = tl.dot(q_r, operand(da_ba, OPERAND, INTERPRET))
    to_b = tl.dot(k_r, operand(dak_ba, OPERAND, INTERPRET), to_b)
    dG_a -= k_c.to(tl.float32) * to_b
    dk_a += to_b * c

    # A token's own read, and the norms.
    dq_a += own_a[None, :] * k_a
    dk_a += own_a[None, :] * q_a
    dq_b += own_b[None, :] * k_b
    dk_b += own_b[None, :] * q_b
    dq_a = q_norm_a * unit * (scale * dq_a - q_a * (tl.sum(q_a * dq_a, 0)[None, :] / scale))
    dq_b = q_norm_b * unit * (scale * dq_b - q_b * (tl.sum(q_b * dq_b, 0)[None, :] / scale))
    known_a, known_b = tl.sum(k_a * dk_a, 0), tl.sum(k_b * dk_b, 0)
    store_db(known_a * unit, norms + 4 * R, db_ptr + row * H, row < count)
    store_db(known_b * unit, norms + 5 * R, db_ptr + (row + R) * H, row + R < count)
    dk_a = k_norm_a * unit * (dk_a - k_a * known_a[None, :])
    dk_b = k_norm_b * unit * (dk_b - k_b * known_b[None, :])
    at_a_K, at_b_K = channel[None, :] + at_a * (H * K), channel[None, :] + at_b * (H * K)
    tl.store(dq_ptr + at_a_K, tl.trans(dq_a.to(dq_ptr.dtype.element_ty)), mask=in_a)
    tl.store(dq_ptr + at_b_K, tl.trans(dq_b.to(dq_ptr.dtype.element_ty)), mask=in_b)
    tl.store(dk_ptr + at_a_K, tl.trans(dk_a.to(dk_ptr.dtype.element_ty)), mask=in_a)
    tl.store(dk_ptr + at_b_K, tl.trans(dk_b.to(dk_ptr.dtype.element_ty)), mask=in_b)

    # The gate.
    carried = tl.zeros((K, K), tl.float32)
    value = tl.arange(0, BV)
    for block in tl.static_range(V // BV):
        at_state = (block * BV + value)[:, None] * K + channel[None, :]
        state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
        carried = tl.dot(state, operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET), carried)
    through = tl.sum(tl.where(channel[:, None] == channel[None, :], carried, 0.0), 1)[:, None]
    through = through * (exp2(t0 + t1 + t2 + t3, INTERPRET) * per_unit)
    earlier = (1.0 - later.to(tl.float32)).to(later.dtype)
    dg_a = times_ones(dG_a, later, 3, OPERAND, INTERPRET) + times_ones(ended_a, earlier, 3, OPERAND, INTERPRET)
    dg_b = times_ones(dG_b, later, 3, OPERAND, INTERPRET) + times_ones(ended_b, earlier, 3, OPERAND, INTERPRET)
    dg_a += tl.sum(dG_b, 1)[:, None] + through
    dg_b += tl.sum(ended_a, 1)[:, None] + through
    bias_a, rate_a = through_gate(
        dg_a * unit, z_ptr, dz_ptr, in_a, at_a, bias, rate, z_stride, identity, channel, H, K, INTERPRET
    )
    bias_b, rate_b = through_gate(
        dg_b * unit, z_ptr, dz_ptr, in_b, at_b, bias, rate, z_stride, identity, channel, H, K, INTERPRET
    )
    tl.store(dbias_ptr + channel, bias_a + bias_b)
    tl.store(drate_ptr + channel, rate_a + rate_b)
