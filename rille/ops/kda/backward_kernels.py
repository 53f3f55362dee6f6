"""Kernels of the KDA backward that make states and their gradients: `prepare`, `states`, `reverse`. `chunk_backward.py`
is the same algebra in PyTorch; `backward_local.py` has the kernel that follows.

    prepare   one program a chunk and head: Q = q 2^G, -k 2^G, E = b k 2^(Gc-G) and Elow, 2^Gc, and norms of q and k
    states    one program a sequence, head and block of value channels, first chunk to last: S before each chunk, U

                  r = v^T - S (k 2^G)^T          u = r (T + Tlow)^T          S <- S 2^Gc + u (E + Elow)

    reverse   the same programs, last chunk to first: dV, the gradient D of the state after each chunk and of the first

                  du = dO^T A + D E^T          dv = du (T + Tlow)          D <- D 2^Gc + dO^T Q - dv (k 2^G)

States, u, du, dv are value-first, so that the left operand of every product with them comes from registers: a rounded
accumulator has the layout of one. r is formed before T meets it: where the state already predicts v, T v - (T k 2^G) S
would be a small difference of two rounded numbers. Low are second digits: what rounding to bf16 took off.

Suffixes: C = 64 rows of a chunk, K key channels, V value channels, BV value channels of a program. Rows of a tail that
hold no token are loaded as zeros, and every operand in chunk layout is zero there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.kda.intra import LOG2E, exp2, inverse_root, leading_bits, log2_decay, operand, reciprocal

NO_TOKEN: tl.constexpr = tl.constexpr(-1e30)  # a decay logit that decays nothing, whatever is added to it


@triton.jit
def bounded_decay(x, rate, lower_bound, INTERPRET: tl.constexpr):
    """log2-decay for x = z + dt_bias: lower_bound sigmoid(rate x) / ln 2."""
    return (lower_bound * LOG2E) * reciprocal(1.0 + exp2(x * (rate * -LOG2E), INTERPRET), INTERPRET)


@triton.jit
def times_ones(x, ones, PIECES: tl.constexpr, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """x @ ones, where ones has entries 0, 1 and -1, with 8 bits of x a piece, 2 or 3 of them."""
    if x.dtype == OPERAND:
        return tl.dot(x, ones.to(tl.float32))
    ones = operand(ones, OPERAND, INTERPRET)
    high = leading_bits(x)
    rest = x - high
    if PIECES == 2:
        y = tl.dot(operand(rest, OPERAND, INTERPRET), ones)
    else:
        middle = leading_bits(rest)
        y = tl.dot(operand(rest - middle, OPERAND, INTERPRET), ones)
        y = tl.dot(operand(middle, OPERAND, INTERPRET), ones, y)
    return tl.dot(operand(high, OPERAND, INTERPRET), ones, y)


@triton.jit
def factor(x, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """`operand` for tiles that are widened again. The compiler would round those one by one, by an instruction of an
    eighth of the rate; here it adds half of the last place and packs the upper halves of pairs."""
    if INTERPRET:
        return operand(x, OPERAND, INTERPRET)
    upper = (x.to(tl.int32, bitcast=True) + 32768) >> 16
    return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def transposed(x, identity, INTERPRET: tl.constexpr):
    """x^T in fp32, in the layout of a product's result. A product with the identity is exact in bf16 and costs no
    instruction an element."""
    if x.dtype == tl.bfloat16 and not INTERPRET:
        return tl.dot(tl.trans(x), identity)
    return tl.trans(x.to(tl.float32))


@triton.jit
def prepare_kernel(
    q_ptr,  # [N, H, K], with any stride between tokens; k, z too
    k_ptr,
    z_ptr,
    b_ptr,  # [N, H]
    A_log_ptr,  # fp32 [H]
    dt_bias_ptr,  # fp32 [H, K]
    spans_ptr,  # int32 [M, 2]: first token and number of tokens of each chunk
    ones_ptr,  # [3, 32, 32]: identity, anchors of a half transposed; the third is not used here
    q_out_ptr,  # [M, H, C, K]: q 2^G
    k_start_ptr,  # [M, H, C, K]: -k 2^G
    k_end_ptr,  # [DIGITS, M, H, C, K]: b k 2^(Gc-G), and what rounding it took off
    decay_ptr,  # fp32 [M, H, K]: 2^Gc
    totals_ptr,  # fp32 [M, H, 4, K]: log2-decay summed over each tile
    norms_ptr,  # fp32 [M, H, 4, C]: what normalises q (without the scale K^-0.5), and k; beta; room for a sum
    q_stride,
    k_stride,
    z_stride,
    b_stride,
    lower_bound,
    scale,
    H: tl.constexpr,
    K: tl.constexpr,
    BOUNDED: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRET: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """Tiles are transposed, [K, 32], one half of the chunk at a time: sums over rows stay within a thread or four."""
    C: tl.constexpr = tl.constexpr(64)
    R: tl.constexpr = tl.constexpr(32)
    program = tl.program_id(0)
    h = program % H
    start = tl.load(spans_ptr + 2 * (program // H)).to(tl.int64)
    count = tl.load(spans_ptr + 2 * (program // H) + 1)
    out = program.to(tl.int64)
    row = tl.arange(0, R)
    channel = tl.arange(0, K)
    q_ptr += start * q_stride + h * K
    k_ptr += start * k_stride + h * K
    z_ptr += start * z_stride + h * K
    ones = row[:, None] * R + row[None, :] + ones_ptr
    identity, anchors = tl.load(ones), tl.load(ones + R * R)
    rate = exp2(tl.load(A_log_ptr + h).to(tl.float32) * LOG2E, INTERPRET)
    bias = tl.load(dt_bias_ptr + h * K + channel)[:, None]

    at_z = z_ptr + row[:, None] * z_stride + channel[None, :]
    PIECES: tl.constexpr = 2 if BOUNDED else 3
    z = tl.load(at_z, mask=(row < count)[:, None], other=NO_TOKEN)
    g = log2_decay(transposed(z, identity, INTERPRET), bias, rate, lower_bound, BOUNDED, INTERPRET)
    x_a = times_ones(g, anchors, PIECES, OPERAND, INTERPRET)
    t0 = tl.sum(tl.where((row < 16)[None, :], g, 0.0), 1)
    t1 = tl.sum(tl.where((row < 16)[None, :], 0.0, g), 1)
    z = tl.load(at_z + R * z_stride, mask=(row + R < count)[:, None], other=NO_TOKEN)
    g = log2_decay(transposed(z, identity, INTERPRET), bias, rate, lower_bound, BOUNDED, INTERPRET)
    x_b = times_ones(g, anchors, PIECES, OPERAND, INTERPRET)
    t2 = tl.sum(tl.where((row < 16)[None, :], g, 0.0), 1)
    t3 = tl.sum(tl.where((row < 16)[None, :], 0.0, g), 1)
    tl.store(decay_ptr + out * K + channel, exp2(t0 + t1 + t2 + t3, INTERPRET))
    at_totals = totals_ptr + out * (4 * K) + channel
    tl.store(at_totals, t0)
    tl.store(at_totals + K, t1)
    tl.store(at_totals + 2 * K, t2)
    tl.store(at_totals + 3 * K, t3)

    for half in tl.static_range(2):
        if half == 0:
            x, to_start, to_end = x_a, t0, t1 + t2 + t3
        else:
            x, to_start, to_end = x_b, t0 + t1 + t2, t3
        place = row + half * R
        held = (place < count)[:, None]
        q = tl.load(q_ptr + place[:, None] * q_stride + channel[None, :], mask=held, other=0.0)
        k = tl.load(k_ptr + place[:, None] * k_stride + channel[None, :], mask=held, other=0.0)
        q_norm = inverse_root(tl.sum(q.to(tl.float32) * q.to(tl.float32), 1) + 1e-6, INTERPRET)
        k_norm = inverse_root(tl.sum(k.to(tl.float32) * k.to(tl.float32), 1) + 1e-6, INTERPRET)
        tl.store(norms_ptr + out * (4 * C) + place, q_norm)
        tl.store(norms_ptr + out * (4 * C) + C + place, k_norm)
        from_start = exp2(tl.minimum(x + to_start[:, None], 0.0), INTERPRET)
        k = transposed(k, identity, INTERPRET) * k_norm[None, :]
        q = transposed(q, identity, INTERPRET) * (q_norm * scale)[None, :] * from_start
        at = out * (C * K) + place[:, None] * K + channel[None, :]
        tl.store(q_out_ptr + at, tl.trans(q.to(OPERAND)))
        tl.store(k_start_ptr + at, tl.trans((-k * from_start).to(OPERAND)))
        b = tl.load(b_ptr + (start + place) * b_stride + h, mask=place < count, other=0.0).to(tl.float32)
        beta = reciprocal(1.0 + exp2(b * -LOG2E, INTERPRET), INTERPRET)
        tl.store(norms_ptr + out * (4 * C) + 2 * C + place, beta)
        k_end = k * beta[None, :] * exp2(tl.minimum(to_end[:, None] - x, 0.0), INTERPRET)
        rounded = factor(k_end, OPERAND, INTERPRET)
        tl.store(k_end_ptr + at, tl.trans(rounded.to(OPERAND)))
        if DIGITS == 2:
            at_low = k_end_ptr + tl.num_programs(0).to(tl.int64) * (C * K) + at
            tl.store(at_low, tl.trans((k_end - rounded.to(tl.float32)).to(OPERAND)))


@triton.jit
def states_kernel(
    t_desc,  # [DIGITS * M * H * C, C]
    k_start_desc,  # [M * H * C, K]: -k 2^G
    k_end_desc,  # [DIGITS * M * H * C, K]: b k 2^(Gc-G)
    identity_ptr,  # [C, C]
    v_ptr,  # [N, H, V], with any stride between tokens
    decay_ptr,  # fp32 [M, H, K]
    u_desc,  # [M * H * C, V]
    states_desc,  # [M * H * V, K]: the state before each chunk
    starts_ptr,  # int32 [S + 1]
    order_ptr,  # int32 [S]: sequences, longest first
    first_ptr,  # int64 [S]: first chunk of each sequence
    initial_ptr,  # [S, H, V, K] or None
    v_stride,
    tiles,  # M * H: from a tile of T or of b k 2^(Gc-G) to its low bits
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRET: tl.constexpr,
    DIGITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = V // BV
    program = tl.program_id(0)
    h = (program // BLOCKS) % H
    s = tl.load(order_ptr + program // (BLOCKS * H))
    start = tl.load(starts_ptr + s)
    length = tl.load(starts_ptr + s + 1) - start
    first = tl.load(first_ptr + s).to(tl.int32)

    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    block = (program % BLOCKS) * BV
    value = block + tl.arange(0, BV)
    if initial_ptr is not None:
        at_state = (s * H + h).to(tl.int64) * (V * K) + value[:, None] * K + channel[None, :]
        state = tl.load(initial_ptr + at_state).to(tl.float32)
    else:
        state = tl.zeros((BV, K), tl.float32)
    identity = operand(tl.load(identity_ptr + row[:, None] * C + row[None, :]), OPERAND, INTERPRET)

    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        tile = (first + i) * H + h
        left = length - i * C
        token = (start + i * C + row).to(tl.int64)
        v = tl.load(v_ptr + token[:, None] * v_stride + h * V + value[None, :], mask=row[:, None] < left, other=0.0)
        t = operand(t_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        k_start = operand(k_start_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        k_end = operand(k_end_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        decay = tl.load(decay_ptr + tile.to(tl.int64) * K + channel)
        stored = state.to(OPERAND)
        states_desc.store([tile * V + block, 0], stored)
        r = tl.dot(tl.trans(operand(v, OPERAND, INTERPRET)), identity)
        r = tl.dot(operand(stored, OPERAND, INTERPRET), tl.trans(k_start), r)
        r = operand(r, OPERAND, INTERPRET)
        if DIGITS == 2:
            low = operand(t_desc.load([(tiles + tile) * C, 0]), OPERAND, INTERPRET)
            u = tl.dot(r, tl.trans(t), tl.dot(r, tl.trans(low))).to(OPERAND)
        else:
            u = tl.dot(r, tl.trans(t)).to(OPERAND)
        state *= decay[None, :]
        if DIGITS == 2:
            low = operand(k_end_desc.load([(tiles + tile) * C, 0]), OPERAND, INTERPRET)
            state = tl.dot(operand(u, OPERAND, INTERPRET), low, state)
        state = tl.dot(operand(u, OPERAND, INTERPRET), k_end, state)
        u_desc.store([tile * C, block], tl.trans(u))


@triton.jit
def reverse_kernel(
    t_desc,  # [DIGITS * M * H * C, C]
    a_desc,  # [M * H * C, C]
    q_desc,  # [M * H * C, K]: q 2^G
    k_start_desc,  # [M * H * C, K]: -k 2^G
    k_end_desc,  # [M * H * C, K]: b k 2^(Gc-G)
    do_ptr,  # [N, H, V]
    decay_ptr,  # fp32 [M, H, K]
    dv_ptr,  # [N, H, V]
    dstates_desc,  # [M * H * V, K]: gradient of the state after each chunk
    starts_ptr,  # int32 [S + 1]
    order_ptr,  # int32 [S]: sequences, longest first
    first_ptr,  # int64 [S]: first chunk of each sequence
    dfinal_ptr,  # [S, H, V, K] or None: gradient of the final states
    dinitial_ptr,  # fp32 [S, H, V, K] or None: gradient of the initial states
    do_stride,
    tiles,  # M * H: from a tile of T to its low bits
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRET: tl.constexpr,
    DIGITS: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = V // BV
    program = tl.program_id(0)
    h = (program // BLOCKS) % H
    s = tl.load(order_ptr + program // (BLOCKS * H))
    start = tl.load(starts_ptr + s)
    length = tl.load(starts_ptr + s + 1) - start
    first = tl.load(first_ptr + s).to(tl.int32)

    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    block = (program % BLOCKS) * BV
    value = block + tl.arange(0, BV)
    at_state = (s * H + h).to(tl.int64) * (V * K) + value[:, None] * K + channel[None, :]
    if dfinal_ptr is not None:
        dstate = tl.load(dfinal_ptr + at_state).to(tl.float32)
    else:
        dstate = tl.zeros((BV, K), tl.float32)

    count = tl.cdiv(length, C)
    for j in tl.range(0, count, num_stages=STAGES):
        i = count - 1 - j
        tile = (first + i) * H + h
        held = row[:, None] < length - i * C
        token = (start + i * C + row).to(tl.int64)
        do = tl.load(do_ptr + token[:, None] * do_stride + h * V + value[None, :], mask=held, other=0.0)
        do = operand(do, OPERAND, INTERPRET)
        a = operand(a_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        t = operand(t_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        q = operand(q_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        k_start = operand(k_start_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        k_end = operand(k_end_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        decay = tl.load(decay_ptr + tile.to(tl.int64) * K + channel)
        stored = dstate.to(OPERAND)
        dstates_desc.store([tile * V + block, 0], stored)
        du = tl.dot(tl.trans(do), a)
        du = tl.dot(operand(stored, OPERAND, INTERPRET), tl.trans(k_end), du)
        du = operand(du, OPERAND, INTERPRET)
        if DIGITS == 2:
            low = operand(t_desc.load([(tiles + tile) * C, 0]), OPERAND, INTERPRET)
            dv = tl.dot(du, t, tl.dot(du, low))
        else:
            dv = tl.dot(du, t)
        dstate = tl.dot(tl.trans(do), q, dstate * decay[None, :])
        dstate = tl.dot(operand(dv, OPERAND, INTERPRET), k_start, dstate)
        at_dv = token[:, None] * (H * V) + h * V + value[None, :]
        tl.store(dv_ptr + at_dv, tl.trans(dv.to(dv_ptr.dtype.element_ty)), mask=held)
    if dinitial_ptr is not None:
        tl.store(dinitial_ptr + at_state, dstate)
