"""RMS norms in Triton, forward and backward.

    s = x + residual                                                 (ADD: written too)
    y = round(s r) w          r = rsqrt(mean(s^2) + eps)             ds = r (g - n mean(g n))     g = dy w     n = s r
    y = round(o r w sigmoid(gate))                                   the same with g = dy w sigmoid(gate)

Bound by bytes: each tensor is read or written once. A tile is ROWS whole rows. Forward leaves r behind, one number a
row. Backward sums the gradient of the gain in fp32 registers over the tiles of a program, one partial sum a program,
added up in order by a second pass: the same bits every time.

Suffixes: R rows of a tile, B block of the width D (a power of two).
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet


@triton.jit
def tile_of(tile, N, D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Rows, columns, and which of them there are. tile is 64 bits wide."""
    row_R = tile * ROWS + tl.arange(0, ROWS)
    d_B = tl.arange(0, BLOCK)
    return row_R, d_B, (row_R < N)[:, None] & (d_B < D)[None, :]


@triton.jit
def load(pointer, row_R, d_B, stride, mask_RB):
    return tl.load(pointer + row_R[:, None] * stride + d_B[None, :], mask=mask_RB, other=0.0).to(tl.float32)


@triton.jit
def rms_forward(
    x, residual, weight, y, total, rstd, N, x_row, residual_row, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
    CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (N / ROWS). y, total [N, D] and rstd [N] dense."""
    meet(CHAINED)
    row_R, d_B, mask_RB = tile_of(tl.program_id(0).to(tl.int64), N, D, BLOCK, ROWS)
    dtype: tl.constexpr = y.dtype.element_ty
    x_RB = load(x, row_R, d_B, x_row, mask_RB)
    if ADD:
        rounded_RB = (x_RB + load(residual, row_R, d_B, residual_row, mask_RB)).to(dtype)
        tl.store(total + row_R[:, None] * D + d_B[None, :], rounded_RB, mask=mask_RB)
        x_RB = rounded_RB.to(tl.float32)
    r_R = tl.rsqrt(tl.sum(x_RB * x_RB, 1) / D + eps)
    y_RB = (x_RB * r_R[:, None]).to(dtype)
    if WEIGHT:
        w_B = tl.load(weight + d_B, mask=d_B < D, other=0.0).to(dtype).to(tl.float32)
        y_RB = (y_RB.to(tl.float32) * w_B[None, :]).to(dtype)
    tl.store(y + row_R[:, None] * D + d_B[None, :], y_RB, mask=mask_RB)
    tl.store(rstd + row_R, r_R, mask=row_R < N)


@triton.jit
def rms_backward(
    dy, d_total, x, weight, rstd, dx, partial, N, dy_row, x_row,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, ADD: tl.constexpr, WEIGHT: tl.constexpr,
):  # fmt: skip
    """Grid (P), each program a share of the tiles. x is the normed sum. dx, d_total [N, D] dense; partial [P, D]."""
    dtype: tl.constexpr = dx.dtype.element_ty
    if WEIGHT:
        dw_RB = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row_R, d_B, mask_RB = tile_of(tile, N, D, BLOCK, ROWS)
        g_RB = load(dy, row_R, d_B, dy_row, mask_RB)
        r_R = tl.load(rstd + row_R, mask=row_R < N, other=0.0)
        n_RB = load(x, row_R, d_B, x_row, mask_RB) * r_R[:, None]
        if WEIGHT:
            dw_RB += g_RB * n_RB.to(dtype).to(tl.float32)
            w_B = tl.load(weight + d_B, mask=d_B < D, other=0.0).to(dtype).to(tl.float32)
            g_RB = g_RB * w_B[None, :]
        along_R = tl.sum(g_RB * n_RB, 1) / D
        dx_RB = r_R[:, None] * (g_RB - n_RB * along_R[:, None])
        if ADD:
            dx_RB += load(d_total, row_R, d_B, D, mask_RB)
        tl.store(dx + row_R[:, None] * D + d_B[None, :], dx_RB.to(dtype), mask=mask_RB)
    if WEIGHT:
        d_B = tl.arange(0, BLOCK)
        tl.store(partial + tl.program_id(0) * D + d_B, tl.sum(dw_RB, 0), mask=d_B < D)


@triton.jit
def gated_forward(
    o, gate, weight, y, rstd, N, o_row, gate_token, gate_head, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Grid (N / ROWS). A row is one head of one token; those of the gate may lie at two distances."""
    row_R, d_B, mask_RB = tile_of(tl.program_id(0).to(tl.int64), N, D, BLOCK, ROWS)
    o_RB = load(o, row_R, d_B, o_row, mask_RB)
    gate_R = row_R // HEADS * gate_token + row_R % HEADS * gate_head
    gate_RB = load(gate, gate_R, d_B, 1, mask_RB)
    w_B = tl.load(weight + d_B, mask=d_B < D, other=0.0).to(tl.float32)
    r_R = tl.rsqrt(tl.sum(o_RB * o_RB, 1) / D + eps)
    y_RB = o_RB * r_R[:, None] * w_B[None, :] * tl.sigmoid(gate_RB)
    tl.store(y + row_R[:, None] * D + d_B[None, :], y_RB.to(y.dtype.element_ty), mask=mask_RB)
    tl.store(rstd + row_R, r_R, mask=row_R < N)


@triton.jit
def gated_backward(
    dy, o, gate, weight, rstd, d_o, d_gate, partial, N, dy_row, o_row, gate_row,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (P), each program a share of the tiles. d_o, d_gate dense; partial [P, D]."""
    d_B = tl.arange(0, BLOCK)
    w_B = tl.load(weight + d_B, mask=d_B < D, other=0.0).to(tl.float32)
    dw_RB = tl.zeros([ROWS, BLOCK], tl.float32)
    for tile in range(tl.program_id(0).to(tl.int64), tl.cdiv(N, ROWS), tl.num_programs(0)):
        row_R, d_B, mask_RB = tile_of(tile, N, D, BLOCK, ROWS)
        dy_RB = load(dy, row_R, d_B, dy_row, mask_RB)
        r_R = tl.load(rstd + row_R, mask=row_R < N, other=0.0)
        n_RB = load(o, row_R, d_B, o_row, mask_RB) * r_R[:, None]
        sigmoid_RB = tl.sigmoid(load(gate, row_R, d_B, gate_row, mask_RB))
        dw_RB += dy_RB * sigmoid_RB * n_RB
        g_RB = dy_RB * sigmoid_RB * w_B[None, :]
        along_R = tl.sum(g_RB * n_RB, 1) / D
        d_o_RB = r_R[:, None] * (g_RB - n_RB * along_R[:, None])
        place_RB = row_R[:, None] * D + d_B[None, :]
        tl.store(d_o + place_RB, d_o_RB.to(d_o.dtype.element_ty), mask=mask_RB)
        d_gate_RB = g_RB * n_RB * (1.0 - sigmoid_RB)
        tl.store(d_gate + place_RB, d_gate_RB.to(d_gate.dtype.element_ty), mask=mask_RB)
    tl.store(partial + tl.program_id(0) * D + d_B, tl.sum(dw_RB, 0), mask=d_B < D)
