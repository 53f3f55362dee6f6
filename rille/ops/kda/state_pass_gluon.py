"""The state pass of `state_pass.py` in Gluon: the same arithmetic, with loads and layouts placed by hand.

One warp does nothing but fetch: it fills a ring of STAGES chunks by TMA, ahead of the others as far as the ring goes.
The consumer warps hold BV value rows of the state as wgmma accumulators, 64 rows for each group of 4 warps, and
multiply: the state and u are left operands from registers, all right operands lie in the ring. Two barriers a slot pass
it back and forth, `full` from the TMA unit, `empty` from the consumers.

o leaves through a buffer of its own, by TMA as well, while the next chunk is at work. A chunk that is not full: TMA
cannot leave out rows, so the rows of v that belong to the next sequence are overwritten with zeros once they have
arrived, and o is stored by pointers with a mask.

Gluon has no interpreter: `state_pass_kernel` is the twin that the tests run, and on a GPU both must agree.
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
    t_desc, a_desc, w_desc, q_desc, k_desc, v_desc, decay_desc, ring, full, empty, first, start, count, h,
    H: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, block, STAGES: gl.constexpr,
):  # fmt: skip
    t_ring, a_ring, w_ring, q_ring, k_ring, v_ring, decay_ring = ring
    BYTES: gl.constexpr = (
        t_desc.block_type.nbytes + a_desc.block_type.nbytes + w_desc.block_type.nbytes + q_desc.block_type.nbytes
        + k_desc.block_type.nbytes + v_desc.block_type.nbytes + decay_desc.block_type.nbytes
    )  # fmt: skip
    for i in range(count):
        s = i % STAGES
        bar = full.index(s)
        mbarrier.wait(empty.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(bar, BYTES)
        tile = (first + i) * H + h
        tma.async_copy_global_to_shared(v_desc, [start + i * 64, h * V + block * BV], bar, v_ring.index(s))
        tma.async_copy_global_to_shared(t_desc, [tile * 64, 0], bar, t_ring.index(s))
        tma.async_copy_global_to_shared(w_desc, [tile * 64, 0], bar, w_ring.index(s))
        tma.async_copy_global_to_shared(q_desc, [tile * 64, 0], bar, q_ring.index(s))
        tma.async_copy_global_to_shared(decay_desc, [tile, 0], bar, decay_ring.index(s))
        tma.async_copy_global_to_shared(k_desc, [tile * 64, 0], bar, k_ring.index(s))
        tma.async_copy_global_to_shared(a_desc, [tile * 64, 0], bar, a_ring.index(s))


@gluon.jit
def multiply(
    ring, full, empty, o_desc, o_buffer, o_ptr, initial_ptr, final_ptr, saved_ptr, saved_slots_ptr,
    at_initial, at_final, saved_stride, first, start, length, count, h, block,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, BV: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    t_ring, a_ring, w_ring, q_ring, k_ring, v_ring, decay_ring = ring
    DTYPE: gl.constexpr = v_ring.dtype
    ROWS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, 64, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    LEFT_ROWS: gl.constexpr = gl.DotOperandLayout(0, ROWS, 2)
    LEFT_STATE: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BV, BV // 8], [WARPS, 1], [1, 0])

    value = block * BV + gl.arange(0, BV, gl.SliceLayout(1, STATE))
    at_state = h * (V * K) + value[:, None] * K + gl.arange(0, K, gl.SliceLayout(0, STATE))[None, :]
    if initial_ptr is not None:
        state = gl.load(initial_ptr + at_initial + at_state).to(gl.float32)
    else:
        state = gl.zeros([BV, K], gl.float32, STATE)
    zero = gl.zeros([BV, 64], gl.float32, ROWS)
    row = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
    column = block * BV + gl.arange(0, BV, gl.SliceLayout(0, WIDE))

    for i in range(count):
        s = i % STAGES
        left = length - i * 64
        mbarrier.wait(full.index(s), (i // STAGES) & 1)
        v = v_ring.index(s)
        if left < 64:
            held = v.load(WIDE)
            v.store(gl.where((row < left)[:, None], held, gl.zeros_like(held)))
            fence_async_shared()
        u = warpgroup_mma(v.permute((1, 0)), t_ring.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        rounded = gl.convert_layout(state.to(DTYPE), LEFT_ROWS)
        u = warpgroup_mma(rounded, w_ring.index(s).permute((1, 0)), u, is_async=True)
        o = warpgroup_mma(rounded, q_ring.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        state = state * decay_ring.index(s).load(STATE)
        u = warpgroup_mma_wait(1, deps=(u,))
        u = u.to(DTYPE)
        new = warpgroup_mma(gl.convert_layout(u, LEFT_STATE), k_ring.index(s), state, is_async=True)
        o = warpgroup_mma(gl.convert_layout(u, LEFT_ROWS), a_ring.index(s).permute((1, 0)), o, is_async=True)
        state, o = warpgroup_mma_wait(0, deps=(new, o))
        tma.store_wait(0)  # the buffer's last content has left
        o_buffer.permute((1, 0)).store(o.to(DTYPE))
        fence_async_shared()
        barrier()
        mbarrier.arrive(empty.index(s), count=1)  # after the barrier: every warp is done with the slot
        if left < 64:
            wide = o_buffer.load(WIDE)
            token = (start + i * 64 + row).to(gl.int64)
            gl.store(o_ptr + token[:, None] * (H * V) + (h * V + column)[None, :], wide, mask=(row < left)[:, None])
        else:
            tma.async_copy_shared_to_global(o_desc, [start + i * 64, h * V + block * BV], o_buffer)
        if saved_ptr is not None:
            saved = gl.load(saved_slots_ptr + first + i)
            if saved >= 0:
                at_saved = saved_ptr + saved * saved_stride + at_state
                gl.store(at_saved, state.to(saved_ptr.dtype.element_ty))
    tma.store_wait(0)
    if final_ptr is not None:
        gl.store(final_ptr + at_final + at_state, state.to(final_ptr.dtype.element_ty))


@gluon.jit
def state_pass_ring_kernel(
    t_desc,  # [M * H * C, C], as is a; w, q, k: [M * H * C, K]; v: [N, H * V]; decay: fp32 [M * H, K]
    a_desc,
    w_desc,
    q_desc,
    k_desc,
    v_desc,
    decay_desc,
    o_desc,  # [N, H * V]
    o_ptr,  # these and the rest as in `state_pass_kernel`
    starts_ptr,
    order_ptr,
    first_ptr,
    initial_ptr,
    final_ptr,
    slots_ptr,
    saved_ptr,
    saved_slots_ptr,
    initial_stride,
    final_stride,
    saved_stride,
    H: gl.constexpr,
    K: gl.constexpr,
    V: gl.constexpr,
    BV: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    BLOCKS: gl.constexpr = V // BV
    program = gl.program_id(0)
    block = program % BLOCKS
    h = (program // BLOCKS) % H
    s = gl.load(order_ptr + program // (BLOCKS * H))
    start = gl.load(starts_ptr + s)
    length = gl.load(starts_ptr + s + 1) - start
    count = gl.cdiv(length, 64)
    first = gl.load(first_ptr + s).to(gl.int32)
    slot = s.to(gl.int64)
    if slots_ptr is not None:
        slot = gl.load(slots_ptr + s)

    t_ring = gl.allocate_shared_memory(t_desc.dtype, [STAGES, 64, 64], t_desc.layout)
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 64, 64], a_desc.layout)
    w_ring = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 64, K], w_desc.layout)
    q_ring = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 64, K], q_desc.layout)
    k_ring = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 64, K], k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 64, BV], v_desc.layout)
    decay_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, K], decay_desc.layout)
    o_buffer = gl.allocate_shared_memory(o_desc.dtype, [64, BV], o_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    ring = (t_ring, a_ring, w_ring, q_ring, k_ring, v_ring, decay_ring)
    gl.warp_specialize(
        [
            (multiply, (
                ring, full, empty, o_desc, o_buffer, o_ptr, initial_ptr, final_ptr, saved_ptr, saved_slots_ptr,
                slot * initial_stride, slot * final_stride, saved_stride, first, start, length, count, h, block,
                H, K, V, BV, STAGES, num_warps,
            )),
            (fetch, (
                t_desc, a_desc, w_desc, q_desc, k_desc, v_desc, decay_desc, ring, full, empty,
                first, start, count, h, H, V, BV, block, STAGES,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
    give_up(full)
    give_up(empty)
