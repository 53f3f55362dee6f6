"""The gradient of embeddings by runs: tokens sorted by id, so that those of one word stand together.

    ids       0 0 0 | 0 1 1 | 1 1 1 | 2 4 4         cut into chunks of CHUNK places, whatever the words are
    sum_runs  a program walks one chunk. A run inside it is complete and goes to the table. Of one that began before,
              the part here is left in partial[chunk, 0]; of one that goes on behind, in partial[chunk, 1].
    join_runs at the chunk where a cut run ends: partial[first, 1] + ... + partial[last - 1, 1] + partial[last, 0]

Every program has the same work, however often a word occurs, every sum has one order, and nobody adds to memory that
another writes. Rows of the table without a token are not touched.
"""

import triton
import triton.language as tl


@triton.jit
def same(ids, a, b, N):
    """Whether there are places a and b and they hold one word."""
    there = (a >= 0) & (b < N)
    return there & (tl.load(ids + a, mask=there, other=0) == tl.load(ids + b, mask=there, other=1))


@triton.jit
def sum_runs(
    dy, order, ids, table, partial, N, dy_row, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    AHEAD: tl.constexpr,
):  # fmt: skip
    """Grid (chunks * D / BLOCK). dy [N, D], order int64 [N]: the token at each place, ids int32 [N] sorted, table
    [W, D], partial fp32 [chunks, 2, D]. AHEAD rows are on the way together."""
    across: tl.constexpr = (D + BLOCK - 1) // BLOCK
    chunk = (tl.program_id(0) // across).to(tl.int64)
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    first = tl.program_id(0) // across * CHUNK
    partial += chunk * 2 * D + d
    before = same(ids, first - 1, first, N)
    sum_D = tl.zeros([BLOCK], tl.float32)
    for at in range(first, tl.minimum(first + CHUNK, N), AHEAD):
        rows = ()
        for i in tl.static_range(AHEAD):
            inside = at + i < N
            token = tl.load(order + at + i, mask=inside, other=0)
            rows = rows + (tl.load(dy + token * dy_row + d, mask=inside & (d < D), other=0.0),)
        for i in tl.static_range(AHEAD):
            word = tl.load(ids + at + i, mask=at + i < N, other=0).to(tl.int64)
            sum_D += rows[i].to(tl.float32)
            if (at + i < N) & (same(ids, at + i, at + i + 1, N) == 0):
                if before:
                    tl.store(partial, sum_D, mask=d < D)
                else:
                    tl.store(table + word * D + d, sum_D.to(table.dtype.element_ty), mask=d < D)
                sum_D = tl.zeros([BLOCK], tl.float32)
                before = before & False
    tl.store(partial + D, sum_D, mask=same(ids, first + CHUNK - 1, first + CHUNK, N) & (d < D))


@triton.jit
def join_runs(
    partial, ids, starts, table, N, D: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, AHEAD: tl.constexpr
):
    """Grid (chunks * D / BLOCK). starts int32 [chunks]: the first place of the word at each chunk's first place."""
    across: tl.constexpr = (D + BLOCK - 1) // BLOCK
    chunk = tl.program_id(0) // across
    d = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)
    first = chunk * CHUNK
    goes_on = same(ids, first, first + CHUNK - 1, N) & same(ids, first + CHUNK - 1, first + CHUNK, N)
    if same(ids, first - 1, first, N) & (goes_on == 0):
        sum_D = tl.zeros([BLOCK], tl.float32)
        for c in range(tl.load(starts + chunk) // CHUNK, chunk, AHEAD):
            c_A = c + tl.arange(0, AHEAD)
            at_AD = partial + (c_A.to(tl.int64) * 2 + 1)[:, None] * D + d[None, :]
            sum_D += tl.sum(tl.load(at_AD, mask=(c_A < chunk)[:, None] & (d < D)[None, :], other=0.0), 0)
        sum_D += tl.load(partial + chunk.to(tl.int64) * 2 * D + d, mask=d < D, other=0.0)
        word = tl.load(ids + first).to(tl.int64)
        tl.store(table + word * D + d, sum_D.to(table.dtype.element_ty), mask=d < D)
