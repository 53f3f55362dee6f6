"""A product of a few rows in Triton: y = x W' (+ onto).

A program has COLUMNS rows of W, whole where they fit: the weights are asked for first, then each row of x meets them by
plain multiplications, which hide behind the read. A row's sums do not depend on the rows beside it.

Suffixes: N rows, C columns of the result, D the axis of the sum.
"""

import triton
import triton.language as tl


@triton.jit
def few_product(
    x, w, onto, y, N, C, x_row, onto_row, D: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Grid (C / COLUMNS). x [N, D] and onto [N, C] (or None) with distant rows, w [C, D] and y [N, C] dense; N up to
    ROWS."""
    c_C, d_D = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, BLOCK)
    inside_C = c_C < C
    w_CD = w + c_C.to(tl.int64)[:, None] * D + d_D[None, :]
    if BLOCK >= D:
        held_CD = tl.load(w_CD, mask=inside_C[:, None] & (d_D < D)[None, :], other=0.0).to(tl.float32)
    for n in tl.static_range(ROWS):
        there = n < N
        if BLOCK >= D:
            x_D = tl.load(x + n * x_row + d_D, mask=(d_D < D) & there, other=0.0).to(tl.float32)
            sum_C = tl.sum(held_CD * x_D[None, :], 1)
        else:
            sum_CD = tl.zeros([COLUMNS, BLOCK], tl.float32)
            for d in range(0, D, BLOCK):
                part_CD = tl.load(w_CD + d, mask=inside_C[:, None] & (d + d_D < D)[None, :], other=0.0)
                x_D = tl.load(x + n * x_row + d + d_D, mask=(d + d_D < D) & there, other=0.0).to(tl.float32)
                sum_CD += part_CD.to(tl.float32) * x_D[None, :]
            sum_C = tl.sum(sum_CD, 1)
        if onto is not None:
            sum_C += tl.load(onto + n * onto_row + c_C, mask=inside_C & there, other=0.0).to(tl.float32)
        tl.store(y + n * C + c_C, sum_C.to(y.dtype.element_ty), mask=inside_C & there)
