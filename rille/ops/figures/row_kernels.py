"""Figures of rows of logits in Triton: each row in parts of BLOCK, then the parts of a row.

    of a part    m = max l, the first place that has it, s = sum exp(l - m), whether all are finite
    of a row     M = max m, the first part that has it;  log p = l[token] - M - log sum s exp(m - M)

Parts and their order follow from W alone, so a row's figures do not depend on the rows beside it.

Suffixes: B places of a part, P parts.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet


@triton.jit
def part_kernel(logits, tops, places, sums, row, W, PARTS, BLOCK: tl.constexpr, CHAINED: tl.constexpr):
    """Grid (PARTS, N). logits [N, W] with distant rows; tops, sums fp32 and places int32 [N, PARTS]. Of a part that is
    not all finite the sum is NaN."""
    p, n = tl.program_id(0), tl.program_id(1)
    meet(CHAINED)
    w_B = p * BLOCK + tl.arange(0, BLOCK)
    l_B = tl.load(logits + n.to(tl.int64) * row + w_B, mask=w_B < W, other=float("-inf")).to(tl.float32)
    finite_B = tl.abs(l_B) < float("inf")
    is_number = tl.min(tl.where(finite_B | (w_B >= W), 1, 0), 0)
    l_B = tl.where(finite_B, l_B, float("-inf"))
    top = tl.max(l_B, 0)
    place = tl.min(tl.where(l_B == top, w_B, W), 0)
    sum_B = tl.sum(tl.exp(l_B - tl.where(top == float("-inf"), 0.0, top)), 0)
    at = n * PARTS + p
    tl.store(tops + at, top)
    tl.store(places + at, tl.minimum(place, W - 1))
    tl.store(sums + at, tl.where(is_number == 1, sum_B, float("nan")))


@triton.jit
def row_kernel(
    logits, tokens, tops, places, sums, found, figures, row, N, PARTS, W, least, BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (N). tokens int64 [N] or None; found int64 [N]; figures float64 [3, N]."""
    n, p_P = tl.program_id(0), tl.arange(0, BLOCK)
    meet(CHAINED)
    at_P, there_P = n * PARTS + p_P, p_P < PARTS
    top_P = tl.load(tops + at_P, mask=there_P, other=float("-inf"))
    sum_P = tl.load(sums + at_P, mask=there_P, other=0.0)
    place_P = tl.load(places + at_P, mask=there_P, other=W - 1)
    is_number = tl.min(tl.where(sum_P == sum_P, 1, 0), 0)
    top = tl.max(top_P, 0)
    token = tl.min(tl.where(top_P == top, place_P, W - 1), 0).to(tl.int64)
    chosen = top
    if tokens is not None:
        token = tl.load(tokens + n)
        chosen = tl.load(logits + n.to(tl.int64) * row + token).to(tl.float32)
    total = tl.sum(sum_P * tl.exp(top_P - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(found + n, token)
    tl.store(figures + n, token.to(tl.float64))
    tl.store(figures + N + n, tl.maximum(chosen - top - tl.log(total), least).to(tl.float64))
    tl.store(figures + 2 * N + n, is_number.to(tl.float64))
