"""The packed forward kernel of `forward_kernels.py` in Gluon: the same tiles and arithmetic, with loads and products
placed by hand.

One warp fetches: queries once, then blocks of keys and values by TMA into two rings, as far ahead as they go. Two
groups of four warps hold 64 queries each. A group starts the scores of the next block before the product of this
block's weights with its values, and takes exponentials while that product runs. Blocks are walked from the diagonal
down, so that only the first needs a mask. Barriers hand a slot of a ring back and forth: `full` from the TMA unit,
`empty` from both groups.

For widths that need no padding. TMA cannot leave out rows, so the values of the next sequence in the first block are
overwritten with zeros by whoever is about to use them; both groups write the same.

Gluon has no interpreter: `forward_kernel` is the twin that the tests run, and on a GPU both must agree.
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


@gluon.jit
def fetch(
    descs, queries, rings, bars, places, token, start, blocks, COLUMNS: gl.constexpr, KB: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc = descs
    q_a_s, q_b_s = queries
    k_a_ring, k_b_ring, v_ring = rings
    q_bar, k_full, k_empty, v_full, v_empty = bars
    q_place, k_place, v_place = places
    Q_BYTES: gl.constexpr = q_a_desc.block_type.nbytes + (q_b_desc.block_type.nbytes if KB > 0 else 0)
    K_BYTES: gl.constexpr = k_a_desc.block_type.nbytes + (k_b_desc.block_type.nbytes if KB > 0 else 0)
    mbarrier.expect(q_bar, 2 * Q_BYTES)
    for g in gl.static_range(2):
        tma.async_copy_global_to_shared(q_a_desc, [token + 64 * g, q_place], q_bar, q_a_s.index(g))
        if KB > 0:
            tma.async_copy_global_to_shared(q_b_desc, [token + 64 * g, q_place], q_bar, q_b_s.index(g))
    for i in range(blocks):
        s = i % STAGES
        turn = ((i // STAGES) & 1) ^ 1
        row = start + (blocks - 1 - i) * COLUMNS
        mbarrier.wait(k_empty.index(s), turn)
        mbarrier.expect(k_full.index(s), K_BYTES)
        tma.async_copy_global_to_shared(k_a_desc, [row, k_place], k_full.index(s), k_a_ring.index(s))
        if KB > 0:
            tma.async_copy_global_to_shared(k_b_desc, [row, k_place], k_full.index(s), k_b_ring.index(s))
        mbarrier.wait(v_empty.index(s), turn)
        mbarrier.expect(v_full.index(s), v_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(v_desc, [row, v_place], v_full.index(s), v_ring.index(s))


@gluon.jit
def scores(q_a, q_b, k_a, k_b, zero, KB: gl.constexpr):
    s = warpgroup_mma(q_a, k_a.permute((1, 0)), zero, use_acc=False, is_async=True)
    if KB > 0:
        s = warpgroup_mma(q_b, k_b.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@gluon.jit
def attend(
    queries, rings, bars, o_ptr, y_ptr, gate_ptr, lse_ptr, start, first, length, blocks, h, N, H, gate_row, gate_head,
    scale2, GROUP: gl.constexpr, COLUMNS: gl.constexpr, KB: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    k_a_ring, k_b_ring, v_ring = rings
    q_bar, k_full, k_empty, v_full, v_empty = bars
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(0, VALUES, 2)
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // V, V // 8], [4, 1], [1, 0])
    DTYPE: gl.constexpr = v_ring.dtype
    q_a = queries[0].index(GROUP)
    q_b = queries[1].index(GROUP)
    zero = gl.zeros([64, COLUMNS], gl.float32, SCORES)
    acc = gl.zeros([64, V], gl.float32, VALUES)

    mbarrier.wait(q_bar, 0)
    mbarrier.wait(k_full.index(0), 0)
    s = scores(q_a, q_b, k_a_ring.index(0), k_b_ring.index(0), zero, KB)
    s = warpgroup_mma_wait(0, deps=(s,))
    barrier()
    mbarrier.arrive(k_empty.index(0), count=1)
    column = (blocks - 1) * COLUMNS
    row = first + 64 * GROUP + gl.arange(0, 64, ROW)
    columns = column + gl.arange(0, COLUMNS, gl.SliceLayout(0, SCORES))
    s = gl.where(row[:, None] >= columns[None, :], s, float("-inf"))
    m = gl.max(s, 1) * scale2
    p = exp2(s * scale2 - m[:, None])
    total = gl.sum(p, 1)
    weights = gl.convert_layout(p.to(DTYPE), WEIGHTS)
    mbarrier.wait(v_full.index(0), 0)
    if column + COLUMNS > length:
        v = v_ring.index(0)
        held = v.load(WIDE)
        inside = column + gl.arange(0, COLUMNS, gl.SliceLayout(1, WIDE)) < length
        v.store(gl.where(inside[:, None], held, gl.zeros_like(held)))
        fence_async_shared()
        barrier()

    for i in range(1, blocks):
        slot = i % STAGES
        last = (i - 1) % STAGES
        mbarrier.wait(k_full.index(slot), (i // STAGES) & 1)
        s = scores(q_a, q_b, k_a_ring.index(slot), k_b_ring.index(slot), zero, KB)
        running = warpgroup_mma(weights, v_ring.index(last), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=(s,))
        barrier()
        mbarrier.arrive(k_empty.index(slot), count=1)
        new = gl.maximum(m, gl.max(s, 1) * scale2)
        p = exp2(s * scale2 - new[:, None])
        decay = exp2(m - new)
        total = total * decay + gl.sum(p, 1)
        m = new
        following = p.to(DTYPE)
        # The next values are awaited before the product, not after: a branch that the assembler moves no exponential
        # across, so that they are taken while the product runs.
        mbarrier.wait(v_full.index(slot), (i // STAGES) & 1)
        acc, following = warpgroup_mma_wait(0, deps=(running, following))
        barrier()
        mbarrier.arrive(v_empty.index(last), count=1)
        acc = acc * gl.convert_layout(decay, gl.SliceLayout(1, VALUES))[:, None]
        weights = gl.convert_layout(following, WEIGHTS)
    acc = warpgroup_mma(weights, v_ring.index((blocks - 1) % STAGES), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))

    token = (start + row).to(gl.int64)
    gl.store(lse_ptr + h.to(gl.int64) * N + token, m + gl.log2(total), mask=row < length)
    acc = acc / gl.convert_layout(total, gl.SliceLayout(1, VALUES))[:, None]
    row = first + 64 * GROUP + gl.arange(0, 64, gl.SliceLayout(1, VALUES))
    token = (start + row).to(gl.int64)
    held = (row < length)[:, None]
    channel = gl.arange(0, V, gl.SliceLayout(0, VALUES))
    at = (token * (H * V) + h * V)[:, None] + channel[None, :]
    if o_ptr is not None:
        gl.store(o_ptr + at, acc.to(o_ptr.dtype.element_ty), mask=held)
    if gate_ptr is not None:
        at_gate = (token * gate_row + h * gate_head)[:, None] + channel[None, :]
        gate = gl.load(gate_ptr + at_gate, mask=held, other=0.0).to(gl.float32)
        y = acc / (1.0 + exp2(gate * -1.4426950408889634))
        gl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=held)


@gluon.jit
def forward_rings_kernel(
    q_a_desc,  # [N, heads and channels], blocks [64, KA]; q_b: from channel KA on, None without; k_a, k_b, v: COLUMNS
    q_b_desc,
    k_a_desc,
    k_b_desc,
    v_desc,
    gate_ptr,  # these and the rest as in `forward_kernel`
    o_ptr,
    y_ptr,
    lse_ptr,
    tiles_ptr,
    N,
    H,
    together,
    gate_row,
    gate_head,
    q_head,  # distances of heads
    k_head,
    v_head,
    scale2,
    V: gl.constexpr,
    COLUMNS: gl.constexpr,
    KA: gl.constexpr,
    KB: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    tiles = gl.num_programs(0) // H
    group = gl.program_id(0) // (tiles * together)
    within = gl.program_id(0) - group * tiles * together
    size = gl.minimum(H - group * together, together)
    h = group * together + within % size
    tile = within // size
    start = gl.load(tiles_ptr + 4 * tile)
    first = gl.load(tiles_ptr + 4 * tile + 1)
    length = gl.load(tiles_ptr + 4 * tile + 2)
    blocks = gl.cdiv(gl.minimum(first + 128, length), COLUMNS)

    q_a_s = gl.allocate_shared_memory(q_a_desc.dtype, [2, 64, KA], q_a_desc.layout)
    k_a_ring = gl.allocate_shared_memory(k_a_desc.dtype, [STAGES, COLUMNS, KA], k_a_desc.layout)
    q_b_s = q_a_s
    k_b_ring = k_a_ring
    if KB > 0:
        q_b_s = gl.allocate_shared_memory(q_b_desc.dtype, [2, 64, KB], q_b_desc.layout)
        k_b_ring = gl.allocate_shared_memory(k_b_desc.dtype, [STAGES, COLUMNS, KB], k_b_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, COLUMNS, V], v_desc.layout)
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_empty.index(stage), count=2)
    fence_async_shared()
    descs = (q_a_desc, q_b_desc, k_a_desc, k_b_desc, v_desc)
    queries = (q_a_s, q_b_s)
    rings = (k_a_ring, k_b_ring, v_ring)
    bars = (q_bar, k_full, k_empty, v_full, v_empty)
    places = (h * q_head, h * k_head, h * v_head)
    gl.warp_specialize(
        [
            (attend, (
                queries, rings, bars, o_ptr, y_ptr, gate_ptr, lse_ptr, start, first, length, blocks, h, N, H, gate_row,
                gate_head, scale2, 0, COLUMNS, KB, V, STAGES,
            )),
            (attend, (
                queries, rings, bars, o_ptr, y_ptr, gate_ptr, lse_ptr, start, first, length, blocks, h, N, H, gate_row,
                gate_head, scale2, 1, COLUMNS, KB, V, STAGES,
            )),
            (fetch, (descs, queries, rings, bars, places, start + first, start, blocks, COLUMNS, KB, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
    for i in gl.static_range(len(bars)):
        give_up(bars[i])
