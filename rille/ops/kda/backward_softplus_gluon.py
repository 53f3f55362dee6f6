"""The last kernel of the KDA backward for the softplus gate in Gluon, for K = V = 128: tiles, copies and products of
`backward_local_gluon.py`, decays as in the first kernel. `backward_direct.py`, which forms the factor of each pair of
rows and channel by itself, is its twin and has the equations.

Each sum over pairs of rows is a product whose two factors are measured from one origin, and which origin is right for a
pair says its least common block of 8, 16 or 32 rows. Inside a block of 8 `up` = 2^x and `down` = 2^-x have the block's
middle as origin, x within 4 * 28 bits. From the first block of a tile to the second the column is measured from the
middle of the second: `over` = 2^(Gm - G), at most 1. So rows take the same factor for both, and two products add up to
one sum. Between the tiles of a half their border is the origin of rows and columns alike, w = 2^-|G - G15|:

    dq  = up (dA_8 (k down) + dA_16 (k over)) + w (dA_32 (k w))
    dk  = up (dAk_8 (k down) + dAk_16 (k over)) + down (dA_8^T (q up) + dAk_8^T (k up))
        + over (dA_16^T (q up) + dAk_16^T (k up)) + w (dAk_32 (k w) + dAk_32^T (k w) + dA_32^T (q w))

with dA_8, dA_16, dA_32 the pairs whose least common block has 8, 16 or 32 rows: parts of the registers that hold dA.
Rows and columns of dA_32 are different tiles, and dA_8, dA_16 are zero between tiles, so products are of tiles. Each
exponent is a sum of g that begins at its own origin, by a product with ones: no difference of long sums.

What a token leaves in the state after the chunk stays out of dG: only later tokens decay it, and a sum that took it
back would keep its rounding. A decay that was cut off passes no gradient.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from rille.ops.barriers_gluon import barrier
from rille.ops.kda.backward_local_gluon import (
    BLOCK,
    CHANNEL,
    LEFT,
    LINE,
    RIGHT,
    ROW,
    SMALL,
    TALL,
    TILE,
    along_channels,
    buffers,
    fetch_blocks,
    fetch_rows,
    fetch_state,
    pairs_of_rows,
    put_rows,
    rows_of,
    times,
    times_state,
    turned,
)
from rille.ops.kda.numbers_gluon import LOG2E, SHUT, bf16, exp2, leading_bits, reciprocal, softplus_decay, wide

PRIVATE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))  # fp32, rows of 32


@gluon.jit
def by(x, y, sums):
    """sums + x y for y in registers."""
    return mma_v2(gl.convert_layout(x, LEFT, assert_trivial=True), y, sums)


@gluon.jit
def tiles_of(x):
    """[channels, 32] as two tiles of 16 rows."""
    first, second = gl.split(gl.reshape(x, [128, 2, 16]).permute((0, 2, 1)))
    return gl.convert_layout(first, TALL, assert_trivial=True), gl.convert_layout(second, TALL, assert_trivial=True)


@gluon.jit
def half_of(first, second):
    """Two tiles as one half."""
    x = gl.reshape(gl.join(first, second).permute((0, 2, 1)), [128, 32])
    return gl.convert_layout(x, TALL, assert_trivial=True)


@gluon.jit
def squares_of(y):
    """The tiles of y [32, 32] on the diagonal, below it and above it."""
    left, right = gl.split(gl.reshape(y, [2, 16, 2, 16]).permute((1, 3, 0, 2)))
    first, below = gl.split(left)
    above, second = gl.split(right)
    return (
        gl.convert_layout(first, RIGHT, assert_trivial=True),
        gl.convert_layout(second, RIGHT, assert_trivial=True),
        gl.convert_layout(below, RIGHT, assert_trivial=True),
        gl.convert_layout(above, RIGHT, assert_trivial=True),
    )


@gluon.jit
def in_block(y, SIZE: gl.constexpr):
    """y [16, 16] at pairs whose least common block of 8 or 16 rows has SIZE rows, else 0. Registers hold parts of one
    block, so this costs nothing."""
    row = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))[:, None]
    column = gl.arange(0, 16, gl.SliceLayout(0, RIGHT))[None, :]
    picked = (row ^ column) < 8
    if SIZE == 16:
        picked = (row ^ column) >= 8
    return gl.where(picked, y, gl.zeros([16, 16], gl.bfloat16, RIGHT))


@gluon.jit
def exponents(high, low, ones):
    """[channels, 16]: sums of g = high + low over the rows that a column of ones has."""
    return by(high, ones, by(low, ones, gl.zeros([128, 16], gl.float32, TALL)))


@gluon.jit
def sums_of_rows(x, ones, PIECES: gl.constexpr):
    """The same of x [channels, 16] in fp32, with 8 bits of it a piece."""
    high = leading_bits(x)
    rest = x - high
    if PIECES == 2:
        return exponents(bf16(high), bf16(rest), ones)
    middle = leading_bits(rest)
    return by(bf16(high), ones, exponents(bf16(middle), bf16(rest - middle), ones))


@gluon.jit
def pairs_of_tile(dq, dk, dG, q, k, high, low, squares, middle, beyond):
    """Adds to dq, dk, dG [channels, 16] what the pairs inside a tile give. squares: dA, dAk and both transposed."""
    da, dak, da_turned, dak_turned = squares
    zero = gl.zeros([128, 16], gl.float32, TALL)
    x = exponents(high, low, middle)
    over = exp2(exponents(high, low, beyond))
    up, down = exp2(x), exp2(-x)
    k_down, k_over = bf16(k * down), bf16(k * over)
    q_up, k_up = bf16(q * up), bf16(k * up)
    sums = by(k_over, in_block(da_turned, 16), by(k_down, in_block(da_turned, 8), zero))
    dG += wide(q_up) * sums
    dq += sums * up
    sums = by(k_over, in_block(dak_turned, 16), by(k_down, in_block(dak_turned, 8), zero))
    dG += wide(k_up) * sums
    dk += sums * up
    sums = by(k_up, in_block(dak, 8), by(q_up, in_block(da, 8), zero))
    dG -= wide(k_down) * sums
    dk += sums * down
    sums = by(k_up, in_block(dak, 16), by(q_up, in_block(da, 16), zero))
    dG -= wide(k_over) * sums
    return dq, dk + sums * over, dG


@gluon.jit
def pairs_of_half(dq, dk, dG, q, k, digits, w_first, w_second, da_s, dak_s, ones):
    """Adds to dq, dk, dG what the pairs inside a half give; returns dG tile by tile. w: the decay between a row and the
    border of the tiles."""
    high_first, low_first, high_second, low_second = digits
    dq_first, dq_second = tiles_of(dq)
    dk_first, dk_second = tiles_of(dk)
    dG_first, dG_second = tiles_of(dG)
    q_first, q_second = tiles_of(q)
    k_first, k_second = tiles_of(k)
    zero = gl.zeros([128, 16], gl.float32, TALL)
    da_first, da_second, da, _ = squares_of(da_s.load(RIGHT))
    dak_first, dak_second, dak, _ = squares_of(dak_s.load(RIGHT))
    da_turned_first, da_turned_second, _, da_turned = squares_of(da_s.permute((1, 0)).load(RIGHT))
    dak_turned_first, dak_turned_second, _, dak_turned = squares_of(dak_s.permute((1, 0)).load(RIGHT))

    k_w, q_w = bf16(k_second * w_second), bf16(q_second * w_second)
    sums = by(k_w, dak, by(q_w, da, zero))
    column = bf16(k_first * w_first)
    dG_first -= wide(column) * sums
    dk_first += sums * w_first
    sums = by(column, da_turned, zero)
    dG_second += wide(q_w) * sums
    dq_second += sums * w_second
    sums = by(column, dak_turned, zero)
    dG_second += wide(k_w) * sums
    dk_second += sums * w_second

    middle, beyond = ones
    squares = (da_first, dak_first, da_turned_first, dak_turned_first)
    dq_first, dk_first, dG_first = pairs_of_tile(
        dq_first, dk_first, dG_first, q_first, k_first, high_first, low_first, squares, middle, beyond
    )  # fmt: skip
    squares = (da_second, dak_second, da_turned_second, dak_turned_second)
    dq_second, dk_second, dG_second = pairs_of_tile(
        dq_second, dk_second, dG_second, q_second, k_second, high_second, low_second, squares, middle, beyond
    )  # fmt: skip
    return half_of(dq_first, dq_second), half_of(dk_first, dk_second), dG_first, dG_second


@gluon.jit
def keep_decay(decay_s, z_s, bias, rate, count, HALF: gl.constexpr):
    """The log2-decay of a half [channels, 32], fp32, to shared memory: to make it again costs more."""
    g = softplus_decay(turned(z_s[HALF]) + bias, rate)
    row = 32 * HALF + gl.arange(0, 32, ROW)[None, :]
    decay_s[HALF].store(gl.where(row < count, g, 0.0))


@gluon.jit
def digits_of(decay_s):
    """The leading 8 bits of the decay and the next 8, of both tiles of a half."""
    g = decay_s.load(TALL)
    high = leading_bits(g)
    first, second = tiles_of(bf16(high))
    low_first, low_second = tiles_of(bf16(g - high))
    return first, low_first, second, low_second


@gluon.jit
def put_dz(dg, z_s, decay_s, bias, rate, unit, pointer, stride: gl.constexpr, count, HALF: gl.constexpr):
    """dz of a half to memory; sums over its rows of dz, and of dg times the decay."""
    g = decay_s[HALF].load(TALL)
    x = turned(z_s[HALF]) + bias
    row = 32 * HALF + gl.arange(0, 32, ROW)[None, :]
    dg = gl.where((row < count) & (g > -SHUT), dg * unit, 0.0)
    dz = dg * (-rate * reciprocal(1.0 + exp2(gl.minimum(x * -LOG2E, 126.0))))
    put_rows(pointer, dz, stride, count, HALF)
    return gl.sum(dz, 1), gl.sum(dg * g, 1) * 0.6931471805599453


@gluon.jit
def gradients_of_half(
    digits, k, between, tiles, totals, before, behind, places, unit, scale, count, H: gl.constexpr, LATE: gl.constexpr
):  # fmt: skip
    """dq, dk and db of a half to memory. between: k c of half a for the second half; for the first k c too, and what
    the second gave it. totals: decays of this half's tiles; before, behind: from the chunk's start to this half's and
    from this half's end to the chunk's, [channels, 1]. Returns what a token's decay takes from pairs and states in this
    half, the sum of dG over rows, that of what they leave after the chunk, and what half a is given."""
    q_s, state_s, dstate_s, do_s, dv_s, u_s, pairs_s, numbers_s, own_s, along_s, ones_s = tiles
    dq_ptr, dk_ptr, db_ptr = places
    high_first, low_first, high_second, low_second = digits
    t_first, t_second = totals
    HALF: gl.constexpr = 1 if LATE else 0
    per_unit = 1.0 / unit
    zero = gl.zeros([128, 32], gl.float32, TALL)
    beta = numbers_s.index(4 + HALF).load(ROW)[None, :]
    to_end = ones_s[1].permute((1, 0)).load(RIGHT)
    w_first = exp2(exponents(high_first, low_first, to_end))
    c = half_of(w_first * exp2(t_second), exp2(exponents(high_second, low_second, to_end)))
    end = times_state(dstate_s, u_s, HALF) * (c * (exp2(behind) * per_unit) * beta)
    first, second = tiles_of(k * end)
    left_first, left = gl.sum(first, 1)[:, None], gl.sum(second, 1)[:, None]
    earlier = ones_s[1].load(RIGHT)
    dg_first, dg_second = sums_of_rows(first, earlier, 2), sums_of_rows(second, earlier, 2) + left_first
    left += left_first
    from_start = ones_s[0].permute((1, 0)).load(RIGHT)
    w_second = exp2(exponents(high_second, low_second, from_start))
    r = half_of(exp2(exponents(high_first, low_first, from_start)), w_second * exp2(t_first))
    start = r * (exp2(before) * per_unit)
    dq = times_state(state_s, do_s, HALF) * start
    dk = times_state(state_s, dv_s, HALF) * -start
    q_norm = numbers_s.index(HALF).load(ROW)[None, :]
    q = turned(q_s[HALF]) * (q_norm * scale)
    dG = q * dq + k * dk
    dk += end
    if LATE:
        k_c = between
        q_r, k_r = bf16(q * r), bf16(k * r)
        from_a = times(k_c, pairs_s[1].permute((1, 0)), zero)
        dG += wide(q_r) * from_a
        dq += from_a * r
        from_a = times(k_c, pairs_s[4].permute((1, 0)), zero)
        dG += wide(k_r) * from_a
        dk += from_a * r
        to_a = times(k_r, pairs_s[4], times(q_r, pairs_s[1], zero))
    else:
        k_c, to_a = between
        dG -= wide(k_c) * to_a
        dk += to_a * c
    ones = (ones_s[2].load(RIGHT), ones_s[3].load(RIGHT))
    da_s, dak_s = pairs_s[2 * HALF], pairs_s[3 + 2 * HALF]
    dq, dk, first, second = pairs_of_half(dq, dk, dG, q, k, digits, w_first, w_second, da_s, dak_s, ones)
    own = own_s.index(HALF).load(ROW)[None, :] * (beta * per_unit)
    dq += own * k
    dk += own * q
    read = gl.sum(q * dq, 0)[None, :] * unit
    put_rows(dq_ptr, (q_norm * scale * unit) * dq - (q_norm * read / scale) * q, H * 128, count, HALF)
    known = gl.sum(k * dk, 0) * unit
    row = 32 * HALF + gl.arange(0, 32, ROW)
    twice = known + along_s.index(HALF).load(ROW)
    db = twice * (0.5 - 0.5 * numbers_s.index(4 + HALF).load(ROW))
    gl.store(db_ptr + row * H, db.to(db_ptr.dtype.element_ty), mask=row < count)
    k_norm = numbers_s.index(2 + HALF).load(ROW)[None, :]
    put_rows(dk_ptr, k_norm * (unit * dk - k * known[None, :]), H * 128, count, HALF)
    later = ones_s[0].load(RIGHT)
    after = gl.sum(second, 1)[:, None]
    dg_first += sums_of_rows(first, later, 3) + after
    dg_second += sums_of_rows(second, later, 3)
    return half_of(dg_first, dg_second), after + gl.sum(first, 1)[:, None], left, to_a


@gluon.jit
def softplus_tile_kernel(
    q_ptr,  # [N, H, K], with any stride between tokens; k, z too
    k_ptr,
    z_ptr,
    v_ptr,  # [N, H, V]; do too; dv without gaps
    do_ptr,
    dv_ptr,
    A_log_ptr,  # fp32 [H]
    dt_bias_ptr,  # fp32 [H, K]
    spans_ptr,  # int32 [M, 2]
    ones_ptr,  # [4, 16, 16]: `ones_of_tile` of `backward.py`
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
    H: gl.constexpr,
    num_warps: gl.constexpr,
):
    program = gl.program_id(0)
    h = program % H
    start = gl.load(spans_ptr + 2 * (program // H))
    count = gl.load(spans_ptr + 2 * (program // H) + 1)
    token = start.to(gl.int64)
    out = program.to(gl.int64)
    do_s = buffers(4, 32, 64, TILE)
    dv_s = buffers(4, 32, 64, TILE)
    u_s = buffers(4, 32, 64, TILE)
    q_s = buffers(2, 32, 128, TILE)
    k_s = buffers(2, 32, 128, TILE)
    z_s = buffers(2, 32, 128, TILE)
    state_s = buffers(2, 64, 128, TILE)
    dstate_s = buffers(2, 64, 128, TILE)
    pairs_s = buffers(6, 32, 32, SMALL)
    ones_s = buffers(4, 16, 16, SMALL)
    decay_s = ()
    for _ in gl.static_range(2):
        decay_s = decay_s + (gl.allocate_shared_memory(gl.float32, [128, 32], PRIVATE),)
    numbers_s = gl.allocate_shared_memory(gl.float32, [8, 32], LINE)  # norms of q, of k, beta: a and b of each
    own_s = gl.allocate_shared_memory(gl.float32, [2, 32], LINE)
    along_s = gl.allocate_shared_memory(gl.float32, [2, 32], LINE)
    fetch_blocks(do_s, do_ptr + (token * do_stride + h * 128), do_stride, count)
    fetch_blocks(u_s, u_ptr + out * (64 * 128), 128, 64)
    fetch_blocks(dv_s, dv_ptr + (token * (H * 128) + h * 128), H * 128, count)
    FLAT: gl.constexpr = gl.BlockedLayout([1], [32], [8], [0])
    each = gl.arange(0, 256, FLAT)
    async_copy.async_copy_global_to_shared(
        numbers_s._reinterpret(gl.float32, [256], LINE), norms_ptr + (out * 256 + each)
    )  # fmt: skip
    async_copy.commit_group()
    fetch_rows(z_s, z_ptr + (token * z_stride + h * 128), z_stride, count)
    fetch_rows(k_s, k_ptr + (token * k_stride + h * 128), k_stride, count)
    row, column = gl.arange(0, 16, gl.SliceLayout(1, BLOCK))[:, None], gl.arange(0, 16, gl.SliceLayout(0, BLOCK))
    for n in gl.static_range(4):
        here = ones_ptr + (256 * n + row * 16 + column[None, :])
        async_copy.async_copy_global_to_shared(ones_s[n], here)
    fetch_state(state_s, states_ptr + out * (128 * 128))
    fetch_state(dstate_s, dstates_ptr + out * (128 * 128))
    fetch_rows(q_s, q_ptr + (token * q_stride + h * 128), q_stride, count)
    async_copy.commit_group()
    channel = gl.arange(0, 128, CHANNEL)
    rate = exp2(gl.load(A_log_ptr + h).to(gl.float32) * LOG2E)
    bias = gl.load(dt_bias_ptr + h * 128 + channel)[:, None]
    at_totals = totals_ptr + (out * 512 + channel)
    t0, t1 = gl.load(at_totals)[:, None], gl.load(at_totals + 128)[:, None]
    t2, t3 = gl.load(at_totals + 256)[:, None], gl.load(at_totals + 384)[:, None]

    v = rows_of(v_ptr + (token * v_stride + h * 128), v_stride, count)

    async_copy.wait_group(1)
    barrier()
    unit = pairs_of_rows(do_s, dv_s, u_s, v, numbers_s, own_s, along_s, pairs_s)
    async_copy.wait_group(0)
    barrier()
    tiles = (q_s, state_s, dstate_s, do_s, dv_s, u_s, pairs_s, numbers_s, own_s, along_s, ones_s)
    places = (dq_ptr + (token * (H * 128) + h * 128), dk_ptr + (token * (H * 128) + h * 128), db_ptr + (token * H + h))
    through = along_channels(state_s, dstate_s)[:, None] * (exp2(t0 + t1 + t2 + t3) / unit)
    none = t0 * 0.0

    keep_decay(decay_s, z_s, bias, rate, count, 0)
    keep_decay(decay_s, z_s, bias, rate, count, 1)
    digits = digits_of(decay_s[0])
    to_end = ones_s[1].permute((1, 0)).load(RIGHT)
    c = exp2(exponents(digits[0], digits[1], to_end)) * exp2(t1)
    k = turned(k_s[0]) * numbers_s.index(2).load(ROW)[None, :]
    k_c = bf16(k * half_of(c, exp2(exponents(digits[2], digits[3], to_end))))
    k = turned(k_s[1]) * numbers_s.index(3).load(ROW)[None, :]
    dg_b, after, _, to_a = gradients_of_half(
        digits_of(decay_s[1]), k, k_c, tiles, (t2, t3), t0 + t1, none, places, unit, scale, count, H, True
    )  # fmt: skip
    k = turned(k_s[0]) * numbers_s.index(2).load(ROW)[None, :]
    dg_a, _, left, _ = gradients_of_half(
        digits_of(decay_s[0]), k, (k_c, to_a), tiles, (t0, t1), none, t2 + t3, places, unit, scale, count, H, False
    )  # fmt: skip
    dg_a += after + through
    dg_b += left + through

    dz_ptr += token * (H * 128) + h * 128
    bias_a, rate_a = put_dz(dg_a, z_s, decay_s, bias, rate, unit, dz_ptr, H * 128, count, 0)
    bias_b, rate_b = put_dz(dg_b, z_s, decay_s, bias, rate, unit, dz_ptr, H * 128, count, 1)
    gl.store(dbias_ptr + (out * 128 + channel), bias_a + bias_b)
    gl.store(drate_ptr + (out * 128 + channel), rate_a + rate_b)
