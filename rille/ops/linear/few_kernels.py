"""Products of few rows in Triton: y = x W' (+ onto).

A program has COLUMNS rows of W, whole where they fit: the weights are asked for first. Then in `few_product` each row
of x meets them by plain multiplications, which hide behind the read; in `tile_product` ROWS of them by the tensor
cores. A row's sums do not depend on the rows beside it.

Suffixes: N rows, C columns of the result, D the axis of the sum.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet


@triton.jit
def normed(x_D, gain_D, D: tl.constexpr, eps, dtype: tl.constexpr):
    """RMS norm of one row, roundings as in `rille.ops.norm`."""
    x_D = x_D.to(dtype).to(tl.float32)
    r = tl.rsqrt(tl.sum(x_D * x_D, 0) / D + eps)
    return ((x_D * r).to(dtype).to(tl.float32) * gain_D).to(dtype).to(tl.float32)


@triton.jit
def few_product(
    x, w, gain, onto, y, N, C, x_row, onto_row, eps, D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (C / COLUMNS). x [N, D] and onto [N, C] (or None) with distant rows, w [C, D] and y [N, C] dense; N up to
    ROWS. gain [D] or None: x is rounded to w's dtype and normed first, if BLOCK covers D; every program does so."""
    c_C, d_D = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    inside_C = c_C < C
    w_CD = w + c_C.to(tl.int64)[:, None] * D + d_D[None, :]
    if BLOCK >= D:
        held_CD = tl.load(w_CD, mask=inside_C[:, None] & (d_D < D)[None, :], other=0.0).to(tl.float32)
        if gain is not None:
            gain_D = tl.load(gain + d_D, mask=d_D < D, other=0.0).to(w.dtype.element_ty).to(tl.float32)
    meet(CHAINED)
    if BLOCK >= D:
        rows = ()
        for n in tl.static_range(ROWS):  # all of them are on their way before anything is stored
            rows = rows + (tl.load(x + n * x_row + d_D, mask=(d_D < D) & (n < N), other=0.0).to(tl.float32),)
    for n in tl.static_range(ROWS):
        if BLOCK >= D:
            x_D = rows[n]
            if gain is not None:
                x_D = normed(x_D, gain_D, D, eps, w.dtype.element_ty)
            sum_C = tl.sum(held_CD * x_D[None, :], 1)
        else:
            sum_CD = tl.zeros([COLUMNS, BLOCK], tl.float32)
            for d in range(0, D, BLOCK):
                part_CD = tl.load(w_CD + d, mask=inside_C[:, None] & (d + d_D < D)[None, :], other=0.0)
                x_D = tl.load(x + n * x_row + d + d_D, mask=(d + d_D < D) & (n < N), other=0.0).to(tl.float32)
                sum_CD += part_CD.to(tl.float32) * x_D[None, :]
            sum_C = tl.sum(sum_CD, 1)
        if onto is not None:
            sum_C += tl.load(onto + n * onto_row + c_C, mask=inside_C & (n < N), other=0.0).to(tl.float32)
        tl.store(y + n * C + c_C, sum_C.to(y.dtype.element_ty), mask=inside_C & (n < N))


@triton.jit
def tile_product(
    x, w, onto, y, N, C, x_row, onto_row, D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (C / COLUMNS, N / ROWS). As `few_product`; BLOCK covers D."""
    c_C, d_D = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    n_N = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside_C, there_N = c_C < C, n_N < N
    w_CD = tl.load(w + c_C[:, None] * D + d_D[None, :], mask=inside_C[:, None] & (d_D < D)[None, :], other=0.0)
    meet(CHAINED)
    x_ND = tl.load(x + n_N[:, None] * x_row + d_D[None, :], mask=there_N[:, None] & (d_D < D)[None, :], other=0.0)
    y_NC = tl.dot(x_ND, w_CD.T)
    mask_NC = there_N[:, None] & inside_C[None, :]
    if onto is not None:
        y_NC += tl.load(onto + n_N[:, None] * onto_row + c_C[None, :], mask=mask_NC, other=0.0).to(tl.float32)
    tl.store(y + n_N[:, None] * C + c_C[None, :], y_NC.to(y.dtype.element_ty), mask=mask_NC)
