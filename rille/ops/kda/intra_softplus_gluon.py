"""The first kernel of `intra.py` for the softplus gate in Gluon: the same arithmetic, with layouts and stages placed by
hand.

K / 16 warps. In the first half a thread holds 16 rows, one tile, of two channels: the sums of g run inside a thread,
and only the totals of the tiles pass through shared memory. q, k and z come by TMA; the operands of the products take
their places. The inverse is that of `solve_gluon.py`.

The four parts of a tile's rows are the halves of its blocks of 8: the middle of a block is the border between two
parts, sums run over 4 rows, and all other origins are reached by factors that a channel's rows share. Two blocks of 8
need no rows of their own: from the middle of the second to a column of the first no factor exceeds 1, and rows measured
from there are at most 2^84, so that what underflows is below 2^-42. L is made first and A then, with q in the places of
k's rows, so that two programs still share a multiprocessor.

Gluon has no interpreter: `intra_kernel` is the twin that the tests run, and on a GPU both must agree.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rille.ops.barriers_gluon import barrier, give_up
from rille.ops.kda.numbers_gluon import LOG2E, add, exp2, inverse_root, reciprocal, softplus_decay
from rille.ops.kda.solve_gluon import SQUARE_S, invert

PARTS: gl.constexpr = gl.constexpr(4)  # of a tile's rows: as many as a thread keeps in registers at a time, R = 4


@gluon.constexpr_function
def square_layout(width):
    """The layout of a product [64, 64] of wgmma whose rows and columns are numbered part, tile, row, in the order of
    tokens: tile, part, row. The bits of both numbers, lowest first, change places."""
    token = [1, 2, 16, 32, 4, 8]
    column = [[0, token[n]] for n in range(6)]
    row = [[token[n], 0] for n in range(6)]
    registers = [column[0], row[3], *column[3:]]
    lanes = [column[1], column[2], row[0], row[1], row[2]]
    warps = [row[4], row[5]]
    if width == 2:
        warps.append(registers.pop())
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 64])


@gluon.jit
def cut_tail(x, count, value, K: gl.constexpr, WARPS: gl.constexpr):
    """Overwrite the rows of x [64, K] in shared memory that hold no token."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [WARPS, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    held = x.load(WIDE)
    x.store(gl.where((row < count)[:, None], held, gl.full([64, K], value, gl.float32, WIDE).to(held.dtype)))


@gluon.jit
def row_factor(x, K: gl.constexpr, WARPS: gl.constexpr):
    """1 / |row| of x [64, K] in shared memory."""
    ROWS: gl.constexpr = gl.BlockedLayout([1, K // 4], [8, 4], [WARPS, 1], [1, 0])
    held = x.load(ROWS).to(gl.float32)
    return inverse_root(gl.sum(held * held, 1) + 1e-6)


@gluon.jit
def tiles_of(x, TILES: gl.constexpr, FLAT: gl.constexpr, K: gl.constexpr):
    return gl.convert_layout(gl.reshape(x.load(FLAT), [4, 16, K]), TILES, assert_trivial=True)


@gluon.jit
def halves_of(x, PART: gl.constexpr):
    """First and second half of the rows of each tile: [4, R, K] as two [4, R / 2, K], in registers."""
    R: gl.constexpr = x.shape[1]
    K: gl.constexpr = x.shape[2]
    first, second = gl.split(gl.reshape(x, [4, 2, R // 2, K]).permute((0, 2, 3, 1)))
    return gl.convert_layout(first, PART, assert_trivial=True), gl.convert_layout(second, PART, assert_trivial=True)


@gluon.jit
def quarters_of(x, PART: gl.constexpr):
    WARPS: gl.constexpr = PART.warps_per_cta
    HALF: gl.constexpr = gl.BlockedLayout([1, 8, 2], [1, 1, 32], WARPS, [2, 1, 0])
    first, second = halves_of(x, HALF)
    a, b = halves_of(first, PART)
    c, d = halves_of(second, PART)
    return a, b, c, d


@gluon.jit
def put(target, x, part, R: gl.constexpr, K: gl.constexpr):
    """Rows [4, R, K] into their place of target [64, K], where parts follow one another."""
    target.slice(part * 4 * R, 4 * R, 0).store(gl.reshape(x.to(target.dtype), [4 * R, K]))


@gluon.jit
def in_order(x, LAYOUT: gl.constexpr):
    """Rows and columns of a product of parts back in the order of tokens."""
    R: gl.constexpr = 16 // PARTS
    x = gl.reshape(x, [PARTS, 4, R, PARTS, 4, R]).permute((1, 0, 2, 4, 3, 5))
    return gl.convert_layout(gl.reshape(x, [64, 64]), LAYOUT, assert_trivial=True)


@gluon.jit
def from_middle_of_8(g, PART: gl.constexpr):
    """g [4, 16, K] summed from the middle of each row's block of 8, in four parts; 2^sum over the rows of each part."""
    a, b, c, d = quarters_of(g, PART)
    a_sums, b_sums = gl.associative_scan(a, 1, add), gl.associative_scan(b, 1, add)
    c_sums, d_sums = gl.associative_scan(c, 1, add), gl.associative_scan(d, 1, add)
    a, b, c, d = gl.sum(a, 1), gl.sum(b, 1), gl.sum(c, 1), gl.sum(d, 1)
    x_parts = (a_sums - a[:, None, :], b_sums, c_sums - c[:, None, :], d_sums)
    return x_parts, (exp2(a), exp2(b), exp2(c), exp2(d)), a + b + c + d


@gluon.jit
def by_tile(tile, a, b, c, d):
    """One of four vectors [K] for each tile, [4, 1, K]."""
    tile = tile[:, None]
    early, late = gl.where(tile == 0, a[None, :], b[None, :]), gl.where(tile == 2, c[None, :], d[None, :])
    return gl.where(tile < 2, early, late)[:, None, :]


@gluon.jit
def decays_of_tiles(tile, totals):
    """Of each tile: from its edge to the border between the halves, from the chunk's first row to its own, from its
    last row to the chunk's."""
    t0, t1, t2, t3 = totals
    none = t0 * 0.0
    over_middle = exp2(by_tile(tile, t1, none, none, t2))
    from_start = exp2(by_tile(tile, none, t0, t0 + t1, t0 + t1 + t2))
    return over_middle, from_start, exp2(by_tile(tile, t1 + t2 + t3, t2 + t3, t3, none))


@gluon.jit
def block_factors(factors, FIRST: gl.constexpr):
    """For rows in the first or second block of 8 of each tile, [4, 1, K]: from the tile's first row to the block's
    middle, from there to the block's end, and on to the tile's."""
    a, b, c, d = factors
    a, b, c, d = a[:, None, :], b[:, None, :], c[:, None, :], d[:, None, :]
    if FIRST:
        return a, b, c * d
    return a * b * c, d, a * 0.0 + 1.0


@gluon.jit
def nested_rows_of_k(
    k_s, down_s, blocks_s, pairs_s, kw_s, start_s, k_out, x_parts, factors, k_factors, betas, tile, totals,
    TILES: gl.constexpr, FLAT: gl.constexpr, PART: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """All that products take of k, and b k 2^(Gc-G), which goes to memory. Measured from the
    middle of its block k is at most 2^84 where decays before the block multiply it, and up to 2^112 where those after
    do: there the block's own comes first, so that no factor below 2^-126 takes along what counts."""
    over_middle, from_start, to_end = decays_of_tiles(tile, totals)
    second, late = (tile % 2 == 1)[:, None][:, None, :], (tile >= 2)[:, None][:, None, :]
    k_parts = quarters_of(tiles_of(k_s, TILES, FLAT, K), PART)
    barrier()  # all rows of k are in registers
    for p in gl.static_range(PARTS):
        from_tile, to_block, to_tile = block_factors(factors, p < PARTS // 2)
        k = k_parts[p].to(gl.float32) * k_factors.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        k_up, k_down = k * exp2(x_parts[p]), k * exp2(-x_parts[p])
        k_end = k_down * to_block
        put(k_s, k_up, p, R, K)
        put(down_s, k_down, p, R, K)
        if p < PARTS // 2:
            put(blocks_s, k_end * factors[2][:, None, :], p, R, K)
        put(pairs_s, gl.where(second, k_up, k_end) * gl.where(second, from_tile, to_tile), p, R, K)
        put(kw_s, gl.where(late, k_up, k_end) * (gl.where(late, from_tile, to_tile) * over_middle), p, R, K)
        put(start_s, k_up * (from_tile * from_start), p, R, K)
        beta = betas.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        gl.store(k_out + p * R * K, (k_end * (to_tile * to_end) * beta).to(gl.bfloat16))


@gluon.jit
def nested_rows_of_q(
    q_s, up_s, q_out, x_parts, factors, q_factors, tile, totals,
    TILES: gl.constexpr, FLAT: gl.constexpr, PART: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """What products take of q, and q 2^G, which goes to memory. Rows for the product between the
    halves are returned, in bf16."""
    over_middle, from_start, _ = decays_of_tiles(tile, totals)
    q_parts = quarters_of(tiles_of(q_s, TILES, FLAT, K), PART)
    rows = ()
    barrier()  # all rows of q are in registers, and k's have been read
    for p in gl.static_range(PARTS):
        from_tile, _, _ = block_factors(factors, p < PARTS // 2)
        q = q_parts[p].to(gl.float32) * q_factors.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        q_up = q * exp2(x_parts[p])
        put(up_s, q_up, p, R, K)
        put(q_s, q_up * from_tile, p, R, K)
        rows = rows + ((q_up * (from_tile * over_middle)).to(gl.bfloat16),)
        gl.store(q_out + p * R * K, (q_up * (from_tile * from_start)).to(gl.bfloat16))
    return rows


@gluon.jit
def two_products(
    left_s, right_s, other_left_s, other_right_s, SIZE: gl.constexpr, SQUARE: gl.constexpr, PRODUCT: gl.constexpr
):  # fmt: skip
    """The first product where both rows lie in one block of SIZE rows, else the second; in the order of tokens."""
    zero = gl.zeros([64, 64], gl.float32, PRODUCT)
    x = warpgroup_mma(left_s, right_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    y = warpgroup_mma(other_left_s, other_right_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    x, y = warpgroup_mma_wait(0, deps=(x, y))
    return gl.where(rows_apart(SQUARE) < SIZE, in_order(x, SQUARE), in_order(y, SQUARE))


@gluon.jit
def rows_apart(SQUARE: gl.constexpr):
    """The bits in which the row and the column of each entry differ: below 8 both lie in one block of 8 rows."""
    i, j = gl.arange(0, 64, gl.SliceLayout(1, SQUARE)), gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    return i[:, None] ^ j[None, :]


@gluon.jit
def nested_products_of_k(
    k_s, down_s, blocks_s, pairs_s, kw_s, SQUARE: gl.constexpr, PRODUCT: gl.constexpr
):  # fmt: skip
    """L, each entry from the product whose origin is right for its pair of rows. Two at a time:
    the sums of four do not fit into registers beside the exponents."""
    fence_async_shared()
    tiles = two_products(k_s, down_s, k_s, blocks_s, 8, SQUARE, PRODUCT)
    rest = two_products(pairs_s, pairs_s, kw_s, kw_s, 32, SQUARE, PRODUCT)
    return gl.where(rows_apart(SQUARE) < 16, tiles, rest)


@gluon.jit
def nested_products_of_q(
    up_s, q_s, down_s, blocks_s, pairs_s, kw_s, rows,
    SQUARE: gl.constexpr, PRODUCT: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """A likewise. rows: of q for the last product, which take a place that the first two have read."""
    fence_async_shared()
    tiles = two_products(up_s, down_s, up_s, blocks_s, 8, SQUARE, PRODUCT)
    barrier()
    for p in gl.static_range(PARTS):
        put(up_s, rows[p], p, R, K)
    fence_async_shared()
    barrier()
    rest = two_products(q_s, pairs_s, up_s, kw_s, 32, SQUARE, PRODUCT)
    return gl.where(rows_apart(SQUARE) < 16, tiles, rest)


@gluon.jit
def intra_softplus_kernel(
    q_desc,  # [N, H * K], as k and z
    k_desc,
    z_desc,
    t_desc,  # [DIGITS * M * H * C, C]
    a_desc,  # [M * H * C, C]; w: [M * H * C, K]
    w_desc,
    b_ptr,  # these and the rest as in `intra_kernel`
    A_log_ptr,
    dt_bias_ptr,
    spans_ptr,
    q_out_ptr,
    k_out_ptr,
    decay_ptr,
    b_stride,
    scale,
    H: gl.constexpr,
    K: gl.constexpr,
    DIGITS: gl.constexpr,
    num_warps: gl.constexpr,
):
    R: gl.constexpr = 16 // PARTS
    WIDTH: gl.constexpr = num_warps // 4  # warps side by side along the channels
    TILES: gl.constexpr = gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, WIDTH], [2, 1, 0])
    SIDE: gl.constexpr = [[0, 64], [16, 0], [32, 0]] if WIDTH == 2 else [[16, 0], [32, 0]]
    FLAT: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]], [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]], SIDE, [], [64, K]
    )
    PART: gl.constexpr = gl.BlockedLayout([1, R, 2], [1, 1, 32], [4, 1, WIDTH], [2, 1, 0])
    BY_TILE: gl.constexpr = gl.SliceLayout(1, TILES)
    CHANNEL: gl.constexpr = gl.SliceLayout(0, BY_TILE)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDTH], [16, 64 // WIDTH, 16])
    SQUARE: gl.constexpr = square_layout(WIDTH)
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, WIDTH], [16, 64, 16])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BF16: gl.constexpr = gl.bfloat16

    program = gl.program_id(0)
    h = program % H
    start = gl.load(spans_ptr + 2 * (program // H))
    count = gl.load(spans_ptr + 2 * (program // H) + 1)

    q_s = gl.allocate_shared_memory(BF16, [64, K], q_desc.layout)  # q, then q up
    k_s = gl.allocate_shared_memory(BF16, [64, K], k_desc.layout)  # k, then k up
    z_s = gl.allocate_shared_memory(BF16, [64, K], z_desc.layout)  # z, then k down
    start_s = gl.allocate_shared_memory(BF16, [64, K], w_desc.layout)  # k 2^G
    kw_s = gl.allocate_shared_memory(BF16, [64, K], w_desc.layout)  # factors with the middle as origin
    totals_s = start_s._reinterpret(gl.float32, [4, K], LINE)  # two programs just fit into a multiprocessor
    factors_s = gl.allocate_shared_memory(gl.float32, [3, 64], LINE)  # 1 / |row| of k and of q; beta
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    barrier()
    mbarrier.expect(bars.index(0), z_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(z_desc, [start, h * K], bars.index(0), z_s)
    mbarrier.expect(bars.index(1), q_desc.block_type.nbytes + k_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(k_desc, [start, h * K], bars.index(1), k_s)
    tma.async_copy_global_to_shared(q_desc, [start, h * K], bars.index(1), q_s)

    channel = gl.arange(0, K, CHANNEL)
    rate = exp2(gl.load(A_log_ptr + h).to(gl.float32) * LOG2E)
    bias = gl.load(dt_bias_ptr + h * K + channel).to(gl.float32)
    out = program.to(gl.int64)

    mbarrier.wait(bars.index(0), 0)
    if count < 64:
        cut_tail(z_s, count, -1e38, K, num_warps)  # a gate of 0
    z = tiles_of(z_s, TILES, FLAT, K).to(gl.float32)
    g = softplus_decay(z + bias[None, :][:, None, :], rate)
    x_parts, factors, total = from_middle_of_8(g, PART)
    all_totals_s = totals_s._reinterpret(gl.float32, [4, K], PLAIN)
    all_totals_s.store(total)
    OF_PART: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, PART))
    t0, t1 = totals_s.index(0).load(OF_PART), totals_s.index(1).load(OF_PART)
    t2, t3 = totals_s.index(2).load(OF_PART), totals_s.index(3).load(OF_PART)
    tile_p = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, PART)))
    row_p = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, PART)))[None, :][:, :, None]
    channel_p = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, PART)))
    gl.store(decay_ptr + out * K + channel_p, exp2(t0 + t1 + t2 + t3))

    mbarrier.wait(bars.index(1), 0)
    if count < 64:
        cut_tail(q_s, count, 0.0, K, num_warps)
        cut_tail(k_s, count, 0.0, K, num_warps)
    factors_s.index(0).store(row_factor(k_s, K, num_warps))
    factors_s.index(1).store(row_factor(q_s, K, num_warps) * scale)
    i = gl.arange(0, 64, gl.BlockedLayout([1], [32], [num_warps], [0]))
    b = gl.load(b_ptr + (start + i).to(gl.int64) * b_stride + h, mask=i < count, other=0.0).to(gl.float32)
    factors_s.index(2).store(gl.where(i < count, reciprocal(1.0 + exp2(b * -LOG2E)), 0.0))
    k_factors = factors_s.index(0)._reinterpret(gl.float32, [4, 16], PLAIN)
    q_factors = factors_s.index(1)._reinterpret(gl.float32, [4, 16], PLAIN)
    betas = factors_s.index(2)._reinterpret(gl.float32, [4, 16], PLAIN)
    at = out * (64 * K) + (tile_p[:, None][:, None, :] * 16 + row_p) * K + channel_p[None, :][:, None, :]
    pairs_s = gl.allocate_shared_memory(BF16, [64, K], w_desc.layout)
    blocks_s = gl.allocate_shared_memory(BF16, [64, K], w_desc.layout)  # first blocks of 8, seen from the second
    nested_rows_of_k(
        k_s, z_s, blocks_s, pairs_s, kw_s, start_s, k_out_ptr + at, x_parts, factors, k_factors, betas, tile_p,
        (t0, t1, t2, t3), TILES, FLAT, PART, R, K,
    )  # fmt: skip
    lower = nested_products_of_k(k_s, z_s, blocks_s, pairs_s, kw_s, SQUARE, PRODUCT)
    q_rows = nested_rows_of_q(
        q_s, k_s, q_out_ptr + at, x_parts, factors, q_factors, tile_p, (t0, t1, t2, t3), TILES, FLAT, PART, R, K,
    )  # fmt: skip
    a = nested_products_of_q(k_s, q_s, z_s, blocks_s, pairs_s, kw_s, q_rows, SQUARE, PRODUCT, R, K)
    i = gl.arange(0, 64, gl.SliceLayout(1, SQUARE))[:, None]
    j = gl.arange(0, 64, gl.SliceLayout(0, SQUARE))[None, :]
    give_up(bars)
    barrier()  # the operands' places are free, and the barriers'
    beta = factors_s.index(2).load(gl.SliceLayout(0, SQUARE))[None, :]
    a_s = q_s._reinterpret(BF16, [64, 64], a_desc.layout)
    a_s.store((gl.where(i >= j, a, 0.0) * beta).to(BF16))
    if K == 128:
        l_s = z_s._reinterpret(gl.float32, [64, 64], SQUARE_S)
    else:
        l_s = gl.allocate_shared_memory(gl.float32, [64, 64], SQUARE_S)
    l_s.store(lower * beta)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(a_desc, [program * 64, 0], a_s)
    invert(l_s, kw_s, num_warps)
    barrier()
    exact = l_s.load(SQUARE)
    t = exact.to(BF16)
    t_s = k_s._reinterpret(BF16, [64, 64], t_desc.layout)
    t_s.store(t)
    parts_s = pairs_s._reinterpret(BF16, [64, 64], t_desc.layout)
    parts_s.store(gl.reshape(gl.reshape(t, [64, 4, PARTS, R]).permute((0, 2, 1, 3)), [64, 64]))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(t_desc, [program * 64, 0], t_s)
    if DIGITS == 2:
        low_s = z_s._reinterpret(BF16, [64, 64], t_desc.layout)  # L's place or k down's: both have been read
        low_s.store((exact - t.to(gl.float32)).to(BF16))
    w = warpgroup_mma(parts_s, start_s, gl.zeros([64, K], gl.float32, OUT), use_acc=False, is_async=True)
    w = warpgroup_mma_wait(0, deps=(w,))
    kw_s.store((-w).to(BF16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(w_desc, [program * 64, 0], kw_s)
    if DIGITS == 2:
        tma.async_copy_shared_to_global(t_desc, [(gl.num_programs(0) + program) * 64, 0], low_s)
    tma.store_wait(0)
