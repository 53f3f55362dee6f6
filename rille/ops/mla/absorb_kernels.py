"""What stands around absorbed attention while text is generated, a launch each (see `absorb.py` for the equations).

    store_kernel     the rows that the cache keeps, normed, into their pages; the query's latent, normed
    query_kernel     queries against the cached rows: a head's own part times W_k, and its shared part as it is
    value_kernel     W_v times the mixtures, times the sigmoid of the gate

Rows are few: a program has a tile of weights and up to 16 rows, the least that the tensor cores take. A row's sums do
not depend on the rows beside it. fp32 mixtures meet 16-bit weights as the sum of two 16-bit numbers (`values.py`).

Suffixes: M rows of a tile, R latent channels, K key channels, V value channels; Q channels of the query's latent.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet


@triton.jit
def normed_row(x_B, gain, d_B, D: tl.constexpr, eps, dtype: tl.constexpr):
    """RMS norm of one row of D, roundings as in `rille.ops.norm`."""
    x_B = x_B.to(tl.float32)
    r = tl.rsqrt(tl.sum(x_B * x_B, 0) / D + eps)
    gain_B = tl.load(gain + d_B, mask=d_B < D, other=0.0).to(dtype).to(tl.float32)
    return ((x_B * r).to(dtype).to(tl.float32) * gain_B).to(dtype)


@triton.jit
def store_kernel(
    both, gain, first, first_gain, normed, pool, table, positions, sequences, both_row, first_row, page_stride,
    max_pages, eps, R: tl.constexpr, REST: tl.constexpr, Q: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    TAIL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (N, 2 or 1 without queries). both [N, R + REST], first [N, Q] with distant rows, normed [N, Q] dense; pool
    [pages, PAGE, R + REST], table [S, max_pages]."""
    n, d_B = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    meet(CHAINED)
    if tl.program_id(1) == 0:
        position, sequence = tl.load(positions + n), tl.load(sequences + n)
        page = tl.load(table + sequence * max_pages + position // PAGE)
        row = pool + page * page_stride + position % PAGE * (R + REST)
        c_B = tl.load(both + n * both_row + d_B, mask=d_B < R, other=0.0)
        c_B = normed_row(c_B, gain, d_B, R, eps, both.dtype.element_ty)
        tl.store(row + d_B, c_B.to(pool.dtype.element_ty), mask=d_B < R)
        t_T = tl.arange(0, TAIL)
        s_T = tl.load(both + n * both_row + R + t_T, mask=t_T < REST, other=0.0)
        tl.store(row + R + t_T, s_T.to(pool.dtype.element_ty), mask=t_T < REST)
    elif Q > 0:
        x_B = tl.load(first + n * first_row + d_B, mask=d_B < Q, other=0.0)
        tl.store(normed + n * Q + d_B, normed_row(x_B, first_gain, d_B, Q, eps, first.dtype.element_ty), mask=d_B < Q)


@triton.jit
def query_kernel(
    q, key, out, N, q_row, q_head, key_head, H, R: tl.constexpr, K: tl.constexpr, REST: tl.constexpr,
    BLOCK_K: tl.constexpr, BR: tl.constexpr, TAIL: tl.constexpr, BM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of R, and one for the shared part; H, tiles of rows). q [N, H, K + REST], key [H, K, R], out
    [N, H, R + REST]."""
    h = tl.program_id(1)
    n_M = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    there_M = n_M < N
    q_M, out_M = q + n_M * q_row + h * q_head, out + (n_M * H + h) * (R + REST)
    if tl.program_id(0) * BR < R:
        r_R, k_K = tl.program_id(0) * BR + tl.arange(0, BR), tl.arange(0, BLOCK_K)
        key_KR = key + h.to(tl.int64) * key_head + k_K[:, None] * R + r_R[None, :]
        w_KR = tl.load(key_KR, mask=(k_K < K)[:, None] & (r_R < R)[None, :], other=0.0)
        meet(CHAINED)
        q_MK = tl.load(q_M[:, None] + k_K[None, :], mask=there_M[:, None] & (k_K < K)[None, :], other=0.0)
        own_MR = tl.dot(q_MK, w_KR).to(out.dtype.element_ty)
        tl.store(out_M[:, None] + r_R[None, :], own_MR, mask=there_M[:, None] & (r_R < R)[None, :])
    else:
        t_T = tl.arange(0, TAIL)
        mask_MT = there_M[:, None] & (t_T < REST)[None, :]
        meet(CHAINED)
        shared_MT = tl.load(q_M[:, None] + (K + t_T)[None, :], mask=mask_MT, other=0.0)
        tl.store(out_M[:, None] + (R + t_T)[None, :], shared_MT, mask=mask_MT)


@triton.jit
def add_values(x_MV, o_MR, w_VR):
    """x + o w' of an fp32 o, as the sum of two numbers of w's type."""
    large_MR = o_MR.to(w_VR.dtype)
    x_MV = tl.dot(large_MR, w_VR.T, x_MV)
    if w_VR.dtype != tl.float32:
        x_MV = tl.dot((o_MR - large_MR.to(tl.float32)).to(w_VR.dtype), w_VR.T, x_MV)
    return x_MV


@triton.jit
def value_kernel(
    o, value, gate, out, N, value_head, gate_row, gate_head, H, R: tl.constexpr, V: tl.constexpr, BLOCK: tl.constexpr,
    BV: tl.constexpr, BM: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of V, H, tiles of rows). o fp32 [N, H, R] dense, value [H, V, R], gate [N, H, V] or None, out
    [N, H V]."""
    h = tl.program_id(1)
    n_M = tl.program_id(2).to(tl.int64) * BM + tl.arange(0, BM)
    v_V, r_R = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BLOCK)
    there_M1 = (n_M < N)[:, None]
    there_MV = there_M1 & (v_V < V)[None, :]
    value_VR = value + h.to(tl.int64) * value_head + v_V[:, None] * R + r_R[None, :]
    o_MR = o + ((n_M * H + h) * R)[:, None] + r_R[None, :]
    x_MV = tl.zeros([BM, BV], tl.float32)
    if BLOCK >= R:
        inside_1R = (r_R < R)[None, :]
        w_VR = tl.load(value_VR, mask=(v_V < V)[:, None] & inside_1R, other=0.0)
        meet(CHAINED)
        x_MV = add_values(x_MV, tl.load(o_MR, mask=there_M1 & inside_1R, other=0.0), w_VR)
    else:
        meet(CHAINED)
        for r in range(0, R, BLOCK):
            inside_1R = (r + r_R < R)[None, :]
            w_VR = tl.load(value_VR + r, mask=(v_V < V)[:, None] & inside_1R, other=0.0)
            x_MV = add_values(x_MV, tl.load(o_MR + r, mask=there_M1 & inside_1R, other=0.0), w_VR)
    if gate is not None:
        gate_MV = gate + n_M[:, None] * gate_row + h * gate_head + v_V[None, :]
        x_MV *= tl.sigmoid(tl.load(gate_MV, mask=there_MV, other=0.0).to(tl.float32))
    tl.store(out + (n_M * H + h)[:, None] * V + v_V[None, :], x_MV.to(out.dtype.element_ty), mask=there_MV)
