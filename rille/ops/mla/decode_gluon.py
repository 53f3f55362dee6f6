"""The latent kernel of `decode_kernels.py` in Gluon for tiles of 64 queries, with work divided among groups of warps.

One warp fetches the cached rows by TMA, 32 at a time, into a ring. One group of four warps takes the scores and turns
them into weights; it starts the scores of the next rows before it takes the exponentials of these. Two groups hold half
of the value columns each and add weights times values. Weights, and the factor of what was summed before, pass through
two buffers. All barriers come in pairs: what is full, and what may be overwritten.

A block of 32 rows serves the scores and both halves of the values from one place in shared memory. Rows at and beyond
the end are zeroed there, each half by the group that reads it.

Gluon has no interpreter: `latent_kernel` is the twin that the tests run, and on a GPU both must agree.
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

from rille.ops.mla.forward_gluon import barrier, exp2

BLOCK: gl.constexpr = gl.constexpr(32)


@gluon.jit
def fetch(
    descs, places, bars, table_ptr, q_row, begin, blocks, max_pages, page_step, PAGE: gl.constexpr, PART: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    q_desc, q_b_desc, c_desc, c_b_desc = descs
    q_s, q_b_s, c_ring, c_b_ring, _, _, _ = places
    q_bar, c_full, c_empty, _, _, _ = bars
    if blocks > 0:
        mbarrier.expect(q_bar, 4 * q_desc.block_type.nbytes + q_b_desc.block_type.nbytes)
        for part in gl.static_range(4):
            tma.async_copy_global_to_shared(q_desc, [q_row, part * PART], q_bar, q_s.index(part))
        tma.async_copy_global_to_shared(q_b_desc, [q_row, 0], q_bar, q_b_s)
    page = gl.load(table_ptr + gl.minimum(begin // PAGE, max_pages - 1))
    for i in range(blocks):
        s = i % STAGES
        at = begin + i * BLOCK
        row = page.to(gl.int32) * page_step + at % PAGE
        page = gl.load(table_ptr + gl.minimum((at + BLOCK) // PAGE, max_pages - 1))  # one block ahead
        mbarrier.wait(c_empty.index(s), ((i // STAGES) & 1) ^ 1)
        mbarrier.expect(c_full.index(s), 4 * c_desc.block_type.nbytes + c_b_desc.block_type.nbytes)
        for part in gl.static_range(4):
            tma.async_copy_global_to_shared(c_desc, [row, part * PART], c_full.index(s), c_ring.index(4 * s + part))
        tma.async_copy_global_to_shared(c_b_desc, [row, 0], c_full.index(s), c_b_ring.index(s))


@gluon.jit
def scores(q_s, q_b_s, c_ring, c_b_ring, slot, zero):
    s = warpgroup_mma(q_b_s, c_b_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    for part in gl.static_range(4):
        s = warpgroup_mma(q_s.index(part), c_ring.index(4 * slot + part).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def pass_on(s, m, total, i, at, seen, scale2, weights, factors, p_full, p_empty):
    """Scores of block i become weights in the buffer that they take in turn."""
    columns = at + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
    s = gl.where(columns[None, :] < seen[:, None], s, float("-inf"))
    new = gl.maximum(m, gl.max(s, 1) * scale2)
    safe = gl.where(new == float("-inf"), 0.0, new)
    p = exp2(s * scale2 - safe[:, None])
    decay = exp2(m - safe)
    total = total * decay + gl.sum(p, 1)
    buffer = i % 2
    mbarrier.wait(p_empty.index(buffer), ((i // 2) & 1) ^ 1)
    weights.index(buffer).store(p.to(weights.dtype))
    factors.index(buffer).store(decay)
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full.index(buffer), count=1)
    return new, total


@gluon.jit
def weigh(
    places, bars, lse_ptr, at_row, begin, blocks, history, first_row, end, rows, H, scale2, STAGES: gl.constexpr
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    q_s, q_b_s, c_ring, c_b_ring, weights, factors, totals = places
    q_bar, c_full, _, p_full, p_empty, done = bars
    if blocks > 0:
        row = gl.arange(0, 64, ROW)
        seen = gl.minimum(history + (first_row + row) // H + 1, end)
        zero = gl.zeros([64, 32], gl.float32, SCORES)
        m = gl.full([64], float("-inf"), gl.float32, ROW)
        total = gl.zeros([64], gl.float32, ROW)
        mbarrier.wait(q_bar, 0)
        mbarrier.wait(c_full.index(0), 0)
        s = scores(q_s, q_b_s, c_ring, c_b_ring, 0, zero)
        s = warpgroup_mma_wait(0, deps=(s,))
        for i in range(1, blocks):
            slot = i % STAGES
            mbarrier.wait(c_full.index(slot), (i // STAGES) & 1)
            following = scores(q_s, q_b_s, c_ring, c_b_ring, slot, zero)
            m, total = pass_on(
                s, m, total, i - 1, begin + (i - 1) * BLOCK, seen, scale2, weights, factors, p_full, p_empty
            )
            s = warpgroup_mma_wait(0, deps=(following,))
        last = blocks - 1
        m, total = pass_on(s, m, total, last, begin + last * BLOCK, seen, scale2, weights, factors, p_full, p_empty)
        total = gl.where(total == 0.0, 1.0, total)
        totals.store(total)
        barrier()
        mbarrier.arrive(done, count=1)
        if lse_ptr is not None:
            gl.store(lse_ptr + at_row + row, m + gl.log2(total), mask=first_row + row < rows)


@gluon.jit
def cut_tail(values, left, PART: gl.constexpr):
    """Zeros over the rows [32, PART] in shared memory from `left` on."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // PART, PART // 8], [4, 1], [1, 0])
    inside = gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE)) < left
    held = values.load(WIDE)
    values.store(gl.where(inside[:, None], held, gl.zeros_like(held)))


@gluon.jit
def add_values(
    places, bars, o_ptr, place, begin, blocks, first_row, end, rows, PART: gl.constexpr, WHICH: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Two parts of the value columns: an instruction of 256 columns takes more registers than a thread starts with."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    _, _, c_ring, _, weights, factors, totals = places
    _, c_full, c_empty, p_full, p_empty, done = bars
    if blocks > 0:
        acc_0 = gl.zeros([64, PART], gl.float32, VALUES)
        acc_1 = gl.zeros([64, PART], gl.float32, VALUES)
        for i in range(blocks):
            slot = i % STAGES
            buffer = i % 2
            mbarrier.wait(c_full.index(slot), (i // STAGES) & 1)
            mbarrier.wait(p_full.index(buffer), (i // 2) & 1)
            values_0 = c_ring.index(4 * slot + 2 * WHICH)
            values_1 = c_ring.index(4 * slot + 2 * WHICH + 1)
            left = end - begin - i * BLOCK
            if left < BLOCK:  # the scores have been taken
                cut_tail(values_0, left, PART)
                cut_tail(values_1, left, PART)
                fence_async_shared()
                barrier()
            factor = factors.index(buffer).load(ROW)[:, None]
            acc_0 = acc_0 * factor
            acc_1 = acc_1 * factor
            acc_0 = warpgroup_mma(weights.index(buffer), values_0, acc_0, is_async=True)
            acc_1 = warpgroup_mma(weights.index(buffer), values_1, acc_1, is_async=True)
            acc_0, acc_1 = warpgroup_mma_wait(0, deps=(acc_0, acc_1))
            barrier()
            mbarrier.arrive(p_empty.index(buffer), count=1)
            mbarrier.arrive(c_empty.index(slot), count=1)
        mbarrier.wait(done, 0)
        total = totals.load(ROW)[:, None]
        row = gl.arange(0, 64, ROW)
        channel = 2 * WHICH * PART + gl.arange(0, PART, gl.SliceLayout(0, VALUES))
        at_o = o_ptr + (place + row.to(gl.int64) * (4 * PART))[:, None] + channel[None, :]
        held = (first_row + row < rows)[:, None]
        gl.store(at_o, acc_0 / total, mask=held)
        gl.store(at_o + PART, acc_1 / total, mask=held)


@gluon.jit
def latent_rings_kernel(
    q_desc,  # [N * H, R], blocks [64, VALUE / 4]; q_b: the channels behind VALUE
    q_b_desc,
    c_desc,  # the pool as one table of rows, blocks [32, VALUE / 4]; c_b likewise
    c_b_desc,
    table_ptr,  # these and the rest as in `latent_kernel`
    starts_ptr,
    history_ptr,
    members_ptr,
    o_ptr,
    lse_ptr,
    page_step,  # rows from page to page
    max_pages,
    H,
    tiles,
    splits,
    most_rows,
    scale2,
    VALUE: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    num_warps: gl.constexpr,
):
    PART: gl.constexpr = VALUE // 4
    member = gl.program_id(1)
    first_row = gl.program_id(0) % tiles * 64
    split = gl.program_id(0) // tiles
    s = gl.load(members_ptr + member)
    start = gl.load(starts_ptr + s)
    queries = gl.load(starts_ptr + s + 1) - start
    history = gl.load(history_ptr + s)
    begin = split * SPLIT
    rows = queries * H
    end = gl.minimum(history + gl.minimum((first_row + 63) // H + 1, queries), begin + SPLIT)
    # A split that only other tiles see still says so in lse: it takes one block, all of it masked.
    blocks = gl.maximum(gl.cdiv(end - begin, BLOCK), 1)
    blocks = gl.where((first_row < rows) & (begin < history + queries), blocks, 0)
    place = (start.to(gl.int64) * H + first_row) * VALUE
    at_row = (member.to(gl.int64) * splits + split) * most_rows + first_row
    if lse_ptr is not None:
        place = at_row * VALUE

    q_s = gl.allocate_shared_memory(q_desc.dtype, [4, 64, PART], q_desc.layout)
    q_b_s = gl.allocate_shared_memory(q_desc.dtype, q_b_desc.block_type.shape, q_b_desc.layout)
    c_ring = gl.allocate_shared_memory(c_desc.dtype, [4 * STAGES, 32, PART], c_desc.layout)
    c_b_ring = gl.allocate_shared_memory(c_desc.dtype, [STAGES, 32, c_b_desc.block_type.shape[1]], c_b_desc.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 32], q_desc.dtype)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = gl.allocate_shared_memory(q_desc.dtype, [2, 64, 32], WEIGHTS)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [64], LINE)
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar, count=1)
    mbarrier.init(done, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(c_full.index(stage), count=1)
        mbarrier.init(c_empty.index(stage), count=2)
    for buffer in gl.static_range(2):
        mbarrier.init(p_full.index(buffer), count=1)
        mbarrier.init(p_empty.index(buffer), count=2)
    fence_async_shared()
    descs = (q_desc, q_b_desc, c_desc, c_b_desc)
    places = (q_s, q_b_s, c_ring, c_b_ring, weights, factors, totals)
    bars = (q_bar, c_full, c_empty, p_full, p_empty, done)
    table_ptr += s.to(gl.int64) * max_pages
    q_row = start * H + first_row
    gl.warp_specialize(
        [
            (add_values, (places, bars, o_ptr, place, begin, blocks, first_row, end, rows, PART, 0, STAGES)),
            (add_values, (places, bars, o_ptr, place, begin, blocks, first_row, end, rows, PART, 1, STAGES)),
            (weigh, (places, bars, lse_ptr, at_row, begin, blocks, history, first_row, end, rows, H, scale2, STAGES)),
            (fetch, (descs, places, bars, table_ptr, q_row, begin, blocks, max_pages, page_step, PAGE, PART, STAGES)),
        ],
        [4, 4, 1],
        [200, 88, 24],
    )  # fmt: skip
