"""The last kernel of the KDA backward in Gluon, for K = V = 128 and a bounded gate: the arithmetic of
`backward_local.py`, which is its twin and has the equations.

The twin waits. Its products are wgmma's, forty one after another, each behind a barrier of all threads and a fence, and
its loads are asked for where they are used. Here everything that is read comes into shared memory by asynchronous
copies, all asked for at once. Tiles are [channels, 32 rows] as there, a warp has 16 channels, and products are of
warps: the left operand of each is registers of the same warp, the right one is read from shared memory, and no thread
waits for another but for sums over channels and for rows on their way out.

Row sums over value channels of two tiles (the diagonals of dA and of dV V^T) are sums of products, element by element;
so is the diagonal of S D^T, channel by channel.
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
from rille.ops.kda.numbers_gluon import LOG2E, bf16, exp2, leading_bits, reciprocal, wide

TALL: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1], [16, 8]))  # [channels, 32]
LEFT: gl.constexpr = gl.constexpr(gl.DotOperandLayout(0, TALL, 2))
RIGHT: gl.constexpr = gl.constexpr(gl.DotOperandLayout(1, TALL, 2))
CHANNEL: gl.constexpr = gl.constexpr(gl.SliceLayout(1, TALL))
ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(0, TALL))
SQUARE: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [2, 4], [16, 8]))  # [32, 32]
WIDE: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0]))  # [rows, 128] as in memory
BLOCK: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))  # [32, 64]
TILE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))  # in shared memory: rows of 64 or more
SMALL: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [1, 0]))  # rows of 32
LINE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def buffers(COUNT: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """Shared memory for bf16, each tile by itself: the compiler orders by barriers what touches parts of one."""
    found = ()
    for _ in gl.static_range(COUNT):
        found = found + (gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], LAYOUT),)
    return found


@gluon.jit
def fetch_rows(smem, pointer, stride, count):
    """Rows of a chunk into both halves of smem [2, 32, 128]; zeros where there is no token."""
    row = gl.arange(0, 32, gl.SliceLayout(1, WIDE))[:, None]
    channel = gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :]
    for half in gl.static_range(2):
        at = row + 32 * half
        here = pointer + (at * stride + channel)
        async_copy.async_copy_global_to_shared(smem[half], here, (at < count) & (channel >= 0))


@gluon.jit
def fetch_blocks(smem, pointer, stride, count):
    """The same in blocks of 64 channels, smem [4, 32, 64]."""
    row = gl.arange(0, 32, gl.SliceLayout(1, BLOCK))[:, None]
    channel = gl.arange(0, 64, gl.SliceLayout(0, BLOCK))[None, :]
    for n in gl.static_range(4):
        at = row + 32 * (n // 2)
        here = pointer + (at * stride + channel + 64 * (n % 2))
        async_copy.async_copy_global_to_shared(smem[n], here, (at < count) & (channel >= 0))


@gluon.jit
def fetch_state(smem, pointer):
    """A state [128, 128] into smem [2, 64, 128]."""
    value = gl.arange(0, 64, gl.SliceLayout(1, WIDE))[:, None]
    channel = gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :]
    for n in gl.static_range(2):
        async_copy.async_copy_global_to_shared(smem[n], pointer + ((value + 64 * n) * 128 + channel))


@gluon.jit
def pairs(left_s, right_s, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """[32, 32]: rows of one half of left times rows of one half of right."""
    sums = gl.zeros([32, 32], gl.float32, SQUARE)
    for n in gl.static_range(2):
        left = left_s[2 * ROWS + n].load(gl.DotOperandLayout(0, SQUARE, 2))
        right = right_s[2 * COLUMNS + n].permute((1, 0)).load(gl.DotOperandLayout(1, SQUARE, 2))
        sums = mma_v2(left, right, sums)
    return sums


@gluon.jit
def row_sums(x_s, y_s, HALF: gl.constexpr):
    """[32]: sum over channels of the product of two tiles, element by element."""
    first = wide(x_s[2 * HALF].load(BLOCK)) * wide(y_s[2 * HALF].load(BLOCK))
    second = wide(x_s[2 * HALF + 1].load(BLOCK)) * wide(y_s[2 * HALF + 1].load(BLOCK))
    return gl.sum(first + second, 1)


@gluon.jit
def largest(a, b, c):
    return gl.maximum(gl.maximum(gl.abs(a), gl.abs(b)), gl.abs(c))


@gluon.jit
def turned(x_s):
    """x^T in fp32: the layout of a left operand is that of a product."""
    return wide(gl.convert_layout(x_s.permute((1, 0)).load(LEFT), TALL, assert_trivial=True))


@gluon.jit
def times(x, y_s, sums):
    """sums + x y for x [channels, 32] in bf16."""
    return mma_v2(gl.convert_layout(x, LEFT, assert_trivial=True), y_s.load(RIGHT), sums)


@gluon.jit
def times_ones(x, ones_s, PIECES: gl.constexpr):
    """x times a matrix of 0, 1 and -1, with 8 bits of x a piece."""
    high = leading_bits(x)
    rest = x - high
    zero = gl.zeros([128, 32], gl.float32, TALL)
    if PIECES == 2:
        sums = times(bf16(rest), ones_s, zero)
    else:
        middle = leading_bits(rest)
        sums = times(bf16(middle), ones_s, times(bf16(rest - middle), ones_s, zero))
    return times(bf16(high), ones_s, sums)


@gluon.jit
def times_state(state_s, rows_s, HALF: gl.constexpr):
    """state^T rows^T, [channels, 32]."""
    sums = gl.zeros([128, 32], gl.float32, TALL)
    for n in gl.static_range(2):
        rows = rows_s[2 * HALF + n].permute((1, 0)).load(RIGHT)
        sums = mma_v2(state_s[n].permute((1, 0)).load(LEFT), rows, sums)
    return sums


@gluon.jit
def along_channels(state_s, dstate_s):
    """[channels]: sum over value channels of S D."""
    sums = gl.zeros([64, 128], gl.float32, WIDE)
    for n in gl.static_range(2):
        sums += wide(state_s[n].load(WIDE)) * wide(dstate_s[n].load(WIDE))
    return gl.convert_layout(gl.sum(sums, 0), CHANNEL)


@gluon.jit
def put_rows(pointer, x, stride: gl.constexpr, count, HALF: gl.constexpr):
    """Rows of a half, x [channels, 32], to memory."""
    x = gl.convert_layout(bf16(x).permute((1, 0)), WIDE)
    row = 32 * HALF + gl.arange(0, 32, gl.SliceLayout(1, WIDE))[:, None]
    channel = gl.arange(0, 128, gl.SliceLayout(0, WIDE))[None, :]
    gl.store(pointer + (row * stride + channel), x, mask=(row < count) & (channel >= 0))


@gluon.jit
def decay_of(z_s, bias, rate, lower_bound, count, HALF: gl.constexpr):
    """log2-decay, [channels, 32]."""
    x = turned(z_s[HALF]) + bias
    g = (lower_bound * LOG2E) * reciprocal(1.0 + exp2(x * (rate * -LOG2E)))
    row = 32 * HALF + gl.arange(0, 32, ROW)[None, :]
    return gl.where(row < count, g, 0.0)


@gluon.jit
def put_dz(
    dg, z_s, bias, rate, lower_bound, unit, pointer, stride: gl.constexpr, count, HALF: gl.constexpr
):  # fmt: skip
    """dz of a half to memory; its sums over rows, by itself and times z + bias. `gate_slope` says why this form."""
    x = turned(z_s[HALF]) + bias
    below = exp2(gl.minimum(x * (rate * -LOG2E), 126.0))
    opened = reciprocal(1.0 + below)
    row = 32 * HALF + gl.arange(0, 32, ROW)[None, :]
    dz = gl.where(row < count, dg * unit, 0.0) * ((lower_bound * rate) * (opened * (opened * below)))
    put_rows(pointer, dz, stride, count, HALF)
    return gl.sum(dz, 1), gl.sum(dz * x, 1)


@gluon.jit
def rows_of(pointer, stride, count):
    """Rows of a chunk as `fetch_blocks` lays them out, in registers."""
    row = gl.arange(0, 32, gl.SliceLayout(1, BLOCK))[:, None]
    channel = gl.arange(0, 64, gl.SliceLayout(0, BLOCK))[None, :]
    found = ()
    for n in gl.static_range(4):
        at = row + 32 * (n // 2)
        here = pointer + (at * stride + channel + 64 * (n % 2))
        found = found + (gl.load(here, mask=(at < count) & (channel >= 0), other=0.0),)
    return found


@gluon.jit
def pairs_of_rows(do_s, dv_s, u_s, v, numbers_s, own_s, along_s, pairs_s):
    """dA and dAk below the diagonal in units of which 32 are their largest, in blocks aa, ba, bb; the diagonal of dA
    without beta, row by row, and sum_V dV v. Returns the unit."""
    for half in gl.static_range(2):
        own_s.index(half).store(row_sums(do_s, u_s, half))
        sums = gl.zeros([32, 64], gl.float32, BLOCK)
        for n in gl.static_range(2):
            sums += wide(dv_s[2 * half + n].load(BLOCK)) * wide(v[2 * half + n])
        along_s.index(half).store(gl.sum(sums, 1))
    i, j = gl.arange(0, 32, gl.SliceLayout(1, SQUARE))[:, None], gl.arange(0, 32, gl.SliceLayout(0, SQUARE))[None, :]
    beta_a = numbers_s.index(4).load(gl.SliceLayout(0, SQUARE))[None, :]
    beta_b = numbers_s.index(5).load(gl.SliceLayout(0, SQUARE))[None, :]
    aa = gl.where(i > j, pairs(do_s, u_s, 0, 0), 0.0) * beta_a
    ba = pairs(do_s, u_s, 1, 0) * beta_a
    bb = gl.where(i > j, pairs(do_s, u_s, 1, 1), 0.0) * beta_b
    k_aa = gl.where(i > j, pairs(dv_s, u_s, 0, 0), 0.0) * -beta_a
    k_ba = pairs(dv_s, u_s, 1, 0) * -beta_a
    k_bb = gl.where(i > j, pairs(dv_s, u_s, 1, 1), 0.0) * -beta_b
    barrier()
    own_a = own_s.index(0).load(gl.SliceLayout(0, SQUARE))[None, :] * beta_a
    own_b = own_s.index(1).load(gl.SliceLayout(0, SQUARE))[None, :] * beta_b
    size = gl.maximum(largest(aa, ba, bb), largest(k_aa, k_ba, k_bb))
    size = gl.maximum(size, gl.maximum(gl.abs(own_a), gl.abs(own_b)))
    unit = gl.maximum(gl.max(gl.max(size, 1), 0), 1e-20) * 0.03125
    per_unit = 1.0 / unit
    pairs_s[0].store((aa * per_unit).to(gl.bfloat16))
    pairs_s[1].store((ba * per_unit).to(gl.bfloat16))
    pairs_s[2].store((bb * per_unit).to(gl.bfloat16))
    pairs_s[3].store((k_aa * per_unit).to(gl.bfloat16))
    pairs_s[4].store((k_ba * per_unit).to(gl.bfloat16))
    pairs_s[5].store((k_bb * per_unit).to(gl.bfloat16))
    barrier()
    return unit


@gluon.jit
def gradients_of_half(
    x, k, between, tiles, vectors, places, unit, scale, count, H: gl.constexpr, LATE: gl.constexpr
):  # fmt: skip
    """dq, dk and db of a half to memory. between: k c of half a for the second half, q r and k r of half b for the
    first; k c too. vectors: exponents from the start and to the end, the decay of tile b (for half b of tile c), all
    [channels, 1]. Returns dG, what rows leave after the chunk summed over them, and q r and k r."""
    q_s, state_s, dstate_s, do_s, dv_s, u_s, pairs_s, numbers_s, own_s, along_s = tiles
    to_start, to_end, over = vectors
    dq_ptr, dk_ptr, db_ptr = places
    HALF: gl.constexpr = 1 if LATE else 0
    per_unit = 1.0 / unit
    zero = gl.zeros([128, 32], gl.float32, TALL)
    da_s, dak_s = pairs_s[2 * HALF], pairs_s[3 + 2 * HALF]
    over_s, over_k_s = pairs_s[1], pairs_s[4]
    beta = numbers_s.index(4 + HALF).load(ROW)[None, :]
    up, down = exp2(x), exp2(-x)
    k_down = bf16(k * down)
    from_start = exp2(to_start) * per_unit
    dq = times(k_down, da_s.permute((1, 0)), times_state(state_s, do_s, HALF) * from_start)
    dk = times(k_down, dak_s.permute((1, 0)), times_state(state_s, dv_s, HALF) * -from_start)
    q_norm = numbers_s.index(HALF).load(ROW)[None, :]
    q = turned(q_s[HALF]) * (q_norm * scale)
    q_up, k_up = bf16(q * up), bf16(k * up)
    dG = wide(q_up) * dq + wide(k_up) * dk
    own = own_s.index(HALF).load(ROW)[None, :] * (beta * per_unit)
    if LATE:
        k_c = between
        q_r, k_r = bf16(q * up * over), bf16(k * up * over)
        from_a = times(k_c, over_s.permute((1, 0)), zero)
        dG += wide(q_r) * from_a
        dq += from_a * over
        from_a = times(k_c, over_k_s.permute((1, 0)), zero)
        dG += wide(k_r) * from_a
        dk += from_a * over
    else:
        k_c, q_r, k_r = between
    dq = dq * up + own * k
    dk = dk * up + own * q
    read = gl.sum(q * dq, 0)[None, :] * unit
    put_rows(dq_ptr, (q_norm * scale * unit) * dq - (q_norm * read / scale) * q, H * 128, count, HALF)
    end = times_state(dstate_s, u_s, HALF) * (exp2(to_end) * per_unit) * beta
    kept = k * down * end
    inside = times(k_up, dak_s, times(q_up, da_s, zero))
    dG -= wide(k_down) * inside + kept
    if LATE:
        dk += (end + inside) * down
    else:
        to_b = times(k_r, over_k_s, times(q_r, over_s, zero))
        dG -= wide(k_c) * to_b
        dk += (end + inside + to_b * over) * down
    known = gl.sum(k * dk, 0) * unit
    row = 32 * HALF + gl.arange(0, 32, ROW)
    twice = known + along_s.index(HALF).load(ROW)
    db = twice * (0.5 - 0.5 * numbers_s.index(4 + HALF).load(ROW))
    gl.store(db_ptr + row * H, db.to(db_ptr.dtype.element_ty), mask=row < count)
    k_norm = numbers_s.index(2 + HALF).load(ROW)[None, :]
    put_rows(dk_ptr, k_norm * (unit * dk - k * known[None, :]), H * 128, count, HALF)
    return dG, gl.sum(kept, 1)[:, None], q_r, k_r


@gluon.jit
def local_tile_kernel(
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
    ones_s = buffers(2, 32, 32, SMALL)  # anchors, sums over later rows
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
    row, column = gl.arange(0, 32, gl.SliceLayout(1, BLOCK))[:, None], gl.arange(0, 32, gl.SliceLayout(0, BLOCK))
    for n in gl.static_range(2):
        here = ones_ptr + (1024 * (n + 1) + row * 32 + column[None, :])
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
    tiles = (q_s, state_s, dstate_s, do_s, dv_s, u_s, pairs_s, numbers_s, own_s, along_s)
    places = (dq_ptr + (token * (H * 128) + h * 128), dk_ptr + (token * (H * 128) + h * 128), db_ptr + (token * H + h))
    carried = along_channels(state_s, dstate_s)[:, None] * (exp2(t0 + t1 + t2 + t3) / unit)
    anchors_s, later_s = ones_s[0], ones_s[1]

    x_a = times_ones(decay_of(z_s, bias, rate, lower_bound, count, 0), anchors_s, 2)
    k_a = turned(k_s[0]) * numbers_s.index(2).load(ROW)[None, :]
    k_c = bf16(k_a * exp2(gl.minimum(t1 - x_a, 0.0)))

    x_b = times_ones(decay_of(z_s, bias, rate, lower_bound, count, 1), anchors_s, 2)
    k_b = turned(k_s[1]) * numbers_s.index(3).load(ROW)[None, :]
    vectors = (t0 + t1 + t2, t3, exp2(t2))
    dG, kept, q_r, k_r = gradients_of_half(x_b, k_b, k_c, tiles, vectors, places, unit, scale, count, H, True)
    carried += kept
    dg_b = times_ones(dG, later_s, 3)
    after = gl.sum(dG, 1)[:, None]

    vectors = (t0, t1 + t2 + t3, exp2(t1))
    between = (k_c, q_r, k_r)
    dG, kept, _, _ = gradients_of_half(x_a, k_a, between, tiles, vectors, places, unit, scale, count, H, False)
    carried += kept
    dg_a = times_ones(dG, later_s, 3) + (after + carried)
    dg_b += carried

    dz_ptr += token * (H * 128) + h * 128
    bias_a, rate_a = put_dz(dg_a, z_s, bias, rate, lower_bound, unit, dz_ptr, H * 128, count, 0)
    bias_b, rate_b = put_dz(dg_b, z_s, bias, rate, lower_bound, unit, dz_ptr, H * 128, count, 1)
    gl.store(dbias_ptr + (out * 128 + channel), bias_a + bias_b)
    gl.store(drate_ptr + (out * 128 + channel), rate_a + rate_b)
