"""Figures of rows of logits in Triton: each row in parts of BLOCK, then the parts of a row.

    of a part    m = max l, the first place that has it, s = sum exp(l - m), whether all are finite
    of a row     M = max m, the first part that has it;  log p = l[token] - M - log sum s exp(m - M)

A token that is drawn at temperature t by the number u is the first one whose running sum of e = exp((l - M) / t)
exceeds u sum e, in float64: a part leaves S = sum exp((l - m) / t), the row finds the part by the sums and the place
inside it.

Parts and their order follow from W alone, so a row's figures do not depend on the rows beside it.

Suffixes: B places of a part, P parts.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet


@triton.jit
def finite_part(logits, row, n, p, W, BLOCK: tl.constexpr):
    """Places and logits of a part, -inf where there is none or no number; whether all of it are numbers."""
    w_B = p * BLOCK + tl.arange(0, BLOCK)
    l_B = tl.load(logits + n.to(tl.int64) * row + w_B, mask=w_B < W, other=float("-inf")).to(tl.float32)
    finite_B = tl.abs(l_B) < float("inf")
    return w_B, tl.where(finite_B, l_B, float("-inf")), tl.min(tl.where(finite_B | (w_B >= W), 1, 0), 0)


@triton.jit
def within(l_B, top, heat):
    """exp((l - top) / heat) in float64."""
    base = tl.where(top == float("-inf"), 0.0, top)
    return tl.exp((l_B - base).to(tl.float64) / heat)


@triton.jit
def part_kernel(
    logits, heats, tops, places, sums, masses, row, W, PARTS, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Grid (PARTS, N). logits [N, W] with distant rows; tops, sums fp32 and places int32 [N, PARTS]. Of a part that is
    not all finite the sum is NaN. heats float64 [N] or None, and masses float64 [N, PARTS]: S where the heat is above
    0."""
    p, n = tl.program_id(0), tl.program_id(1)
    heat = 0.0 if heats is None else tl.load(heats + n)
    meet(CHAINED)
    w_B, l_B, is_number = finite_part(logits, row, n, p, W, BLOCK)
    top = tl.max(l_B, 0)
    place = tl.min(tl.where(l_B == top, w_B, W), 0)
    sum_B = tl.sum(tl.exp(l_B - tl.where(top == float("-inf"), 0.0, top)), 0)
    at = n * PARTS + p
    tl.store(tops + at, top)
    tl.store(places + at, tl.minimum(place, W - 1))
    tl.store(sums + at, tl.where(is_number == 1, sum_B, float("nan")))
    if heats is not None:
        tl.store(masses + at, tl.sum(within(l_B, top, tl.where(heat > 0, heat, 1.0)), 0))


@triton.jit
def place_of(logits, masses, top_P, top, heat, number, row, n, PARTS, W, BLOCK: tl.constexpr, PART: tl.constexpr):
    """The place that is drawn."""
    p_P = tl.arange(0, BLOCK)
    mass_P = tl.load(masses + n * PARTS + p_P, mask=p_P < PARTS, other=0.0) * within(top_P, top, heat)
    mass_P = tl.where(p_P < PARTS, mass_P, 0.0)
    running_P = tl.cumsum(mass_P, 0)
    target = number * tl.sum(mass_P, 0)
    part = tl.sum(((running_P <= target) & (p_P < PARTS)).to(tl.int32), 0)
    part = tl.minimum(part, tl.max(tl.where(mass_P > 0, p_P, 0), 0))  # rounding must not reach what has no mass
    target -= tl.sum(tl.where(p_P < part, mass_P, 0.0), 0)
    w_B, l_B, _ = finite_part(logits, row, n, part, W, PART)
    mass_B = tl.where(w_B < W, within(l_B, top, heat), 0.0)
    count = tl.sum(((tl.cumsum(mass_B, 0) <= target) & (w_B < W)).to(tl.int32), 0)
    last = tl.max(tl.where(mass_B > 0, w_B, part * PART), 0)
    return tl.minimum(part * PART + count, last)


@triton.jit
def row_kernel(
    logits, tokens, heats, numbers, tops, places, sums, masses, found, figures, row, N, PARTS, W, least,
    BLOCK: tl.constexpr, PART: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (N). tokens int64 [N] or None; heats, numbers float64 [N] or None: rows whose heat is above 0 are drawn.
    found int64 [N]; figures float64 [3, N]. PART: places of a part."""
    n, p_P = tl.program_id(0), tl.arange(0, BLOCK)
    meet(CHAINED)
    at_P, there_P = n * PARTS + p_P, p_P < PARTS
    top_P = tl.load(tops + at_P, mask=there_P, other=float("-inf"))
    sum_P = tl.load(sums + at_P, mask=there_P, other=0.0)
    place_P = tl.load(places + at_P, mask=there_P, other=W - 1)
    is_number = tl.min(tl.where(sum_P == sum_P, 1, 0), 0)
    top = tl.max(top_P, 0)
    token = tl.min(tl.where(top_P == top, place_P, W - 1), 0).to(tl.int64)
    if tokens is not None:
        token = tl.load(tokens + n)
    if heats is not None:
        heat = tl.load(heats + n)
        if heat > 0:
            drawn = place_of(logits, masses, top_P, top, heat, tl.load(numbers + n), row, n, PARTS, W, BLOCK, PART)
            token = tl.minimum(tl.maximum(drawn, 0), W - 1).to(tl.int64)
    chosen = tl.load(logits + n.to(tl.int64) * row + token).to(tl.float32)
    total = tl.sum(sum_P * tl.exp(top_P - tl.where(top == float("-inf"), 0.0, top)), 0)
    tl.store(found + n, token)
    tl.store(figures + n, token.to(tl.float64))
    tl.store(figures + N + n, tl.maximum(chosen - top - tl.log(total), least).to(tl.float64))
    tl.store(figures + 2 * N + n, is_number.to(tl.float64))
