"""The key kernel of `backward_kernels.py` in Gluon: 128 keys a program, queries 64 at a time.

One warp fetches: keys and values once, then queries and gradients by TMA into a ring. Two groups of four warps hold 64
keys each, with dk and dv in registers; all products are transposed, keys by queries, so that weights and their
gradients are left operands straight from registers. The gradient's weights are made from the weights as rounded for
dv, which spares a second copy of them.

For widths that need no padding. Queries of the next sequence in the last block are overwritten with zeros by whoever is
about to use them; both groups write the same.

Gluon has no interpreter: `key_kernel` is the twin that the tests run, and on a GPU both must agree.
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

from rille.ops.barriers_gluon import give_up
from rille.ops.mla.forward_gluon import barrier, exp2


@gluon.jit
def fetch(
    descs, held, rings, bars, places, lse_ptr, delta_ptr, start, first, length, blocks, KB: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    k_a_desc, k_b_desc, v_desc, q_a_desc, q_b_desc, do_desc = descs
    k_a_s, k_b_s, v_s = held
    LINE: gl.constexpr = gl.BlockedLayout([2], [32], [1], [0])
    q_a_ring, q_b_ring, do_ring, lse_ring, delta_ring = rings
    k_bar, full, empty = bars
    k_place, v_place, q_place, do_place = places
    K_BYTES: gl.constexpr = k_a_desc.block_type.nbytes + (k_b_desc.block_type.nbytes if KB > 0 else 0)
    Q_BYTES: gl.constexpr = q_a_desc.block_type.nbytes + (q_b_desc.block_type.nbytes if KB > 0 else 0)
    mbarrier.expect(k_bar, 2 * (K_BYTES + v_desc.block_type.nbytes))
    for g in gl.static_range(2):
        row = start + first + 64 * g
        tma.async_copy_global_to_shared(k_a_desc, [row, k_place], k_bar, k_a_s.index(g))
        if KB > 0:
            tma.async_copy_global_to_shared(k_b_desc, [row, k_place], k_bar, k_b_s.index(g))
        tma.async_copy_global_to_shared(v_desc, [row, v_place], k_bar, v_s.index(g))
    for i in range(blocks):
        s = i % STAGES
        row = start + first + i * 64
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(s), Q_BYTES + do_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(q_a_desc, [row, q_place], full.index(s), q_a_ring.index(s))
        if KB > 0:
            tma.async_copy_global_to_shared(q_b_desc, [row, q_place], full.index(s), q_b_ring.index(s))
        tma.async_copy_global_to_shared(do_desc, [row, do_place], full.index(s), do_ring.index(s))
        query = first + i * 64 + gl.arange(0, 64, LINE)
        lse_ring.index(s).store(gl.load(lse_ptr + query, mask=query < length, other=float("inf")))
        delta_ring.index(s).store(gl.load(delta_ptr + query, mask=query < length, other=0.0))
        barrier()
        mbarrier.arrive(full.index(s), count=1)


@gluon.jit
def cut_tail(rows, left):
    """Zeros over the rows [64, width] in shared memory from `left` on."""
    WIDTH: gl.constexpr = rows.shape[1]
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [4, 1], [1, 0])
    inside = gl.arange(0, 64, gl.SliceLayout(1, WIDE)) < left
    held = rows.load(WIDE)
    rows.store(gl.where(inside[:, None], held, gl.zeros_like(held)))


@gluon.jit
def store_rows(ptr, x, start, first, length, h, H, FROM: gl.constexpr, C: gl.constexpr):
    """x [64, width], channels from FROM on, into its rows of [N, H, C]."""
    LAYOUT: gl.constexpr = x.type.layout
    row = first + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    channel = FROM + gl.arange(0, x.shape[1], gl.SliceLayout(0, LAYOUT))
    at = ((start + row).to(gl.int64) * (H * C) + h * C)[:, None] + channel[None, :]
    gl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=(row < length)[:, None])


@gluon.jit
def gather(
    held, rings, bars, dk_ptr, dv_ptr, start, first, length, blocks, h, H, scale, scale2,
    GROUP: gl.constexpr, KA: gl.constexpr, KB: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_a_ring, q_b_ring, do_ring, lse_ring, delta_ring = rings
    k_bar, full, empty = bars
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    KEYS_A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KA, 16])
    KEYS_B: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KB if KB > 0 else KA, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    DTYPE: gl.constexpr = do_ring.dtype
    k_a = held[0].index(GROUP)
    k_b = held[1].index(GROUP)
    v = held[2].index(GROUP)
    own = first + 64 * GROUP
    zero = gl.zeros([64, 64], gl.float32, SCORES)
    dk_a = gl.zeros([64, KA], gl.float32, KEYS_A)
    if KB > 0:
        dk_b = gl.zeros([64, KB], gl.float32, KEYS_B)
    dv = gl.zeros([64, V], gl.float32, VALUES)
    mbarrier.wait(k_bar, 0)
    for i in range(blocks):
        slot = i % STAGES
        row = first + i * 64
        q_a = q_a_ring.index(slot)
        q_b = q_b_ring.index(slot)
        do = do_ring.index(slot)
        mbarrier.wait(full.index(slot), (i // STAGES) & 1)
        if row + 64 > length:
            cut_tail(q_a, length - row)
            if KB > 0:
                cut_tail(q_b, length - row)
            cut_tail(do, length - row)
            fence_async_shared()
            barrier()
        s = warpgroup_mma(k_a, q_a.permute((1, 0)), zero, use_acc=False, is_async=True)
        if KB > 0:
            s = warpgroup_mma(k_b, q_b.permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(s,))
        p = exp2(s * scale2 - lse_ring.index(slot).load(QUERY)[None, :])
        if row < own + 64:
            key = own + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
            query = row + gl.arange(0, 64, QUERY)
            p = gl.where(query[None, :] >= key[:, None], p, 0.0)
        weights = p.to(DTYPE)
        dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
        new_dv = warpgroup_mma(gl.convert_layout(weights, gl.DotOperandLayout(0, VALUES, 2)), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, deps=(dp,))
        delta = delta_ring.index(slot).load(QUERY)
        ds = (weights.to(gl.float32) * (dp - delta[None, :])).to(DTYPE)
        new_dk = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, KEYS_A, 2)), q_a, dk_a, is_async=True)
        if KB > 0:
            new_b = warpgroup_mma(gl.convert_layout(ds, gl.DotOperandLayout(0, KEYS_B, 2)), q_b, dk_b, is_async=True)
            dv, dk_a, dk_b = warpgroup_mma_wait(0, deps=(new_dv, new_dk, new_b))
        else:
            dv, dk_a = warpgroup_mma_wait(0, deps=(new_dv, new_dk))
        barrier()
        mbarrier.arrive(empty.index(slot), count=1)
    store_rows(dk_ptr, dk_a * scale, start, own, length, h, H, 0, KA + KB)
    if KB > 0:
        store_rows(dk_ptr, dk_b * scale, start, own, length, h, H, KA, KA + KB)
    store_rows(dv_ptr, dv, start, own, length, h, H, 0, V)


@gluon.jit
def key_rings_kernel(
    k_a_desc,  # [N, heads and channels], blocks [64, KA]; k_b: from channel KA on, None without; all in blocks of 64
    k_b_desc,
    v_desc,
    q_a_desc,
    q_b_desc,
    do_desc,
    lse_ptr,  # these and the rest as in `key_kernel`
    delta_ptr,
    dk_ptr,
    dv_ptr,
    tiles_ptr,
    N,
    H,
    together,
    k_head,  # distances of heads
    v_head,
    q_head,
    do_head,
    scale,
    scale2,
    V: gl.constexpr,
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
    blocks = gl.cdiv(length - first, 64)

    k_a_s = gl.allocate_shared_memory(k_a_desc.dtype, [2, 64, KA], k_a_desc.layout)
    q_a_ring = gl.allocate_shared_memory(q_a_desc.dtype, [STAGES, 64, KA], q_a_desc.layout)
    k_b_s = k_a_s
    q_b_ring = q_a_ring
    if KB > 0:
        k_b_s = gl.allocate_shared_memory(k_b_desc.dtype, [2, 64, KB], k_b_desc.layout)
        q_b_ring = gl.allocate_shared_memory(q_b_desc.dtype, [STAGES, 64, KB], q_b_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [2, 64, V], v_desc.layout)
    do_ring = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 64, V], do_desc.layout)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 64], LINE)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 64], LINE)
    k_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(k_bar, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=2)  # from the TMA unit, and the warp that copies lse and delta
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    descs = (k_a_desc, k_b_desc, v_desc, q_a_desc, q_b_desc, do_desc)
    held = (k_a_s, k_b_s, v_s)
    rings = (q_a_ring, q_b_ring, do_ring, lse_ring, delta_ring)
    bars = (k_bar, full, empty)
    lse_ptr += h.to(gl.int64) * N + start
    delta_ptr += h.to(gl.int64) * N + start
    places = (h * k_head, h * v_head, h * q_head, h * do_head)
    gl.warp_specialize(
        [
            (gather, (
                held, rings, bars, dk_ptr, dv_ptr, start, first, length, blocks, h, H, scale, scale2, 0, KA, KB, V,
                STAGES,
            )),
            (gather, (
                held, rings, bars, dk_ptr, dv_ptr, start, first, length, blocks, h, H, scale, scale2, 1, KA, KB, V,
                STAGES,
            )),
            (fetch, (
                descs, held, rings, bars, places, lse_ptr, delta_ptr, start, first, length, blocks, KB, STAGES,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
    for i in gl.static_range(len(bars)):
        give_up(bars[i])
