"""The histogram of balancing from logits and cutoffs, counted in shared memory: for batches whose every count would
otherwise be an atomic addition in the L2 cache (`router_kernels.py`, the twin, which small batches keep).

    histogram[e, bin(cutoff - s_e)] += 1

A program has EXPERTS neighbouring experts and every P-th tile of tokens. Two counts of 16 bits share a word, so that 16
experts with up to 4,096 bins fill 128 KB; a program sees at most 65,535 tokens (`router.py`), so none can overflow. At
the end the counts are added to those of the other programs, neighbouring bins by neighbouring lanes. All counts are
integers: the same in any order.

Triton has no atomic additions in shared memory: they are written as instructions. `global_smem` is the compiler's name
for the shared memory of a program; the words are all that is allocated there, so they begin where it begins.

Gluon has no interpreter; on a GPU both forms must agree exactly.

Suffixes: T tokens of a tile, E experts of the program, W words of an expert.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rille.ops.barriers_gluon import barrier


@gluon.jit
def add_to_words(place, amount):
    """words[place / 4] += amount in shared memory, place in bytes."""
    add: gl.constexpr = """{
        .reg .u32 at;
        mov.u32 at, global_smem;
        add.u32 at, at, $1;
        red.shared.add.u32 [at], $2;
        mov.u32 $0, 0;
    }"""
    gl.inline_asm_elementwise(add, "=r,r,r", [place, amount], gl.int32, False, 1)


@gluon.jit
def histogram_kernel(
    logits, cutoff, edges, histogram, N, logits_row, groups, E: gl.constexpr, BINS: gl.constexpr, EXPERTS: gl.constexpr,
    WORDS: gl.constexpr, TOKENS: gl.constexpr, SCORED: gl.constexpr,
):  # fmt: skip
    """Grid (groups * P). logits [N, E] as for the router; cutoff [N] and edges [2], the lowest and highest edge of all
    bins, are its results; histogram int32 [E, BINS]. WORDS: a power of two, at least BINS / 2."""
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    words = gl.allocate_shared_memory(gl.int32, [EXPERTS, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for e in gl.static_range(EXPERTS):
        words.index(e).store(gl.zeros([WORDS], gl.int32, LINE))
    barrier()
    first = gl.program_id(0) % groups * EXPERTS
    low = gl.load(edges)
    width = gl.div_rn(gl.load(edges + 1) - low, BINS * 1.0)
    e_E = gl.arange(0, EXPERTS, gl.SliceLayout(0, TILE))
    for tile in range(gl.program_id(0) // groups, gl.cdiv(N, TOKENS), gl.num_programs(0) // groups):
        n_T = tile * TOKENS + gl.arange(0, TOKENS, gl.SliceLayout(1, TILE))
        inside_TE = (n_T < N)[:, None] & (first + e_E < E)[None, :]
        at_TE = n_T.to(gl.int64)[:, None] * logits_row + (first + e_E)[None, :]
        z_TE = gl.load(logits + at_TE, mask=inside_TE, other=0.0)
        cutoff_T = gl.load(cutoff + n_T, mask=n_T < N, other=0.0)
        s_TE = z_TE
        if not SCORED:
            s_TE = 1.0 / (1.0 + gl.exp(-z_TE))
        above_TE = gl.div_rn((cutoff_T[:, None] - s_TE) - low, width)
        bin_TE = gl.floor(gl.minimum(gl.maximum(above_TE, 0.0), BINS - 1.0)).to(gl.int32)
        place_TE = (e_E[None, :] * WORDS + bin_TE // 2) * 4
        one_TE = gl.where(bin_TE % 2 == 0, 1, 65536)
        add_to_words(place_TE, gl.where(inside_TE, one_TE, 0))
    barrier()
    w_W = gl.arange(0, WORDS, LINE)
    for e in gl.static_range(EXPERTS):
        count_W = words.index(e).load(LINE)
        even_W = count_W & 65535
        odd_W = (count_W >> 16) & 65535
        row = histogram + (first + e) * BINS
        gl.atomic_add(row + 2 * w_W, even_W, mask=even_W > 0, sem="relaxed")
        gl.atomic_add(row + 2 * w_W + 1, odd_W, mask=odd_W > 0, sem="relaxed")
