"""The experts for so few tokens that hardly two share one: every pair reads its expert's weights for itself.

    glu_alone     act[p] = A(h) S(h) B(u),   h = W1_e x[token of p],  u = W3_e x[token of p]       e = ids[p]
    down_alone    out[n] = sum over a of weights[n, a] W2_e act[n A + a]                           e = ids[n, a]

A program has a few rows of weights and one row to meet them, by plain multiplications that hide behind the read;
nothing is looked for. `down_alone` asks for its weights before act is there, and sums in fp32: each product of all
choices first, in their order.

Suffixes: F, L as in `product_kernels.py`, R rows of weights, K the axis of a sum.
"""

import triton
import triton.language as tl

from rille.ops.chain_kernels import meet
from rille.ops.moe.product_kernels import glu_forward_of


@triton.jit
def glu_alone(
    x, ids, w13, act, x_row, CHOICES: tl.constexpr, F: tl.constexpr, L: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, A: tl.constexpr, B: tl.constexpr, CAPPED: tl.constexpr, FAST: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (F / ROWS, pairs). x [N, L] with distant rows, ids [N, A], w13 [E, 2F, L], act [pairs, F]. BLOCK covers
    L."""
    meet(CHAINED)
    p = tl.program_id(1)
    expert = tl.load(ids + p).to(tl.int64)
    f_R, l_K = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    held_RK = (f_R < F)[:, None] & (l_K < L)[None, :]
    gate_RK = w13 + expert * (2 * F * L) + f_R[:, None] * L + l_K[None, :]
    g_RK = tl.load(gate_RK, mask=held_RK, other=0.0)
    u_RK = tl.load(gate_RK + F * L, mask=held_RK, other=0.0)
    x_RK = x + (p // CHOICES).to(tl.int64) * x_row + tl.zeros_like(f_R)[:, None] + l_K[None, :]
    x_RK = tl.load(x_RK, mask=held_RK, other=0.0).to(tl.float32)  # every row reads it where it stands: no barrier
    h_R, u_R = tl.sum(g_RK.to(tl.float32) * x_RK, 1), tl.sum(u_RK.to(tl.float32) * x_RK, 1)
    act_R = glu_forward_of(h_R, u_R, A, B, CAPPED, FAST)
    tl.store(act + p.to(tl.int64) * F + f_R, act_R.to(act.dtype.element_ty), mask=f_R < F)


@triton.jit
def down_alone(
    act, ids, weights, w2, out, CHOICES: tl.constexpr, L: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Grid (L / ROWS, N). act [pairs, F], ids and weights [N, A], w2 [E, L, F], out [N, L]. BLOCK covers F. In a chain
    `glu_alone` stands between what wrote ids and weights and this."""
    n = tl.program_id(1).to(tl.int64)
    l_R, f_K = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    held_RK = (l_R < L)[:, None] & (f_K < F)[None, :]
    at_RK = w2 + l_R[:, None] * F + f_K[None, :]
    held = ()
    for a in tl.static_range(CHOICES):
        expert = tl.load(ids + n * CHOICES + a).to(tl.int64)
        held = held + (tl.load(at_RK + expert * (L * F), mask=held_RK, other=0.0),)
    meet(CHAINED)
    # All are summed across threads once, so that no load waits for a barrier.
    act_RK = act + n * (CHOICES * F) + tl.zeros_like(l_R)[:, None] + f_K[None, :]
    sum_RK = tl.zeros([ROWS, BLOCK], tl.float32)
    for a in tl.static_range(CHOICES):
        part_RK = tl.load(act_RK + a * F, mask=held_RK, other=0.0).to(tl.float32)
        sum_RK += held[a].to(tl.float32) * (tl.load(weights + n * CHOICES + a) * part_RK)
    tl.store(out + n * L + l_R, tl.sum(sum_RK, 1).to(out.dtype.element_ty), mask=l_R < L)
