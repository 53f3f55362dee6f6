"""Second kernel of the KDA forward: the recurrence from chunk to chunk, and the output. One program a sequence, head
and block of value channels; it holds its part of the state, [BV, K] in fp32, from the first chunk to the last.

With S the state before the chunk, value-first, and the first kernel's T, A, -W, Q = q 2^G, E = b k 2^(Gc-G), d = 2^Gc:

    u   = v^T T^T + S (-W)^T          what the states did not know of v, [BV, C]
    o^T = S Q^T + u A^T               [BV, C]
    S  <- S d + u E                   d for each key channel

Value-first, the products with S and u take their left operand from registers: a rounded accumulator has the layout of a
left operand, so neither S nor u goes through shared memory. It is the layout of the released cache as well.

Rows without a token: v is loaded as zero there (a neighbour may hold NaN), the first kernel's operands are zero, and o
is not stored.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.kda.intra import operand


@triton.jit
def state_pass_kernel(
    t_desc,  # [M * H * C, C], as are a; w, q, k: [M * H * C, K]
    a_desc,
    w_desc,
    q_desc,
    k_desc,
    v_ptr,  # [N, H, V], with any stride between tokens
    decay_ptr,  # fp32 [M, H, K]
    o_ptr,  # [N, H, V]
    starts_ptr,  # int32 [S + 1]
    order_ptr,  # int32 [S]: sequences, longest first
    first_ptr,  # int64 [S]: first chunk of each sequence
    initial_ptr,  # [slots, H, V, K] or None
    final_ptr,  # [slots, H, V, K] or None
    slots_ptr,  # int64 [S]: slot of each sequence in initial and final, or None: slot s for sequence s
    saved_ptr,  # [slots, H, V, K] or None: states after chunks that are asked for
    saved_slots_ptr,  # int64 [M]: slot in saved for the state after each chunk, -1 for none
    v_stride,
    initial_stride,
    final_stride,
    saved_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRET: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    BLOCKS: tl.constexpr = V // BV
    program = tl.program_id(0)
    h = (program // BLOCKS) % H
    s = tl.load(order_ptr + program // (BLOCKS * H))
    start = tl.load(starts_ptr + s)
    length = tl.load(starts_ptr + s + 1) - start
    first = tl.load(first_ptr + s).to(tl.int32)
    slot = s.to(tl.int64)
    if slots_ptr is not None:
        slot = tl.load(slots_ptr + s)

    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    value = (program % BLOCKS) * BV + tl.arange(0, BV)
    at_state = h * (V * K) + value[:, None] * K + channel[None, :]
    if initial_ptr is not None:
        state = tl.load(initial_ptr + slot * initial_stride + at_state).to(tl.float32)
    else:
        state = tl.zeros((BV, K), tl.float32)

    for i in tl.range(0, tl.cdiv(length, C), num_stages=STAGES):
        tile = (first + i) * H + h
        left = length - i * C
        token = (start + i * C + row).to(tl.int64)
        v = tl.load(v_ptr + token[:, None] * v_stride + h * V + value[None, :], mask=row[:, None] < left, other=0.0)
        t = operand(t_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        w = operand(w_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        q = operand(q_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        a = operand(a_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        k = operand(k_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        decay = tl.load(decay_ptr + tile.to(tl.int64) * K + channel)
        u = tl.dot(tl.trans(operand(v, OPERAND, INTERPRET)), tl.trans(t))
        rounded = operand(state, OPERAND, INTERPRET)
        u = tl.dot(rounded, tl.trans(w), u)
        o = tl.dot(rounded, tl.trans(q))
        u = operand(u, OPERAND, INTERPRET)
        state = tl.dot(u, k, state * decay[None, :])
        o = tl.dot(u, tl.trans(a), o)
        at_o = token[:, None] * (H * V) + h * V + value[None, :]
        tl.store(o_ptr + at_o, tl.trans(o.to(o_ptr.dtype.element_ty)), mask=row[:, None] < left)
        if saved_ptr is not None:
            saved = tl.load(saved_slots_ptr + first + i)
            if saved >= 0:
                at_saved = saved_ptr + saved * saved_stride + at_state
                tl.store(at_saved, state.to(saved_ptr.dtype.element_ty))
    if final_ptr is not None:
        tl.store(final_ptr + slot * final_stride + at_state, state.to(final_ptr.dtype.element_ty))
