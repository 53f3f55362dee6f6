"""The first kernel of `intra.py` in Gluon: the same arithmetic, with layouts and stages placed by hand.

K / 16 warps. In the first half a thread holds 16 rows, one tile, of two channels: the sums of g run inside a thread,
and only the totals of the tiles pass through shared memory. q, k and z come by TMA; the operands of the products take
their places. The block inverses of 32 rows are made by substitution in fp32, a thread a column; one merge follows,
X_ba = -X_b L_ba X_a.

For the softplus gate the four parts of a tile's rows are the halves of its blocks of 8: the middle of a block is the
border between two parts, sums run over 4 rows, and all other origins are reached by factors that a channel's rows
share. Two blocks of 8 need no rows of their own: from the middle of the second to a column of the first no factor
exceeds 1, and rows measured from there are at most 2^84, so that what underflows is below 2^-42. L is made first and A
then, with q in the places of k's rows, so that two programs still share a multiprocessor.

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
    mma_v2,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from rille.ops.barriers_gluon import give_up

LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
SHUT: gl.constexpr = gl.constexpr(28.0)  # as in `intra.py`
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
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def inverse_root(x):
    return gl.inline_asm_elementwise("rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def leading_bits(x):
    return (x.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def dot_16_bits(a, b, zero):
    """a @ b for fp32 operands in the layouts of mma operands, each cut into two bf16 pieces."""
    a_high, b_high = leading_bits(a), leading_bits(b)
    a_low, b_low = (a - a_high).to(gl.bfloat16), (b - b_high).to(gl.bfloat16)
    a_high, b_high = a_high.to(gl.bfloat16), b_high.to(gl.bfloat16)
    return mma_v2(a_high, b_high, mma_v2(a_high, b_low, mma_v2(a_low, b_high, zero)))


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
def softplus_decay(x, rate):
    """-rate softplus(x) / ln 2, cut off at -SHUT; the polynomial is that of `intra.log2_of_1_and`."""
    y = exp2(gl.maximum(x, -x) * -LOG2E)
    p = y * -0.012319459579885006 + 0.0636078417301178
    p = p * y - 0.15535180270671844
    p = p * y + 0.25600966811180115
    p = p * y - 0.3533948063850403
    p = p * y + 0.48006370663642883
    p = p * y - 0.7213100790977478
    p = p * y + 1.4426947832107544
    g = (gl.maximum(x, 0.0) * LOG2E + y * p) * -rate
    return gl.where(g < -SHUT, -SHUT, g)


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
    SOLVED: gl.constexpr, TILES: gl.constexpr, FLAT: gl.constexpr, PART: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """For the softplus gate all that products take of k, and b k 2^(Gc-G), which goes to memory. Measured from the
    middle of its block k is at most 2^84 where decays before the block multiply it, and up to 2^112 where those after
    do: there the block's own comes first, so that no factor below 2^-126 takes along what counts."""
    over_middle, from_start, to_end = decays_of_tiles(tile, totals)
    second, late = (tile % 2 == 1)[:, None][:, None, :], (tile >= 2)[:, None][:, None, :]
    k_parts = quarters_of(tiles_of(k_s, TILES, FLAT, K), PART)
    gl.thread_barrier()  # all rows of k are in registers
    for p in gl.static_range(PARTS):
        from_tile, to_block, to_tile = block_factors(factors, p < PARTS // 2)
        k = k_parts[p].to(gl.float32) * k_factors.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        k_up, k_down = k * exp2(x_parts[p]), k * exp2(-x_parts[p])
        k_end = k_down * to_block
        if not SOLVED:
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
    SOLVED: gl.constexpr, TILES: gl.constexpr, FLAT: gl.constexpr, PART: gl.constexpr, R: gl.constexpr, K: gl.constexpr,
):  # fmt: skip
    """For the softplus gate what products take of q, and q 2^G, which goes to memory. Rows for the product between the
    halves are returned, in bf16."""
    over_middle, from_start, _ = decays_of_tiles(tile, totals)
    q_parts = quarters_of(tiles_of(q_s, TILES, FLAT, K), PART)
    rows = ()
    gl.thread_barrier()  # all rows of q are in registers, and k's have been read
    for p in gl.static_range(PARTS):
        from_tile, _, _ = block_factors(factors, p < PARTS // 2)
        q = q_parts[p].to(gl.float32) * q_factors.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        q_up = q * exp2(x_parts[p])
        if not SOLVED:
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
    """L for the softplus gate, each entry from the product whose origin is right for its pair of rows. Two at a time:
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
    gl.thread_barrier()
    for p in gl.static_range(PARTS):
        put(up_s, rows[p], p, R, K)
    fence_async_shared()
    gl.thread_barrier()
    rest = two_products(q_s, pairs_s, up_s, kw_s, 32, SQUARE, PRODUCT)
    return gl.where(rows_apart(SQUARE) < 16, tiles, rest)


@gluon.jit
def rows_of_both(
    q_s, k_s, down_s, start_s, kw_s, qw_s, q_out, k_out, x, q_factors, k_factors, betas, late, over_middle, from_start,
    to_end, SOLVED: gl.constexpr, TILES: gl.constexpr, FLAT: gl.constexpr, PART: gl.constexpr, R: gl.constexpr,
    K: gl.constexpr,
):  # fmt: skip
    """For the bounded gate all that products take of q and k, and what goes to memory."""
    k_all, q_all = tiles_of(k_s, TILES, FLAT, K), tiles_of(q_s, TILES, FLAT, K)
    x_parts, k_parts, q_parts = quarters_of(x, PART), quarters_of(k_all, PART), quarters_of(q_all, PART)
    gl.thread_barrier()  # all rows of k and q are in registers
    for p in gl.static_range(PARTS):
        x = x_parts[p]
        k = k_parts[p].to(gl.float32) * k_factors.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        q = q_parts[p].to(gl.float32) * q_factors.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        up, down = exp2(x), exp2(-x)
        middle = gl.where(late, up, down) * over_middle
        if not SOLVED:
            put(k_s, k * up, p, R, K)
            put(q_s, q * up, p, R, K)
            put(down_s, k * down, p, R, K)
            put(kw_s, k * middle, p, R, K)
            put(qw_s, q * middle, p, R, K)
        begin = gl.where(late, middle, up) * from_start
        put(start_s, k * begin, p, R, K)
        gl.store(q_out + p * R * K, (q * begin).to(gl.bfloat16))
        beta = betas.slice(p * R, R, 1).load(gl.SliceLayout(2, PART))[:, :, None]
        end = gl.where(late, down, middle) * to_end * beta
        gl.store(k_out + p * R * K, (k * end).to(gl.bfloat16))


@gluon.jit
def half_products(k_s, q_s, down_s, kw_s, qw_s, i, j, SQUARE: gl.constexpr, PRODUCT: gl.constexpr):
    """L and A for the bounded gate: one product inside the halves, one between them."""
    zero = gl.zeros([64, 64], gl.float32, PRODUCT)
    l_half = warpgroup_mma(k_s, down_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    a_half = warpgroup_mma(q_s, down_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    l_off = warpgroup_mma(kw_s, kw_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    a_off = warpgroup_mma(qw_s, kw_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    l_half, a_half, l_off, a_off = warpgroup_mma_wait(0, deps=(l_half, a_half, l_off, a_off))
    l_half, a_half = in_order(l_half, SQUARE), in_order(a_half, SQUARE)
    l_off, a_off = in_order(l_off, SQUARE), in_order(a_off, SQUARE)
    same = i // 32 == j // 32
    return gl.where(same, l_half, l_off), gl.where(same, a_half, a_off)


@gluon.jit
def inverse_of_halves(columns, HALVES: gl.constexpr):
    """(I + L)^-1 of both diagonal blocks of 32 rows, [2, 32, 32]; columns[m] holds column m of each L, [2, 32]."""
    i = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, HALVES)))[None, :][:, :, None]
    j = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, HALVES)))[None, :][:, None, :]
    x = gl.where(i == j, 1.0, 0.0) + gl.zeros([2, 32, 32], gl.float32, HALVES)
    for m in gl.static_range(31):
        column = columns.index(m).load(gl.SliceLayout(2, HALVES))[:, :, None]
        x_m = gl.sum(gl.where(i == m, x, -0.0), 1)[:, None, :]  # one register: adding -0.0 changes nothing
        x = gl.where(i > m, x - column * x_m, x)
    return x


@gluon.jit
def invert(l_s, columns_s, inverses_s, WARPS: gl.constexpr):
    """(I + L)^-1 in the place of L, below and on the diagonal; the other two places are for use on the way."""
    HALVES: gl.constexpr = gl.BlockedLayout([1, 32, 1], [1, 1, 32], [2, 1, WARPS // 2], [2, 1, 0])
    MERGE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, WARPS // 2], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MERGE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MERGE, 2)
    BLOCK: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PLAIN3: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    columns = columns_s._reinterpret(gl.float32, [32, 64], PLAIN)
    for half in gl.static_range(2):
        block = l_s.slice(32 * half, 32, 0).slice(32 * half, 32, 1).load(BLOCK)
        columns.slice(32 * half, 32, 1).store(block.permute((1, 0)))
    columns = columns_s._reinterpret(gl.float32, [32, 2, 32], PLAIN)
    inverses_s._reinterpret(gl.float32, [2, 32, 32], PLAIN3).store(inverse_of_halves(columns, HALVES))
    inverses = inverses_s._reinterpret(gl.float32, [2, 32, 32], PLAIN)
    zero = gl.zeros([32, 32], gl.float32, MERGE)
    between = l_s.slice(32, 32, 0).slice(0, 32, 1)
    y = dot_16_bits(between.load(LEFT), inverses.index(0).load(RIGHT), zero)
    y_s = columns_s._reinterpret(gl.float32, [2, 32, 32], PLAIN).index(0)
    y_s.store(y)
    for half in gl.static_range(2):
        l_s.slice(32 * half, 32, 0).slice(32 * half, 32, 1).store(inverses.index(half).load(BLOCK))
    between.store(-dot_16_bits(inverses.index(1).load(LEFT), y_s.load(RIGHT), zero))


@gluon.jit
def intra_tile_kernel(
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
    lower_bound,
    scale,
    H: gl.constexpr,
    K: gl.constexpr,
    BOUNDED: gl.constexpr,
    SOLVED: gl.constexpr,
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
    if BOUNDED:
        totals_s = gl.allocate_shared_memory(gl.float32, [4, K], LINE)
    else:
        totals_s = start_s._reinterpret(gl.float32, [4, K], LINE)  # two programs just fit into a multiprocessor
    factors_s = gl.allocate_shared_memory(gl.float32, [3, 64], LINE)  # 1 / |row| of k and of q; beta
    bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(bars.index(0), count=1)
    mbarrier.init(bars.index(1), count=1)
    fence_async_shared()
    gl.thread_barrier()
    mbarrier.expect(bars.index(0), z_desc.block_type.nbytes)
    tma.async_copy_global_to_shared(z_desc, [start, h * K], bars.index(0), z_s)
    t_bytes: gl.constexpr = t_desc.block_type.nbytes if SOLVED else 0
    mbarrier.expect(bars.index(1), q_desc.block_type.nbytes + k_desc.block_type.nbytes + t_bytes)
    tma.async_copy_global_to_shared(k_desc, [start, h * K], bars.index(1), k_s)
    tma.async_copy_global_to_shared(q_desc, [start, h * K], bars.index(1), q_s)
    if SOLVED:
        given_s = gl.allocate_shared_memory(BF16, [64, 64], t_desc.layout)
        tma.async_copy_global_to_shared(t_desc, [program * 64, 0], bars.index(1), given_s)

    tile = gl.arange(0, 4, gl.SliceLayout(1, BY_TILE))
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :][:, :, None]
    channel = gl.arange(0, K, CHANNEL)
    rate = exp2(gl.load(A_log_ptr + h).to(gl.float32) * LOG2E)
    slope = rate * -LOG2E
    bias = gl.load(dt_bias_ptr + h * K + channel).to(gl.float32)
    out = program.to(gl.int64)

    mbarrier.wait(bars.index(0), 0)
    if count < 64:
        cut_tail(z_s, count, -1e38, K, num_warps)  # a gate of 0
    z = tiles_of(z_s, TILES, FLAT, K).to(gl.float32)
    if BOUNDED:
        g = (lower_bound * LOG2E) * reciprocal(1.0 + exp2(z * slope + (bias * slope)[None, :][:, None, :]))
        sums = gl.associative_scan(g, 1, add)
        total = gl.sum(gl.where(row == 15, sums, -0.0), 1)
    else:
        g = softplus_decay(z + bias[None, :][:, None, :], rate)
        x_parts, factors, total = from_middle_of_8(g, PART)
    all_totals_s = totals_s._reinterpret(gl.float32, [4, K], PLAIN)
    all_totals_s.store(total)
    if BOUNDED:
        x = sums - gl.where((tile % 2 == 0)[:, None], total, 0.0)[:, None, :]
    OF_PART: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, PART))
    t0, t1 = totals_s.index(0).load(OF_PART), totals_s.index(1).load(OF_PART)
    t2, t3 = totals_s.index(2).load(OF_PART), totals_s.index(3).load(OF_PART)
    tile_p = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, PART)))
    row_p = gl.arange(0, R, gl.SliceLayout(0, gl.SliceLayout(2, PART)))[None, :][:, :, None]
    channel_p = gl.arange(0, K, gl.SliceLayout(0, gl.SliceLayout(1, PART)))
    gl.store(decay_ptr + out * K + channel_p, exp2(t0 + t1 + t2 + t3))
    late = (tile_p >= 2)[:, None]
    if BOUNDED:
        over_middle = gl.where(late, exp2(t2)[None, :], exp2(t1)[None, :])[:, None, :]
        from_start = gl.where(late, exp2(t0 + t1)[None, :], exp2(t0)[None, :])[:, None, :]
        to_end = gl.where(late, exp2(t3)[None, :], exp2(t2 + t3)[None, :])[:, None, :]
        late = late[:, None, :]

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
    if SOLVED:
        qw_s = kw_s  # neither is used
    else:
        qw_s = gl.allocate_shared_memory(BF16, [64, K], w_desc.layout)
    if BOUNDED:
        rows_of_both(
            q_s, k_s, z_s, start_s, kw_s, qw_s, q_out_ptr + at, k_out_ptr + at, x, q_factors,
            k_factors, betas, late, over_middle, from_start, to_end, SOLVED, TILES, FLAT, PART, R, K,
        )  # fmt: skip
    else:
        if SOLVED:
            blocks_s = kw_s
        else:
            blocks_s = gl.allocate_shared_memory(
                BF16, [64, K], w_desc.layout
            )  # first blocks of 8, seen from the second
        nested_rows_of_k(
            k_s, z_s, blocks_s, qw_s, kw_s, start_s, k_out_ptr + at, x_parts, factors, k_factors, betas, tile_p,
            (t0, t1, t2, t3), SOLVED, TILES, FLAT, PART, R, K,
        )  # fmt: skip
    i, j = gl.arange(0, 64, gl.SliceLayout(1, SQUARE)), gl.arange(0, 64, gl.SliceLayout(0, SQUARE))
    if not BOUNDED:
        if not SOLVED:
            lower = nested_products_of_k(k_s, z_s, blocks_s, qw_s, kw_s, SQUARE, PRODUCT)
        q_rows = nested_rows_of_q(
            q_s, k_s, q_out_ptr + at, x_parts, factors, q_factors, tile_p, (t0, t1, t2, t3),
            SOLVED, TILES, FLAT, PART, R, K,
        )  # fmt: skip
    if SOLVED:
        t = given_s.load(SQUARE)
        parts_s = q_s._reinterpret(BF16, [64, 64], t_desc.layout)
    else:
        if BOUNDED:
            fence_async_shared()
            lower, a = half_products(k_s, q_s, z_s, kw_s, qw_s, i[:, None], j[None, :], SQUARE, PRODUCT)
        else:
            a = nested_products_of_q(k_s, q_s, z_s, blocks_s, qw_s, kw_s, q_rows, SQUARE, PRODUCT, R, K)
        i, j = i[:, None], j[None, :]
        gl.thread_barrier()  # the operands' places are free
        beta = factors_s.index(2).load(gl.SliceLayout(0, SQUARE))[None, :]
        a_s = q_s._reinterpret(BF16, [64, 64], a_desc.layout)
        a_s.store((gl.where(i >= j, a, 0.0) * beta).to(BF16))
        if K == 128:
            l_s = z_s._reinterpret(gl.float32, [64, 64], PLAIN)
        else:
            l_s = gl.allocate_shared_memory(gl.float32, [64, 64], PLAIN)
        l_s.store(gl.where(i > j, lower, 0.0) * beta)
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(a_desc, [program * 64, 0], a_s)
        invert(l_s, kw_s, qw_s, num_warps)
        gl.thread_barrier()
        exact = gl.where(i >= j, l_s.load(SQUARE), 0.0)
        t = exact.to(BF16)
        t_s = k_s._reinterpret(BF16, [64, 64], t_desc.layout)
        t_s.store(t)
        parts_s = qw_s._reinterpret(BF16, [64, 64], t_desc.layout)
    parts_s.store(gl.reshape(gl.reshape(t, [64, 4, PARTS, R]).permute((0, 2, 1, 3)), [64, 64]))
    fence_async_shared()
    gl.thread_barrier()
    if not SOLVED:
        tma.async_copy_shared_to_global(t_desc, [program * 64, 0], t_s)
        if DIGITS == 2:
            low_s = z_s._reinterpret(BF16, [64, 64], t_desc.layout)  # L's place or k down's: both have been read
            low_s.store((exact - t.to(gl.float32)).to(BF16))
    w = warpgroup_mma(parts_s, start_s, gl.zeros([64, K], gl.float32, OUT), use_acc=False, is_async=True)
    w = warpgroup_mma_wait(0, deps=(w,))
    kw_s.store((-w).to(BF16))
    fence_async_shared()
    gl.thread_barrier()
    tma.async_copy_shared_to_global(w_desc, [program * 64, 0], kw_s)
    if DIGITS == 2 and not SOLVED:
        tma.async_copy_shared_to_global(t_desc, [(gl.num_programs(0) + program) * 64, 0], low_s)
    tma.store_wait(0)
    give_up(bars)
