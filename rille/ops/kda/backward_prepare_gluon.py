"""The first kernel of the KDA backward in Gluon, for K = 128 and a bounded gate: the arithmetic of `prepare_kernel`,
its twin, with loads and products as in `backward_local_gluon.py`. Three programs share a multiprocessor."""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from rille.ops.barriers_gluon import barrier
from rille.ops.kda.backward_local_gluon import (
    BLOCK,
    CHANNEL,
    LINE,
    ROW,
    SMALL,
    TILE,
    WIDE,
    buffers,
    decay_of,
    fetch_rows,
    put_rows,
    times_ones,
    turned,
)
from rille.ops.kda.numbers_gluon import LOG2E, bf16, exp2, inverse_root, reciprocal

FLAT: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))


@gluon.jit
def tile_sums(g):
    """Sums over the rows of both tiles, [channels] each."""
    early = gl.arange(0, 32, ROW)[None, :] < 16
    return gl.sum(gl.where(early, g, 0.0), 1), gl.sum(gl.where(early, 0.0, g), 1)


@gluon.jit
def row_norm(x_s):
    """1 / |row| of x [32, 128] in shared memory."""
    x = x_s.load(WIDE).to(gl.float32)
    return inverse_root(gl.sum(x * x, 1) + 1e-6)


@gluon.jit
def operands_of_half(
    x, to_start, to_end, q_s, k_s, numbers_s, betas_s, places, low, scale, HALF: gl.constexpr, DIGITS: gl.constexpr
):  # fmt: skip
    """Rows of q 2^G, -k 2^G and b k 2^(Gc-G) to memory; low: from there to the last one's second digit."""
    q_out, k_start, k_end = places
    from_start = exp2(gl.minimum(x + to_start[:, None], 0.0))
    q = turned(q_s[HALF]) * (numbers_s.index(HALF).load(ROW) * scale)[None, :]
    put_rows(q_out, q * from_start, 128, 64, HALF)
    k = turned(k_s[HALF]) * numbers_s.index(2 + HALF).load(ROW)[None, :]
    put_rows(k_start, -k * from_start, 128, 64, HALF)
    end = k * betas_s.index(HALF).load(ROW)[None, :] * exp2(gl.minimum(to_end[:, None] - x, 0.0))
    put_rows(k_end, end, 128, 64, HALF)
    if DIGITS == 2:
        put_rows(k_end + low, end - bf16(end).to(gl.float32), 128, 64, HALF)


@gluon.jit
def prepare_tile_kernel(
    q_ptr,  # arguments as in `prepare_kernel`
    k_ptr,
    z_ptr,
    b_ptr,
    A_log_ptr,
    dt_bias_ptr,
    spans_ptr,
    ones_ptr,
    q_out_ptr,
    k_start_ptr,
    k_end_ptr,
    decay_ptr,
    totals_ptr,
    norms_ptr,
    q_stride,
    k_stride,
    z_stride,
    b_stride,
    lower_bound,
    scale,
    H: gl.constexpr,
    DIGITS: gl.constexpr,
    num_warps: gl.constexpr,
):
    program = gl.program_id(0)
    h = program % H
    start = gl.load(spans_ptr + 2 * (program // H)).to(gl.int64)
    count = gl.load(spans_ptr + 2 * (program // H) + 1)
    out = program.to(gl.int64)
    z_s, k_s, q_s = buffers(2, 32, 128, TILE), buffers(2, 32, 128, TILE), buffers(2, 32, 128, TILE)
    (anchors_s,) = buffers(1, 32, 32, SMALL)
    numbers_s = gl.allocate_shared_memory(gl.float32, [4, 32], LINE)  # norms of q, of k: a and b of each
    betas_s = gl.allocate_shared_memory(gl.float32, [2, 32], LINE)
    fetch_rows(z_s, z_ptr + (start * z_stride + h * 128), z_stride, count)
    row, column = gl.arange(0, 32, gl.SliceLayout(1, BLOCK))[:, None], gl.arange(0, 32, gl.SliceLayout(0, BLOCK))
    async_copy.async_copy_global_to_shared(anchors_s, ones_ptr + (1024 + row * 32 + column[None, :]))
    async_copy.commit_group()
    fetch_rows(q_s, q_ptr + (start * q_stride + h * 128), q_stride, count)
    fetch_rows(k_s, k_ptr + (start * k_stride + h * 128), k_stride, count)
    async_copy.commit_group()
    channel = gl.arange(0, 128, CHANNEL)
    rate = exp2(gl.load(A_log_ptr + h).to(gl.float32) * LOG2E)
    bias = gl.load(dt_bias_ptr + (h * 128 + channel))[:, None]
    i = gl.arange(0, 64, FLAT)
    b = gl.load(b_ptr + ((start + i) * b_stride + h), mask=i < count, other=0.0).to(gl.float32)
    beta = reciprocal(1.0 + exp2(b * -LOG2E))
    norms_ptr += out * 256
    gl.store(norms_ptr + (128 + i), beta)
    betas_s._reinterpret(gl.float32, [64], LINE).store(beta)

    async_copy.wait_group(1)
    barrier()
    g = decay_of(z_s, bias, rate, lower_bound, count, 0)
    x_a = times_ones(g, anchors_s, 2)
    t0, t1 = tile_sums(g)
    g = decay_of(z_s, bias, rate, lower_bound, count, 1)
    x_b = times_ones(g, anchors_s, 2)
    t2, t3 = tile_sums(g)
    gl.store(decay_ptr + (out * 128 + channel), exp2(t0 + t1 + t2 + t3))
    at_totals = totals_ptr + (out * 512 + channel)
    gl.store(at_totals, t0)
    gl.store(at_totals + 128, t1)
    gl.store(at_totals + 256, t2)
    gl.store(at_totals + 384, t3)

    async_copy.wait_group(0)
    barrier()
    line = gl.arange(0, 32, gl.SliceLayout(1, WIDE))
    for half in gl.static_range(2):
        q_norm, k_norm = row_norm(q_s[half]), row_norm(k_s[half])
        gl.store(norms_ptr + (32 * half + line), q_norm)
        gl.store(norms_ptr + (64 + 32 * half + line), k_norm)
        numbers_s.index(half).store(q_norm)
        numbers_s.index(2 + half).store(k_norm)
    barrier()
    low = gl.num_programs(0).to(gl.int64) * (64 * 128)
    places = (q_out_ptr + out * (64 * 128), k_start_ptr + out * (64 * 128), k_end_ptr + out * (64 * 128))
    operands_of_half(x_a, t0, t1 + t2 + t3, q_s, k_s, numbers_s, betas_s, places, low, scale, 0, DIGITS)
    operands_of_half(x_b, t0 + t1 + t2, t3, q_s, k_s, numbers_s, betas_s, places, low, scale, 1, DIGITS)
