"""Kernels that let segments of one sequence run side by side: what each segment does to any state, and the states at
its borders. `segments.py` says why and where to cut, and has the same in PyTorch.

    segment   one program a segment, head and block of 64 rows, first chunk to last, no output. Rows of the state:

                  S <- S d + (v^T T^T + S (-W)^T) E         from the sequence's own state, or from zero
                  P <- P d + (P (-W)^T) E                   from the identity

              so that a state S before the segment is S P + (its own S) after it.
    reverse   the same for the gradient D of the state, last chunk to first, from that of the final state or from zero:

                  D <- D d + dO^T Q - (dO^T A + D E^T) T K      K = k 2^G

    fold      one program a sequence, head and block of value channels, border to border: S_(j+1) = S_j P_j + S_(j+1),
              or back, D_(j-1) = D_j P_j^T + D_(j-1)

Operands are those of `state_pass.py`: value-first states are left operands from registers. P and the states at borders
are fp32, and the fold keeps fp32's digits (three TF32 products for one): P is multiplied up to as many times as there
are segments.
"""

# The kernels' language is compiled by Triton; a type checker reads it as Python and objects.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportCallIssue=false, reportGeneralTypeIssues=false
# pyright: reportPossiblyUnboundVariable=false, reportOperatorIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

import triton
import triton.language as tl

from rille.ops.kda.intra import operand


@triton.jit
def segment_kernel(
    t_desc,  # [M * H * C, C]; w, k: [M * H * C, K]
    w_desc,
    k_desc,
    v_ptr,  # [N, H, V], with any stride between tokens
    decay_ptr,  # fp32 [M, H, K]
    jobs_ptr,  # int32 [J, 6]: first token, tokens, first chunk, sequence whose state it starts from (-1: zero), rows of
    # `states` that take the state before and after it (-1: none)
    products_ptr,  # int32 [P, 2]: first chunk, chunks
    initial_ptr,  # [slots, H, V, K] or None: zeros
    slots_ptr,  # int64 [S]: slot of each sequence in initial, or None: slot s for sequence s
    states_ptr,  # fp32 [G, H, V, K]
    transitions_ptr,  # fp32 [P, H, K, K]
    local_programs,  # J * H * V / BV; the programs after these make transitions
    v_stride,
    initial_stride,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    OPERAND: tl.constexpr,
    INTERPRET: tl.constexpr,
    STAGES: tl.constexpr,
):
    C: tl.constexpr = 64
    program = tl.program_id(0)
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    inner = tl.arange(0, BV)
    if program < local_programs:
        BLOCKS: tl.constexpr = V // BV
        h = (program // BLOCKS) % H
        job = jobs_ptr + 6 * (program // (BLOCKS * H))
        start = tl.load(job)
        length = tl.load(job + 1)
        first = tl.load(job + 2)
        source = tl.load(job + 3)
        before = tl.load(job + 4)
        after = tl.load(job + 5)
        value = (program % BLOCKS) * BV + inner
        at_state = h * (V * K) + value[:, None] * K + channel[None, :]
        state = tl.zeros((BV, K), tl.float32)
        if initial_ptr is not None:  # noqa: SIM102
            if source >= 0:  # a test of its own: the other is decided when the kernel is compiled
                slot = source.to(tl.int64)
                if slots_ptr is not None:
                    slot = tl.load(slots_ptr + source)
                state = tl.load(initial_ptr + slot * initial_stride + at_state).to(tl.float32)
        if before >= 0:
            tl.store(states_ptr + before.to(tl.int64) * (H * V * K) + at_state, state)
        count = tl.cdiv(length, C)
        at_decay = decay_ptr + (first * H + h).to(tl.int64) * K + channel
        decay = tl.load(at_decay, mask=channel < K * count, other=0.0)
        for i in tl.range(0, count, num_stages=STAGES):
            tile = (first + i) * H + h
            held = row[:, None] < length - i * C
            token = (start + i * C + row).to(tl.int64)
            v = tl.load(v_ptr + token[:, None] * v_stride + h * V + value[None, :], mask=held, other=0.0)
            t = operand(t_desc.load([tile * C, 0]), OPERAND, INTERPRET)
            w = operand(w_desc.load([tile * C, 0]), OPERAND, INTERPRET)
            k = operand(k_desc.load([tile * C, 0]), OPERAND, INTERPRET)
            at_decay += H * K
            ahead = tl.load(at_decay, mask=channel < K * (count - 1 - i), other=0.0)
            u = tl.dot(tl.trans(operand(v, OPERAND, INTERPRET)), tl.trans(t))
            u = tl.dot(operand(state, OPERAND, INTERPRET), tl.trans(w), u)
            state = tl.dot(operand(u, OPERAND, INTERPRET), k, state * decay[None, :])
            decay = ahead
        if after >= 0:
            tl.store(states_ptr + after.to(tl.int64) * (H * V * K) + at_state, state)
    else:
        ROWS: tl.constexpr = K // BV
        program -= local_programs
        h = (program // ROWS) % H
        which = program // (ROWS * H)
        first = tl.load(products_ptr + 2 * which)
        count = tl.load(products_ptr + 2 * which + 1)
        unit = (program % ROWS) * BV + inner
        state = tl.where(unit[:, None] == channel[None, :], 1.0, 0.0)
        at_decay = decay_ptr + (first * H + h).to(tl.int64) * K + channel
        decay = tl.load(at_decay, mask=channel < K * count, other=0.0)
        for i in tl.range(0, count, num_stages=STAGES):
            tile = (first + i) * H + h
            w = operand(w_desc.load([tile * C, 0]), OPERAND, INTERPRET)
            k = operand(k_desc.load([tile * C, 0]), OPERAND, INTERPRET)
            at_decay += H * K
            ahead = tl.load(at_decay, mask=channel < K * (count - 1 - i), other=0.0)
            u = tl.dot(operand(state, OPERAND, INTERPRET), tl.trans(w))
            state = tl.dot(operand(u, OPERAND, INTERPRET), k, state * decay[None, :])
            decay = ahead
        at = (which * H + h).to(tl.int64) * (K * K) + unit[:, None] * K + channel[None, :]
        tl.store(transitions_ptr + at, state)


@triton.jit
def reverse_segment_kernel(
    t_desc,  # [M * H * C, C], as is a
    a_desc,
    q_desc,  # [M * H * C, K]: q 2^G
    k_start_desc,  # [M * H * C, K]: -k 2^G
    k_end_desc,  # [M * H * C, K]: b k 2^(Gc-G)
    do_ptr,  # [N, H, V], with any stride between tokens
    decay_ptr,  # fp32 [M, H, K]
    jobs_ptr,  # int32 [J, 6]: as in `segment_kernel`, but rows of `dstates` that take the gradient after and before it
    dfinal_ptr,  # [S, H, V, K] or None: zeros
    dstates_ptr,  # fp32 [G, H, V, K]: gradient of the state after each segment
    do_stride,
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
    job = jobs_ptr + 6 * (program // (BLOCKS * H))
    start = tl.load(job)
    length = tl.load(job + 1)
    first = tl.load(job + 2)
    source = tl.load(job + 3)
    after = tl.load(job + 4)
    before = tl.load(job + 5)
    row = tl.arange(0, C)
    channel = tl.arange(0, K)
    value = (program % BLOCKS) * BV + tl.arange(0, BV)
    at_state = h * (V * K) + value[:, None] * K + channel[None, :]
    dstate = tl.zeros((BV, K), tl.float32)
    if dfinal_ptr is not None:  # noqa: SIM102
        if source >= 0:  # a test of its own: the other is decided when the kernel is compiled
            dstate = tl.load(dfinal_ptr + source.to(tl.int64) * (H * V * K) + at_state).to(tl.float32)
    if after >= 0:
        tl.store(dstates_ptr + after.to(tl.int64) * (H * V * K) + at_state, dstate)
    count = tl.cdiv(length, C)
    at_decay = decay_ptr + ((first + count - 1) * H + h).to(tl.int64) * K + channel
    decay = tl.load(at_decay, mask=channel < K * count, other=0.0)
    for j in tl.range(0, count, num_stages=STAGES):
        i = count - 1 - j
        tile = (first + i) * H + h
        held = row[:, None] < length - i * C
        token = (start + i * C + row).to(tl.int64)
        do = tl.load(do_ptr + token[:, None] * do_stride + h * V + value[None, :], mask=held, other=0.0)
        do = operand(do, OPERAND, INTERPRET)
        a = operand(a_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        k_end = operand(k_end_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        t = operand(t_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        q = operand(q_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        k_start = operand(k_start_desc.load([tile * C, 0]), OPERAND, INTERPRET)
        at_decay -= H * K
        ahead = tl.load(at_decay, mask=channel < K * i, other=0.0)
        du = tl.dot(tl.trans(do), a)
        du = tl.dot(operand(dstate, OPERAND, INTERPRET), tl.trans(k_end), du)
        dv = tl.dot(operand(du, OPERAND, INTERPRET), t)
        dstate = tl.dot(tl.trans(do), q, dstate * decay[None, :])
        dstate = tl.dot(operand(dv, OPERAND, INTERPRET), k_start, dstate)
        decay = ahead
    if before >= 0:
        tl.store(dstates_ptr + before.to(tl.int64) * (H * V * K) + at_state, dstate)


@triton.jit
def fold_kernel(
    states_ptr,  # fp32 [G, H, V, K]
    transitions_ptr,  # fp32 [P, H, K, K]
    chains_ptr,  # int32 [Q, 3]: row of `states` that is right already, how many follow it, its transition
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BV: tl.constexpr,
    BACK: tl.constexpr,  # rows and transitions in falling order, transitions transposed
):
    BLOCKS: tl.constexpr = V // BV
    program = tl.program_id(0)
    h = (program // BLOCKS) % H
    chain = chains_ptr + 3 * (program // (BLOCKS * H))
    known = tl.load(chain).to(tl.int64)
    count = tl.load(chain + 1)
    which = tl.load(chain + 2).to(tl.int64)
    channel = tl.arange(0, K)
    value = (program % BLOCKS) * BV + tl.arange(0, BV)
    at = states_ptr + (known * H + h) * (V * K) + value[:, None] * K + channel[None, :]
    at_transition = transitions_ptr + (which * H + h) * (K * K) + channel[:, None] * K + channel[None, :]
    state = tl.load(at)
    for _ in range(count):
        transition = tl.load(at_transition)
        if BACK:
            at -= H * V * K
            at_transition -= H * K * K
            transition = tl.trans(transition)
        else:
            at += H * V * K
            at_transition += H * K * K
        state = tl.dot(state, transition, tl.load(at), input_precision="tf32x3")
        tl.store(at, state)
