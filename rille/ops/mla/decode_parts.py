"""The latent kernel of `decode_kernels.py` in Gluon for tiles of 64 queries and blocks of 64 cached rows.

Scores of 64 rows at a time read the queries half as often as scores of 32. Two blocks fill the shared memory, so no
third can be fetched ahead: the ring hands back parts of a block instead, a quarter of the value columns or the columns
behind them, each with barriers of its own, and a part of the block after next follows while the rest is still in use.

One group of four warps takes the scores and turns them into weights. Two groups hold half of the value columns each and
multiply while the next scores are taken. The factor of what was summed before is known ahead of the weights and goes
ahead of them.

    order of parts: the rest, 0, 2, 1, 3        groups 0 and 1 multiply by parts 0, 1 and 2, 3

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

from rille.ops.barriers_gluon import give_up
from rille.ops.mla.decode_stream import cut_tail
from rille.ops.mla.forward_gluon import barrier, exp2

BLOCK: gl.constexpr = gl.constexpr(64)
REST: gl.constexpr = gl.constexpr(4)  # place of the columns behind the values among the five parts of a block


@gluon.jit
def fetch(
    descs, places, bars, table_ptr, q_row, begin, blocks, max_pages, page_step, PAGE: gl.constexpr, PART: gl.constexpr
):  # fmt: skip
    q_desc, q_b_desc, c_desc, c_b_desc = descs
    q_s, q_b_s, c_ring, c_b_ring, _, _, _ = places
    q_bar, full, empty, _, _, _, _ = bars
    if blocks > 0:
        mbarrier.expect(q_bar, 4 * q_desc.block_type.nbytes + q_b_desc.block_type.nbytes)
        for part in gl.static_range(4):
            tma.async_copy_global_to_shared(q_desc, [q_row, part * PART], q_bar, q_s.index(part))
        tma.async_copy_global_to_shared(q_b_desc, [q_row, 0], q_bar, q_b_s)
    page = gl.load(table_ptr + gl.minimum(begin // PAGE, max_pages - 1))
    for i in range(blocks):
        slot = i % 2
        turn = ((i // 2) & 1) ^ 1
        at = begin + i * BLOCK
        row = page.to(gl.int32) * page_step + at % PAGE
        page = gl.load(table_ptr + gl.minimum((at + BLOCK) // PAGE, max_pages - 1))  # one block ahead
        bar = 5 * slot + REST
        mbarrier.wait(empty.index(bar), turn)
        mbarrier.expect(full.index(bar), c_b_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(c_b_desc, [row, 0], full.index(bar), c_b_ring.index(slot))
        for n in gl.static_range(4):
            bar = 5 * slot + n % 2 * 2 + n // 2
            mbarrier.wait(empty.index(bar), turn)
            mbarrier.expect(full.index(bar), c_desc.block_type.nbytes)
            values = c_ring.index(4 * slot + n % 2 * 2 + n // 2)
            tma.async_copy_global_to_shared(c_desc, [row, (n % 2 * 2 + n // 2) * PART], full.index(bar), values)


@gluon.jit
def scores(places, bars, i, zero):
    """Of block i, whose rest then leaves its slot."""
    q_s, q_b_s, c_ring, c_b_ring, _, _, _ = places
    _, full, empty, _, _, _, _ = bars
    slot = i % 2
    turn = (i // 2) & 1
    mbarrier.wait(full.index(5 * slot + REST), turn)
    s = warpgroup_mma(q_b_s, c_b_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
    for n in gl.static_range(4):
        mbarrier.wait(full.index(5 * slot + n % 2 * 2 + n // 2), turn)
        keys = c_ring.index(4 * slot + n % 2 * 2 + n // 2).permute((1, 0))
        s = warpgroup_mma(q_s.index(n % 2 * 2 + n // 2), keys, s, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    barrier()
    mbarrier.arrive(empty.index(5 * slot + REST), count=1)
    return s


@gluon.jit
def pass_on(s, m, total, i, at, seen, least, scale2, places, bars):
    """Scores become weights; their factor goes ahead. least: rows that every query sees."""
    _, _, _, _, weights, factors, _ = places
    _, _, _, f_full, p_full, p_empty, _ = bars
    if at + BLOCK > least:
        columns = at + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
        s = gl.where(columns[None, :] < seen[:, None], s, float("-inf"))
    new = gl.maximum(m, gl.max(s, 1) * scale2)
    safe = gl.where(new == float("-inf"), 0.0, new)
    decay = exp2(m - safe)
    factors.index(i % 2).store(decay)
    barrier()
    mbarrier.arrive(f_full.index(i % 2), count=1)
    p = exp2(s * scale2 - safe[:, None])
    total = total * decay + gl.sum(p, 1)
    mbarrier.wait(p_empty, (i & 1) ^ 1)
    weights.store(p.to(weights.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full, count=1)
    return new, total


@gluon.jit
def weigh(places, bars, lse_ptr, at_row, begin, blocks, history, first_row, end, rows, H, scale2):
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    _, _, _, _, _, _, totals = places
    q_bar, _, _, _, _, _, done = bars
    if blocks > 0:
        row = gl.arange(0, 64, ROW)
        seen = gl.minimum(history + (first_row + row) // H + 1, end)
        least = gl.minimum(history + first_row // H + 1, end)
        zero = gl.zeros([64, 64], gl.float32, SCORES)
        m = gl.full([64], float("-inf"), gl.float32, ROW)
        total = gl.zeros([64], gl.float32, ROW)
        mbarrier.wait(q_bar, 0)
        s = scores(places, bars, 0, zero)
        for i in range(1, blocks):
            # Weights first: a part of the next block that has not come would hold them up, and so its own return.
            m, total = pass_on(s, m, total, i - 1, begin + (i - 1) * BLOCK, seen, least, scale2, places, bars)
            s = scores(places, bars, i, zero)
        last = blocks - 1
        m, total = pass_on(s, m, total, last, begin + last * BLOCK, seen, least, scale2, places, bars)
        total = gl.where(total == 0.0, 1.0, total)
        totals.store(total)
        barrier()
        mbarrier.arrive(done, count=1)
        if lse_ptr is not None:
            gl.store(lse_ptr + at_row + row, m + gl.log2(total), mask=first_row + row < rows)


@gluon.jit
def add_values(
    places, bars, o_ptr, place, begin, blocks, first_row, end, rows, PART: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    _, _, c_ring, _, weights, factors, totals = places
    _, full, empty, f_full, p_full, p_empty, done = bars
    if blocks > 0:
        acc_0 = gl.zeros([64, PART], gl.float32, VALUES)
        acc_1 = gl.zeros([64, PART], gl.float32, VALUES)
        for i in range(blocks):
            slot = i % 2
            mbarrier.wait(f_full.index(slot), (i // 2) & 1)
            factor = factors.index(slot).load(ROW)[:, None]
            acc_0 = acc_0 * factor
            acc_1 = acc_1 * factor
            mbarrier.wait(p_full, i & 1)
            mbarrier.wait(full.index(5 * slot + 2 * WHICH), (i // 2) & 1)
            mbarrier.wait(full.index(5 * slot + 2 * WHICH + 1), (i // 2) & 1)
            values_0 = c_ring.index(4 * slot + 2 * WHICH)
            values_1 = c_ring.index(4 * slot + 2 * WHICH + 1)
            left = end - begin - i * BLOCK
            if left < BLOCK:  # the scores have been taken
                cut_tail(values_0, left, PART)
                cut_tail(values_1, left, PART)
                fence_async_shared()
                barrier()
            acc_0 = warpgroup_mma(weights, values_0, acc_0, is_async=True)
            acc_1 = warpgroup_mma(weights, values_1, acc_1, is_async=True)
            acc_0 = warpgroup_mma_wait(1, deps=(acc_0,))
            barrier()
            mbarrier.arrive(empty.index(5 * slot + 2 * WHICH), count=1)
            acc_1 = warpgroup_mma_wait(0, deps=(acc_1,))
            barrier()
            mbarrier.arrive(p_empty, count=1)
            mbarrier.arrive(empty.index(5 * slot + 2 * WHICH + 1), count=1)
        mbarrier.wait(done, 0)
        over = 1.0 / totals.load(ROW)[:, None]
        row = gl.arange(0, 64, ROW)
        channel = 2 * WHICH * PART + gl.arange(0, PART, gl.SliceLayout(0, VALUES))
        at_o = o_ptr + (place + row.to(gl.int64) * (4 * PART))[:, None] + channel[None, :]
        held = (first_row + row < rows)[:, None]
        gl.store(at_o, acc_0 * over, mask=held)
        gl.store(at_o + PART, acc_1 * over, mask=held)


@gluon.jit
def latent_parts_kernel(
    q_desc,  # [N * H, R], blocks [64, VALUE / 4]; q_b: the channels behind VALUE
    q_b_desc,
    c_desc,  # the pool as one table of rows, blocks [64, VALUE / 4]; c_b likewise
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
    c_ring = gl.allocate_shared_memory(c_desc.dtype, [8, 64, PART], c_desc.layout)
    c_b_ring = gl.allocate_shared_memory(c_desc.dtype, [2, 64, c_b_desc.block_type.shape[1]], c_b_desc.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q_desc.dtype)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = gl.allocate_shared_memory(q_desc.dtype, [64, 64], WEIGHTS)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [64], LINE)
    q_bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    f_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_bar, count=1)
    mbarrier.init(done, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=2)
    for bar in gl.static_range(10):
        mbarrier.init(full.index(bar), count=1)
        mbarrier.init(empty.index(bar), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(f_full.index(buffer), count=1)
    fence_async_shared()
    descs = (q_desc, q_b_desc, c_desc, c_b_desc)
    places = (q_s, q_b_s, c_ring, c_b_ring, weights, factors, totals)
    bars = (q_bar, full, empty, f_full, p_full, p_empty, done)
    table_ptr += s.to(gl.int64) * max_pages
    q_row = start * H + first_row
    gl.warp_specialize(
        [
            (add_values, (places, bars, o_ptr, place, begin, blocks, first_row, end, rows, PART, 0)),
            (add_values, (places, bars, o_ptr, place, begin, blocks, first_row, end, rows, PART, 1)),
            (weigh, (places, bars, lse_ptr, at_row, begin, blocks, history, first_row, end, rows, H, scale2)),
            (fetch, (descs, places, bars, table_ptr, q_row, begin, blocks, max_pages, page_step, PAGE, PART)),
        ],
        [4, 4, 1],
        [176, 128, 24],
    )  # fmt: skip
    for i in gl.static_range(len(bars)):
        give_up(bars[i])
