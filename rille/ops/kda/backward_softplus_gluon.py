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
Rows and columns of dA_32 are different tiles, and dA_8, dA_16 are zero between tiles, so products are of tiles, and of
blocks of 8 columns where a kind has no others. Each exponent is a sum of g that begins at its own origin, by a product
with ones: no difference of long sums.

What a token leaves in the state after the chunk stays out of dG: only later tokens decay it, and a sum that took it
back would keep its rounding. A decay that was cut off passes no gradient.

As many programs run as there are multiprocessors, each one chunk and head after another. What the next one reads is
asked for as soon as its place in shared memory is free: states and rows with value channels while half a's pairs are
still to come, rows with key channels at the end.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

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
    bf16,
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
    wide,
)
from rille.ops.kda.intra_gluon import LOG2E, SHUT, exp2, leading_bits, reciprocal, softplus_decay

FLAT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
PRIVATE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))  # fp32, rows of 32


@gluon.jit
def by(x, y, sums):
    """sums + x y for y in registers."""
    return mma_v2(gl.convert_layout(x, LEFT, assert_trivial=True), y, sums)


@gluon.jit
def halves_of(x):
    """Rows [channels, 2 R] as two times R."""
    R: gl.constexpr = x.shape[1] // 2
    first, second = gl.split(gl.reshape(x, [128, 2, R]).permute((0, 2, 1)))
    return gl.convert_layout(first, TALL, assert_trivial=True), gl.convert_layout(second, TALL, assert_trivial=True)


@gluon.jit
def joined(first, second):
    R: gl.constexpr = first.shape[1]
    x = gl.reshape(gl.join(first, second).permute((0, 2, 1)), [128, 2 * R])
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
def columns_of(y):
    """y [16, 16] for the first block of 8 columns and the second."""
    first, second = gl.split(gl.reshape(y, [16, 2, 8]).permute((0, 2, 1)))
    return gl.convert_layout(first, RIGHT, assert_trivial=True), gl.convert_layout(second, RIGHT, assert_trivial=True)


@gluon.jit
def in_block(y, BLOCK_OF_8: gl.constexpr):
    """y [16, 8] in one of its two blocks of rows, else 0. A register holds parts of one block: nothing is compared."""
    row = gl.arange(0, 16, gl.SliceLayout(1, RIGHT))[:, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, RIGHT))[None, :]
    return gl.where((row + 0 * column) // 8 == BLOCK_OF_8, y, gl.zeros([16, 8], gl.bfloat16, RIGHT))


@gluon.jit
def exponents(high, low, ones):
    """[channels, columns]: sums of g = high + low [channels, 16] over the rows that a column of ones has."""
    return by(high, ones, by(low, ones, gl.zeros([128, ones.shape[1]], gl.float32, TALL)))


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
    """Adds to dq, dk, dG [channels, 16] what the pairs inside a tile give. squares: dA, dAk and both transposed, zero
    where a row is not after its column. So rows of the first block meet columns of that one alone; those of the second
    take k over there, and k down in their own."""
    da, dak, da_turned, dak_turned = squares
    zero = gl.zeros([128, 8], gl.float32, TALL)
    x = exponents(high, low, middle)
    over = exp2(exponents(high, low, beyond))
    up, down = exp2(x), exp2(-x)
    k_down = bf16(k * down)
    k_first, _ = halves_of(k)
    _, down_second = halves_of(k_down)
    k_over = bf16(k_first * over)
    k_mixed = joined(k_over, down_second)
    q_up, k_up = bf16(q * up), bf16(k * up)
    first, second = columns_of(da_turned)
    sums = joined(by(k_down, first, zero), by(k_mixed, second, zero))
    dG += wide(q_up) * sums
    dq += sums * up
    first, second = columns_of(dak_turned)
    sums = joined(by(k_down, first, zero), by(k_mixed, second, zero))
    dG += wide(k_up) * sums
    dk += sums * up
    first, second = columns_of(da)
    k_block, k_second = columns_of(dak)
    sums = by(k_up, in_block(k_block, 0), by(q_up, in_block(first, 0), zero))
    sums = joined(sums, by(k_up, k_second, by(q_up, second, zero)))
    dG -= wide(k_down) * sums
    dk += sums * down
    sums = by(k_up, in_block(k_block, 1), by(q_up, in_block(first, 1), zero))
    dG_first, dG_second = halves_of(dG)
    dk_first, dk_second = halves_of(dk)
    return dq, joined(dk_first + sums * over, dk_second), joined(dG_first - wide(k_over) * sums, dG_second)


@gluon.jit
def pairs_of_half(dq, dk, dG, q, k, digits, w_first, w_second, da_s, dak_s, ones):
    """Adds to dq, dk, dG what the pairs inside a half give; returns dG tile by tile. w: the decay between a row and the
    border of the tiles."""
    high_first, low_first, high_second, low_second = digits
    dq_first, dq_second = halves_of(dq)
    dk_first, dk_second = halves_of(dk)
    dG_first, dG_second = halves_of(dG)
    q_first, q_second = halves_of(q)
    k_first, k_second = halves_of(k)
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
    return joined(dq_first, dq_second), joined(dk_first, dk_second), dG_first, dG_second


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
    first, second = halves_of(bf16(high))
    low_first, low_second = halves_of(bf16(g - high))
    return first, low_first, second, low_second


@gluon.jit
def put_dz(dg, z_s, decay_s, bias, rate, unit, pointer, stride: gl.constexpr, count, HALF: gl.constexpr):
    """dz of a half to memory; sums over its rows of dz, and of dg times the decay."""
    g = decay_s[HALF].load(TALL)
    x = turned(z_s[HALF]) + bias
    row = 32 * HALF + gl.arange(0, 32, ROW)[None, :]
    dg = gl.where(g > -SHUT, dg, 0.0)  # where there is no token g is 0
    dz = dg * gl.where(row < count, rate * -unit, 0.0) * reciprocal(1.0 + exp2(x * -LOG2E))
    put_rows(pointer, dz, stride, count, HALF)
    return gl.sum(dz, 1), gl.sum(dg * g, 1) * (unit * 0.6931471805599453)


@gluon.jit
def fetch_values(tiles, pointers, strides, item, first, count, H: gl.constexpr):
    """Rows with value channels of a chunk and head, its norms, and in a second group its states, to shared memory."""
    _, state_s, dstate_s, do_s, dv_s, u_s, _, _, _, _, _, asked_s = tiles
    _, _, _, do_ptr, dv_ptr, u_ptr, states_ptr, dstates_ptr, norms_ptr = pointers
    _, _, _, do_stride = strides
    token, out, h = first.to(gl.int64), item.to(gl.int64), item % H
    fetch_blocks(do_s, do_ptr + (token * do_stride + h * 128), do_stride, count)
    fetch_blocks(u_s, u_ptr + out * (64 * 128), 128, 64)
    fetch_blocks(dv_s, dv_ptr + (token * (H * 128) + h * 128), H * 128, count)
    here = norms_ptr + (out * 256 + gl.arange(0, 256, FLAT))
    async_copy.async_copy_global_to_shared(asked_s._reinterpret(gl.float32, [256], LINE), here)
    async_copy.commit_group()
    fetch_state(state_s, states_ptr + out * (128 * 128))
    fetch_state(dstate_s, dstates_ptr + out * (128 * 128))
    async_copy.commit_group()


@gluon.jit
def fetch_keys(tiles, z_s, k_s, pointers, strides, item, first, count, H: gl.constexpr):
    """Its rows with key channels."""
    q_ptr, k_ptr, z_ptr, _, _, _, _, _, _ = pointers
    q_stride, k_stride, z_stride, _ = strides
    token, h = first.to(gl.int64), item % H
    fetch_rows(z_s, z_ptr + (token * z_stride + h * 128), z_stride, count)
    fetch_rows(k_s, k_ptr + (token * k_stride + h * 128), k_stride, count)
    fetch_rows(tiles[0], q_ptr + (token * q_stride + h * 128), q_stride, count)
    async_copy.commit_group()


@gluon.jit
def gradients_of_half(
    digits, k, between, tiles, totals, before, behind, places, upcoming, unit, scale, count,
    H: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """dq, dk and db of a half to memory. between: k c of half a for the second half; for the first k c too, and what
    the second gave it. totals: decays of this half's tiles; before, behind: from the chunk's start to this half's and
    from this half's end to the chunk's, [channels, 1]. Returns what a token's decay takes from pairs and states in this
    half, the sum of dG over rows, that of what they leave after the chunk, and what half a is given."""
    q_s, state_s, dstate_s, do_s, dv_s, u_s, pairs_s, numbers_s, own_s, along_s, ones_s, _ = tiles
    dq_ptr, dk_ptr, db_ptr = places
    high_first, low_first, high_second, low_second = digits
    t_first, t_second = totals
    HALF: gl.constexpr = 1 if LATE else 0
    per_unit = 1.0 / unit
    zero = gl.zeros([128, 32], gl.float32, TALL)
    beta = numbers_s.index(4 + HALF).load(ROW)[None, :]
    to_end = ones_s[1].permute((1, 0)).load(RIGHT)
    w_first = exp2(exponents(high_first, low_first, to_end))
    c = joined(w_first * exp2(t_second), exp2(exponents(high_second, low_second, to_end)))
    end = times_state(dstate_s, u_s, HALF) * (c * (exp2(behind) * per_unit) * beta)
    first, second = halves_of(k * end)
    left_first, left = gl.sum(first, 1)[:, None], gl.sum(second, 1)[:, None]
    earlier = ones_s[1].load(RIGHT)
    dg_first, dg_second = sums_of_rows(first, earlier, 2), sums_of_rows(second, earlier, 2) + left_first
    left += left_first
    from_start = ones_s[0].permute((1, 0)).load(RIGHT)
    w_second = exp2(exponents(high_second, low_second, from_start))
    r = joined(exp2(exponents(high_first, low_first, from_start)), w_second * exp2(t_first))
    start = r * (exp2(before) * per_unit)
    dq = times_state(state_s, do_s, HALF) * start
    dk = times_state(state_s, dv_s, HALF) * -start
    if not LATE:
        pointers, strides, item, first, there = upcoming
        gl.thread_barrier()  # nothing more is read of states and rows of values
        fetch_values(tiles, pointers, strides, item, first, there, H)
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
    beyond, _ = columns_of(ones_s[3].load(RIGHT))
    ones = (ones_s[2].load(RIGHT), beyond)
    da_s, dak_s = pairs_s[2 * HALF], pairs_s[3 + 2 * HALF]
    dq, dk, first, second = pairs_of_half(dq, dk, dG, q, k, digits, w_first, w_second, da_s, dak_s, ones)
    own = own_s.index(HALF).load(ROW)[None, :] * (beta * per_unit)
    dq += own * k
    dk += own * q
    read = gl.sum(q * dq, 0)[None, :] * (1.0 / (scale * scale))
    put_rows(dq_ptr, (q_norm * (scale * unit)) * (dq - read * q), H * 128, count, HALF)
    known = gl.sum(k * dk, 0)
    row = 32 * HALF + gl.arange(0, 32, ROW)
    twice = known * unit + along_s.index(HALF).load(ROW)
    db = twice * (0.5 - 0.5 * numbers_s.index(4 + HALF).load(ROW))
    gl.store(db_ptr + row * H, db.to(db_ptr.dtype.element_ty), mask=row < count)
    k_norm = numbers_s.index(2 + HALF).load(ROW)[None, :]
    put_rows(dk_ptr, (k_norm * unit) * (dk - known[None, :] * k), H * 128, count, HALF)
    later = ones_s[0].load(RIGHT)
    after = gl.sum(second, 1)[:, None]
    dg_first += sums_of_rows(first, later, 3) + after
    dg_second += sums_of_rows(second, later, 3)
    return joined(dg_first, dg_second), after + gl.sum(first, 1)[:, None], left, to_a


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
    items,  # chunks times heads; a program takes every so-manyth
    H: gl.constexpr,
    num_warps: gl.constexpr,
):
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
    decay_a_s = gl.allocate_shared_memory(gl.float32, [128, 32], PRIVATE)
    decay_s = (decay_a_s, gl.allocate_shared_memory(gl.float32, [128, 32], PRIVATE))
    asked_s = gl.allocate_shared_memory(gl.float32, [8, 32], LINE)  # norms of q, of k, beta: a and b of each
    numbers_s = gl.allocate_shared_memory(gl.float32, [8, 32], LINE)  # the same, of the chunk in work
    own_s = gl.allocate_shared_memory(gl.float32, [2, 32], LINE)
    along_s = gl.allocate_shared_memory(gl.float32, [2, 32], LINE)
    tiles = (q_s, state_s, dstate_s, do_s, dv_s, u_s, pairs_s, numbers_s, own_s, along_s, ones_s, asked_s)
    pointers = (q_ptr, k_ptr, z_ptr, do_ptr, dv_ptr, u_ptr, states_ptr, dstates_ptr, norms_ptr)
    strides = (q_stride, k_stride, z_stride, do_stride)
    row, column = gl.arange(0, 16, gl.SliceLayout(1, BLOCK))[:, None], gl.arange(0, 16, gl.SliceLayout(0, BLOCK))
    for n in gl.static_range(4):
        here = ones_ptr + (256 * n + row * 16 + column[None, :])
        async_copy.async_copy_global_to_shared(ones_s[n], here)
    program = gl.program_id(0)
    first = gl.load(spans_ptr + 2 * (program // H))
    there = gl.load(spans_ptr + 2 * (program // H) + 1)
    fetch_values(tiles, pointers, strides, program, first, there, H)
    fetch_keys(tiles, z_s, k_s, pointers, strides, program, first, there, H)
    channel = gl.arange(0, 128, CHANNEL)
    for further in range(0, items - program, gl.num_programs(0)):
        item = program + further
        h = item % H
        start = gl.load(spans_ptr + 2 * (item // H))
        count = gl.load(spans_ptr + 2 * (item // H) + 1)
        token = start.to(gl.int64)
        out = item.to(gl.int64)
        following = gl.minimum(item + gl.num_programs(0), items - 1)  # of the last item nobody waits for what it asks
        following_start = gl.load(spans_ptr + 2 * (following // H))
        following_count = gl.load(spans_ptr + 2 * (following // H) + 1)
        rate = exp2(gl.load(A_log_ptr + h).to(gl.float32) * LOG2E)
        bias = gl.load(dt_bias_ptr + h * 128 + channel)[:, None]
        at_totals = totals_ptr + (out * 512 + channel)
        t0, t1 = gl.load(at_totals)[:, None], gl.load(at_totals + 128)[:, None]
        t2, t3 = gl.load(at_totals + 256)[:, None], gl.load(at_totals + 384)[:, None]
        v = rows_of(v_ptr + (token * v_stride + h * 128), v_stride, count)

        async_copy.wait_group(2)
        gl.thread_barrier()
        numbers_s._reinterpret(gl.float32, [256], LINE).store(
            asked_s._reinterpret(gl.float32, [256], LINE).load(FLAT)
        )  # fmt: skip
        unit = pairs_of_rows(do_s, dv_s, u_s, v, asked_s, own_s, along_s, pairs_s)
        async_copy.wait_group(0)
        gl.thread_barrier()
        at = token * (H * 128) + h * 128
        places = (dq_ptr + at, dk_ptr + at, db_ptr + (token * H + h))
        through = along_channels(state_s, dstate_s)[:, None] * (exp2(t0 + t1 + t2 + t3) / unit)
        none = t0 * 0.0

        keep_decay(decay_s, z_s, bias, rate, count, 0)
        keep_decay(decay_s, z_s, bias, rate, count, 1)
        digits = digits_of(decay_s[0])
        to_end = ones_s[1].permute((1, 0)).load(RIGHT)
        c = exp2(exponents(digits[0], digits[1], to_end)) * exp2(t1)
        k = turned(k_s[0]) * numbers_s.index(2).load(ROW)[None, :]
        k_c = bf16(k * joined(c, exp2(exponents(digits[2], digits[3], to_end))))
        upcoming = (pointers, strides, following, following_start, following_count)
        k = turned(k_s[1]) * numbers_s.index(3).load(ROW)[None, :]
        dg_b, after, _left, to_a = gradients_of_half(
            digits_of(decay_s[1]), k, k_c, tiles, (t2, t3), t0 + t1, none, places, upcoming, unit, scale, count, H, True
        )  # fmt: skip
        k = turned(k_s[0]) * numbers_s.index(2).load(ROW)[None, :]
        dg_a, _after, left, _given = gradients_of_half(
            digits_of(decay_s[0]), k, (k_c, to_a), tiles, (t0, t1), none, t2 + t3, places, upcoming,
            unit, scale, count, H, False,
        )  # fmt: skip
        dg_a += after + through
        dg_b += left + through

        bias_a, rate_a = put_dz(dg_a, z_s, decay_s, bias, rate, unit, dz_ptr + at, H * 128, count, 0)
        bias_b, rate_b = put_dz(dg_b, z_s, decay_s, bias, rate, unit, dz_ptr + at, H * 128, count, 1)
        gl.store(dbias_ptr + (out * 128 + channel), bias_a + bias_b)
        gl.store(drate_ptr + (out * 128 + channel), rate_a + rate_b)
        gl.thread_barrier()
        fetch_keys(tiles, z_s, k_s, pointers, strides, following, following_start, following_count, H)
    async_copy.wait_group(0)
