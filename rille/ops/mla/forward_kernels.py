"""Causal attention over packed sequences in Triton: one program holds ROWS queries of one head and walks its keys.

    s = scale <q, k>        m, total: running maximum and sum of 2^(s log2 e)        o = sum 2^(s - m) v / total

Keys before the tile's first query need no mask; the blocks on the diagonal compare places. The query width is cut into
two powers of two, KA + KB (192 = 128 + 64): no product runs over padding. Tensors come through descriptors
[H, N, width] whose reads beyond N or the width give zeros, so that odd widths and the last rows need no mask either.
Rows of the next sequence in a diagonal block are hidden by the mask; its values are zeroed, as 0 * NaN is NaN.

The output can be gated before it is rounded: y = o sigmoid(gate).

Suffixes in names: q_a, q_b the two parts of the queries; blocks of COLUMNS keys.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block(desc, h, row, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    return desc.load([h, row, 0]).reshape(HEIGHT, WIDTH)


@triton.jit
def product(a, b, UPCAST: tl.constexpr):
    """a @ b^T."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), input_precision="ieee")
    return tl.dot(a, tl.trans(b))


@triton.jit
def product_add(a, b, c, UPCAST: tl.constexpr):
    """a @ b^T + c."""
    if UPCAST:
        return tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), c, input_precision="ieee")
    return tl.dot(a, tl.trans(b), c)


@triton.jit
def mix(p, v, c, UPCAST: tl.constexpr):
    """p @ v + c, p rounded to v's type."""
    if UPCAST:
        return tl.dot(p.to(v.dtype).to(tl.float32), v.to(tl.float32), c, input_precision="ieee")
    return tl.dot(p.to(v.dtype), v, c)


@triton.jit
def head_and_tile(program, H, together, tiles):
    """Heads in groups whose keys and values fit the L2 cache; in a group tiles in order, so the longest come first."""
    group = program // (tiles * together)
    first = group * together
    size = tl.minimum(H - first, together)
    within = program - group * tiles * together
    return first + within % size, within // size


@triton.jit
def attend(
    q_a, q_b, k_a, k_b, v_desc, acc, m, total, h, start, column, rows, length, scale2,
    COLUMNS: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of keys: the running maximum m, sum total and weighted values acc after it."""
    s = product(q_a, block(k_a, h, start + column, COLUMNS, KA), UPCAST)
    if KB > 0:
        s = product_add(q_b, block(k_b, h, start + column, COLUMNS, KB), s, UPCAST)
    v = block(v_desc, h, start + column, COLUMNS, VB)
    if MASKED:
        columns = column + tl.arange(0, COLUMNS)
        s = tl.where(rows[:, None] >= columns[None, :], s, float("-inf"))
        v = tl.where((columns < length)[:, None], v, tl.zeros_like(v))
    new = tl.maximum(m, tl.max(s, 1) * scale2)
    p = tl.exp2(s * scale2 - new[:, None])
    decay = tl.exp2(m - new)
    acc = mix(p, v, acc * decay[:, None], UPCAST)
    return acc, new, total * decay + tl.sum(p, 1)


@triton.jit
def forward_kernel(
    q_a_desc,  # [H, N, KA], blocks [1, ROWS, KA]; q_b: the other channels, None without; k_a, k_b, v in COLUMNS rows
    q_b_desc,
    k_a_desc,
    k_b_desc,
    v_desc,
    gate_ptr,  # [N, H, V] raw, None without a gate
    o_ptr,  # [N, H, V], None where only y is wanted
    y_ptr,  # [N, H, V], None without a gate
    lse_ptr,  # fp32 [H, N]: log2 of the sum of 2^(s log2 e)
    tiles_ptr,  # int32 [tiles, 4]: start of the sequence, first row inside it, its length
    N,
    H,
    together,
    gate_row,
    gate_head,
    scale2,  # scale log2 e
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    KA: tl.constexpr,
    KB: tl.constexpr,
    VB: tl.constexpr,
    UPCAST: tl.constexpr,
):
    h, tile = head_and_tile(tl.program_id(0), H, together, tl.num_programs(0) // H)
    start = tl.load(tiles_ptr + 4 * tile)
    first = tl.load(tiles_ptr + 4 * tile + 1)
    length = tl.load(tiles_ptr + 4 * tile + 2)
    rows = first + tl.arange(0, ROWS)
    q_a = block(q_a_desc, h, start + first, ROWS, KA)
    q_b = q_a
    if KB > 0:
        q_b = block(q_b_desc, h, start + first, ROWS, KB)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, VB], tl.float32)
    for column in tl.range(0, first, COLUMNS):
        acc, m, total = attend(
            q_a, q_b, k_a_desc, k_b_desc, v_desc, acc, m, total, h, start, column, rows, length, scale2,
            COLUMNS, KA, KB, VB, False, UPCAST,
        )  # fmt: skip
    for column in tl.range(first, tl.minimum(first + ROWS, length), COLUMNS, num_stages=1):
        acc, m, total = attend(
            q_a, q_b, k_a_desc, k_b_desc, v_desc, acc, m, total, h, start, column, rows, length, scale2,
            COLUMNS, KA, KB, VB, True, UPCAST,
        )  # fmt: skip
    acc = acc / total[:, None]
    held = rows < length
    token = (start + rows).to(tl.int64)
    tl.store(lse_ptr + h.to(tl.int64) * N + token, m + tl.log2(total), mask=held)
    channel = tl.arange(0, VB)
    mask = held[:, None] & (channel < V)[None, :]
    at = token[:, None] * (H * V) + h * V + channel[None, :]
    if o_ptr is not None:
        tl.store(o_ptr + at, acc.to(o_ptr.dtype.element_ty), mask=mask)
    if gate_ptr is not None:
        at_gate = token[:, None] * gate_row + h * gate_head + channel[None, :]
        gate = tl.load(gate_ptr + at_gate, mask=mask, other=0.0).to(tl.float32)
        y = acc / (1.0 + tl.exp2(gate * -1.4426950408889634))
        tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=mask)
