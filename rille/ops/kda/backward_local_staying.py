"""`local_tile_kernel` for programs that stay: each goes from item to item, a chunk and head, and asks for the next one
as soon as the tiles of this one have been read, so that memory is at work while dz is made.

A multiprocessor has room for one program, and a program by itself waits for its first loads.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rille.ops.kda.backward_local_gluon import (
    BLOCK,
    CHANNEL,
    LINE,
    ROW,
    SMALL,
    TILE,
    along_channels,
    bf16,
    buffers,
    decay_of,
    fetch_blocks,
    fetch_rows,
    fetch_state,
    gradients_of_half,
    pairs_of_rows,
    put_dz,
    times_ones,
    turned,
)
from rille.ops.kda.intra_gluon import LOG2E, exp2


@gluon.jit
def span_of(spans_ptr, item, items, H: gl.constexpr):
    """First token and number of tokens of an item's chunk; none past the last."""
    at = spans_ptr + 2 * (item // H)
    return gl.load(at, mask=item < items, other=0), gl.load(at + 1, mask=item < items, other=0)


@gluon.jit
def fetch_item(
    tiles, numbers_s, pointers, strides, item, items, start, count, H: gl.constexpr
):  # fmt: skip
    """Ask for all of an item but its gates' logits."""
    do_s, dv_s, u_s, v_s, q_s, k_s, state_s, dstate_s = tiles
    do_ptr, dv_ptr, u_ptr, v_ptr, q_ptr, k_ptr, states_ptr, dstates_ptr, norms_ptr = pointers
    do_stride, v_stride, q_stride, k_stride = strides
    rows = gl.where(item < items, 128, 0)
    item = gl.minimum(item, items - 1)  # no address leaves its tensor
    h, token, out = item % H, start.to(gl.int64), item.to(gl.int64)
    fetch_blocks(do_s, do_ptr + (token * do_stride + h * 128), do_stride, count)
    fetch_blocks(u_s, u_ptr + out * (64 * 128), 128, rows)
    fetch_blocks(dv_s, dv_ptr + (token * (H * 128) + h * 128), H * 128, count)
    fetch_blocks(v_s, v_ptr + (token * v_stride + h * 128), v_stride, count)
    each = gl.arange(0, 256, gl.BlockedLayout([1], [32], [8], [0]))
    async_copy.async_copy_global_to_shared(numbers_s, norms_ptr + (out * 256 + each), each < 2 * rows)
    fetch_state(state_s, states_ptr + out * (128 * 128), rows)
    fetch_state(dstate_s, dstates_ptr + out * (128 * 128), rows)
    fetch_rows(k_s, k_ptr + (token * k_stride + h * 128), k_stride, count)
    fetch_rows(q_s, q_ptr + (token * q_stride + h * 128), q_stride, count)


@gluon.jit
def staying_tile_kernel(
    q_ptr,  # these and the next as in `local_tile_kernel`
    k_ptr,
    z_ptr,
    v_ptr,
    do_ptr,
    dv_ptr,
    A_log_ptr,
    dt_bias_ptr,
    spans_ptr,
    ones_ptr,
    u_ptr,
    states_ptr,
    dstates_ptr,
    totals_ptr,
    norms_ptr,
    dq_ptr,
    dk_ptr,
    dz_ptr,
    db_ptr,
    dbias_ptr,
    drate_ptr,
    q_stride,
    k_stride,
    z_stride,
    v_stride,
    do_stride,
    lower_bound,
    scale,
    items,  # M * H
    H: gl.constexpr,
    num_warps: gl.constexpr,
):
    do_s, dv_s = buffers(4, 32, 64, TILE), buffers(4, 32, 64, TILE)
    u_s, v_s = buffers(4, 32, 64, TILE), buffers(4, 32, 64, TILE)
    q_s, k_s, z_s = buffers(2, 32, 128, TILE), buffers(2, 32, 128, TILE), buffers(2, 32, 128, TILE)
    state_s, dstate_s = buffers(2, 64, 128, TILE), buffers(2, 64, 128, TILE)
    pairs_s = buffers(6, 32, 32, SMALL)
    anchors_s, later_s = buffers(2, 32, 32, SMALL)  # sums from the border, over the row and later ones
    all_numbers_s = gl.allocate_shared_memory(gl.float32, [2, 256], LINE)  # in turn
    own_s = gl.allocate_shared_memory(gl.float32, [2, 32], LINE)
    along_s = gl.allocate_shared_memory(gl.float32, [2, 32], LINE)
    row, column = gl.arange(0, 32, gl.SliceLayout(1, BLOCK))[:, None], gl.arange(0, 32, gl.SliceLayout(0, BLOCK))
    async_copy.async_copy_global_to_shared(anchors_s, ones_ptr + (1024 + row * 32 + column[None, :]))
    async_copy.async_copy_global_to_shared(later_s, ones_ptr + (2048 + row * 32 + column[None, :]))
    item, turn = gl.program_id(0), gl.program_id(0) * 0
    start, count = span_of(spans_ptr, item, items, H)
    fetched = (do_s, dv_s, u_s, v_s, q_s, k_s, state_s, dstate_s)
    pointers = (do_ptr, dv_ptr, u_ptr, v_ptr, q_ptr, k_ptr, states_ptr, dstates_ptr, norms_ptr)
    strides = (do_stride, v_stride, q_stride, k_stride)
    fetch_item(fetched, all_numbers_s.index(turn), pointers, strides, item, items, start, count, H)
    async_copy.commit_group()
    channel = gl.arange(0, 128, CHANNEL)

    for _ in range(gl.program_id(0), items, gl.num_programs(0)):
        h, token, out = item % H, start.to(gl.int64), item.to(gl.int64)
        after = item + gl.num_programs(0)
        start_after, count_after = span_of(spans_ptr, after, items, H)
        numbers_s = all_numbers_s.index(turn)._reinterpret(gl.float32, [8, 32], LINE)  # norms of q, of k, beta
        gl.thread_barrier()  # logits of the item before have been read
        fetch_rows(z_s, z_ptr + (token * z_stride + h * 128), z_stride, count)
        async_copy.commit_group()
        rate = exp2(gl.load(A_log_ptr + h).to(gl.float32) * LOG2E)
        bias = gl.load(dt_bias_ptr + (h * 128 + channel))[:, None]
        at_totals = totals_ptr + (out * 512 + channel)
        t0, t1 = gl.load(at_totals)[:, None], gl.load(at_totals + 128)[:, None]
        t2, t3 = gl.load(at_totals + 256)[:, None], gl.load(at_totals + 384)[:, None]

        async_copy.wait_group(1)
        gl.thread_barrier()
        v = (v_s[0].load(BLOCK), v_s[1].load(BLOCK), v_s[2].load(BLOCK), v_s[3].load(BLOCK))
        unit = pairs_of_rows(do_s, dv_s, u_s, v, numbers_s, own_s, along_s, pairs_s)
        async_copy.wait_group(0)
        gl.thread_barrier()
        tiles = (q_s, state_s, dstate_s, do_s, dv_s, u_s, pairs_s, numbers_s, own_s, along_s)
        at = token * (H * 128) + h * 128
        places = (dq_ptr + at, dk_ptr + at, db_ptr + (token * H + h))
        carried = along_channels(state_s, dstate_s)[:, None] * (exp2(t0 + t1 + t2 + t3) / unit)

        x_a = times_ones(decay_of(z_s, bias, rate, lower_bound, count, 0), anchors_s, 2)
        k_a = turned(k_s[0]) * numbers_s.index(2).load(ROW)[None, :]
        k_c = bf16(k_a * exp2(gl.minimum(t1 - x_a, 0.0)))

        x_b = times_ones(decay_of(z_s, bias, rate, lower_bound, count, 1), anchors_s, 2)
        k_b = turned(k_s[1]) * numbers_s.index(3).load(ROW)[None, :]
        vectors = (t0 + t1 + t2, t3, exp2(t2))
        dG, kept, q_r, k_r = gradients_of_half(x_b, k_b, k_c, tiles, vectors, places, unit, scale, count, H, True)
        carried += kept
        dg_b = times_ones(dG, later_s, 3)
        past_b = gl.sum(dG, 1)[:, None]

        vectors = (t0, t1 + t2 + t3, exp2(t1))
        between = (k_c, q_r, k_r)
        dG, kept, _, _ = gradients_of_half(x_a, k_a, between, tiles, vectors, places, unit, scale, count, H, False)
        gl.thread_barrier()  # nobody needs this item's tiles any more
        fetch_item(fetched, all_numbers_s.index(1 - turn), pointers, strides, after, items, start_after, count_after, H)
        async_copy.commit_group()
        carried += kept
        dg_a = times_ones(dG, later_s, 3) + (past_b + carried)
        dg_b += carried
        bias_a, rate_a = put_dz(dg_a, z_s, bias, rate, lower_bound, unit, dz_ptr + at, H * 128, count, 0)
        bias_b, rate_b = put_dz(dg_b, z_s, bias, rate, lower_bound, unit, dz_ptr + at, H * 128, count, 1)
        gl.store(dbias_ptr + (out * 128 + channel), bias_a + bias_b)
        gl.store(drate_ptr + (out * 128 + channel), rate_a + rate_b)
        item, start, count, turn = after, start_after, count_after, 1 - turn
    async_copy.wait_group(0)
