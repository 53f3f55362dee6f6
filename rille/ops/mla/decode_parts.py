"""The latent kernel of `decode_kernels.py` in Gluon for tiles of 64 queries and blocks of 64 cached rows.

Scores of 64 rows at a time read the queries half as often as scores of 32. Two blocks fill the shared memory, so no
third can be fetched ahead: the ring hands back parts of a block instead, a quarter of the value columns or the columns
behind them, each with barriers of its own, and a part of the block after next follows while the rest is still in use.

One group of four warps takes the scores and turns them into weights. Two groups hold half of the value columns each and
multiply while the next scores are taken. The factor of what was summed before is known ahead of the weights and goes
ahead of them.

    order of parts: the rest, 0, 2, 1, 3        groups 0 and 1 multiply by parts 0, 1 and 2, 3

A program may take one tile of one split or walk several: the fetching warp goes on to the next while the last is being
finished. Which ones a program takes does not touch their bits.

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

from rille.ops.mla.decode_stream import cut_tail
from rille.ops.mla.forward_gluon import barrier, exp2

BLOCK: gl.constexpr = gl.constexpr(64)
REST: gl.constexpr = gl.constexpr(4)  # place of the columns behind the values among the five parts of a block


@gluon.jit
def share(item, lists, tiles, splits, H, SPLIT: gl.constexpr):
    """Of one tile of one split: sequence, member, split, first query, first row, end, new tokens, history, blocks."""
    starts_ptr, history_ptr, members_ptr = lists
    first_row = item % tiles * 64
    split = item // tiles % splits
    member = item // (tiles * splits)
    s = gl.load(members_ptr + member)
    start = gl.load(starts_ptr + s)
    queries = gl.load(starts_ptr + s + 1) - start
    history = gl.load(history_ptr + s)
    begin = split * SPLIT
    end = gl.minimum(history + gl.minimum((first_row + 63) // H + 1, queries), begin + SPLIT)
    # A split that only other tiles see still says so in lse: it takes one block, all of it masked.
    blocks = gl.maximum(gl.cdiv(end - begin, BLOCK), 1)
    blocks = gl.where((first_row < queries * H) & (begin < history + queries), blocks, 0)
    return s, member, split, start, first_row, begin, end, queries, history, blocks


@gluon.jit
def fetch(
    descs, places, bars, lists, table_ptr, items, tiles, splits, H, max_pages, page_step, PAGE: gl.constexpr,
    PART: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    q_desc, q_b_desc, c_desc, c_b_desc = descs
    q_s, q_b_s, c_ring, c_b_ring, _, _, _ = places
    q_full, q_empty, full, empty, _, _, _, _ = bars
    taken = 0  # tiles, and blocks, so far
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, member, split, start, first_row, begin, end, queries, history, blocks = share(
            item, lists, tiles, splits, H, SPLIT
        )
        if blocks > 0:
            mbarrier.wait(q_empty, (taken & 1) ^ 1)
            mbarrier.expect(q_full, 4 * q_desc.block_type.nbytes + q_b_desc.block_type.nbytes)
            for part in gl.static_range(4):
                tma.async_copy_global_to_shared(q_desc, [start * H + first_row, part * PART], q_full, q_s.index(part))
            tma.async_copy_global_to_shared(q_b_desc, [start * H + first_row, 0], q_full, q_b_s)
            taken += 1
            pages_ptr = table_ptr + sequence.to(gl.int64) * max_pages
            page = gl.load(pages_ptr + gl.minimum(begin // PAGE, max_pages - 1))
            for i in range(blocks):
                slot = count % 2
                turn = ((count // 2) & 1) ^ 1
                at = begin + i * BLOCK
                row = page.to(gl.int32) * page_step + at % PAGE
                page = gl.load(pages_ptr + gl.minimum((at + BLOCK) // PAGE, max_pages - 1))  # one block ahead
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
                count += 1


@gluon.jit
def scores(places, bars, count, zero):
    """Of the block in its slot, which the rest then leaves."""
    q_s, q_b_s, c_ring, c_b_ring, _, _, _ = places
    _, _, full, empty, _, _, _, _ = bars
    slot = count % 2
    turn = (count // 2) & 1
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
def pass_on(s, m, total, count, at, seen, least, scale2, places, bars):
    """Scores become weights; their factor goes ahead. least: rows that every query sees."""
    _, _, _, _, weights, factors, _ = places
    _, _, _, _, f_full, p_full, p_empty, _ = bars
    if at + BLOCK > least:
        columns = at + gl.arange(0, BLOCK, gl.SliceLayout(0, s.type.layout))
        s = gl.where(columns[None, :] < seen[:, None], s, float("-inf"))
    new = gl.maximum(m, gl.max(s, 1) * scale2)
    safe = gl.where(new == float("-inf"), 0.0, new)
    decay = exp2(m - safe)
    factors.index(count % 2).store(decay)
    barrier()
    mbarrier.arrive(f_full.index(count % 2), count=1)
    p = exp2(s * scale2 - safe[:, None])
    total = total * decay + gl.sum(p, 1)
    mbarrier.wait(p_empty, (count & 1) ^ 1)
    weights.store(p.to(weights.dtype))
    fence_async_shared()
    barrier()
    mbarrier.arrive(p_full, count=1)
    return new, total


@gluon.jit
def weigh(
    places, bars, lists, lse_ptr, items, tiles, splits, most_rows, H, scale2, SPLIT: gl.constexpr
):  # fmt: skip
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    _, _, _, _, _, _, totals = places
    q_full, q_empty, _, _, _, _, _, done = bars
    row = gl.arange(0, 64, ROW)
    taken = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, member, split, start, first_row, begin, end, queries, history, blocks = share(
            item, lists, tiles, splits, H, SPLIT
        )
        if blocks > 0:
            seen = gl.minimum(history + (first_row + row) // H + 1, end)
            least = gl.minimum(history + first_row // H + 1, end)
            zero = gl.zeros([64, 64], gl.float32, SCORES)
            m = gl.full([64], float("-inf"), gl.float32, ROW)
            total = gl.zeros([64], gl.float32, ROW)
            mbarrier.wait(q_full, taken & 1)
            s = scores(places, bars, count, zero)
            for i in range(1, blocks):
                # Weights first: a part of the next block that has not come would hold them up, and so its own return.
                m, total = pass_on(s, m, total, count, begin + (i - 1) * BLOCK, seen, least, scale2, places, bars)
                count += 1
                s = scores(places, bars, count, zero)
            mbarrier.arrive(q_empty, count=1)
            m, total = pass_on(s, m, total, count, begin + (blocks - 1) * BLOCK, seen, least, scale2, places, bars)
            count += 1
            total = gl.where(total == 0.0, 1.0, total)
            totals.index(taken % 2).store(total)
            barrier()
            mbarrier.arrive(done.index(taken % 2), count=1)
            taken += 1
            if lse_ptr is not None:
                at_row = (member.to(gl.int64) * splits + split) * most_rows + first_row
                gl.store(lse_ptr + at_row + row, m + gl.log2(total), mask=first_row + row < queries * H)


@gluon.jit
def add_values(
    places, bars, lists, o_ptr, items, tiles, splits, most_rows, H, PART: gl.constexpr, WHICH: gl.constexpr,
    SPLIT: gl.constexpr, WHOLE: gl.constexpr,
):  # fmt: skip
    """WHOLE: one split takes a sequence, and o is the result itself."""
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART, 16])
    ROW: gl.constexpr = gl.SliceLayout(1, VALUES)
    _, _, c_ring, _, weights, factors, totals = places
    _, _, full, empty, f_full, p_full, p_empty, done = bars
    row = gl.arange(0, 64, ROW)
    channel = 2 * WHICH * PART + gl.arange(0, PART, gl.SliceLayout(0, VALUES))
    taken = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, member, split, start, first_row, begin, end, queries, history, blocks = share(
            item, lists, tiles, splits, H, SPLIT
        )
        if blocks > 0:
            acc_0 = gl.zeros([64, PART], gl.float32, VALUES)
            acc_1 = gl.zeros([64, PART], gl.float32, VALUES)
            for i in range(blocks):
                slot = count % 2
                turn = (count // 2) & 1
                mbarrier.wait(f_full.index(slot), turn)
                factor = factors.index(slot).load(ROW)[:, None]
                acc_0 = acc_0 * factor
                acc_1 = acc_1 * factor
                mbarrier.wait(p_full, count & 1)
                mbarrier.wait(full.index(5 * slot + 2 * WHICH), turn)
                mbarrier.wait(full.index(5 * slot + 2 * WHICH + 1), turn)
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
                count += 1
            mbarrier.wait(done.index(taken % 2), (taken // 2) & 1)
            over = 1.0 / totals.index(taken % 2).load(ROW)[:, None]
            taken += 1
            place = (start.to(gl.int64) * H + first_row) * (4 * PART)
            if not WHOLE:
                place = ((member.to(gl.int64) * splits + split) * most_rows + first_row) * (4 * PART)
            at_o = o_ptr + (place + row.to(gl.int64) * (4 * PART))[:, None] + channel[None, :]
            held = (first_row + row < queries * H)[:, None]
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
    items,  # tiles of splits of all members
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
    WHOLE: gl.constexpr = lse_ptr is None
    q_s = gl.allocate_shared_memory(q_desc.dtype, [4, 64, PART], q_desc.layout)
    q_b_s = gl.allocate_shared_memory(q_desc.dtype, q_b_desc.block_type.shape, q_b_desc.layout)
    c_ring = gl.allocate_shared_memory(c_desc.dtype, [8, 64, PART], c_desc.layout)
    c_b_ring = gl.allocate_shared_memory(c_desc.dtype, [2, 64, c_b_desc.block_type.shape[1]], c_b_desc.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], q_desc.dtype)
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    weights = gl.allocate_shared_memory(q_desc.dtype, [64, 64], WEIGHTS)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], LINE)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [10, 1], mbarrier.MBarrierLayout())
    f_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    p_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    mbarrier.init(p_full, count=1)
    mbarrier.init(p_empty, count=2)
    for bar in gl.static_range(10):
        mbarrier.init(full.index(bar), count=1)
        mbarrier.init(empty.index(bar), count=1)
    for buffer in gl.static_range(2):
        mbarrier.init(f_full.index(buffer), count=1)
        mbarrier.init(done.index(buffer), count=1)
    fence_async_shared()
    descs = (q_desc, q_b_desc, c_desc, c_b_desc)
    places = (q_s, q_b_s, c_ring, c_b_ring, weights, factors, totals)
    bars = (q_full, q_empty, full, empty, f_full, p_full, p_empty, done)
    lists = (starts_ptr, history_ptr, members_ptr)
    gl.warp_specialize(
        [
            (add_values, (places, bars, lists, o_ptr, items, tiles, splits, most_rows, H, PART, 0, SPLIT, WHOLE)),
            (add_values, (places, bars, lists, o_ptr, items, tiles, splits, most_rows, H, PART, 1, SPLIT, WHOLE)),
            (weigh, (places, bars, lists, lse_ptr, items, tiles, splits, most_rows, H, scale2, SPLIT)),
            (fetch, (descs, places, bars, lists, table_ptr, items, tiles, splits, H, max_pages, page_step, PAGE, PART,
                     SPLIT)),
        ],
        [4, 4, 1],
        [176, 128, 32],
    )  # fmt: skip
