"""(I + L)^-1 in the place of L, a square of fp32 in shared memory, for the first kernels in Gluon.

Forward substitution in the four diagonal tiles of 16 rows, a thread a column, then two merges X_ba = -X_b L_ba X_a, to
32 and to 64 rows, by products of two bf16 pieces of each operand.

Rows that lie 256 bytes apart are in the same banks, and then each access of a merge takes 4 to 8 times as long. So the
square lies in tiles of 16 x 16, one after another, and inside a tile rows are turned against each other: nothing that
writes or reads it, a product's accumulators, operands, eight words of a row, meets a bank twice.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from rille.ops.kda.numbers_gluon import leading_bits, negative

# Row and column that each bit of a word's place stands for. First a tile's: bits of the row change those of the bank.
# Then a tile right below and one to the right of a diagonal one, and the same for blocks of 32 x 32.
INSIDE = [[0, 1], [0, 2], [0, 4], [0, 8], [1, 0], [2, 8], [5, 0], [8, 0]]
SQUARE_S: gl.constexpr = gl.constexpr(gl.SharedLinearLayout([*INSIDE, [16, 16], [0, 16], [32, 32], [0, 32]]))
BLOCK_S: gl.constexpr = gl.constexpr(gl.SharedLinearLayout([*INSIDE, [16, 16], [0, 16]]))
TILE_S: gl.constexpr = gl.constexpr(gl.SharedLinearLayout(INSIDE))
DIAGONAL_S: gl.constexpr = gl.constexpr(  # [2, 2, 2, 16, 16]: half; diagonal tiles, or others; tile of the half
    gl.SharedLinearLayout([*[[0, 0, 0, *x] for x in INSIDE], [0, 0, 1, 0, 0], [0, 1, 0, 0, 0], [1, 0, 0, 0, 0]])
)
EIGHTS_S: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [4, 3, 2, 1, 0]))  # the same, eight words a row


@gluon.constexpr_function
def place_of(row, eight):
    """Which eight words of a tile hold columns 8 * eight and on of a row."""
    bit = [row >> n & 1 for n in range(4)]
    return (eight ^ bit[1]) + 2 * (bit[0] ^ bit[2]) + 4 * bit[1] + 8 * bit[2] + 16 * bit[3]


@gluon.constexpr_function
def column_layout(warps):
    """Of four tiles [4, 16, 16]: a thread has a column of one; warps beyond the second repeat."""
    registers = [[0, 1, 0], [0, 2, 0], [0, 4, 0], [0, 8, 0]]
    lanes = [[0, 0, 1], [0, 0, 2], [0, 0, 4], [0, 0, 8], [1, 0, 0]]
    repeated = [[0, 0, 0]] * (warps.bit_length() - 2)
    return gl.DistributedLinearLayout(registers, lanes, [[2, 0, 0], *repeated], [], [4, 16, 16])


@gluon.constexpr_function
def eight_layout(warps):
    """Eight columns of a row of each tile, as threads of `column_layout` need them: each has all of its tile's."""
    none = [0] * 5
    registers, lanes = [[*none[1:], 1], [*none[1:], 2], [*none[1:], 4]], [none, none, none, none, [0, 0, 1, 0, 0]]
    repeated = [none] * (warps.bit_length() - 2)
    return gl.DistributedLinearLayout(registers, lanes, [[1, 0, 0, 0, 0], *repeated], [], [2, 1, 2, 1, 8])


@gluon.jit
def dot_16_bits(a, b, zero):
    """a @ b for fp32 operands in the layouts of mma operands, each cut into two bf16 pieces."""
    a_high, b_high = leading_bits(a), leading_bits(b)
    a_low, b_low = (a - a_high).to(gl.bfloat16), (b - b_high).to(gl.bfloat16)
    a_high, b_high = a_high.to(gl.bfloat16), b_high.to(gl.bfloat16)
    return mma_v2(a_high, b_high, mma_v2(a_high, b_low, mma_v2(a_low, b_high, zero)))


@gluon.jit
def eight_of_row(eights, place: gl.constexpr, EIGHT: gl.constexpr):
    return gl.reshape(eights.slice(place, 1, 3).load(EIGHT), [4, 8])


@gluon.jit
def diagonal_inverses(l_s, TILES: gl.constexpr, EIGHT: gl.constexpr):
    """(I + L)^-1 of the four diagonal tiles, [4, 16, 16]: row n is e_n less the rows before it, times row n of L."""
    ROW: gl.constexpr = gl.SliceLayout(2, TILES)
    i = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, TILES)))[None, :][:, :, None]
    j = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, TILES)))[None, :][:, None, :]
    eights = l_s._reinterpret(gl.float32, [2, 2, 2, 32, 8], EIGHTS_S).slice(0, 1, 1)
    x = gl.where(i == j, 1.0, 0.0) + gl.zeros([4, 16, 16], gl.float32, TILES)
    for n in gl.static_range(1, 16):
        first, second = eight_of_row(eights, place_of(n, 0), EIGHT), eight_of_row(eights, place_of(n, 1), EIGHT)
        row = gl.reshape(gl.join(first, second).permute((0, 2, 1)), [4, 16])
        row = gl.convert_layout(row, ROW, assert_trivial=True)
        dot = gl.sum(gl.where(i < n, row[:, :, None] * x, -0.0), 1)[:, None, :]
        x = gl.where(i == n, x - dot, x)
    return x


@gluon.jit
def invert(square_s, y_s, WARPS: gl.constexpr):
    """(I + L)^-1 in the place of L, zero above the diagonal; of L what lies below is read. y_s: 4 KB for use on the
    way."""
    WIDE: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [2, WARPS // 2], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, WIDE, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, WIDE, 2)
    diagonal = square_s._reinterpret(gl.float32, [2, 2, 2, 16, 16], DIAGONAL_S).slice(0, 1, 1)
    inverses = diagonal_inverses(square_s, column_layout(WARPS), eight_layout(WARPS))
    diagonal.store(gl.reshape(inverses, [2, 1, 2, 16, 16]))
    tiles = square_s._reinterpret(gl.float32, [16, 16, 16], TILE_S)  # of half h: 4 h, 4 h + 1, between them 4 h + 3
    y_tiles = y_s._reinterpret(gl.float32, [2, 16, 16], TILE_S)
    zero = gl.zeros([16, 16], gl.float32, WIDE)
    tiles.index(2).store(zero)  # above the diagonal, where products of blocks read
    tiles.index(6).store(zero)
    for half in gl.static_range(2):
        y = dot_16_bits(tiles.index(4 * half + 3).load(LEFT), tiles.index(4 * half).load(RIGHT), zero)
        y_tiles.index(half).store(y)
    for half in gl.static_range(2):
        x = dot_16_bits(tiles.index(4 * half + 1).load(LEFT), y_tiles.index(half).load(RIGHT), zero)
        tiles.index(4 * half + 3).store(negative(x))
    blocks = square_s._reinterpret(gl.float32, [4, 32, 32], BLOCK_S)  # both halves, above the diagonal, between them
    y_block = y_s._reinterpret(gl.float32, [32, 32], BLOCK_S)
    zero = gl.zeros([32, 32], gl.float32, WIDE)
    blocks.index(2).store(zero)
    y_block.store(dot_16_bits(blocks.index(3).load(LEFT), blocks.index(0).load(RIGHT), zero))
    blocks.index(3).store(negative(dot_16_bits(blocks.index(1).load(LEFT), y_block.load(RIGHT), zero)))
