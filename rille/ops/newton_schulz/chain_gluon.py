"""All steps of a run of the Gram form without leaving the processor: T from A, both P x P, P = 128 or 256.

    B = a I + b A + c A^2;   of two steps:  M = B A,  A' = M B,  B' = a I + b A' + c A'^2,  T = B' B

A program is one matrix. All of these are symmetric, so a matrix is its tiles of 128 on and above the diagonal: one, or
(0, 0), (0, 1), (1, 1). Two matrices lie in shared memory, 96 KB each at P = 256, and a third forms in registers before
it takes the place of one of them: A is read once and T written once, and a product of 256 has 6 products of tiles, not
8. Sums are fp32, every result is rounded to the dtype of A.

Gluon has no interpreter; the tests run this by Python (tests/ops/gluon_on_cpu.py) beside `blocks.transform`.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from rille.ops.barriers_gluon import barrier


@gluon.jit
def tile_of_product(left, right, WHICH: gl.constexpr, TILES: gl.constexpr, SUMS: gl.constexpr):
    """Tile WHICH of L R in fp32; tile (1, 0) of a matrix is the transpose of its tile 1."""
    sums = gl.full([128, 128], 0.0, gl.float32, SUMS)
    if WHICH == 0:
        sums = warpgroup_mma(left.index(0), right.index(0), sums, use_acc=False, is_async=True)
        if TILES == 2:
            sums = warpgroup_mma(left.index(1), right.index(1).permute((1, 0)), sums, is_async=True)
    elif WHICH == 1:
        sums = warpgroup_mma(left.index(0), right.index(1), sums, use_acc=False, is_async=True)
        sums = warpgroup_mma(left.index(1), right.index(2), sums, is_async=True)
    else:
        sums = warpgroup_mma(left.index(1).permute((1, 0)), right.index(1), sums, use_acc=False, is_async=True)
        sums = warpgroup_mma(left.index(2), right.index(2), sums, is_async=True)
    return warpgroup_mma_wait(0, deps=(sums,))


@gluon.jit
def tile_of_polynomial(x, a, b, c, WHICH: gl.constexpr, TILES: gl.constexpr, SUMS: gl.constexpr):
    """Tile WHICH of a I + b X + c X^2 in fp32."""
    sums = c * tile_of_product(x, x, WHICH, TILES, SUMS) + b * x.index(WHICH).load(SUMS).to(gl.float32)
    if WHICH != 1:
        rows = gl.arange(0, 128, gl.SliceLayout(1, SUMS))
        columns = gl.arange(0, 128, gl.SliceLayout(0, SUMS))
        sums += gl.where(rows[:, None] == columns[None, :], a, 0.0)
    return sums


@gluon.jit
def put(target, x0, x1, x2, TILES: gl.constexpr):
    """A matrix from registers into shared memory, when nobody reads the old one any more."""
    barrier()
    target.index(0).store(x0)
    if TILES == 2:
        target.index(1).store(x1)
        target.index(2).store(x2)
    fence_async_shared()
    barrier()


@gluon.jit
def multiply(target, left, right, KIND: gl.constexpr, TILES: gl.constexpr, SUMS: gl.constexpr):
    """target = L R; it may be L or R."""
    x0 = tile_of_product(left, right, 0, TILES, SUMS).to(KIND)
    x1 = x0
    x2 = x0
    if TILES == 2:
        x1 = tile_of_product(left, right, 1, TILES, SUMS).to(KIND)
        x2 = tile_of_product(left, right, 2, TILES, SUMS).to(KIND)
    put(target, x0, x1, x2, TILES)


@gluon.jit
def polynomial(target, x, a, b, c, KIND: gl.constexpr, TILES: gl.constexpr, SUMS: gl.constexpr):
    """target = a I + b X + c X^2; it may be X."""
    x0 = tile_of_polynomial(x, a, b, c, 0, TILES, SUMS).to(KIND)
    x1 = x0
    x2 = x0
    if TILES == 2:
        x1 = tile_of_polynomial(x, a, b, c, 1, TILES, SUMS).to(KIND)
        x2 = tile_of_polynomial(x, a, b, c, 2, TILES, SUMS).to(KIND)
    put(target, x0, x1, x2, TILES)


@gluon.jit
def transform(a_ptr, t_ptr, a, b, c, STEPS: gl.constexpr, TILES: gl.constexpr):
    P: gl.constexpr = TILES * 128
    KIND: gl.constexpr = a_ptr.dtype.element_ty
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, 128, 16])
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [8, 1], [1, 0])
    NUMBER: gl.constexpr = TILES * (TILES + 1) // 2
    x = gl.allocate_shared_memory(KIND, [NUMBER, 128, 128], SHARED)
    y = gl.allocate_shared_memory(KIND, [NUMBER, 128, 128], SHARED)
    matrix = gl.program_id(0).to(gl.int64) * (P * P)
    rows = gl.arange(0, 128, gl.SliceLayout(1, LINES))
    columns = gl.arange(0, 128, gl.SliceLayout(0, LINES))
    at = rows[:, None] * P + columns[None, :]
    x0 = gl.load(a_ptr + matrix + at)
    x1 = x0
    x2 = x0
    if TILES == 2:
        x1 = gl.load(a_ptr + matrix + 128 + at)
        x2 = gl.load(a_ptr + matrix + 128 * P + 128 + at)
    put(x, x0, x1, x2, TILES)
    if STEPS == 1:
        polynomial(x, x, a, b, c, KIND, TILES, SUMS)
    else:
        polynomial(y, x, a, b, c, KIND, TILES, SUMS)
        multiply(x, y, x, KIND, TILES, SUMS)
        multiply(x, x, y, KIND, TILES, SUMS)
        polynomial(x, x, a, b, c, KIND, TILES, SUMS)
        multiply(x, x, y, KIND, TILES, SUMS)
    t_ptr += matrix
    gl.store(t_ptr + at, x.index(0).load(LINES))
    if TILES == 2:
        gl.store(t_ptr + 128 + at, x.index(1).load(LINES))
        gl.store(t_ptr + 128 * P + at, x.index(1).permute((1, 0)).load(LINES))
        gl.store(t_ptr + 128 * P + 128 + at, x.index(2).load(LINES))
