"""The first kernel of `intra.py` for the bounded gate in Gluon: the same arithmetic, with layouts and stages placed by
hand so that three programs share a multiprocessor.

Four warps, a tile of 16 rows each; a thread holds two channels of its tile and goes through the panels of 64 channels
one after another. So the sums of g run inside a thread, and only the totals of the tiles pass through shared memory. q,
k and z come by TMA, and the operands of the products take their places, element by element.

What rows and columns measured from the border between the halves need is k's 64 rows and q's late ones: 96 rows, k
before q. Read from the first on they are the left operand of L between the halves, from the 33rd on that of A, whose
results then lie in the rows in which products inside the halves have theirs. -k 2^G, the operand of -W, waits in
registers until the products have read what lies in its place.

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

from rille.ops.barriers_gluon import barrier, give_up
from rille.ops.kda.numbers_gluon import (
    LOG2E,
    add,
    bf16,
    exp2,
    exp2_of_negative,
    inverse_root,
    negative,
    reciprocal,
    wide,
)
from rille.ops.kda.solve_gluon import SQUARE_S, invert

PANEL: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16))
TILES_S: gl.constexpr = gl.constexpr(gl.NVMMASharedLayout.get_default_for([4, 16, 64], gl.bfloat16))  # of a panel
PLAIN: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
LINE: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
TILES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 16, 2], [1, 1, 32], [4, 1, 1], [2, 1, 0]))
FLAT: gl.constexpr = gl.constexpr(  # the same as 64 rows
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[0, 2], [0, 4], [0, 8], [0, 16], [0, 32]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
CHANNEL: gl.constexpr = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, TILES)))
OF_ROW: gl.constexpr = gl.constexpr(gl.SliceLayout(2, TILES))
PRODUCT: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HALF: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))


@gluon.jit
def panels_of(x, K: gl.constexpr):
    """x [64, K] in shared memory as [K / 64, 64, 64]."""
    return x._reinterpret(gl.bfloat16, [K // 64, 64, 64], PANEL)


@gluon.jit
def cut_tail(panels, count, value, K: gl.constexpr):
    """Overwrite the rows that hold no token."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    filling = gl.full([64, 64], value, gl.float32, WIDE).to(gl.bfloat16)
    for c in gl.static_range(K // 64):
        held = panels.index(c).load(WIDE)
        panels.index(c).store(gl.where((row < count)[:, None], held, filling))


@gluon.jit
def row_factor(panels, K: gl.constexpr):
    """1 / |row| of each tile, [4, 16], from the diagonal of its product with itself."""
    SQUARES: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SQUARES, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SQUARES, 2)
    sums = gl.zeros([4, 16, 16], gl.float32, SQUARES)
    for c in gl.static_range(K // 64):
        tiles = panels.index(c)._reinterpret(gl.bfloat16, [4, 16, 64], TILES_S)
        sums = mma_v2(tiles.load(LEFT), tiles.permute((0, 2, 1)).load(RIGHT), sums)
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, SQUARES)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SQUARES)))[None, :][:, None, :]
    return inverse_root(gl.sum(gl.where(i == j, sums, 0.0), 2) + 1e-6)


@gluon.jit
def tiles_of(panel):
    return gl.convert_layout(gl.reshape(wide(panel.load(FLAT)), [4, 16, 64]), TILES, assert_trivial=True)


@gluon.jit
def rows(tiles):
    return gl.convert_layout(gl.reshape(bf16(tiles), [64, 64]), FLAT, assert_trivial=True)


@gluon.jit
def decays_of(panel, slope, bias, lower_bound, totals_s, tile):
    """Of a panel of z: g summed from the border between the two tiles of each half; the totals of all four tiles."""
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :][:, :, None]
    z = tiles_of(panel)
    g = (lower_bound * LOG2E) * reciprocal(1.0 + exp2(z * slope + (bias * slope)[None, :][:, None, :]))
    sums = gl.associative_scan(g, 1, add)
    total = gl.sum(gl.where(row == 15, sums, -0.0), 1)
    totals_s._reinterpret(gl.float32, [4, 64], PLAIN).store(total)
    x = sums - gl.where((tile % 2 == 0)[:, None], total, 0.0)[:, None, :]
    barrier()
    lines = totals_s._reinterpret(gl.float32, [4, 64], LINE)
    totals = ()
    for n in gl.static_range(4):
        totals = totals + (lines.index(n).load(CHANNEL),)
    return x, totals


@gluon.jit
def rows_of_panel(
    q_s, k_s, down_s, k_middle_s, q_middle_s, q_out, k_out, x, totals, late, q_factors, k_factors, betas
):  # fmt: skip
    """All that products take of a panel of q and k, and what goes to memory; -k 2^G is returned, in bf16. k_middle_s
    and q_middle_s overlap: q's early rows, which nobody needs, lie where k's late ones then come."""
    t0, t1, t2, t3 = totals
    over_middle = gl.where(late, exp2(t2)[None, :], exp2(t1)[None, :])[:, None, :]
    from_start = gl.where(late, exp2(t0 + t1)[None, :], exp2(t0)[None, :])[:, None, :]
    to_end = gl.where(late, exp2(t3)[None, :], exp2(t2 + t3)[None, :])[:, None, :]
    late = late[:, None, :]
    up, down = exp2(x), exp2_of_negative(x)
    q = tiles_of(q_s) * q_factors.load(OF_ROW)[:, :, None]
    q_up = q * up
    q_middle = gl.where(late, q_up, q * down) * over_middle
    q_middle_s.store(rows(q_middle))
    q_s.store(rows(q_up))
    gl.store(q_out, bf16(gl.where(late, q_middle, q_up) * from_start))
    k = tiles_of(k_s) * k_factors.load(OF_ROW)[:, :, None]
    barrier()
    k_up, k_down = k * up, k * down
    k_middle = gl.where(late, k_up, k_down) * over_middle
    k_s.store(rows(k_up))
    down_s.store(rows(k_down))
    k_middle_s.store(rows(k_middle))
    begin = rows(gl.where(late, k_middle, k_up) * negative(from_start))
    gl.store(k_out, bf16(gl.where(late, k_down, k_middle) * to_end * betas.load(OF_ROW)[:, :, None]))
    return begin


@gluon.jit
def in_place_of(x, middle):
    """Of x [64, 64] the products inside the halves, with those between them, [64, 32], in their place; above the
    diagonal anything."""
    left, right = gl.split(gl.reshape(x, [64, 2, 32]).permute((0, 2, 1)))
    early = gl.arange(0, 64, gl.SliceLayout(1, HALF))[:, None] < 32
    left = gl.where(early, gl.convert_layout(left, HALF, assert_trivial=True), middle)
    both = gl.join(left, gl.convert_layout(right, HALF, assert_trivial=True))
    return gl.convert_layout(gl.reshape(both.permute((0, 2, 1)), [64, 64]), PRODUCT, assert_trivial=True)


@gluon.jit
def squares_of(q_s, k_s, down_s, middle_s, K: gl.constexpr):
    """L and A without beta, above the diagonal anything."""
    zero, narrow = gl.zeros([64, 64], gl.float32, PRODUCT), gl.zeros([64, 32], gl.float32, HALF)
    lower = warpgroup_mma(k_s, down_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    a = warpgroup_mma(q_s, down_s.permute((1, 0)), zero, use_acc=False, is_async=True)
    l_middle, a_middle = narrow, narrow
    for c in gl.static_range(K // 64):
        early = middle_s.index(3 * c).permute((1, 0))
        k_left = middle_s.index(3 * c)._reinterpret(gl.bfloat16, [64, 64], PANEL)
        q_left = middle_s.index(3 * c + 1)._reinterpret(gl.bfloat16, [64, 64], PANEL)
        l_middle = warpgroup_mma(k_left, early, l_middle, use_acc=c > 0, is_async=True)
        a_middle = warpgroup_mma(q_left, early, a_middle, use_acc=c > 0, is_async=True)
    lower, a, l_middle, a_middle = warpgroup_mma_wait(0, deps=(lower, a, l_middle, a_middle))
    return in_place_of(lower, l_middle), in_place_of(a, a_middle)


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
    DIGITS: gl.constexpr,
    num_warps: gl.constexpr,
):
    BF16: gl.constexpr = gl.bfloat16
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    # the last chunks first: what the second kernel begins with is then still in the L2 cache
    program = gl.num_programs(0) - 1 - gl.program_id(0)
    h = program % H
    start = gl.load(spans_ptr + 2 * (program // H))
    count = gl.load(spans_ptr + 2 * (program // H) + 1)

    q_s = gl.allocate_shared_memory(BF16, [64, K], q_desc.layout)  # q, then q up, then A and T
    k_s = gl.allocate_shared_memory(BF16, [64, K], k_desc.layout)  # k, then k up, then -k 2^G
    z_s = gl.allocate_shared_memory(BF16, [64, K], z_desc.layout)  # z, then k down, then L and its inverse
    middle_s = gl.allocate_shared_memory(BF16, [3 * K // 64, 32, 64], PANEL)  # a panel's k early, k late, q late
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

    q_panels, k_panels, z_panels = panels_of(q_s, K), panels_of(k_s, K), panels_of(z_s, K)
    tile = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(1, TILES)))
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :][:, :, None]
    channel = gl.arange(0, 64, CHANNEL)
    slope = exp2(gl.load(A_log_ptr + h).to(gl.float32) * LOG2E) * -LOG2E
    out = program.to(gl.int64)
    biases = ()
    for c in gl.static_range(K // 64):
        biases = biases + (gl.load(dt_bias_ptr + h * K + c * 64 + channel).to(gl.float32),)
    i = gl.arange(0, 64, gl.BlockedLayout([1], [32], [num_warps], [0]))
    b = gl.load(b_ptr + (start + i).to(gl.int64) * b_stride + h, mask=i < count, other=0.0).to(gl.float32)
    factors_s.index(2).store(gl.where(i < count, reciprocal(1.0 + exp2(b * -LOG2E)), 0.0))
    k_factors = factors_s.index(0)._reinterpret(gl.float32, [4, 16], PLAIN)
    q_factors = factors_s.index(1)._reinterpret(gl.float32, [4, 16], PLAIN)
    betas = factors_s.index(2)._reinterpret(gl.float32, [4, 16], PLAIN)

    mbarrier.wait(bars.index(0), 0)
    mbarrier.wait(bars.index(1), 0)
    if count < 64:
        cut_tail(z_panels, count, -1e38, K)  # a gate of 0
        cut_tail(q_panels, count, 0.0, K)
        cut_tail(k_panels, count, 0.0, K)
    k_factors.store(row_factor(k_panels, K))
    q_factors.store(row_factor(q_panels, K) * scale)
    # tile >= 2, which is so for a warp as a whole; a compiler that knows copies it again and again
    late = tile[:, None] * 32 + channel[None, :] // 2 >= 64
    totals_s = middle_s.index(3 * K // 64 - 1)
    starts = ()
    for c in gl.static_range(K // 64):
        x, totals = decays_of(z_panels.index(c), slope, biases[c], lower_bound, totals_s, tile)
        t0, t1, t2, t3 = totals
        gl.store(decay_ptr + out * K + c * 64 + channel, exp2(t0 + t1 + t2 + t3))
        at = out * (64 * K) + (tile[:, None][:, None, :] * 16 + row) * K + c * 64 + channel[None, :][:, None, :]
        k_middle_s = middle_s.index(3 * c)._reinterpret(BF16, [64, 64], PANEL)
        q_middle_s = middle_s.index(3 * c + 1)._reinterpret(BF16, [64, 64], PANEL)
        begin = rows_of_panel(
            q_panels.index(c), k_panels.index(c), z_panels.index(c), k_middle_s, q_middle_s, q_out_ptr + at,
            k_out_ptr + at, x, totals, late, q_factors, k_factors, betas,
        )  # fmt: skip
        starts = starts + (begin,)
    fence_async_shared()
    barrier()
    lower, a = squares_of(q_s, k_s, z_s, middle_s, K)
    give_up(bars)
    barrier()  # the operands' places are free, and the barriers'
    for c in gl.static_range(K // 64):
        k_panels.index(c).store(starts[c])
    a_s = q_panels.index(0)
    if K == 128:
        l_s, t_s = z_s._reinterpret(gl.float32, [64, 64], SQUARE_S), q_panels.index(1)
    else:
        l_s, t_s = gl.allocate_shared_memory(gl.float32, [64, 64], SQUARE_S), z_panels.index(0)
    i, j = gl.arange(0, 64, gl.SliceLayout(1, PRODUCT))[:, None], gl.arange(0, 64, gl.SliceLayout(0, PRODUCT))
    beta = factors_s.index(2).load(gl.SliceLayout(0, PRODUCT))[None, :]
    l_s.store(lower * beta)
    a_s.store((gl.where(i >= j[None, :], a, 0.0) * beta).to(BF16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(a_desc, [program * 64, 0], a_s)
    invert(l_s, middle_s.index(0), num_warps)
    barrier()
    exact = l_s.load(PRODUCT)
    t = exact.to(BF16)
    t_s.store(t)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(t_desc, [program * 64, 0], t_s)
    if DIGITS == 2:
        low_s = l_s._reinterpret(BF16, [64, 64], PANEL)  # all have read the inverse
        low_s.store((exact - t.to(gl.float32)).to(BF16))
    w = warpgroup_mma(t_s, k_s, gl.zeros([64, K], gl.float32, OUT), use_acc=False, is_async=True)
    w = warpgroup_mma_wait(0, deps=(w,))
    w_s = middle_s._reinterpret(BF16, [64, K], w_desc.layout)
    w_s.store(w.to(BF16))
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(w_desc, [program * 64, 0], w_s)
    if DIGITS == 2:
        tma.async_copy_shared_to_global(t_desc, [(gl.num_programs(0) + program) * 64, 0], low_s)
    tma.store_wait(0)
