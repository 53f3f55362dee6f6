"""First kernel of the KDA forward: everything that chunks do not need from each other, one program a chunk and head.

With G the log2-decay summed from the chunk's first row through each row (Gc: through the last), b = diag(beta), q and k
normalised:

    A = tril( [q 2^G] [k 2^-G]^T ) b     L = strict_tril( [k 2^G] [k 2^-G]^T ) b     T = (I + L)^-1     W = T (k 2^G)

It stores T (where gradients are wanted, what rounding took from it too), A, and the operands of the state pass: -W,
q 2^G, b k 2^(Gc-G), 2^Gc. `chunk.py` is the same algebra in PyTorch.

2^-G overflows, so factors are anchored. Rows come in tiles of 16, two tiles make a half. x = G - G at the border
between the two tiles of the row's own half, so |x| <= 16 * 5 / ln 2 = 115.4 for a bound of -5, and a product of q 2^x
with k 2^-x gives a whole half. The block between the halves takes the border between them as origin, where no factor
exceeds 1. Both are computed as full products and picked apart by `where`: what lies outside its block may be infinite,
so it must never meet a multiplication.

x is a product too: `anchors`, whose entries are 0, 1 and -1, times g, with g split into bf16 pieces (2 pieces keep 16
bits). Every sum starts at its own anchor, so no difference of long sums is formed.

The softplus gate has no bound, so it gets one: a token that keeps less than 2^-28 of a channel keeps 2^-28. That is a
sixteenth of fp32's rounding, 2^-24: in the sum with the next write it is lost, unless the old state is more than 16
times as large, and under the rounding of bf16 operands, 2^-9, unless it is 2^19 times as large. Then x = G - G at the
middle of the row's own block of 8 rows stays within 4 * 28 = 112, and with a q or k of 2^-14 still within the exponents
of fp32 and bf16, so that the product of q 2^x with k 2^-x is right inside the blocks of 8. Pairs of blocks of 8, 16 and
32 rows have the border between the two as origin, where no factor exceeds 1 and what underflows is nothing.

Suffixes: C = 64 rows of a chunk, K key channels. Rows of a tail that hold no token are loaded as zeros (never read: a
neighbour may hold NaN), with g = 0 and beta = 0: they neither write nor decay. T has a 1 on the diagonal there too.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
SHUT: tl.constexpr = tl.constexpr(28.0)  # the softplus gate's decays are cut off at 2^-28


@triton.jit
def exp2(x, INTERPRET: tl.constexpr):
    """2^x in one instruction (error 2^-22, results below 2^-126 are 0); the interpreter knows no machine code."""
    if INTERPRET:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def reciprocal(x, INTERPRET: tl.constexpr):
    """1 / x in one instruction (error 2^-23)."""
    if INTERPRET:
        return 1.0 / x
    return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def inverse_root(x, INTERPRET: tl.constexpr):
    """1 / sqrt(x) in one instruction (error 2^-22)."""
    if INTERPRET:
        return 1.0 / tl.sqrt(x)
    return tl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def operand(x, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """Round to the type of matrix operands. The interpreter multiplies bf16 wrongly, so there it is widened again."""
    x = x.to(OPERAND)
    if INTERPRET:
        x = x.to(tl.float32)
    return x


@triton.jit
def leading_bits(x):
    """x cut (not rounded) to the 8 bits that bf16 holds, still as fp32: one instruction, where rounding to bf16 and
    back takes a slow conversion. The rest x - leading_bits(x) is exact."""
    return (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def log2_of_1_and(y):
    """log2(1 + y) / y for y in [0, 1], off by 3e-7 of it. A polynomial: the logarithm of a sum loses a small y."""
    p = y * -0.012319459579885006 + 0.0636078417301178
    p = p * y - 0.15535180270671844
    p = p * y + 0.25600966811180115
    p = p * y - 0.3533948063850403
    p = p * y + 0.48006370663642883
    p = p * y - 0.7213100790977478
    return p * y + 1.4426947832107544


@triton.jit
def log2_decay(z, bias, rate, lower_bound, BOUNDED: tl.constexpr, INTERPRET: tl.constexpr):
    """g / ln 2 for x = z + dt_bias: lower_bound sigmoid(rate x), or -rate softplus(x), cut off at -SHUT."""
    if BOUNDED:
        slope = rate * -LOG2E
        return (lower_bound * LOG2E) * reciprocal(1.0 + exp2(z * slope + bias * slope, INTERPRET), INTERPRET)
    x = z + bias
    y = exp2(tl.abs(x) * -LOG2E, INTERPRET)
    g = -rate * (tl.maximum(x, 0.0) * LOG2E + y * log2_of_1_and(y))
    return tl.where(g < -SHUT, -SHUT, g)  # NaN stays


@triton.jit
def anchored_sums(ones, g, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """ones @ g with 16 bits of g, for entries 0, 1 and -1."""
    if ones.dtype == tl.float32:
        return tl.dot(ones, g)
    ones = operand(ones, OPERAND, INTERPRET)
    high = leading_bits(g)
    x = tl.dot(ones, operand(g - high, OPERAND, INTERPRET))
    return tl.dot(ones, operand(high, OPERAND, INTERPRET), x)


@triton.jit
def tile_totals(g, K: tl.constexpr):
    """Sums of g over each of the four tiles, four vectors [K]."""
    totals = tl.sum(tl.reshape(g, [4, 16, K]), axis=1)
    tile = tl.arange(0, 4)[:, None]
    t0 = tl.sum(tl.where(tile == 0, totals, 0.0), axis=0)
    t1 = tl.sum(tl.where(tile == 1, totals, 0.0), axis=0)
    t2 = tl.sum(tl.where(tile == 2, totals, 0.0), axis=0)
    t3 = tl.sum(tl.where(tile == 3, totals, 0.0), axis=0)
    return t0, t1, t2, t3


@triton.jit
def by_half(first, second):
    """Two vectors [K] as [2, 1, K]: one for the rows of each half."""
    return tl.where((tl.arange(0, 2) == 0)[:, None], first[None, :], second[None, :])[:, None, :]


@triton.jit
def scaled(x, factor, K: tl.constexpr):
    """Rows [C, K] times a vector for each half [2, 1, K]."""
    return tl.reshape(tl.reshape(x, [2, 32, K]) * factor, [64, K])


@triton.jit
def sums_of_rows(first, last, g, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """For each row the sum of g over rows first to last, [C, K]; none where last < first."""
    j = tl.arange(0, 64)[None, :]
    ones = tl.where((j >= first[:, None]) & (j <= last[:, None]), 1.0, 0.0)
    return anchored_sums(ones.to(OPERAND), g, OPERAND, INTERPRET)


@triton.jit
def to_border(size, g, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """Sums of g between each row and the border in the middle of its block of 2 `size` rows, never positive."""
    row = tl.arange(0, 64)
    border = row // (2 * size) * 2 * size + size
    first, last = tl.where(row < border, row + 1, border), tl.where(row < border, border - 1, row)
    return sums_of_rows(first, last, g, OPERAND, INTERPRET)


@triton.jit
def from_middle_of_8(g, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """G - G at the middle of the row's block of 8 rows."""
    i, j = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    middle = i // 8 * 8 + 4  # first row after it
    ones = tl.where((j >= middle) & (j <= i), 1.0, 0.0) - tl.where((j > i) & (j < middle), 1.0, 0.0)
    return anchored_sums(ones.to(OPERAND), g, OPERAND, INTERPRET)


@triton.jit
def across_borders(lower, a, q, k, g, OPERAND: tl.constexpr, INTERPRET: tl.constexpr):
    """k k^T in lower and q k^T in a with their decays, where row and column lie in two blocks of 8, 16 or 32 rows."""
    row = tl.arange(0, 64)
    for n in tl.static_range(3):
        size = 8 << n
        up_or_down = exp2(to_border(size, g, OPERAND, INTERPRET), INTERPRET)
        k_row = operand(k * up_or_down, OPERAND, INTERPRET)
        k_column = tl.trans(k_row)
        block = row // size
        across = (block % 2 == 1)[:, None] & (block[:, None] == block[None, :] + 1)
        lower = tl.where(across, tl.dot(k_row, k_column), lower)
        a = tl.where(across, tl.dot(operand(q * up_or_down, OPERAND, INTERPRET), k_column), a)
    return lower, a


@triton.jit
def same_tile():
    tile = tl.arange(0, 4)
    return (tile[:, None] == tile[None, :])[:, None, :, None]


@triton.jit
def from_tiles(tiles):
    """Put [4, 16, 16] onto the diagonal of [C, C]."""
    return tl.reshape(tl.where(same_tile(), tiles[:, :, None, :], 0.0), [64, 64])


@triton.jit
def dot_16_bits(a, b, INTERPRET: tl.constexpr):
    """a @ b for fp32 operands, each cut into two bf16 pieces. The compiler's own bf16x3 also guards against NaN, which
    costs as much as the products."""
    if INTERPRET:
        return tl.dot(a, b)
    a_high, b_high = leading_bits(a), leading_bits(b)
    a_low, b_low = (a - a_high).to(tl.bfloat16), (b - b_high).to(tl.bfloat16)
    a_high, b_high = a_high.to(tl.bfloat16), b_high.to(tl.bfloat16)
    return tl.dot(a_high, b_high, tl.dot(a_high, b_low, tl.dot(a_low, b_high)))


@triton.jit
def doubled(x, lower, S: tl.constexpr, R: tl.constexpr, INTERPRET: tl.constexpr):
    """From the inverses of diagonal blocks of S rows to those of 2 S rows: X <- X - X (L . between) X, exact but for
    rounding, where `between` holds the block below the diagonal of each pair."""
    i = tl.arange(0, R)[:, None]
    j = tl.arange(0, R)[None, :]
    between = (i // (2 * S) == j // (2 * S)) & (i // S > j // S)
    if len(x.shape) == 3:
        between = between[None]
    y = dot_16_bits(tl.where(between, lower, 0.0), x, INTERPRET)
    return x - dot_16_bits(x, y, INTERPRET)


@triton.jit
def inverse_of_unit_lower(lower, INTERPRET: tl.constexpr):
    """(I + L)^-1 for strictly lower triangular L [C, C], doubling from pairs of rows. A series in powers of L would
    lose everything for repeated keys, whose powers grow like binomials; the inverses of leading blocks stay small."""
    i = tl.arange(0, 16)[:, None]
    j = tl.arange(0, 16)[None, :]
    tiles = tl.sum(tl.where(same_tile(), tl.reshape(lower, [4, 16, 4, 16]), 0.0), axis=2)
    pair = (i // 2 == j // 2) & (i > j)
    x = tl.where(i == j, 1.0, 0.0)[None] - tl.where(pair[None], tiles, 0.0)
    x = doubled(x, tiles, 2, 16, INTERPRET)
    x = doubled(x, tiles, 4, 16, INTERPRET)
    x = doubled(x, tiles, 8, 16, INTERPRET)
    x = from_tiles(x)
    x = doubled(x, lower, 16, 64, INTERPRET)
    return doubled(x, lower, 32, 64, INTERPRET)


@triton.jit
def intra_kernel(
    q_ptr,  # [N, H, K], with any stride between tokens; k, z too
    k_ptr,
    z_ptr,
    b_ptr,  # [N, H]
    A_log_ptr,  # fp32 [H]
    dt_bias_ptr,  # fp32 [H, K]
    spans_ptr,  # int32 [M, 2]: first token and number of tokens of each chunk
    anchors_ptr,  # [C, C]
    t_ptr,  # [DIGITS, M, H, C, C]
    a_ptr,  # [M, H, C, C]
    w_ptr,  # [M, H, C, K]: -W; None leaves out this one and the three that follow
    q_out_ptr,  # [M, H, C, K]: q 2^G
    k_out_ptr,  # [M, H, C, K]: b k 2^(Gc-G)
    decay_ptr,  # fp32 [M, H, K]: 2^Gc
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
    SOLVED: tl.constexpr,  # T is given: read its first digit, and leave A alone
    DIGITS: tl.constexpr,  # 2: what the rounding of T took off is stored too
):
    C: tl.constexpr = 64
    program = tl.program_id(0)
    h = program % H
    start = tl.load(spans_ptr + 2 * (program // H))
    count = tl.load(spans_ptr + 2 * (program // H) + 1)
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    valid = row < count
    held = valid[:, None]
    token = (start + row).to(tl.int64)
    place = h * K + channel
    out = program.to(tl.int64)
    at_K = out * (C * K) + row[:, None] * K + channel[None, :]
    at_C = out * (C * C) + row[:, None] * C + row[None, :]

    z = tl.load(z_ptr + token[:, None] * z_stride + place[None, :], mask=held, other=0.0).to(tl.float32)
    rate = exp2(tl.load(A_log_ptr + h).to(tl.float32) * LOG2E, INTERPRET)
    bias = tl.load(dt_bias_ptr + place).to(tl.float32)
    g = tl.where(held, log2_decay(z, bias[None, :], rate, lower_bound, BOUNDED, INTERPRET), 0.0)
    if BOUNDED:
        x = anchored_sums(tl.load(anchors_ptr + row[:, None] * C + row[None, :]), g, OPERAND, INTERPRET)
    else:
        x = from_middle_of_8(g, OPERAND, INTERPRET)
    t0, t1, t2, t3 = tile_totals(g, K)
    if decay_ptr is not None:
        tl.store(decay_ptr + out * K + channel, exp2(t0 + t1 + t2 + t3, INTERPRET))
    up = exp2(x, INTERPRET)
    down = exp2(-x, INTERPRET)
    if BOUNDED:
        one = exp2(t0 * 0.0, INTERPRET)
        from_middle = by_half(one, exp2(t2, INTERPRET))
        to_middle = by_half(exp2(t1, INTERPRET), one)
        from_start = by_half(exp2(t0, INTERPRET), exp2(t0 + t1, INTERPRET))
        to_end = by_half(exp2(t2 + t3, INTERPRET), exp2(t3, INTERPRET))

    b = tl.load(b_ptr + token * b_stride + h, mask=valid, other=0.0).to(tl.float32)
    beta = tl.where(valid, reciprocal(1.0 + exp2(b * -LOG2E, INTERPRET), INTERPRET), 0.0)
    k = tl.load(k_ptr + token[:, None] * k_stride + place[None, :], mask=held, other=0.0).to(tl.float32)
    k *= inverse_root(tl.sum(k * k, 1) + 1e-6, INTERPRET)[:, None]
    q = tl.load(q_ptr + token[:, None] * q_stride + place[None, :], mask=held, other=0.0).to(tl.float32)
    q *= (inverse_root(tl.sum(q * q, 1) + 1e-6, INTERPRET) * scale)[:, None]
    k_up, k_down, q_up = k * up, k * down, q * up
    if not SOLVED:
        k_half = tl.trans(operand(k_down, OPERAND, INTERPRET))
        l_half = tl.dot(operand(k_up, OPERAND, INTERPRET), k_half)
        a_half = tl.dot(operand(q_up, OPERAND, INTERPRET), k_half)
    if BOUNDED:
        k_up, q_up = scaled(k_up, from_middle, K), scaled(q_up, from_middle, K)
        k_down = scaled(k_down, to_middle, K)
        k_start, q_start = scaled(k_up, from_start, K), scaled(q_up, from_start, K)
        k_end = scaled(k_down, to_end, K)
    else:
        from_start = exp2(sums_of_rows(row * 0, row, g, OPERAND, INTERPRET), INTERPRET)
        to_end = exp2(sums_of_rows(row + 1, row * 0 + C, g, OPERAND, INTERPRET), INTERPRET)
        k_start, q_start, k_end = k * from_start, q * from_start, k * to_end
    if w_ptr is not None:
        tl.store(k_out_ptr + at_K, (k_end * beta[:, None]).to(OPERAND))
        tl.store(q_out_ptr + at_K, q_start.to(OPERAND))
    k_start = operand(k_start, OPERAND, INTERPRET)

    if SOLVED:
        t = tl.load(t_ptr + at_C)
    else:
        if BOUNDED:
            k_off = tl.trans(operand(k_down, OPERAND, INTERPRET))
            l_off = tl.dot(operand(k_up, OPERAND, INTERPRET), k_off)
            a_off = tl.dot(operand(q_up, OPERAND, INTERPRET), k_off)
            same_half = row[:, None] // 32 == row[None, :] // 32
            lower, a = tl.where(same_half, l_half, l_off), tl.where(same_half, a_half, a_off)
        else:
            lower, a = across_borders(l_half, a_half, q, k, g, OPERAND, INTERPRET)
        a = tl.where(row[:, None] >= row[None, :], a, 0.0)
        tl.store(a_ptr + at_C, (a * beta[None, :]).to(OPERAND))
        lower = tl.where(row[:, None] > row[None, :], lower, 0.0)
        exact = inverse_of_unit_lower(lower * beta[None, :], INTERPRET)
        t = exact.to(OPERAND)
        tl.store(t_ptr + at_C, t)
        if DIGITS == 2:
            at_low = t_ptr + tl.num_programs(0).to(tl.int64) * (C * C) + at_C
            tl.store(at_low, (exact - t.to(tl.float32)).to(OPERAND))
    if w_ptr is not None:
        w = tl.dot(operand(t, OPERAND, INTERPRET), k_start)
        tl.store(w_ptr + at_K, (-w).to(OPERAND))
