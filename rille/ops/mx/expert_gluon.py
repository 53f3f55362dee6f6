"""The experts' products from packed MXFP4 weights for few rows, in Gluon: each weight is read once, straight into
registers, and decoded there.

    first     h = W1_e x, u = W3_e x        act = A(h) S(h) B(u)         [rows, F] bf16
    second    y = W2_e act                                               [rows, L] fp32

Weights are the left operand of mma.sync (16 rows of a weight, 8 rows of x), tokens the right one, so filling up the
tokens' side costs nothing. The order of a product's sum is free. So a lane reads 16 bytes of a weight's row at once,
which are the 32 columns of one scale, and what makes up a step of the tensor cores is whatever the decoding yields: of
a word of 8 codes n0 .. n7 the four pairs (n0, n4) (n1, n5) (n2, n6) (n3, n7). For the first of them

    m = word & 0x000F000F        a code in each half: sign in bit 3, exponent in 2 and 1, mantissa in 0
    m * 0x1040                   m << 12 and m << 6 side by side: the sign in bit 15, the rest in bits 8 to 6
    & 0x81C081C0                 these alone, the bf16 of the value times 2^-126, subnormals among them
    * 2^(byte - 33)              the value times 2^-32, exact for scale bytes 27 to 160

17 instructions for 8 weights; 2^32 comes back with the sums. x and act lie in the order that this asks for
(`expert_kernels.py`). The loops as compiled have 3.0 and 3.2 instructions a weight, loads and addresses included, and
the card has slots for 3.9 at the speed of a copy. What is read next is on its way while this is decoded: 4 KB a warp.

Suffixes: M rows of a weight, G groups of 32 columns, W words of a group, C its codes, K columns of a step, N rows of x.
Gluon has no interpreter: `expert_kernels.py` has the twins, and on a GPU both must agree.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from rille.ops.kda.decode_gluon import exp2

ROWS = gl.constexpr(64)  # of a weight, a program of 4 warps: 16 a warp
STEP = gl.constexpr(256)  # columns: 8 groups

MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA.value, 32))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA.value, 32))
# The left operand, [64, 256], as [64, 8, 4, 8]: a lane holds whole groups.
CODES = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 1, 0], [0, 0, 2, 0], [8, 0, 0, 0], [0, 4, 0, 0]],
        [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
        [[16, 0, 0, 0], [32, 0, 0, 0]],
        [],
        [64, 8, 4, 8],
    )
)
WORDS = gl.constexpr(gl.SliceLayout(3, CODES.value))
GROUPS = gl.constexpr(gl.SliceLayout(2, WORDS.value))


@gluon.constexpr_function
def pieces_of(TILE):
    """The right operand, [256, TILE], as [32, 8, TILE]."""
    more = [[0, 0, n] for n in (8, 16) if n < TILE]
    return gl.DistributedLinearLayout(
        [[0, 1, 0], [0, 2, 0], [0, 4, 0], [1, 0, 0], [2, 0, 0], [16, 0, 0], *more],
        [[4, 0, 0], [8, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 4]],
        [[0, 0, 0], [0, 0, 0]],
        [],
        [32, 8, TILE],
    )


DECODE = gl.constexpr("""{
    .reg .b32 a, b, c, d, high;
    shr.u32 high, $4, 8;
    and.b32 a, $4, 0x000F000F;
    and.b32 b, $4, 0x00F000F0;
    and.b32 c, high, 0x000F000F;
    and.b32 d, high, 0x00F000F0;
    mul.lo.u32 a, a, 0x1040;
    mul.lo.u32 b, b, 0x104;
    mul.lo.u32 c, c, 0x1040;
    mul.lo.u32 d, d, 0x104;
    and.b32 a, a, 0x81C081C0;
    and.b32 b, b, 0x81C081C0;
    and.b32 c, c, 0x81C081C0;
    and.b32 d, d, 0x81C081C0;
    mul.rn.bf16x2 $0, a, $12;
    mul.rn.bf16x2 $1, b, $12;
    mul.rn.bf16x2 $2, c, $12;
    mul.rn.bf16x2 $3, d, $12;
}""")


@gluon.jit
def fetch(codes, scales, row, M, k, K: gl.constexpr):
    """Words [M, G, W] and scale bytes [M, G] of rows from `row` on, of M that there are, and columns from k on."""
    m_M = gl.arange(0, ROWS, gl.SliceLayout(1, GROUPS))
    g_G = gl.arange(0, STEP // 32, gl.SliceLayout(0, GROUPS))
    w_W = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(0, WORDS)))
    m_MG, g_MG = m_M[:, None] + row, g_G[None, :] + k // 32
    there_MG = (m_MG < M) & (g_MG < K // 32)
    scale_MG = gl.load(scales + m_MG * (K // 32) + g_MG, mask=there_MG, other=0)
    at_MGW = gl.expand_dims(m_MG * (K // 8) + g_MG * 4, 2) + gl.expand_dims(gl.expand_dims(w_W, 0), 0)
    there_MGW = gl.expand_dims(there_MG, 2) & (at_MGW >= 0)
    return gl.load(codes + at_MGW, mask=there_MGW, other=0, cache_modifier=".cg"), scale_MG


@gluon.jit
def decode(word_MGW, scale_MG):
    """The left operand [M, K] of a step."""
    factor_MG = scale_MG.to(gl.int32) * 0x00800080 + 94 * 0x00800080  # 2^(byte - 33) twice, as bf16
    factor_MGW, word_MGW = gl.broadcast(gl.expand_dims(factor_MG, 2), word_MGW)
    code_M = gl.zeros([ROWS, STEP // 32, 4, 8], gl.int32, CODES)
    word_MGWC, _ = gl.broadcast(gl.expand_dims(word_MGW, 3), code_M)
    factor_MGWC, _ = gl.broadcast(gl.expand_dims(factor_MGW, 3), code_M)
    value_MGWC = gl.inline_asm_elementwise(
        DECODE, "=r,=r,=r,=r" + 16 * ",r", [word_MGWC, factor_MGWC], gl.bfloat16, True, 8
    )
    return gl.convert_layout(value_MGWC.reshape([ROWS, STEP]), LEFT, assert_trivial=True)


@gluon.jit
def slot(j):
    """Where place j of a row lies: the 32 that a lane takes are apart, so that 4 lanes read 64 bytes together."""
    return j // 128 * 128 + j % 32 // 8 * 32 + j % 128 // 32 * 8 + j % 8


@gluon.jit
def right(x, there_N, at_N, k, K: gl.constexpr):
    """The right operand [K, N] of the step at column k."""
    TILE: gl.constexpr = there_N.shape[0]
    PIECES: gl.constexpr = pieces_of(TILE)
    q_Q = gl.arange(0, STEP // 8, gl.SliceLayout(1, gl.SliceLayout(2, PIECES)))
    e_E = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, PIECES)))
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, PIECES))
    there_N = gl.convert_layout(there_N, ROW, assert_trivial=True)
    at_N = gl.convert_layout(at_N, ROW, assert_trivial=True) + k
    slot_QE = (q_Q // 16 * 128 + q_Q % 4 * 32 + q_Q % 16 // 4 * 8)[:, None] + e_E[None, :]
    there_QE = (q_Q * 8 + k < K)[:, None] & (e_E < 8)[None, :]
    at_QEN = gl.expand_dims(slot_QE, 2) + gl.expand_dims(gl.expand_dims(at_N, 0), 0)
    there_QEN = gl.expand_dims(there_QE, 2) & gl.expand_dims(gl.expand_dims(there_N, 0), 0)
    x_QEN = gl.load(x + at_QEN, mask=there_QEN, other=0.0)
    return gl.convert_layout(x_QEN.reshape([STEP, TILE]), RIGHT, assert_trivial=True)


@gluon.jit
def pairs_of(pair_of_row, tile, TILE: gl.constexpr, layout: gl.constexpr):
    """Rows of x of a tile, and the pair of each, -1 where none."""
    row_N = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
    return row_N, gl.load(pair_of_row + row_N)


@gluon.jit
def tanh(x):
    return gl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def activation(h, u, A: gl.constexpr, B: gl.constexpr, CAPPED: gl.constexpr):
    z = exp2(gl.abs(h) * -1.4426950408889634)
    below = gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + z], gl.float32, True, 1)
    s = gl.where(h < 0, z, 1.0) * below
    if CAPPED:
        return tanh(h * (1.0 / A)) * s * (tanh(u * (1.0 / B)) * (A * B))
    else:
        return h * s * u


@gluon.jit
def first_product(
    x, codes, scales, act, pair_of_row, expert_of_tile, F: gl.constexpr, L: gl.constexpr, ACTIVE: gl.constexpr,
    TILE: gl.constexpr, A: gl.constexpr, B: gl.constexpr, CAPPED: gl.constexpr,
):  # fmt: skip
    """Grid (tiles * F / 64). x [N, L] and act [rows, F] in the order of the pairs, codes [E, 2F, L / 2], scales
    [E, 2F, L / 32]."""
    blocks: gl.constexpr = (F + ROWS - 1) // ROWS
    row_x: gl.constexpr = (L + 127) // 128 * 128
    row_act: gl.constexpr = (F + 127) // 128 * 128
    tile, row = gl.program_id(0) // blocks, gl.program_id(0) % blocks * ROWS
    expert = gl.load(expert_of_tile + tile)
    if expert >= 0:
        codes += expert.to(gl.int64) * (F * L // 4)
        scales += expert.to(gl.int64) * (F * L // 16)
        up_codes, up_scales = codes + F * (L // 8), scales + F * (L // 32)
        gate_MGW, gate_scale_MG = fetch(codes, scales, row, F, 0, L)
        up_MGW, up_scale_MG = fetch(up_codes, up_scales, row, F, 0, L)
        _, pair_N = pairs_of(pair_of_row, tile, TILE, RIGHT)
        token_N = gl.maximum(pair_N, 0) // ACTIVE * row_x
        h_MN = gl.zeros([ROWS, TILE], gl.float32, MMA)
        u_MN = gl.zeros([ROWS, TILE], gl.float32, MMA)
        for k in range(0, L, STEP):
            x_KN = right(x, pair_N >= 0, token_N, k, L)
            now = gate_MGW, gate_scale_MG, up_MGW, up_scale_MG
            gate_MGW, gate_scale_MG = fetch(codes, scales, row, F, k + STEP, L)
            up_MGW, up_scale_MG = fetch(up_codes, up_scales, row, F, k + STEP, L)
            h_MN = mma_v2(decode(now[0], now[1]), x_KN, h_MN)
            u_MN = mma_v2(decode(now[2], now[3]), x_KN, u_MN)
        act_MN = activation(h_MN * 4294967296.0, u_MN * 4294967296.0, A, B, CAPPED)
        out_N, pair_N = pairs_of(pair_of_row, tile, TILE, MMA)
        f_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        place_M = slot(f_M // 8 * 8 + f_M % 4 * 2 + f_M % 8 // 4)
        there_MN = (f_M < F)[:, None] & (pair_N >= 0)[None, :]
        gl.store(act + out_N[None, :] * row_act + place_M[:, None], act_MN.to(act.dtype.element_ty), mask=there_MN)


@gluon.jit
def second_product(
    act, codes, scales, y, pair_of_row, expert_of_tile, L: gl.constexpr, F: gl.constexpr, TILE: gl.constexpr,
):  # fmt: skip
    """Grid (tiles * L / 64). act [rows, F] in the order of the pairs, codes [E, L, F / 2], scales [E, L, F / 32], y
    [rows, L] fp32. Two steps of columns are on the way together."""
    blocks: gl.constexpr = (L + ROWS - 1) // ROWS
    row_act: gl.constexpr = (F + 127) // 128 * 128
    tile, row = gl.program_id(0) // blocks, gl.program_id(0) % blocks * ROWS
    expert = gl.load(expert_of_tile + tile)
    if expert >= 0:
        codes += expert.to(gl.int64) * (L * F // 8)
        scales += expert.to(gl.int64) * (L * F // 32)
        a_MGW, a_scale_MG = fetch(codes, scales, row, L, 0, F)
        b_MGW, b_scale_MG = fetch(codes, scales, row, L, STEP, F)
        row_N, pair_N = pairs_of(pair_of_row, tile, TILE, RIGHT)
        there_N, at_N = pair_N >= 0, row_N * row_act
        y_MN = gl.zeros([ROWS, TILE], gl.float32, MMA)
        z_MN = gl.zeros([ROWS, TILE], gl.float32, MMA)
        for k in range(0, F, 2 * STEP):
            x_KN = right(act, there_N, at_N, k, F)
            now = a_MGW, a_scale_MG, b_MGW, b_scale_MG
            a_MGW, a_scale_MG = fetch(codes, scales, row, L, k + 2 * STEP, F)
            b_MGW, b_scale_MG = fetch(codes, scales, row, L, k + 3 * STEP, F)
            y_MN = mma_v2(decode(now[0], now[1]), x_KN, y_MN)
            x_KN = right(act, there_N, at_N, k + STEP, F)
            z_MN = mma_v2(decode(now[2], now[3]), x_KN, z_MN)
        out_N, pair_N = pairs_of(pair_of_row, tile, TILE, MMA)
        l_M = row + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        there_MN = (l_M < L)[:, None] & (pair_N >= 0)[None, :]
        gl.store(y + out_N[None, :] * L + l_M[:, None], (y_MN + z_MN) * 4294967296.0, mask=there_MN)
