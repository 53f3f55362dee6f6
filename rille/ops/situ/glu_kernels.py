"""SiTU-GLU and SwiGLU in Triton, forward and backward.

    A = a tanh(g/a)     S = sigmoid(g)     B = b tanh(u/b)     y = A S B                  (CAPPED; else A = g, B = u)
    dg = dy B (A' S + A S (1 - S))         A' = 1 - (A/a)^2
    du = dy A S B'                         B' = 1 - (B/b)^2

Bound by bytes, and by the unit for exponentials right behind: forward spends three exponentials and one division.
tanh(x) = (1 - e)/(1 + e) with e = exp(-2|x|) loses what 1 - e cancels, so below 1/32 the series takes over, x - x^3/3:
both are right to 1e-6.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet


@triton.jit
def exp_of_minus(x, FAST: tl.constexpr):
    """exp(-x). FAST, on the card: the one instruction; the plain form adds six for results below 1e-38, and the kernels
    run out of issue slots before they run out of bandwidth. The interpreter has no assembly."""
    if FAST:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * -1.4426950408889634], tl.float32, True, 1
        )
    return tl.exp(-x)


@triton.jit
def reciprocal(x, FAST: tl.constexpr):
    """1 / x for 1 <= x <= 8, see `exp_of_minus`."""
    if FAST:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    return 1.0 / x


@triton.jit
def tanh_parts(x, FAST: tl.constexpr):
    """Numerator and denominator of tanh(x)."""
    size = tl.abs(x)
    e = exp_of_minus(2.0 * size, FAST)
    small = size < 0.03125
    numerator = tl.where(small, size * (1.0 - size * size * (1.0 / 3.0)), 1.0 - e)
    return tl.where(x < 0, -numerator, numerator), tl.where(small, 1.0, 1.0 + e)


@triton.jit
def place(N_COLUMNS, BLOCK: tl.constexpr):
    """Row (64 bits), columns, and which of them there are."""
    blocks = tl.cdiv(N_COLUMNS, BLOCK)
    row = (tl.program_id(0) // blocks).to(tl.int64)
    column_B = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return row, column_B, column_B < N_COLUMNS


@triton.jit
def glu_forward(
    gate, up, out, N_COLUMNS, gate_row, up_row, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr,
    BLOCK: tl.constexpr, FAST: tl.constexpr, CHAINED: tl.constexpr = False,
):  # fmt: skip
    """Grid (rows * columns / BLOCK). out is dense. A, B: the caps."""
    meet(CHAINED)
    row, column_B, inside_B = place(N_COLUMNS, BLOCK)
    g_B = tl.load(gate + row * gate_row + column_B, mask=inside_B, other=0.0).to(tl.float32)
    u_B = tl.load(up + row * up_row + column_B, mask=inside_B, other=0.0).to(tl.float32)
    z_B = exp_of_minus(tl.abs(g_B), FAST)
    rising_B = tl.where(g_B < 0, z_B, 1.0)  # sigmoid(g) = rising / (1 + z), without overflow
    if CAPPED:
        a_B, below_a_B = tanh_parts(g_B * (1.0 / A), FAST)
        b_B, below_b_B = tanh_parts(u_B * (1.0 / B), FAST)
        out_B = (a_B * rising_B) * (b_B * (A * B)) * reciprocal(below_a_B * below_b_B * (1.0 + z_B), FAST)
    else:
        out_B = g_B * u_B * rising_B * reciprocal(1.0 + z_B, FAST)
    tl.store(out + row * N_COLUMNS + column_B, out_B.to(out.dtype.element_ty), mask=inside_B)


@triton.jit
def glu_backward(
    dy, gate, up, d_gate, d_up, N_COLUMNS, dy_row, gate_row, up_row, A: tl.constexpr, B: tl.constexpr,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (rows * columns / BLOCK). d_gate and d_up are dense."""
    row, column_B, inside_B = place(N_COLUMNS, BLOCK)
    dy_B = tl.load(dy + row * dy_row + column_B, mask=inside_B, other=0.0).to(tl.float32)
    g_B = tl.load(gate + row * gate_row + column_B, mask=inside_B, other=0.0).to(tl.float32)
    u_B = tl.load(up + row * up_row + column_B, mask=inside_B, other=0.0).to(tl.float32)
    z_B = exp_of_minus(tl.abs(g_B), FAST)
    below_B = reciprocal(1.0 + z_B, FAST)
    s_B = tl.where(g_B < 0, z_B, 1.0) * below_B
    rest_B = tl.where(g_B < 0, 1.0, z_B) * below_B  # 1 - sigmoid
    if CAPPED:
        a_B, below_a_B = tanh_parts(g_B * (1.0 / A), FAST)
        b_B, below_b_B = tanh_parts(u_B * (1.0 / B), FAST)
        a_B, b_B = a_B * reciprocal(below_a_B, FAST), b_B * reciprocal(below_b_B, FAST)
        slope_a_B, slope_b_B = 1.0 - a_B * a_B, 1.0 - b_B * b_B
        a_B, b_B = a_B * A, b_B * B
        d_g_B = dy_B * b_B * s_B * (slope_a_B + a_B * rest_B)
        d_u_B = dy_B * a_B * s_B * slope_b_B
    else:
        d_g_B = dy_B * u_B * s_B * (1.0 + g_B * rest_B)
        d_u_B = dy_B * g_B * s_B
    here_B = row * N_COLUMNS + column_B
    tl.store(d_gate + here_B, d_g_B.to(d_gate.dtype.element_ty), mask=inside_B)
    tl.store(d_up + here_B, d_u_B.to(d_up.dtype.element_ty), mask=inside_B)
