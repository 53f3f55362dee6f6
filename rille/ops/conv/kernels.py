"""The short convolution in Triton: forward, backward, and the tails at the ends of sequences.

    pre[n, c] = sum_{j<W} weight[c, W-1-j] x[n-j, c]        y = silu(pre)
    dpre = dy silu'(pre)      dx[m] = sum_j weight[., W-1-j] dpre[m+j]      dweight[., W-1-j] = sum_n dpre[n] x[n-j]

within each sequence, where x before its first row is the tail. Everything is bound by bytes: forward reads x and writes
y once, backward reads x and dy and writes dx once; what it needs of the forward it computes again.

Forward: a program has a tile of rows and channels and reads it W times, shifted, all but the first time from the cache.
Backward: a program has one block of channels and walks over BLOCK rows, the last inputs and the unfinished dx in
registers; W - 1 more rows finish its last dx. dweight is summed in registers, one partial sum a program, added up in
order by a second pass: the same bits every time.

Suffixes: N packed tokens, S sequences, C channels, W <= 4 taps. start: the first row of a row's sequence.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x, FAST: tl.constexpr):
    """1 / (1 + 2^(-x log2 e)). FAST, on the card: the two instructions alone; the plain forms add six for results below
    1e-38, and the backward runs out of issue slots before it runs out of bandwidth. The interpreter has no assembly."""
    if FAST:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, True, 1
        )
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [power + 1.0], tl.float32, True, 1)
    return tl.sigmoid(x)


@triton.jit
def forward(
    x, weight, y, starts, sequence_of, tails, slots, N, x_row, tail_slot,
    C: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, POOLED: tl.constexpr, ROWS: tl.constexpr,
    CHANNELS: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (C / CHANNELS, N / ROWS)."""
    n_R = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    c_B = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    inside_R, inside_B = n_R < N, c_B < C
    sequence_R = tl.load(sequence_of + n_R, mask=inside_R, other=0)
    offset_R = n_R - tl.load(starts + sequence_R, mask=inside_R, other=0)
    rows_RB = x + n_R[:, None].to(tl.int64) * x_row + c_B[None, :]
    total_RB = tl.zeros([ROWS, CHANNELS], tl.float32)
    for tap in tl.static_range(W):
        w_B = tl.load(weight + c_B * W + tap, mask=inside_B, other=0.0)
        reaches_R = inside_R & (offset_R >= W - 1 - tap)
        x_RB = tl.load(rows_RB - (W - 1 - tap) * x_row, mask=reaches_R[:, None] & inside_B[None, :], other=0.0)
        total_RB += x_RB.to(tl.float32) * w_B[None, :]
    if HAS_TAIL and W > 1:
        nearest = tl.min(tl.where(inside_R, offset_R, W), 0)
        if nearest < W - 1:
            slot_R = sequence_R
            if POOLED:
                slot_R = tl.load(slots + sequence_R, mask=inside_R, other=0)
            tail_RB = tails + slot_R[:, None].to(tl.int64) * tail_slot + c_B[None, :]
            for tap in tl.static_range(W - 1):
                w_B = tl.load(weight + c_B * W + tap, mask=inside_B, other=0.0)
                before_R = inside_R & (offset_R < W - 1 - tap)
                pointer_RB = tail_RB + (offset_R + tap)[:, None] * C
                x_RB = tl.load(pointer_RB, mask=before_R[:, None] & inside_B[None, :], other=0.0)
                total_RB += x_RB.to(tl.float32) * w_B[None, :]
    y_RB = y + n_R[:, None].to(tl.int64) * C + c_B[None, :]
    y_value_RB = total_RB * sigmoid(total_RB, FAST)
    tl.store(y_RB, y_value_RB.to(y.dtype.element_ty), mask=inside_R[:, None] & inside_B[None, :])


@triton.jit
def move_tails(
    x, starts, tails, slots, final, x_row, tail_slot, final_slot,
    C: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, POOLED: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (C / CHANNELS, S). The last W - 1 inputs of each sequence; rows of the old tail where it is shorter. `final`
    may be the pool of tails: all rows are read before one is written."""
    sequence, c_B = tl.program_id(1), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    start, end = tl.load(starts + sequence), tl.load(starts + sequence + 1)
    slot = (tl.load(slots + sequence) if POOLED else sequence).to(tl.int64)
    row_P = tl.arange(0, 4)
    index_P = end - start + row_P - (W - 1)  # row of this batch's sequence; below 0, counted from the tail's end
    used_PB = (row_P < W - 1)[:, None] & (c_B < C)[None, :]
    new_PB = x + (start + index_P)[:, None].to(tl.int64) * x_row + c_B[None, :]
    value_PB = tl.load(new_PB, mask=used_PB & (index_P >= 0)[:, None], other=0.0).to(final.dtype.element_ty)
    if HAS_TAIL:
        old_PB = tails + slot * tail_slot + (index_P + W - 1)[:, None] * C + c_B[None, :]
        old_PB = tl.load(old_PB, mask=used_PB & (index_P < 0)[:, None], other=0.0)
        value_PB = tl.where((index_P < 0)[:, None], old_PB.to(final.dtype.element_ty), value_PB)
    tl.debug_barrier()
    tl.store(final + slot * final_slot + row_P[:, None] * C + c_B[None, :], value_PB, mask=used_PB)


@triton.jit
def conv_weights(weight, c_B, inside_B, W: tl.constexpr):
    """Four weights of each channel, the current row's first; absent taps are 0 and never multiply an input."""
    w0 = tl.load(weight + c_B * W + (W - 1), mask=inside_B, other=0.0)
    w1 = tl.load(weight + c_B * W + (W - 2), mask=inside_B, other=0.0) if W > 1 else w0 * 0.0
    w2 = tl.load(weight + c_B * W + (W - 3), mask=inside_B, other=0.0) if W > 2 else w0 * 0.0
    w3 = tl.load(weight + c_B * W + (W - 4), mask=inside_B, other=0.0) if W > 3 else w0 * 0.0
    return w0, w1, w2, w3


@triton.jit
def earlier(
    x, tail, row, offset, c_B, mask_B, x_row, back: tl.constexpr, C: tl.constexpr, W: tl.constexpr,
    HAS_TAIL: tl.constexpr,
):  # fmt: skip
    """The input `back` rows before `row`, which is row `offset` of its sequence: from x or the tail, 0 if neither."""
    x_B = tl.load(x + (row - back) * x_row + c_B, mask=mask_B & (offset >= back), other=0.0).to(tl.float32)
    if HAS_TAIL:
        tail_B = tail + (W - 1 + offset - back) * C + c_B
        x_B += tl.load(tail_B, mask=mask_B & (offset < back), other=0.0).to(tl.float32)
    return x_B


@triton.jit
def past(x, tail, row, offset, c_B, mask_B, x_row, C: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr):
    """The inputs one, two and three rows before `row`; 0 beyond the taps."""
    zero_B = c_B.to(tl.float32) * 0.0
    x1 = earlier(x, tail, row, offset, c_B, mask_B, x_row, 1, C, W, HAS_TAIL) if W > 1 else zero_B
    x2 = earlier(x, tail, row, offset, c_B, mask_B, x_row, 2, C, W, HAS_TAIL) if W > 2 else zero_B
    x3 = earlier(x, tail, row, offset, c_B, mask_B, x_row, 3, C, W, HAS_TAIL) if W > 3 else zero_B
    return x1, x2, x3


@triton.jit
def slope(dy, x0, x1, x2, x3, w, W: tl.constexpr, FAST: tl.constexpr):
    """dpre = dy silu'(pre), silu' = s + pre s (1 - s)."""
    pre = x0 * w[0]
    if W > 1:
        pre += x1 * w[1]
    if W > 2:
        pre += x2 * w[2]
    if W > 3:
        pre += x3 * w[3]
    s = sigmoid(pre, FAST)
    return dy * (s + pre * (s * (1.0 - s)))


@triton.jit
def fold(dpre, x0, history, unfinished, sums, w, W: tl.constexpr, COUNT: tl.constexpr):
    """Add a row to the unfinished dx before it and to dweight; also returns the dx it finishes, W - 1 rows before."""
    x1, x2, x3 = history
    d1, d2, d3 = unfinished
    g0, g1, g2, g3 = sums
    if COUNT:
        g0 += dpre * x0
        g1 += dpre * x1
        g2 += dpre * x2
        g3 += dpre * x3
    d0 = dpre * w[0]
    d1 += dpre * w[1]
    d2 += dpre * w[2]
    d3 += dpre * w[3]
    done = d0 if W == 1 else (d1 if W == 2 else (d2 if W == 3 else d3))
    return done, (x0, x1, x2), (d0, d1, d2), (g0, g1, g2, g3)


@triton.jit
def inner_row(
    out, x0, dy_B, history, unfinished, sums, w, inside_B, C: tl.constexpr, W: tl.constexpr, FAST: tl.constexpr
):  # fmt: skip
    """A row of the backward walk with W - 1 rows of its sequence and of this block before it. out: its place in dx."""
    dpre = slope(dy_B, x0, history[0], history[1], history[2], w, W, FAST)
    done, history, unfinished, sums = fold(dpre, x0, history, unfinished, sums, w, W, True)
    tl.store(out - (W - 1) * C, done.to(out.dtype.element_ty), mask=inside_B)
    return history, unfinished, sums


@triton.jit
def any_row(
    row, x0, dy_B, history, unfinished, sums, w, next_start, oldest, x, dx, starts, sequence_of, tails, N, x_row,
    tail_slot, last, c_B, inside_B, C: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, COUNT: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """A row of the backward walk.

    history: the three inputs before it. unfinished: what dx of the three rows before it has so far. sums: dweight.
    next_start: where the next sequence begins. oldest: the first row of this block whose dx is not yet stored; rows
    from `last` on belong to the next block. A row is finished W - 1 rows later, or where its sequence ends.
    """
    d1, d2, d3 = unfinished
    dtype: tl.constexpr = dx.dtype.element_ty
    if row == next_start:
        out = dx + row * C + c_B
        if W > 1:
            tl.store(out - C, d1.to(dtype), mask=inside_B & (row - 1 >= oldest) & (row - 1 < last))
        if W > 2:
            tl.store(out - 2 * C, d2.to(dtype), mask=inside_B & (row - 2 >= oldest) & (row - 2 < last))
        if W > 3:
            tl.store(out - 3 * C, d3.to(dtype), mask=inside_B & (row - 3 >= oldest) & (row - 3 < last))
        oldest = row
        sequence = tl.load(sequence_of + row, mask=row < N, other=0)
        next_start = tl.load(starts + sequence + 1, mask=row < N, other=0).to(tl.int64)
        tail = tails + sequence * tail_slot
        history = past(x, tail, row, 0, c_B, inside_B & (row < N), x_row, C, W, HAS_TAIL)
    dpre = slope(dy_B, x0, history[0], history[1], history[2], w, W, FAST)
    done, history, unfinished, sums = fold(dpre, x0, history, unfinished, sums, w, W, COUNT)
    finished = row - (W - 1)
    stored = (finished >= oldest) & (finished < last) & (row < N)
    tl.store(dx + finished * C + c_B, done.to(dtype), mask=inside_B & stored)
    oldest = tl.where(stored, finished + 1, oldest)
    return history, unfinished, sums, next_start, oldest


@triton.jit
def load_row(pointer, row, at_row, N, c_B, inside_B):
    return tl.load(pointer + row * at_row + c_B, mask=inside_B & (row < N), other=0.0).to(tl.float32)


@triton.jit
def backward(
    x, weight, dy, dx, partial, starts, sequence_of, tails, N, x_row, dy_row, tail_slot,
    C: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, ROWS: tl.constexpr, CHANNELS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Grid (C / CHANNELS, N / ROWS), ROWS a multiple of 4. dx [N, C], and partial [N / ROWS, W, C]: dweight of a
    block of rows."""
    c_B = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    first, inside_B = tl.program_id(1).to(tl.int64) * ROWS, c_B < C
    last = first + ROWS
    w = conv_weights(weight, c_B, inside_B, W)
    sequence = tl.load(sequence_of + first)
    offset = (first - tl.load(starts + sequence)).to(tl.int32)
    next_start = tl.load(starts + sequence + 1).to(tl.int64)
    history = past(x, tails + sequence * tail_slot, first, offset, c_B, inside_B, x_row, C, W, HAS_TAIL)
    zero_B = tl.zeros([CHANNELS], tl.float32)
    unfinished, sums, oldest = (zero_B, zero_B, zero_B), (zero_B, zero_B, zero_B, zero_B), first
    for step in range(0, ROWS, 4):
        row = first + step
        # All loads of four rows before the first store: the compiler must not move a load across one.
        xa, ya = load_row(x, row, x_row, N, c_B, inside_B), load_row(dy, row, dy_row, N, c_B, inside_B)
        xb, yb = load_row(x, row + 1, x_row, N, c_B, inside_B), load_row(dy, row + 1, dy_row, N, c_B, inside_B)
        xc, yc = load_row(x, row + 2, x_row, N, c_B, inside_B), load_row(dy, row + 2, dy_row, N, c_B, inside_B)
        xd, yd = load_row(x, row + 3, x_row, N, c_B, inside_B), load_row(dy, row + 3, dy_row, N, c_B, inside_B)
        if (next_start >= row + 4) & (oldest == row - (W - 1)):
            out = dx + row * C + c_B
            history, unfinished, sums = inner_row(out, xa, ya, history, unfinished, sums, w, inside_B, C, W, FAST)
            history, unfinished, sums = inner_row(out + C, xb, yb, history, unfinished, sums, w, inside_B, C, W, FAST)
            out += 2 * C
            history, unfinished, sums = inner_row(out, xc, yc, history, unfinished, sums, w, inside_B, C, W, FAST)
            history, unfinished, sums = inner_row(out + C, xd, yd, history, unfinished, sums, w, inside_B, C, W, FAST)
            oldest += 4
        else:
            for u in tl.static_range(4):
                x0 = xa if u == 0 else (xb if u == 1 else (xc if u == 2 else xd))
                dy_B = ya if u == 0 else (yb if u == 1 else (yc if u == 2 else yd))
                history, unfinished, sums, next_start, oldest = any_row(
                    row + u, x0, dy_B, history, unfinished, sums, w, next_start, oldest, x, dx, starts, sequence_of,
                    tails, N, x_row, tail_slot, last, c_B, inside_B, C, W, HAS_TAIL, True, FAST)  # fmt: skip
    for extra in tl.static_range(W - 1):
        row = last + extra
        x0, dy_B = load_row(x, row, x_row, N, c_B, inside_B), load_row(dy, row, dy_row, N, c_B, inside_B)
        history, unfinished, sums, next_start, oldest = any_row(
            row, x0, dy_B, history, unfinished, sums, w, next_start, oldest, x, dx, starts, sequence_of,
            tails, N, x_row, tail_slot, last, c_B, inside_B, C, W, HAS_TAIL, False, FAST)  # fmt: skip
    partial += tl.program_id(1).to(tl.int64) * (W * C) + c_B
    tl.store(partial + (W - 1) * C, sums[0], mask=inside_B)
    if W > 1:
        tl.store(partial + (W - 2) * C, sums[1], mask=inside_B)
    if W > 2:
        tl.store(partial + (W - 3) * C, sums[2], mask=inside_B)
    if W > 3:
        tl.store(partial + (W - 4) * C, sums[3], mask=inside_B)


@triton.jit
def tail_gradient(
    x, weight, dy, dx, starts, tails, d_tails, d_final, x_row, dy_row,
    C: tl.constexpr, W: tl.constexpr, HAS_TAIL: tl.constexpr, HAS_FINAL: tl.constexpr, CHANNELS: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Grid (C / CHANNELS, S), W > 1. The gradient of the tails [S, W-1, C]: each meets the first W - 1 rows of its
    sequence. And what the final tails' gradient [S, W-1, C] adds to dx, or to the old tail where a sequence is shorter.
    """
    sequence, c_B = tl.program_id(1).to(tl.int64), tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    start, inside_B = tl.load(starts + sequence).to(tl.int64), c_B < C
    length = (tl.load(starts + sequence + 1) - start).to(tl.int32)
    old, W1 = sequence * ((W - 1) * C) + c_B, W - 1
    w = conv_weights(weight, c_B, inside_B, W)
    if HAS_TAIL:
        for p in tl.static_range(W - 1):
            total_B = tl.zeros([CHANNELS], tl.float32)
            for offset in tl.static_range(p + 1):
                row, mask_B = start + offset, inside_B & (offset < length)
                x0 = tl.load(x + row * x_row + c_B, mask=mask_B, other=0.0).to(tl.float32)
                dy_B = tl.load(dy + row * dy_row + c_B, mask=mask_B, other=0.0).to(tl.float32)
                tail = tails + sequence * (W1 * C)
                x1, x2, x3 = past(x, tail, row, offset, c_B, mask_B, x_row, C, W, True)
                w_B = tl.load(weight + c_B * W + (p - offset), mask=inside_B, other=0.0)
                total_B += slope(dy_B, x0, x1, x2, x3, w, W, FAST) * w_B
            if HAS_FINAL:
                from_final = d_final + old + (p - length) * C
                total_B += tl.load(from_final, mask=inside_B & (p >= length), other=0.0).to(tl.float32)
            tl.store(d_tails + old + p * C, total_B.to(d_tails.dtype.element_ty), mask=inside_B)
    if HAS_FINAL:
        for p in tl.static_range(W - 1):
            offset = length - W1 + p
            mask_B = inside_B & (offset >= 0)
            into = dx + (start + offset) * C + c_B
            total_B = tl.load(into, mask=mask_B, other=0.0).to(tl.float32)
            total_B += tl.load(d_final + old + p * C, mask=mask_B, other=0.0).to(tl.float32)
            tl.store(into, total_B.to(dx.dtype.element_ty), mask=mask_B)
