"""The products of the experts in Triton: every tile of rows belongs to one expert (see `permute_kernels.py`).

    glu_product            h = x W1', u = x W3'          act = A(h) S(h) B(u)                      [rows, F]
    row_product            y = act W2'      dx = [dh du] [W1; W3]
    glu_backward_product   h, u again; d = dy W2;  dp = <act, d>;  dh, du = w d act'(h, u);  act w
    weight_product         dW13 = [dh du]' x     dW2 = dy' (act w)                                 [E, out, in]

A tile of the gate and the same tile of the up part share a program, so the pre-activation is never written, forward or
backward. Operands come through TMA descriptors: columns beyond a tensor read zero and are not written. Where a tile of
weight rows reaches beyond its expert the surplus columns are dropped; a sum never does, since BK divides its length.
Sums are fp32 and belong to one program each: the same bits every time.

Suffixes: M rows, F, O, I columns, K the axis of a sum.
"""

import triton
import triton.language as tl

from rille.ops.situ.glu_kernels import exp_of_minus, reciprocal, tanh_parts


@triton.jit
def place_of(ROW_TILES, COLUMN_TILES: tl.constexpr, GROUP: tl.constexpr):
    """Tile of rows and of columns: GROUP tiles of rows sweep the columns together, so that both operands stay in L2."""
    pid = tl.program_id(0)
    each = GROUP * COLUMN_TILES
    first = pid // each * GROUP
    height = tl.minimum(ROW_TILES - first, GROUP)
    return first + pid % each % height, pid % each // height


@triton.jit
def tanh(x, FAST: tl.constexpr):
    """FAST: the card's one instruction, right to 2^-11 of the value, where the bf16 results are rounded by 2^-9."""
    if FAST:
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    above, below = tanh_parts(x, FAST)
    return above / below


@triton.jit
def glu_forward_of(h, u, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr):
    z = exp_of_minus(tl.abs(h), FAST)
    s = tl.where(h < 0, z, 1.0) * reciprocal(1.0 + z, FAST)  # sigmoid(h), without overflow
    if CAPPED:
        return tanh(h * (1.0 / A), FAST) * s * (tanh(u * (1.0 / B), FAST) * (A * B))
    else:
        return h * s * u


@triton.jit
def glu_backward_of(d, h, u, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr):
    """(act, d act/dh, d act/du) times (1, d, d)."""
    z = exp_of_minus(tl.abs(h), FAST)
    below = reciprocal(1.0 + z, FAST)
    s = tl.where(h < 0, z, 1.0) * below
    rest = tl.where(h < 0, 1.0, z) * below
    if CAPPED:
        a, b = tanh(h * (1.0 / A), FAST), tanh(u * (1.0 / B), FAST)
        slope_a, slope_b = 1.0 - a * a, 1.0 - b * b
        a_s, b = a * A * s, b * B
        return a_s * b, d * b * (s * slope_a + a_s * rest), d * a_s * slope_b
    else:
        h_s = h * s
        return h_s * u, d * u * (s + h_s * rest), d * h_s


@triton.jit
def halves(x, M: tl.constexpr, F: tl.constexpr):
    """Left and right columns of a tile."""
    return tl.split(tl.permute(tl.reshape(x, [M, 2, F // 2]), [0, 2, 1]))


@triton.jit
def parts_of(x, M: tl.constexpr, F: tl.constexpr, PARTS: tl.constexpr):
    """The tile in 1, 2 or 4 parts side by side: an activation needs registers beside its operands, part by part."""
    if PARTS == 1:
        return (x,)
    elif PARTS == 2:
        return halves(x, M, F)
    else:
        left, right = halves(x, M, F)
        first, second = halves(left, M, F // 2)
        third, fourth = halves(right, M, F // 2)
        return (first, second, third, fourth)


@triton.jit
def glu_product(
    x, w13, act, expert_of_tile, ROW_TILES, F: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, PARTS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr,
    FAST: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles * F / BF). x [rows, L], w13 [E 2F, L], act [rows, F]: descriptors; act's in blocks of BF / PARTS
    columns."""
    m, n = place_of(ROW_TILES, (F + BF - 1) // BF, GROUP)
    expert = tl.load(expert_of_tile + m)
    if expert >= 0:
        gate_row = expert * (2 * F) + n * BF
        h_MF = tl.zeros([BM, BF], tl.float32)
        u_MF = tl.zeros([BM, BF], tl.float32)
        for k in range(0, L, BK):
            x_MK = x.load([m * BM, k])
            h_MF = tl.dot(x_MK, w13.load([gate_row, k]).T, h_MF)
            u_MF = tl.dot(x_MK, w13.load([gate_row + F, k]).T, u_MF)
        h_parts, u_parts = parts_of(h_MF, BM, BF, PARTS), parts_of(u_MF, BM, BF, PARTS)
        for i in tl.static_range(PARTS):
            act_MF = glu_forward_of(h_parts[i], u_parts[i], A, B, CAPPED, FAST)
            act.store([m * BM, n * BF + i * (BF // PARTS)], act_MF.to(act.dtype))


@triton.jit
def row_product(
    x, w, y, expert_of_tile, ROW_TILES, O: tl.constexpr, I: tl.constexpr, BM: tl.constexpr, BO: tl.constexpr,  # noqa: E741
    BK: tl.constexpr, GROUP: tl.constexpr, OUT_FIRST: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles * O / BO). y [rows, O] = x [rows, I] times w [E O, I] (OUT_FIRST) or [E I, O]: descriptors."""
    m, n = place_of(ROW_TILES, (O + BO - 1) // BO, GROUP)
    expert = tl.load(expert_of_tile + m)
    if expert >= 0:
        y_MO = tl.zeros([BM, BO], tl.float32)
        for k in range(0, I, BK):
            x_MK = x.load([m * BM, k])
            if OUT_FIRST:
                y_MO = tl.dot(x_MK, w.load([expert * O + n * BO, k]).T, y_MO)
            else:
                y_MO = tl.dot(x_MK, w.load([expert * I + k, n * BO]), y_MO)
        y.store([m * BM, n * BO], y_MO.to(y.dtype))


@triton.jit
def glu_backward_product(
    x, dy, w13, w2, d_gate, d_up, act, partial, weights, pair_of_row, expert_of_tile, ROW_TILES,
    F: tl.constexpr, L: tl.constexpr, BM: tl.constexpr, BF: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PARTS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles * F / BF). x, dy [rows, L], w13 [E 2F, L], w2 [E L, F], d_gate, d_up, act [rows, F]: descriptors,
    the last three in blocks of BF / PARTS columns.
    partial fp32 [rows, tiles of F]: <act, d> over the tile; weights fp32 by pair."""
    tiles: tl.constexpr = (F + BF - 1) // BF
    m, n = place_of(ROW_TILES, tiles, GROUP)
    expert = tl.load(expert_of_tile + m)
    if expert >= 0:
        gate_row = expert * (2 * F) + n * BF
        h_MF = tl.zeros([BM, BF], tl.float32)
        u_MF = tl.zeros([BM, BF], tl.float32)
        d_MF = tl.zeros([BM, BF], tl.float32)
        for k in range(0, L, BK):
            x_MK = x.load([m * BM, k])
            h_MF = tl.dot(x_MK, w13.load([gate_row, k]).T, h_MF)
            u_MF = tl.dot(x_MK, w13.load([gate_row + F, k]).T, u_MF)
            d_MF = tl.dot(dy.load([m * BM, k]), w2.load([expert * L + k, n * BF]), d_MF)
        r_M = m.to(tl.int64) * BM + tl.arange(0, BM)
        pair_M = tl.load(pair_of_row + r_M)
        weight_M = tl.load(weights + pair_M, mask=pair_M >= 0, other=0.0)
        h_parts, u_parts = parts_of(h_MF, BM, BF, PARTS), parts_of(u_MF, BM, BF, PARTS)
        d_parts = parts_of(d_MF, BM, BF, PARTS)
        along_M = tl.zeros([BM], tl.float32)
        for i in tl.static_range(PARTS):
            f = n * BF + i * (BF // PARTS)
            weighted_MF = d_parts[i] * weight_M[:, None]
            act_MF, dh_MF, du_MF = glu_backward_of(weighted_MF, h_parts[i], u_parts[i], A, B, CAPPED, FAST)
            along_MF = act_MF * d_parts[i]
            if F % BF:
                along_MF = tl.where((f + tl.arange(0, BF // PARTS) < F)[None, :], along_MF, 0.0)
            along_M += tl.sum(along_MF, 1)
            d_gate.store([m * BM, f], dh_MF.to(d_gate.dtype))
            d_up.store([m * BM, f], du_MF.to(d_up.dtype))
            act.store([m * BM, f], (act_MF * weight_M[:, None]).to(act.dtype))
        tl.store(partial + r_M * tiles + n, along_M)


@triton.jit
def weight_product(
    p, q, out, ends, O: tl.constexpr, I: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BK: tl.constexpr,  # noqa: E741
):  # fmt: skip
    """Grid (E * tiles of out). out [E, O, I] = sum over the expert's rows of p [rows, O]' q [rows, I]: p and q are
    descriptors."""
    across: tl.constexpr = (I + BI - 1) // BI
    each: tl.constexpr = across * ((O + BO - 1) // BO)
    expert = tl.program_id(0) // each
    o = tl.program_id(0) % each // across * BO
    i = tl.program_id(0) % across * BI
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    sum_OI = tl.zeros([BO, BI], tl.float32)
    for r in range(start, tl.load(ends + expert), BK):
        sum_OI = tl.dot(p.load([r, o]).T, q.load([r, i]), sum_OI)
    o_O, i_I = o + tl.arange(0, BO), i + tl.arange(0, BI)
    at_OI = out + expert.to(tl.int64) * (O * I) + o_O[:, None].to(tl.int64) * I + i_I[None, :]
    tl.store(at_OI, sum_OI.to(out.dtype.element_ty), mask=(o_O < O)[:, None] & (i_I < I)[None, :])


@triton.jit
def glu_backward_rows(
    h, d, along, weights, pair_of_row, expert_of_tile, F: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """Grid (row blocks). In place: h [rows, 2F] becomes dh and du, d [rows, F] the weighted act; along fp32 [rows] is
    <act, d>."""
    first = tl.program_id(0) * ROWS
    if tl.load(expert_of_tile + first // TILE) >= 0:
        r_R = first.to(tl.int64) + tl.arange(0, ROWS)
        pair_R = tl.load(pair_of_row + r_R)
        weight_R1 = tl.load(weights + pair_R, mask=pair_R >= 0, other=0.0)[:, None]
        along_R = tl.zeros([ROWS], tl.float32)
        for f in range(0, F, BLOCK):
            f_1C = (f + tl.arange(0, BLOCK))[None, :]
            inside = f_1C < F
            gate_at, d_at = h + r_R[:, None] * (2 * F) + f_1C, d + r_R[:, None] * F + f_1C
            gate_RC = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
            up_RC = tl.load(gate_at + F, mask=inside, other=0.0).to(tl.float32)
            d_RC = tl.load(d_at, mask=inside, other=0.0).to(tl.float32)
            act_RC, dh_RC, du_RC = glu_backward_of(d_RC * weight_R1, gate_RC, up_RC, A, B, CAPPED, FAST)
            along_R += tl.sum(act_RC * d_RC, 1)
            tl.store(gate_at, dh_RC.to(h.dtype.element_ty), mask=inside)
            tl.store(gate_at + F, du_RC.to(h.dtype.element_ty), mask=inside)
            tl.store(d_at, (act_RC * weight_R1).to(d.dtype.element_ty), mask=inside)
        tl.store(along + r_R, along_R)
