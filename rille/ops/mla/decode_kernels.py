"""Absorbed attention over the paged latent cache in Triton, the cached rows of a sequence split among programs.

Every head and every new token of a sequence reads the same rows, so a sequence's queries are one matrix, tokens times
heads. A program takes ROWS of them and SPLIT cached rows, in blocks of BLOCK. A block lies in shared memory once and
serves both products: as keys, all of its channels; as values, its first ones. `merge_kernel` joins the splits in
order:

    lse_i = log2 sum 2^(s log2 e)      o = sum_i 2^(lse_i - max lse) o_i / sum_i 2^(lse_i - max lse)

Splits begin at multiples of SPLIT whatever the batch is: a sequence's bits do not depend on its neighbours. Lengths are
read on the device, and programs beyond them end at once; the launch depends on static bounds alone.

`many_kernel` multiplies queries by rows. With few queries a tile of 64 would be mostly padding; `few_kernel` has the
cached rows on the left, s^T = c q^T and o^T = c^T p^T, where 16 columns are enough.

Blocks that lie in one page come through descriptors [pages, page_rows, channels], others row by row. Rows at and beyond
the length are zeroed before a product: 0 * NaN is NaN.

Suffixes in names: c_a, q_a the value channels, c_b, q_b the others.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.mla.forward_kernels import product, product_add


@triton.jit
def reach(starts_ptr, history_ptr, s, tile, split, H, ROWS: tl.constexpr, SPLIT: tl.constexpr):
    """First token, new tokens, rows seen by the tile's first query, and where this program's cached rows end."""
    start = tl.load(starts_ptr + s)
    queries = tl.load(starts_ptr + s + 1) - start
    history = tl.load(history_ptr + s)
    least = history + tl.minimum(tile * ROWS // H, queries) + 1
    most = history + tl.minimum((tile * ROWS + ROWS - 1) // H + 1, queries)
    return start, queries, history, least, tl.minimum(most, (split + 1) * SPLIT)


@triton.jit
def page_of(table_ptr, s, max_pages, row, PAGE: tl.constexpr):
    """The page of a row; the last one for rows that the table does not have."""
    return tl.load(table_ptr + s.to(tl.int64) * max_pages + tl.minimum(row // PAGE, max_pages - 1))


@triton.jit
def cached(
    desc, pool_ptr, page_stride, page, table_ptr, s, max_pages, row, end, FROM: tl.constexpr, WIDTH: tl.constexpr,
    TO: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Channels FROM to TO of BLOCK cached rows, padded to WIDTH. Not WHOLE: zero beyond the end."""
    if WHOLE:
        c = desc.load([page.to(tl.int32), row % PAGE, 0]).reshape(BLOCK, WIDTH)
    else:
        rows = row + tl.arange(0, BLOCK)
        channel = FROM + tl.arange(0, WIDTH)
        pages = tl.load(table_ptr + s.to(tl.int64) * max_pages + rows // PAGE, mask=rows < end, other=0)
        at = (pages * page_stride + (rows % PAGE) * R)[:, None] + channel[None, :]
        c = tl.load(pool_ptr + at, mask=(rows < end)[:, None] & (channel < TO)[None, :], other=0.0)
    return c


@triton.jit
def scales_of(
    scale_ptr, scale_page, scale_row, page, table_ptr, s, max_pages, row, end, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BLOCK)
    if WHOLE:
        at = page * scale_page + (rows % PAGE) * scale_row
    else:
        pages = tl.load(table_ptr + s.to(tl.int64) * max_pages + rows // PAGE, mask=rows < end, other=0)
        at = pages * scale_page + (rows % PAGE) * scale_row
    return tl.load(scale_ptr + at, mask=rows < end, other=0.0)


@triton.jit
def soften(s, m, scale2, AXIS: tl.constexpr):
    """New maximum, weights and the factor of what was summed before; a query that has seen no row keeps 0."""
    new = tl.maximum(m, tl.max(s, AXIS) * scale2)
    safe = tl.where(new == float("-inf"), 0.0, new)
    return new, tl.exp2(s * scale2 - tl.expand_dims(safe, AXIS)), tl.exp2(m - safe)


@triton.jit
def many_step(
    q_a, q_b, c_a, c_b, factors, acc, m, total, seen, columns, scale2,
    HAS_B: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    c_a = c_a.to(q_a.dtype)
    s = product(q_a, c_a, UPCAST)
    if HAS_B:
        s = product_add(q_b, c_b.to(q_a.dtype), s, UPCAST)
    if SCALED:
        s = s * factors[None, :]
    if MASKED:
        s = tl.where(columns[None, :] < seen[:, None], s, float("-inf"))
    m, p, decay = soften(s, m, scale2, 1)
    total = total * decay + tl.sum(p, 1)
    if SCALED:
        p = p * factors[None, :]
    acc = acc * decay[:, None]
    if UPCAST:
        acc = tl.dot(p.to(tl.float32), c_a.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(p.to(c_a.dtype), c_a, acc)
    return acc, m, total


@triton.jit
def few_step(
    q_a, q_b, c_a, c_b, factors, acc, m, total, seen, columns, scale2,
    HAS_B: tl.constexpr, SCALED: tl.constexpr, MASKED: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """As `many_step` with every matrix transposed."""
    c_a = c_a.to(q_a.dtype)
    s = product(c_a, q_a, UPCAST)
    if HAS_B:
        s = product_add(c_b.to(q_a.dtype), q_b, s, UPCAST)
    if SCALED:
        s = s * factors[:, None]
    if MASKED:
        s = tl.where(columns[:, None] < seen[None, :], s, float("-inf"))
    m, p, decay = soften(s, m, scale2, 0)
    total = total * decay + tl.sum(p, 0)
    if SCALED:
        p = p * factors[:, None]
    acc = acc * decay[None, :]
    if UPCAST:
        acc = tl.dot(tl.trans(c_a.to(tl.float32)), p.to(tl.float32), acc, input_precision="ieee")
    else:
        acc = tl.dot(tl.trans(c_a), p.to(c_a.dtype), acc)
    return acc, m, total


@triton.jit
def latent_kernel(
    q_a_desc,  # [1, N * H, VALUE] of the queries, blocks [1, ROWS, A]; q_b: the other channels, None without
    q_b_desc,
    c_a_desc,  # [pages, page_rows, VALUE], blocks [1, BLOCK, A]; None where blocks cross pages, as is c_b
    c_b_desc,
    pool_ptr,  # [pages, page_rows, R], pages any distance apart
    scale_ptr,  # fp32 factors of the cached rows, None without
    table_ptr,  # int64 [S, max_pages]
    starts_ptr,
    history_ptr,
    members_ptr,  # int32: sequences of this launch
    o_ptr,  # fp32 [member, split, row, VALUE]; [N * H, VALUE] where one split takes all
    lse_ptr,  # fp32 [member, split, row], None where one split takes all
    page_stride,
    scale_page,
    scale_row,
    max_pages,
    H,
    tiles,
    splits,
    most_rows,
    scale2,
    VALUE: tl.constexpr,
    R: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL: tl.constexpr,
    SPLIT: tl.constexpr,
    WHOLE: tl.constexpr,
    FEW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    SCALED: tl.constexpr = scale_ptr is not None
    member = tl.program_id(1)
    tile = tl.program_id(0) % tiles
    split = tl.program_id(0) // tiles
    s = tl.load(members_ptr + member)
    start, queries, history, least, end = reach(starts_ptr, history_ptr, s, tile, split, H, ROWS, SPLIT)
    begin = split * SPLIT
    if (tile * ROWS >= queries * H) | (begin >= history + queries):
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    seen = tl.minimum(history + row // H + 1, end)
    q_a = q_a_desc.load([0, start * H + tile * ROWS, 0]).reshape(ROWS, A)
    q_b = q_a
    if B > 0:
        q_b = q_b_desc.load([0, start * H + tile * ROWS, 0]).reshape(ROWS, B)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if FEW:
        acc = tl.zeros([A, ROWS], tl.float32)
    else:
        acc = tl.zeros([ROWS, A], tl.float32)
    clear = begin + tl.maximum(tl.minimum(least, end) - begin, 0) // BLOCK * BLOCK  # before it every query sees all
    page = page_of(table_ptr, s, max_pages, begin, PAGE)
    for at in tl.range(begin, clear, BLOCK):
        following = page_of(table_ptr, s, max_pages, at + BLOCK, PAGE)  # one block ahead
        c_a = cached(
            c_a_desc, pool_ptr, page_stride, page, table_ptr, s, max_pages, at, end, 0, A, VALUE, R, PAGE, BLOCK,
            WHOLE,
        )  # fmt: skip
        c_b, factors = c_a, m
        if B > 0:
            c_b = cached(
                c_b_desc, pool_ptr, page_stride, page, table_ptr, s, max_pages, at, end, VALUE, B, R, R, PAGE, BLOCK,
                WHOLE,
            )  # fmt: skip
        if SCALED:
            factors = scales_of(
                scale_ptr, scale_page, scale_row, page, table_ptr, s, max_pages, at, end, PAGE, BLOCK, WHOLE
            )
        columns = at + tl.arange(0, BLOCK)
        if FEW:
            acc, m, total = few_step(
                q_a, q_b, c_a, c_b, factors, acc, m, total, seen, columns, scale2, B > 0, SCALED, False, UPCAST
            )
        else:
            acc, m, total = many_step(
                q_a, q_b, c_a, c_b, factors, acc, m, total, seen, columns, scale2, B > 0, SCALED, False, UPCAST
            )
        page = following
    for at in tl.range(clear, end, TAIL, num_stages=1):
        c_a = cached(
            c_a_desc, pool_ptr, page_stride, page, table_ptr, s, max_pages, at, end, 0, A, VALUE, R, PAGE, TAIL,
            False,
        )  # fmt: skip
        c_b, factors = c_a, m
        if B > 0:
            c_b = cached(
                c_b_desc, pool_ptr, page_stride, page, table_ptr, s, max_pages, at, end, VALUE, B, R, R, PAGE, TAIL,
                False,
            )  # fmt: skip
        if SCALED:
            factors = scales_of(
                scale_ptr, scale_page, scale_row, page, table_ptr, s, max_pages, at, end, PAGE, TAIL, False
            )
        columns = at + tl.arange(0, TAIL)
        if FEW:
            acc, m, total = few_step(
                q_a, q_b, c_a, c_b, factors, acc, m, total, seen, columns, scale2, B > 0, SCALED, True, UPCAST
            )
        else:
            acc, m, total = many_step(
                q_a, q_b, c_a, c_b, factors, acc, m, total, seen, columns, scale2, B > 0, SCALED, True, UPCAST
            )
    total = tl.where(total == 0.0, 1.0, total)
    held = row < queries * H
    if lse_ptr is None:
        place = (start.to(tl.int64) * H + row) * VALUE
    else:
        at_row = (member.to(tl.int64) * splits + split) * most_rows + row
        tl.store(lse_ptr + at_row, m + tl.log2(total), mask=held)
        place = at_row * VALUE
    channel = tl.arange(0, A)
    if FEW:
        acc = acc / total[None, :]
        mask = (channel < VALUE)[:, None] & held[None, :]
        tl.store(o_ptr + place[None, :] + channel[:, None], acc, mask=mask)
    else:
        acc = acc / total[:, None]
        mask = held[:, None] & (channel < VALUE)[None, :]
        tl.store(o_ptr + place[:, None] + channel[None, :], acc, mask=mask)


@triton.jit
def merge_kernel(
    partial_ptr,  # as `latent_kernel` leaves them
    lse_ptr,
    starts_ptr,
    history_ptr,
    members_ptr,
    o_ptr,  # fp32 [N * H, VALUE]
    H,
    splits,
    most_rows,
    VALUE: tl.constexpr,
    A: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """One row of one sequence: its splits, first to last, TOGETHER at a time."""
    TOGETHER: tl.constexpr = 8
    row, member = tl.program_id(0), tl.program_id(1)
    s = tl.load(members_ptr + member)
    start = tl.load(starts_ptr + s)
    queries = tl.load(starts_ptr + s + 1) - start
    if row >= queries * H:
        return
    count = (tl.load(history_ptr + s) + queries + SPLIT - 1) // SPLIT
    channel = tl.arange(0, A)
    m = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([A], tl.float32)
    for i in tl.range(0, count, TOGETHER):
        split = i + tl.arange(0, TOGETHER)
        at = (member.to(tl.int64) * splits + split) * most_rows + row
        lse = tl.load(lse_ptr + at, mask=split < count, other=float("-inf"))
        held = (split < count)[:, None] & (channel < VALUE)[None, :]
        o = tl.load(partial_ptr + at[:, None] * VALUE + channel[None, :], mask=held, other=0.0)
        new = tl.maximum(m, tl.max(lse, 0))
        decay, weight = tl.exp2(m - new), tl.exp2(lse - new)
        acc = acc * decay + tl.sum(o * weight[:, None], 0)
        total = total * decay + tl.sum(weight, 0)
        m = new
    at_out = (start.to(tl.int64) * H + row) * VALUE + channel
    tl.store(o_ptr + at_out, acc / total, mask=channel < VALUE)
