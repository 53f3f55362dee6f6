"""The last kernel of the KDA backward for the softplus gate: `local_channels` of `backward_local.py` with the origins
of `intra.py`. The equations are the same, and so are the tiles, [channels, 32 rows], one half at a time.

Inside a block of 8 rows `up` = 2^x and `down` = 2^-x have the block's middle as origin, x within 4 * 28. From the first
block of a tile to the second the column is measured from the middle of the second: `over` = 2^(Gm - G), at most 1. So
rows take the same factor for both, and two products add up to one sum. Between the tiles of a half their border is the
origin of rows and columns alike, w = 2^-|G - G15|, and what a row gives k and what a column gives k are one sum too,
since no row is both:

    dq  = up (dA_8 (k down) + dA_16 (k over)) + w (dA_32 (k w))
    dk  = up (dAk_8 (k down) + dAk_16 (k over)) + down (dA_8^T (q up) + dAk_8^T (k up))
        + over (dA_16^T (q up) + dAk_16^T (k up)) + w ((dAk_32 + dAk_32^T) (k w) + dA_32^T (q w))

with dA_8, dA_16, dA_32 the pairs whose least common block has 8, 16 or 32 rows. Between the halves it is as there.

What a token leaves in the state after the chunk stays out of dG: only later tokens decay it, and a sum that took it
back would keep its rounding. A decay that was cut off passes no gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.kda.backward_kernels import NO_TOKEN, factor, times_ones, transposed
from rille.ops.kda.intra import LOG2E, SHUT, exp2, log2_decay, operand, reciprocal


@triton.jit
def store_db(known, at_beta, at, held):
    """db of a half's rows: sum_V dV U = (sum_K k dk + sum_V dV v) / 2, of which the second lies a chunk after beta."""
    twice = known + tl.load(at_beta + 64)
    tl.store(at, (twice * (0.5 - 0.5 * tl.load(at_beta))).to(at.dtype.element_ty), mask=held)


@triton.jit
def sums_of_rows(g, first, last, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """For each row the sum of g [K, 32] over rows first to last; none where last < first."""
    j = tl.arange(0, 32)[:, None]
    ones = tl.where((j >= first[None, :]) & (j <= last[None, :]), 1.0, 0.0).to(OPERAND)
    return times_ones(g, ones, 2, OPERAND, INTERPRET)


@triton.jit
def from_middle_of_8(g, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    i, j = tl.arange(0, 32)[None, :], tl.arange(0, 32)[:, None]
    middle = i // 8 * 8 + 4  # first row after it
    ones = tl.where((j >= middle) & (j <= i), 1.0, 0.0) - tl.where((j > i) & (j < middle), 1.0, 0.0)
    return times_ones(g, ones.to(OPERAND), 2, OPERAND, INTERPRET)


@triton.jit
def in_block(da, SIZE: tl.constexpr, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """da [32, 32] at pairs whose least common block of 8, 16 or 32 rows has SIZE rows, else 0."""
    row = tl.arange(0, 32)
    apart = row[:, None] ^ row[None, :]
    picked = apart < SIZE
    if SIZE > 8:
        picked = picked & (apart >= SIZE // 2)
    return operand(tl.where(picked, da.to(tl.float32), 0.0), OPERAND, INTERPRET)


@triton.jit
def pairs_of_half(dq, dk, dG, q, k, g, da, dak, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """Adds to dq, dk, dG [K, 32] what the pairs inside a half give; da, dak: zero from the diagonal up. One kind of
    pair after another, so that few tiles live at a time."""
    row = tl.arange(0, 32)
    first, last = tl.where(row < 16, row + 1, 16), tl.where(row < 16, 15, row)
    w = exp2(sums_of_rows(g, first, last, OPERAND, INTERPRET), INTERPRET)
    k_w = factor(k * w, OPERAND, INTERPRET)
    q_w = factor(q * w, OPERAND, INTERPRET)
    da_32, dak_32 = in_block(da, 32, OPERAND, INTERPRET), in_block(dak, 32, OPERAND, INTERPRET)
    sums = tl.dot(k_w, tl.trans(da_32))
    dG += q_w.to(tl.float32) * sums
    dq += sums * w
    sums = tl.dot(k_w, tl.trans(dak_32), tl.dot(k_w, dak_32, tl.dot(q_w, da_32)))
    dG += tl.where((row < 16)[None, :], -1.0, 1.0) * k_w.to(tl.float32) * sums
    dk += sums * w

    x = from_middle_of_8(g, OPERAND, INTERPRET)
    last = tl.where(row % 16 < 8, row // 16 * 16 + 11, row)  # rows of second blocks meet zeros of da
    over = exp2(sums_of_rows(g, row + 1, last, OPERAND, INTERPRET), INTERPRET)
    up, down = exp2(x, INTERPRET), exp2(-x, INTERPRET)
    k_down, k_over = factor(k * down, OPERAND, INTERPRET), factor(k * over, OPERAND, INTERPRET)
    q_up = factor(q * up, OPERAND, INTERPRET)
    da_8, da_16 = in_block(da, 8, OPERAND, INTERPRET), in_block(da, 16, OPERAND, INTERPRET)
    sums = tl.dot(k_over, tl.trans(da_16), tl.dot(k_down, tl.trans(da_8)))
    dG += q_up.to(tl.float32) * sums
    dq += sums * up
    k_up = factor(k * up, OPERAND, INTERPRET)
    dak_8, dak_16 = in_block(dak, 8, OPERAND, INTERPRET), in_block(dak, 16, OPERAND, INTERPRET)
    sums = tl.dot(k_over, tl.trans(dak_16), tl.dot(k_down, tl.trans(dak_8)))
    dG += k_up.to(tl.float32) * sums
    dk += sums * up
    sums = tl.dot(k_up, dak_8, tl.dot(q_up, da_8))
    dG -= k_down.to(tl.float32) * sums
    dk += sums * down
    sums = tl.dot(k_up, dak_16, tl.dot(q_up, da_16))
    dG -= k_over.to(tl.float32) * sums
    return dq, dk + sums * over, dG


@triton.jit
def last_logit(rate):
    """Logits above it are cut off: rate softplus(x) = SHUT ln 2, solved for x."""
    bits = SHUT / rate
    rest = tl.where(bits < 1e-3, bits * 0.6931471805599453, 1.0 - tl.exp2(-bits))
    return (bits + tl.log2(rest)) * 0.6931471805599453


@triton.jit
def through_gate(
    dg, z_ptr, dz_ptr, held, at, bias, rate, z_stride, identity, channel,
    H: tl.constexpr, K: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Stores dz of a half; its sum over rows, the part of dt_bias."""
    x = tl.load(z_ptr + at * z_stride + channel[None, :], mask=held, other=0.0)
    x = transposed(x, identity, INTERPRET) + bias
    dg = tl.where(tl.trans(held) & (x <= last_logit(rate)), dg, 0.0)
    dz = dg * (-rate * reciprocal(1.0 + exp2(tl.minimum(x * -LOG2E, 126.0), INTERPRET), INTERPRET))
    tl.store(dz_ptr + channel[None, :] + at * (H * K), tl.trans(dz.to(dz_ptr.dtype.element_ty)), mask=held)
    return tl.sum(dz, 1)


@triton.jit
def uncut(g):
    return tl.where(g == -SHUT, 0.0, g)


@triton.jit
def decays_of_half(z_ptr, bias, rate, held, at, z_stride, identity, channel, INTERPRET: tl.constexpr):
    """The log2-decay [K, 32]."""
    z = tl.load(z_ptr + at * z_stride + channel[None, :], mask=held, other=NO_TOKEN)
    return log2_decay(transposed(z, identity, INTERPRET), bias, rate, 0.0, False, INTERPRET)


@triton.jit
def rows_of_half(x_ptr, norm, held, at, stride, identity, channel, INTERPRET: tl.constexpr):
    """q or k [K, 32], normalised."""
    x = tl.load(x_ptr + at * stride + channel[None, :], mask=held, other=0.0)
    return transposed(x, identity, INTERPRET) * norm


@triton.jit
def store_rows(dq, dk, q, k, own, q_norm, k_norm, unit, scale, dq_ptr, dk_ptr, db_ptr, at_beta, held, rows_held, at_K):
    """dq, dk and db of a half: what a token reads of its own write, and the norms."""
    dq += own[None, :] * k
    dk += own[None, :] * q
    dq = q_norm * unit * (scale * dq - q * (tl.sum(q * dq, 0)[None, :] / scale))
    tl.store(dq_ptr + at_K, tl.trans(dq.to(dq_ptr.dtype.element_ty)), mask=held)
    known = tl.sum(k * dk, 0) * unit
    store_db(known, at_beta, db_ptr, rows_held)
    dk = k_norm * (unit * dk - k * known[None, :])
    tl.store(dk_ptr + at_K, tl.trans(dk.to(dk_ptr.dtype.element_ty)), mask=held)


@triton.jit
def local_channels_nested(
    own_a, own_b, da_aa, da_ba, da_bb, dak_aa, dak_ba, dak_bb, unit, q_ptr, k_ptr, z_ptr,
    do_ptr, dv_ptr, rate, dt_bias_ptr, ones_ptr, u_ptr, states_ptr, dstates_ptr, totals_ptr, norms_ptr, dq_ptr, dk_ptr,
    dz_ptr, db_ptr, dbias_ptr, drate_ptr, count, q_stride, k_stride, z_stride, do_stride, scale,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    OPERAND: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """dq, dk, dz, db and the parameters' gradients."""
    R: tl.constexpr = tl.constexpr(32)
    row, channel, value = tl.arange(0, R), tl.arange(0, K), tl.arange(0, BV)
    at_a, at_b = row[:, None], row[:, None] + R
    in_a, in_b = at_a < count, at_b < count
    ones = row[:, None] * R + row[None, :] + ones_ptr
    identity, later = tl.load(ones), tl.load(ones + 2 * R * R)
    earlier = (1.0 - later.to(tl.float32)).to(later.dtype)
    bias = tl.load(dt_bias_ptr + channel)[:, None]
    at_totals = totals_ptr + channel
    t0, t1 = tl.load(at_totals)[:, None], tl.load(at_totals + K)[:, None]
    t2, t3 = tl.load(at_totals + 2 * K)[:, None], tl.load(at_totals + 3 * K)[:, None]
    per_unit = 1.0 / unit
    norms = norms_ptr + row

    # What passes the whole chunk.
    through = tl.zeros((K,), tl.float32)
    for block in tl.static_range(V // BV):
        at_state = (block * BV + value)[:, None] * K + channel[None, :]
        state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
        dstate = operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET)
        product = tl.dot(state, dstate)
        through += tl.sum(tl.where(channel[:, None] == channel[None, :], product, 0.0), 1)
    through = through[:, None] * (exp2(t0 + t1 + t2 + t3, INTERPRET) * per_unit)

    # Half a as far as half b needs it.
    k_norm_a = tl.load(norms + 2 * R)[None, :]
    g = decays_of_half(z_ptr, bias, rate, in_a, at_a, z_stride, identity, channel, INTERPRET)
    k = rows_of_half(k_ptr, k_norm_a, in_a, at_a, k_stride, identity, channel, INTERPRET)
    c = exp2(sums_of_rows(g, row + 1, row * 0 + R, OPERAND, INTERPRET), INTERPRET)
    k_c = factor(k * c, OPERAND, INTERPRET)

    # Half b.
    q_norm_b, k_norm_b = tl.load(norms + R)[None, :], tl.load(norms + 3 * R)[None, :]
    g = decays_of_half(z_ptr, bias, rate, in_b, at_b, z_stride, identity, channel, INTERPRET)
    k = rows_of_half(k_ptr, k_norm_b, in_b, at_b, k_stride, identity, channel, INTERPRET)
    q = rows_of_half(q_ptr, q_norm_b * scale, in_b, at_b, q_stride, identity, channel, INTERPRET)
    dq = tl.zeros((K, R), tl.float32)
    dk = tl.zeros((K, R), tl.float32)
    end = tl.zeros((K, R), tl.float32)
    for block in tl.static_range(V // BV):
        at_V = block * BV + value[None, :]
        if V > BV:
            at_state = (block * BV + value)[:, None] * K + channel[None, :]
            state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
            dstate = operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET)
        do = tl.load(do_ptr + at_b * do_stride + at_V, mask=in_b, other=0.0)
        dv = tl.load(dv_ptr + at_b * (H * V) + at_V, mask=in_b, other=0.0)
        u = tl.load(u_ptr + at_b * V + at_V)
        dq = tl.dot(state, tl.trans(operand(do, OPERAND, INTERPRET)), dq)
        dk = tl.dot(state, tl.trans(operand(dv, OPERAND, INTERPRET)), dk)
        end = tl.dot(tl.trans(dstate), tl.trans(operand(u, OPERAND, INTERPRET)), end)
    r = exp2(sums_of_rows(g, row * 0, row, OPERAND, INTERPRET), INTERPRET)
    start = r * (exp2(t0 + t1, INTERPRET) * per_unit)
    dq, dk = dq * start, dk * -start
    to_end = exp2(sums_of_rows(g, row + 1, row * 0 + R, OPERAND, INTERPRET), INTERPRET)
    end *= to_end * per_unit * tl.load(norms + 5 * R)[None, :]
    dg_b = times_ones(k * end, earlier, 2, OPERAND, INTERPRET)
    dG = q * dq + k * dk
    dk += end
    q_r, k_r = factor(q * r, OPERAND, INTERPRET), factor(k * r, OPERAND, INTERPRET)
    from_a = tl.dot(k_c, tl.trans(operand(da_ba, OPERAND, INTERPRET)))
    dG += q_r.to(tl.float32) * from_a
    dq += from_a * r
    from_a = tl.dot(k_c, tl.trans(operand(dak_ba, OPERAND, INTERPRET)))
    dG += k_r.to(tl.float32) * from_a
    dk += from_a * r
    dq, dk, dG = pairs_of_half(dq, dk, dG, q, k, g, da_bb, dak_bb, OPERAND, INTERPRET)
    store_rows(
        dq, dk, q, k, own_b, q_norm_b, k_norm_b, unit, scale, dq_ptr, dk_ptr, db_ptr + (row + R) * H, norms + 5 * R,
        in_b, row + R < count, channel[None, :] + at_b * (H * K),
    )  # fmt: skip
    dg_b += times_ones(dG, later, 3, OPERAND, INTERPRET)
    drate, g_sum = tl.sum(dg_b * uncut(g), 1), tl.sum(uncut(g), 1)
    after = tl.sum(dG, 1)[:, None]

    # Half a.
    q_norm_a = tl.load(norms)[None, :]
    g = decays_of_half(z_ptr, bias, rate, in_a, at_a, z_stride, identity, channel, INTERPRET)
    k = rows_of_half(k_ptr, k_norm_a, in_a, at_a, k_stride, identity, channel, INTERPRET)
    q = rows_of_half(q_ptr, q_norm_a * scale, in_a, at_a, q_stride, identity, channel, INTERPRET)
    dq = tl.zeros((K, R), tl.float32)
    dk = tl.zeros((K, R), tl.float32)
    end = tl.zeros((K, R), tl.float32)
    for block in tl.static_range(V // BV):
        at_V = block * BV + value[None, :]
        if V > BV:
            at_state = (block * BV + value)[:, None] * K + channel[None, :]
            state = tl.trans(operand(tl.load(states_ptr + at_state), OPERAND, INTERPRET))
            dstate = operand(tl.load(dstates_ptr + at_state), OPERAND, INTERPRET)
        do = tl.load(do_ptr + at_a * do_stride + at_V, mask=in_a, other=0.0)
        dv = tl.load(dv_ptr + at_a * (H * V) + at_V, mask=in_a, other=0.0)
        u = tl.load(u_ptr + at_a * V + at_V)
        dq = tl.dot(state, tl.trans(operand(do, OPERAND, INTERPRET)), dq)
        dk = tl.dot(state, tl.trans(operand(dv, OPERAND, INTERPRET)), dk)
        end = tl.dot(tl.trans(dstate), tl.trans(operand(u, OPERAND, INTERPRET)), end)
    start = exp2(sums_of_rows(g, row * 0, row, OPERAND, INTERPRET), INTERPRET) * per_unit
    dq, dk = dq * start, dk * -start
    c = exp2(sums_of_rows(g, row + 1, row * 0 + R, OPERAND, INTERPRET), INTERPRET)
    end *= c * (exp2(t2 + t3, INTERPRET) * per_unit) * tl.load(norms + 4 * R)[None, :]
    ended = k * end
    passed = tl.sum(ended, 1)[:, None] + through  # by every row of b
    dg_b += passed
    drate += tl.sum(passed, 1) * g_sum
    dg = times_ones(ended, earlier, 2, OPERAND, INTERPRET)
    dG = q * dq + k * dk
    to_b = tl.dot(q_r, operand(da_ba, OPERAND, INTERPRET))
    to_b = tl.dot(k_r, operand(dak_ba, OPERAND, INTERPRET), to_b)
    dG -= k_c.to(tl.float32) * to_b
    dk += end + to_b * c
    dq, dk, dG = pairs_of_half(dq, dk, dG, q, k, g, da_aa, dak_aa, OPERAND, INTERPRET)
    store_rows(
        dq, dk, q, k, own_a, q_norm_a, k_norm_a, unit, scale, dq_ptr, dk_ptr, db_ptr + row * H, norms + 4 * R,
        in_a, row < count, channel[None, :] + at_a * (H * K),
    )  # fmt: skip
    dg += times_ones(dG, later, 3, OPERAND, INTERPRET) + (after + through)

    # The gate.
    drate += tl.sum(dg * uncut(g), 1)
    bias_a = through_gate(
        dg * unit, z_ptr, dz_ptr, in_a, at_a, bias, rate, z_stride, identity, channel, H, K, INTERPRET
    )
    bias_b = through_gate(
        dg_b * unit, z_ptr, dz_ptr, in_b, at_b, bias, rate, z_stride, identity, channel, H, K, INTERPRET
    )
    tl.store(dbias_ptr + channel, bias_a + bias_b)
    tl.store(drate_ptr + channel, drate * (unit * 0.6931471805599453))
