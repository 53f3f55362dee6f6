"""The latent kernel of `decode_kernels.py` in Gluon for up to 32 queries of a sequence, where reading is what costs.

As many programs as the card has multiprocessors walk all splits of all sequences. One warp fetches blocks of 64 cached
rows by TMA into a ring of two, 72 KB each, and goes on to the next split while the last one is being finished, so that
reading need not pause between splits. Queries pass through two buffers. One group of four warps does the rest:

    s^T = c q^T        p^T = 2^(s^T scale log2 e - m)        o^T = o^T 2^(m_old - m) + c^T p^T

The cached rows are the left operand, 64 of them or 64 value columns an instruction, so 16 or 32 queries are no padding.
Which splits a program takes does not touch their bits.

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
from rille.ops.chain_gluon import meet
from rille.ops.mla.forward_gluon import barrier, exp2

BLOCK: gl.constexpr = gl.constexpr(64)
STAGES: gl.constexpr = gl.constexpr(2)


@gluon.jit
def share(item, members, starts_ptr, history_ptr, members_ptr, SPLIT: gl.constexpr):
    """Of one split of one sequence: the sequence, its first token, new tokens, history, first row, end, blocks."""
    s = gl.load(members_ptr + item % members)
    start = gl.load(starts_ptr + s)
    queries = gl.load(starts_ptr + s + 1) - start
    history = gl.load(history_ptr + s)
    begin = item // members * SPLIT
    end = gl.minimum(history + queries, begin + SPLIT)
    blocks = gl.cdiv(gl.maximum(end - begin, 0), BLOCK)
    return s, start, queries, history, begin, end, gl.where(queries > 0, blocks, 0)


@gluon.jit
def fetch(
    descs, places, bars, table_ptr, starts_ptr, history_ptr, members_ptr, items, members, page_step, max_pages, H,
    PAGE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    q_desc, q_b_desc, c_desc, c_b_desc = descs
    q_s, q_b_s, c_ring, c_b_ring, weights = places
    q_full, q_empty, c_full, c_empty = bars
    taken = 0  # splits, and blocks, so far
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        s, start, queries, history, begin, end, blocks = share(
            item, members, starts_ptr, history_ptr, members_ptr, SPLIT
        )
        if blocks > 0:
            b = taken % 2
            mbarrier.wait(q_empty.index(b), ((taken // 2) & 1) ^ 1)
            mbarrier.expect(q_full.index(b), q_desc.block_type.nbytes + q_b_desc.block_type.nbytes)
            tma.async_copy_global_to_shared(q_desc, [start * H, 0], q_full.index(b), q_s.index(b))
            tma.async_copy_global_to_shared(q_b_desc, [start * H, 0], q_full.index(b), q_b_s.index(b))
            taken += 1
            pages_ptr = table_ptr + s.to(gl.int64) * max_pages
            page = gl.load(pages_ptr + gl.minimum(begin // PAGE, max_pages - 1))
            for i in range(blocks):
                at = begin + i * BLOCK
                row = page.to(gl.int32) * page_step + at % PAGE
                page = gl.load(pages_ptr + gl.minimum((at + BLOCK) // PAGE, max_pages - 1))  # one block ahead
                slot = count % STAGES
                mbarrier.wait(c_empty.index(slot), ((count // STAGES) & 1) ^ 1)
                mbarrier.expect(c_full.index(slot), c_desc.block_type.nbytes + c_b_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(c_desc, [row, 0], c_full.index(slot), c_ring.index(slot))
                tma.async_copy_global_to_shared(c_b_desc, [row, 0], c_full.index(slot), c_b_ring.index(slot))
                count += 1


@gluon.jit
def cut_tail(values, left, VALUE: gl.constexpr):
    """Zeros over the rows [64, VALUE] in shared memory from `left` on."""
    WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = gl.arange(0, BLOCK, gl.SliceLayout(1, WIDE)) < left
    for part in gl.static_range(VALUE // 64):
        some = values.slice(part * 64, 64, dim=1)
        held = some.load(WIDE)
        some.store(gl.where(inside[:, None], held, gl.zeros_like(held)))


@gluon.jit
def attend(
    places, bars, starts_ptr, history_ptr, members_ptr, o_ptr, lse_ptr, items, members, H, splits, most_rows, scale2,
    VALUE: gl.constexpr, SPLIT: gl.constexpr, Q: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, Q, 16])
    COLUMN: gl.constexpr = gl.SliceLayout(0, TILE)
    q_s, q_b_s, c_ring, c_b_ring, weights = places
    q_full, q_empty, c_full, c_empty = bars
    column = gl.arange(0, Q, COLUMN)
    taken = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        sequence, start, queries, history, begin, end, blocks = share(
            item, members, starts_ptr, history_ptr, members_ptr, SPLIT
        )
        if blocks > 0:
            b = taken % 2
            seen = gl.minimum(history + column // H + 1, end)
            m = gl.full([Q], float("-inf"), gl.float32, COLUMN)
            sums = gl.zeros([BLOCK, Q], gl.float32, TILE)
            acc = gl.zeros([VALUE, Q], gl.float32, TILE)
            mbarrier.wait(q_full.index(b), (taken // 2) & 1)
            for i in range(blocks):
                at = begin + i * BLOCK
                slot = count % STAGES
                mbarrier.wait(c_full.index(slot), (count // STAGES) & 1)
                s = gl.zeros([BLOCK, Q], gl.float32, TILE)
                s = warpgroup_mma(c_b_ring.index(slot), q_b_s.index(b).permute((1, 0)), s, use_acc=False, is_async=True)
                s = warpgroup_mma(c_ring.index(slot), q_s.index(b).permute((1, 0)), s, is_async=True)
                s = warpgroup_mma_wait(0, deps=(s,))
                rows = at + gl.arange(0, BLOCK, gl.SliceLayout(1, TILE))
                s = gl.where(rows[:, None] < seen[None, :], s, float("-inf"))
                new = gl.maximum(m, gl.max(s, 0) * scale2)
                safe = gl.where(new == float("-inf"), 0.0, new)
                p = exp2(s * scale2 - safe[None, :])
                decay = exp2(m - safe)
                sums = sums * decay[None, :] + p
                acc = acc * decay[None, :]
                m = new
                weights.store(p.to(weights.dtype))
                if end - at < BLOCK:  # the scores have been taken
                    cut_tail(c_ring.index(slot), end - at, VALUE)
                fence_async_shared()
                barrier()
                acc = warpgroup_mma(c_ring.index(slot).permute((1, 0)), weights, acc, is_async=True)
                acc = warpgroup_mma_wait(0, deps=(acc,))
                barrier()
                mbarrier.arrive(c_empty.index(slot), count=1)
                count += 1
            mbarrier.arrive(q_empty.index(b), count=1)
            taken += 1
            total = gl.sum(sums, 0)
            total = gl.where(total == 0.0, 1.0, total)
            held = column < queries * H
            place = (start.to(gl.int64) * H + column) * VALUE
            if lse_ptr is not None:
                at_row = ((item % members).to(gl.int64) * splits + item // members) * most_rows + column
                gl.store(lse_ptr + at_row, m + gl.log2(total), mask=held)
                place = at_row * VALUE
            channel = gl.arange(0, VALUE, gl.SliceLayout(1, TILE))
            acc = acc * (1.0 / total)[None, :]
            gl.store(o_ptr + place[None, :] + channel[:, None], acc, mask=held[None, :])


@gluon.jit
def latent_stream_kernel(
    q_desc,  # [N * H, R], blocks [Q, VALUE]; q_b: the channels behind VALUE
    q_b_desc,
    c_desc,  # the pool as one table of rows, blocks [64, VALUE]; c_b likewise
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
    members,
    splits,
    most_rows,
    scale2,
    VALUE: gl.constexpr,
    PAGE: gl.constexpr,
    SPLIT: gl.constexpr,
    Q: gl.constexpr,
    CHAINED: gl.constexpr,
    num_warps: gl.constexpr,
):
    REST: gl.constexpr = c_b_desc.block_type.shape[1]
    q_s = gl.allocate_shared_memory(q_desc.dtype, [2, Q, VALUE], q_desc.layout)
    q_b_s = gl.allocate_shared_memory(q_desc.dtype, [2, Q, REST], q_b_desc.layout)
    c_ring = gl.allocate_shared_memory(c_desc.dtype, [STAGES, BLOCK, VALUE], c_desc.layout)
    c_b_ring = gl.allocate_shared_memory(c_desc.dtype, [STAGES, BLOCK, REST], c_b_desc.layout)
    WEIGHTS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, Q], q_desc.dtype)
    weights = gl.allocate_shared_memory(q_desc.dtype, [BLOCK, Q], WEIGHTS)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    c_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    c_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(c_full.index(stage), count=1)
        mbarrier.init(c_empty.index(stage), count=1)
    fence_async_shared()
    meet(CHAINED)
    descs = (q_desc, q_b_desc, c_desc, c_b_desc)
    places = (q_s, q_b_s, c_ring, c_b_ring, weights)
    bars = (q_full, q_empty, c_full, c_empty)
    items = members * splits
    gl.warp_specialize(
        [
            (attend, (places, bars, starts_ptr, history_ptr, members_ptr, o_ptr, lse_ptr, items, members, H, splits,
                      most_rows, scale2, VALUE, SPLIT, Q)),
            (fetch, (descs, places, bars, table_ptr, starts_ptr, history_ptr, members_ptr, items, members, page_step,
                     max_pages, H, PAGE, SPLIT)),
        ],
        [1],
        [40],
    )  # fmt: skip
    for i in gl.static_range(len(bars)):
        give_up(bars[i])
