"""What surrounds the products of a Muon step: every number is read and written as few times as the norm allows.

    advance     B = mu B + G;  sums of (G + mu B)^2, one for each part of a matrix         12 bytes a number
    normalise   X = (G + mu B) / (sqrt(sum of the sums) + eps), in 16 bits                 10
    descend     W = keep W - step O                                                        10

A matrix is a run of SIZE numbers, cut into PARTS parts of PART; matrices of one tensor lie a fixed distance apart. A
program is one part of one matrix. No atomics: `normalise` adds the sums up in their order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def advance(
    gradient, momentum, sums, gradient_gap, momentum_gap, size, parts, mu, PART: tl.constexpr, BLOCK: tl.constexpr
):
    program = tl.program_id(0)
    matrix, part = (program // parts).to(tl.int64), program % parts
    gradient += matrix * gradient_gap
    momentum += matrix * momentum_gap
    squares = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, PART, BLOCK):
        at = part * PART + start + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(gradient + at, mask=inside, other=0.0)
        b = mu * tl.load(momentum + at, mask=inside, other=0.0) + g
        tl.store(momentum + at, b, mask=inside)
        u = g + mu * b
        squares += u * u
    tl.store(sums + program, tl.sum(squares, axis=0))


@triton.jit
def normalise(
    gradient, momentum, sums, out, gradient_gap, momentum_gap, size, parts, mu, eps,
    PART: tl.constexpr, BLOCK: tl.constexpr, ALL_PARTS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    matrix, part = (program // parts).to(tl.int64), program % parts
    gradient += matrix * gradient_gap
    momentum += matrix * momentum_gap
    out += matrix * size
    which = tl.arange(0, ALL_PARTS)
    found = tl.load(sums + matrix * parts + which, mask=which < parts, other=0.0)
    factor = 1.0 / (tl.sqrt(tl.sum(found, axis=0)) + eps)
    for start in range(0, PART, BLOCK):
        at = part * PART + start + tl.arange(0, BLOCK)
        inside = at < size
        g = tl.load(gradient + at, mask=inside, other=0.0)
        u = g + mu * tl.load(momentum + at, mask=inside, other=0.0)
        tl.store(out + at, (u * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def descend(weight, direction, weight_gap, size, parts, keep, step, PART: tl.constexpr, BLOCK: tl.constexpr):
    program = tl.program_id(0)
    matrix, part = (program // parts).to(tl.int64), program % parts
    weight += matrix * weight_gap
    direction += matrix * size
    for start in range(0, PART, BLOCK):
        at = part * PART + start + tl.arange(0, BLOCK)
        inside = at < size
        w = tl.load(weight + at, mask=inside, other=0.0)
        o = tl.load(direction + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(weight + at, keep * w - step * o, mask=inside)
