"""The forward kernel of `mix_kernels.py` in Gluon for wide rows: the same sums, with loads that never stop.

`mix_forward` asks for the next source while one is summed up, and for nothing while sums go across threads or a row is
written. Here one program a processor walks over rows, and a ring in shared memory takes what the coming sources hold,
SLOTS of them (14 of 7168 are 200 KB) ahead, by copies that pass registers by. A thread finds in the ring what it
asked for itself. A source goes from there to registers, where it stays for the weighted sum, and its place is asked for
anew at once; so a row's sums, all in one reduction, its softmax and its stores run beside the loads of the next.

Two bf16 are one word everywhere, its lower and its upper half (suffix W): nine sources of 7168 fill 144 registers of a
thread, and a source as fp32 twice as many.

Order of a row's entries: the update, the last source (with UPDATE the two make the running sum), then the others.

Gluon has no interpreter: `mix_forward` is the twin that the tests run, and on a GPU both must agree.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy


@gluon.jit
def add2(a0, a1, b0, b1):
    return a0 + b0, a1 + b1


@gluon.jit
def add6(a0, a1, a2, a3, a4, a5, b0, b1, b2, b3, b4, b5):
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5


@gluon.jit
def add18(
    a0, a1, a2, a3, a4, a5, a6, a7, a8, a9, a10, a11, a12, a13, a14, a15, a16, a17,
    b0, b1, b2, b3, b4, b5, b6, b7, b8, b9, b10, b11, b12, b13, b14, b15, b16, b17,
):  # fmt: skip
    return (
        a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8,
        a9 + b9, a10 + b10, a11 + b11, a12 + b12, a13 + b13, a14 + b14, a15 + b15, a16 + b16, a17 + b17,
    )  # fmt: skip


@gluon.jit
def totals(sums):
    """The sum of each tensor of a tuple. All of nine sources share the way through shared memory, else six do."""
    n: gl.constexpr = len(sums)
    if n == 1:
        out = (gl.sum(sums[0], 0),)
    elif n == 2:
        out = gl.reduce(sums, 0, add2)
    elif n == 6:
        out = gl.reduce(sums, 0, add6)
    elif n == 18:
        out = gl.reduce(sums, 0, add18)
    elif n > 6:
        out = totals(sums[:6]) + totals(sums[6:])
    else:
        out = totals(sums[:2]) + totals(sums[2:])
    return out


@gluon.jit
def lower(x_W, shift=16):
    return (x_W << shift).to(gl.float32, bitcast=True)


@gluon.jit
def upper(x_W, mask=-65536):
    return (x_W & mask).to(gl.float32, bitcast=True)


@gluon.jit
def joined(lower_W, upper_W):
    """Two fp32 rounded to a word of two bf16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [lower_W, upper_W], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def within(x_W, LANES: gl.constexpr):
    """[LANES]: the sum of what each thread holds, four neighbours a load."""
    repeats: gl.constexpr = x_W.shape[0] // (LANES * 4)
    return gl.sum(gl.sum(gl.reshape(x_W, [repeats, LANES, 4]), 2), 0)


@gluon.jit
def product(a0_W, b0_W, a1_W, b1_W, LANES: gl.constexpr):
    """Two sums, so that each product is added by the instruction that makes it."""
    return within(a0_W * b0_W, LANES) + within(a1_W * b1_W, LANES)


@gluon.jit
def words(pointer):
    return pointer.to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def wrapped(slot, SLOTS: gl.constexpr):
    return gl.where(slot < SLOTS, slot, slot - SLOTS)


@gluon.jit
def ask(entries, ring, slot, row, which: gl.constexpr, i_W, N, HALF: gl.constexpr):
    """One row of one entry into a slot; nothing beyond the last row, but a group all the same, for they are counted."""
    at_W = words(entries[which]) + row * HALF + i_W
    async_copy.async_copy_global_to_shared(ring.index(slot), at_W, mask=(i_W < HALF) & (row < N))
    async_copy.commit_group()


@gluon.jit
def mix_ring(
    sources, update, query, gain, norm_gain, out, running, stats, N, eps,
    D: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr, GROUP: gl.constexpr, UPDATE: gl.constexpr,
    NORM: gl.constexpr, STATS: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """Grid (G), each program every so-manieth row. The arguments of `mix_forward`, all bf16 but stats; D is even. SLOTS
    of BLOCK in the ring, at least as many as entries; GROUP entries, with UPDATE at least two, are awaited and their
    places asked for together."""
    LANES: gl.constexpr = 32 * num_warps
    WORDS: gl.constexpr = gl.BlockedLayout([4], [32], [num_warps], [0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    R: gl.constexpr = len(sources)
    ENTRIES: gl.constexpr = R + UPDATE
    HALF: gl.constexpr = D // 2
    entries = (sources[R - 1],) + sources[: R - 1]
    if UPDATE:
        entries = (update,) + entries
    i_W = gl.arange(0, BLOCK // 2, WORDS)
    there_W = i_W < HALF
    ring = gl.allocate_shared_memory(gl.int32, [SLOTS, BLOCK // 2], FLAT)
    for i in gl.static_range(SLOTS):  # the end of a slot beyond D is never written again
        ring.index(i).store(gl.zeros([BLOCK // 2], gl.int32, WORDS))
    first, programs = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    for i in gl.static_range(SLOTS):
        ask(entries, ring, i, first + (i // ENTRIES) * programs, i % ENTRIES, i_W, N, HALF)
    query_W = gl.load(words(query) + i_W, mask=there_W, other=0)
    gain_W = gl.load(words(gain) + i_W, mask=there_W, other=0)
    w0_W, w1_W = lower(query_W) * lower(gain_W), upper(query_W) * upper(gain_W)
    # 16 and -65536, which no compiler knows: else it would keep a source as fp32 from its sums to the weighted sum.
    shift, mask = gl.where(eps < 0.0, 0, 16), gl.where(eps < 0.0, 0, -65536)
    at_slot = 0
    for row in range(first, N, programs):
        held, sums = (), ()
        for k in gl.static_range(0, ENTRIES, GROUP):
            async_copy.wait_group(SLOTS - (GROUP if k + GROUP < ENTRIES else ENTRIES - k))
            found = ()
            for i in gl.static_range(k, k + GROUP):
                if i < ENTRIES:
                    found = found + (ring.index(wrapped(at_slot + i, SLOTS)).load(WORDS),)
            for i in gl.static_range(k, k + GROUP):
                if i < ENTRIES:
                    on = row + ((i + SLOTS) // ENTRIES) * programs
                    ask(entries, ring, wrapped(at_slot + i, SLOTS), on, (i + SLOTS) % ENTRIES, i_W, N, HALF)
            if UPDATE and k == 0:
                p_W = joined(lower(found[0]) + lower(found[1]), upper(found[0]) + upper(found[1]))
                gl.store(words(running) + row * HALF + i_W, p_W, mask=there_W)
                found = (p_W,) + found[2:]
            for i in gl.static_range(len(found)):
                v0_W, v1_W = lower(found[i]), upper(found[i])
                sums = sums + (product(v0_W, v0_W, v1_W, v1_W, LANES), product(v0_W, w0_W, v1_W, w1_W, LANES))
            held = held + found
        at_slot = wrapped(at_slot + ENTRIES, SLOTS)
        sums = totals(sums)
        scores, top = (), float("-inf")
        for j in gl.static_range(R):
            r = gl.rsqrt(sums[2 * j] / D + eps)
            scores = scores + (sums[2 * j + 1] * r,)
            top = gl.maximum(top, scores[j])
            if STATS:
                at = stats + row * (2 * R + NORM) + (R - 1 if j == 0 else j - 1)
                gl.store(at, sums[2 * j + 1])
                gl.store(at + R, r)
        total = 0.0
        h0_W = gl.zeros([BLOCK // 2], gl.float32, WORDS)
        h1_W = gl.zeros([BLOCK // 2], gl.float32, WORDS)
        for j in gl.static_range(R):
            e = gl.exp(scores[j] - top)
            total += e
            h0_W += e * lower(held[j], shift)
            h1_W += e * upper(held[j], mask)
        scale = 1.0 / total
        out_W = joined(h0_W * scale, h1_W * scale)
        if NORM:
            n_W = gl.load(words(norm_gain) + i_W, mask=there_W, other=0)
            h0_W, h1_W = lower(out_W), upper(out_W)
            r = gl.rsqrt(gl.sum(product(h0_W, h0_W, h1_W, h1_W, LANES), 0) / D + eps)
            out_W = joined(h0_W * r, h1_W * r)  # the norm rounds before its gain, and the product is rounded again
            out_W = joined(lower(out_W) * lower(n_W), upper(out_W) * upper(n_W))
            if STATS:
                gl.store(stats + row * (2 * R + 1) + 2 * R, r)
        gl.store(words(out) + row * HALF + i_W, out_W, mask=there_W)
    async_copy.wait_group(0)  # nothing may arrive after the end
