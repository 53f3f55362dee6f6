"""The backward pass of the packed attention in Triton: no sum is shared by two programs, so its bits repeat.

    p = 2^(s log2 e - lse)    delta = sum_V o do    ds = p (do v^T - delta)
    dq = scale ds k           dk = scale ds^T q     dv = p^T do

`prepare_kernel` makes delta and rounds do to the operands' type; with a gate it first takes the gradient apart,
do = dy sigmoid(gate) and dgate = dy o sigmoid(gate) (1 - sigmoid(gate)). `query_kernel` holds ROWS queries and walks
their keys, `key_kernel` holds COLUMNS keys and walks the queries that see them. Names as in `forward_kernels.py`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.mla.forward_kernels import block, head_and_tile, mix, product, product_add


@triton.jit
def prepare_kernel(
    o_ptr,  # [N, H, V], as is do, the gradient of y with a gate
    do_ptr,
    gate_ptr,  # [N, H, V] raw, None without a gate; dgate is [N, H, V]
    dgate_ptr,
    rounded_ptr,  # do as the products read it, [N, H, V]
    delta_ptr,  # fp32 [H, N]
    N,
    H,
    do_row,
    do_head,
    gate_row,
    gate_head,
    V: tl.constexpr,
    VB: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows are tokens times heads, heads fastest."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    token, h = row // H, row % H
    channel = tl.arange(0, VB)
    mask = (token < N)[:, None] & (channel < V)[None, :]
    at = row[:, None] * V + channel[None, :]
    o = tl.load(o_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at_do = (token * do_row + h * do_head)[:, None] + channel[None, :]
    do = tl.load(do_ptr + at_do, mask=mask, other=0.0).to(tl.float32)
    if gate_ptr is not None:
        at_gate = (token * gate_row + h * gate_head)[:, None] + channel[None, :]
        gate = tl.load(gate_ptr + at_gate, mask=mask, other=0.0).to(tl.float32)
        opening = 1.0 / (1.0 + tl.exp2(gate * -1.4426950408889634))
        dgate = do * o * opening * (1.0 - opening)
        tl.store(dgate_ptr + at, dgate.to(dgate_ptr.dtype.element_ty), mask=mask)
        do = do * opening
    tl.store(rounded_ptr + at, do.to(rounded_ptr.dtype.element_ty), mask=mask)
    tl.store(delta_ptr + h * N + token, tl.sum(o * do, 1), mask=token < N)


@triton.jit
def descend(
    q_a, q_b, do, k_a_desc, k_b_desc, v_desc, dq_a, dq_b, lse, delta, h, start, column, rows, length, scale2,
    COLUMNS: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """What one block of keys adds to the gradient of the queries, before the scale."""
    k_a = block(k_a_desc, h, start + column, COLUMNS, KA)
    s = product(q_a, k_a, UPCAST)
    if KB > 0:
        k_b = block(k_b_desc, h, start + column, COLUMNS, KB)
        s = product_add(q_b, k_b, s, UPCAST)
    dp = product(do, block(v_desc, h, start + column, COLUMNS, VB), UPCAST)
    ds = tl.exp2(s * scale2 - lse[:, None]) * (dp - delta[:, None])
    if MASKED:
        columns = column + tl.arange(0, COLUMNS)
        inside = (columns < length)[:, None]
        ds = tl.where(rows[:, None] >= columns[None, :], ds, 0.0)
        k_a = tl.where(inside, k_a, tl.zeros_like(k_a))
        if KB > 0:
            k_b = tl.where(inside, k_b, tl.zeros_like(k_b))
    dq_a = mix(ds, k_a, dq_a, UPCAST)
    if KB > 0:
        dq_b = mix(ds, k_b, dq_b, UPCAST)
    return dq_a, dq_b


@triton.jit
def store_rows(ptr, x, token, held, h, H, FROM: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    """x, the WIDTH channels from FROM on, into its rows of [N, H, K]."""
    channel = FROM + tl.arange(0, WIDTH)
    at = token[:, None] * (H * K) + h * K + channel[None, :]
    tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=held[:, None] & (channel < K)[None, :])


@triton.jit
def query_kernel(
    q_a_desc,  # descriptors as in `forward_kernel`; do as q in ROWS rows
    q_b_desc,
    do_desc,
    k_a_desc,
    k_b_desc,
    v_desc,
    lse_ptr,
    delta_ptr,
    dq_ptr,  # [N, H, K]
    tiles_ptr,  # as in `forward_kernel`
    N,
    H,
    together,
    scale,
    scale2,
    K: tl.constexpr,
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
    token, held = (start + rows).to(tl.int64), rows < length
    lse = tl.load(lse_ptr + h.to(tl.int64) * N + token, mask=held, other=float("inf"))
    delta = tl.load(delta_ptr + h.to(tl.int64) * N + token, mask=held, other=0.0)
    q_a = block(q_a_desc, h, start + first, ROWS, KA)
    do = block(do_desc, h, start + first, ROWS, VB)
    dq_a = tl.zeros([ROWS, KA], tl.float32)
    q_b, dq_b = q_a, dq_a
    if KB > 0:
        q_b = block(q_b_desc, h, start + first, ROWS, KB)
        dq_b = tl.zeros([ROWS, KB], tl.float32)
    for column in tl.range(0, first, COLUMNS):
        dq_a, dq_b = descend(
            q_a, q_b, do, k_a_desc, k_b_desc, v_desc, dq_a, dq_b, lse, delta, h, start, column, rows, length, scale2,
            COLUMNS, KA, KB, VB, False, UPCAST,
        )  # fmt: skip
    for column in tl.range(first, tl.minimum(first + ROWS, length), COLUMNS, num_stages=1):
        dq_a, dq_b = descend(
            q_a, q_b, do, k_a_desc, k_b_desc, v_desc, dq_a, dq_b, lse, delta, h, start, column, rows, length, scale2,
            COLUMNS, KA, KB, VB, True, UPCAST,
        )  # fmt: skip
    store_rows(dq_ptr, dq_a * scale, token, held, h, H, 0, KA, K)
    if KB > 0:
        store_rows(dq_ptr, dq_b * scale, token, held, h, H, KA, KB, K)


@triton.jit
def gather(
    k_a, k_b, v, q_a_desc, q_b_desc, do_desc, dk_a, dk_b, dv, lse_row, delta_row, h, start, row, columns, length,
    scale2, ROWS: tl.constexpr, KA: tl.constexpr, KB: tl.constexpr, VB: tl.constexpr, MASKED: tl.constexpr,
    TAIL: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """What one block of queries adds to the gradients of keys, before the scale, and values: products transposed.

    MASKED: some queries do not see some keys. TAIL: some rows belong to the next sequence.
    """
    rows = row + tl.arange(0, ROWS)
    held = rows < length
    seen = (rows[None, :] >= columns[:, None]) & held[None, :]
    q_a = block(q_a_desc, h, start + row, ROWS, KA)
    if TAIL:
        q_a = tl.where(held[:, None], q_a, tl.zeros_like(q_a))
    s = product(k_a, q_a, UPCAST)
    if KB > 0:
        q_b = block(q_b_desc, h, start + row, ROWS, KB)
        if TAIL:
            q_b = tl.where(held[:, None], q_b, tl.zeros_like(q_b))
        s = product_add(k_b, q_b, s, UPCAST)
    do = block(do_desc, h, start + row, ROWS, VB)
    if TAIL:
        do = tl.where(held[:, None], do, tl.zeros_like(do))
        lse = tl.load(lse_row + start + rows, mask=held, other=float("inf"))
        delta = tl.load(delta_row + start + rows, mask=held, other=0.0)
    else:
        lse, delta = tl.load(lse_row + start + rows), tl.load(delta_row + start + rows)
    p = tl.exp2(s * scale2 - lse[None, :])
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dv = mix(p, do, dv, UPCAST)
    ds = p * (product(v, do, UPCAST) - delta[None, :])
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    dk_a = mix(ds, q_a, dk_a, UPCAST)
    if KB > 0:
        dk_b = mix(ds, q_b, dk_b, UPCAST)
    return dk_a, dk_b, dv


@triton.jit
def key_kernel(
    k_a_desc,  # descriptors as in `forward_kernel`, k and v in COLUMNS rows, q and do in ROWS rows
    k_b_desc,
    v_desc,
    q_a_desc,
    q_b_desc,
    do_desc,
    lse_ptr,
    delta_ptr,
    dk_ptr,  # [N, H, K]
    dv_ptr,  # [N, H, V]
    tiles_ptr,  # tiles of COLUMNS keys, as in `forward_kernel`
    N,
    H,
    together,
    scale,
    scale2,
    K: tl.constexpr,
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
    columns = first + tl.arange(0, COLUMNS)
    lse_row, delta_row = lse_ptr + h.to(tl.int64) * N, delta_ptr + h.to(tl.int64) * N
    k_a = block(k_a_desc, h, start + first, COLUMNS, KA)
    v = block(v_desc, h, start + first, COLUMNS, VB)
    dk_a = tl.zeros([COLUMNS, KA], tl.float32)
    dv = tl.zeros([COLUMNS, VB], tl.float32)
    k_b, dk_b = k_a, dk_a
    if KB > 0:
        k_b = block(k_b_desc, h, start + first, COLUMNS, KB)
        dk_b = tl.zeros([COLUMNS, KB], tl.float32)
    whole = first + (length - first) // ROWS * ROWS  # from here on not a full block
    below = tl.minimum(first + COLUMNS, whole)  # from here on every query sees every key of the tile
    for row in tl.range(first, below, ROWS, num_stages=1):
        dk_a, dk_b, dv = gather(
            k_a, k_b, v, q_a_desc, q_b_desc, do_desc, dk_a, dk_b, dv, lse_row, delta_row, h, start, row, columns,
            length, scale2, ROWS, KA, KB, VB, True, False, UPCAST,
        )  # fmt: skip
    for row in tl.range(below, whole, ROWS):
        dk_a, dk_b, dv = gather(
            k_a, k_b, v, q_a_desc, q_b_desc, do_desc, dk_a, dk_b, dv, lse_row, delta_row, h, start, row, columns,
            length, scale2, ROWS, KA, KB, VB, False, False, UPCAST,
        )  # fmt: skip
    for row in tl.range(whole, length, ROWS, num_stages=1):
        dk_a, dk_b, dv = gather(
            k_a, k_b, v, q_a_desc, q_b_desc, do_desc, dk_a, dk_b, dv, lse_row, delta_row, h, start, row, columns,
            length, scale2, ROWS, KA, KB, VB, True, True, UPCAST,
        )  # fmt: skip
    token, held = (start + columns).to(tl.int64), columns < length
    store_rows(dk_ptr, dk_a * scale, token, held, h, H, 0, KA, K)
    if KB > 0:
        store_rows(dk_ptr, dk_b * scale, token, held, h, H, KA, KB, K)
    store_rows(dv_ptr, dv, token, held, h, H, 0, VB, V)
