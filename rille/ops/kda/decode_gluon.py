"""The decode and verify kernels for the card, in Gluon: `decode_kernels.py` with every layout chosen by hand.

One program is one head of one sequence. Its state [V, K] lies in registers, a row of V in 4 lanes, so that each of the
two dot products of a row is K/4 products inside a thread and 2 shuffles. Issue slots, not bytes, are what verifying
many tokens runs out of; per token and warp that leaves hardly more than the four products an element needs.

    1  the loads of the state are issued
    2  all tokens at once: convolution, SiLU, decay; a thread has one channel of every token; to shared memory
    3  token by token, without a word between the warps: S <- S diag(alpha), u, S <- S + beta u k^T, o to shared memory
    4  all tokens at once: the output's norm and gate; a warp has a token

The L2 norms never touch a vector: r_k = 1/|k| goes to the scalars, u = v - r_k (S k) and S <- S + (beta r_k u) k^T,
and each group of 4 lanes sums its own squares.

The interpreter has no Gluon; the twin in `decode_kernels.py` has the same equations, roundings and arguments.

Suffixes: T tokens, K key channels, V value channels, 1 a broadcast axis; C channels of the convolution, W taps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Shared memory without swizzling: a tile [T, N], and the same bytes as T rows of N.
TILE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def short_conv(
    new, past, tail, count, t_T1, channel_1K, weight, mask, row: gl.constexpr, W: gl.constexpr, dtype: gl.constexpr
):  # fmt: skip
    """silu(conv) of the tokens t of `new`, oldest tap first. Before new[0] come `count` rows of `past`, before these
    the tail; rows are `row` elements apart. Rounded to `dtype`, in fp32."""
    for tap in gl.static_range(W):
        index_T1 = t_T1 - (W - 1 - tap)
        before_T1 = index_T1 + count
        old_T1 = gl.where(before_T1 >= 0, past + before_T1 * row, tail + (before_T1 + (W - 1)) * row)
        pointer = gl.where(index_T1 >= 0, new + index_T1 * row, old_T1) + channel_1K
        product = gl.load(pointer, mask=mask, other=0.0).to(gl.float32) * gl.load(weight + channel_1K * W + tap)
        total = product if tap == 0 else total + product  # noqa: F821
    return (total * sigmoid(total)).to(dtype).to(gl.float32)


@gluon.jit
def decay(z, dt_bias, rate, lower_bound, BOUNDED: gl.constexpr):
    """alpha = exp(g) of each key channel."""
    x = z + dt_bias
    if BOUNDED:
        return gl.exp(lower_bound * sigmoid(rate * x))
    softplus = gl.maximum(x, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(x)))
    return gl.exp(-rate * softplus)


@gluon.jit
def advance(S_VK, k_K, v_V, alpha_K, beta):
    """One token: S <- S diag(alpha), then S <- S + beta (v - S k/|k|) k^T/|k|."""
    norm = gl.rsqrt(gl.sum(k_K * k_K, 0) + 1e-6)
    S_VK = S_VK * alpha_K[None, :]
    u_V = v_V - norm * gl.sum(S_VK * k_K[None, :], 1)
    return S_VK + (beta * norm * u_V)[:, None] * k_K[None, :]


@gluon.jit
def rows(T: gl.constexpr, N: gl.constexpr, tile_TN):
    """Put a tile into shared memory. Returned as [T] rows of N: index(t).load(layout) takes one out."""
    return gl.allocate_shared_memory(gl.float32, [T, N], TILE, tile_TN)._reinterpret(gl.float32, [T, N], ROW)


@gluon.jit
def read(S_VK, q_K, K: gl.constexpr):
    """S q/|q| K^-0.5."""
    return gl.rsqrt(gl.sum(q_K * q_K, 0) + 1e-6) * (K**-0.5) * gl.sum(S_VK * q_K[None, :], 1)


@gluon.jit
def finish(o_smem, gate, y, norm_weight, eps, tokens, T: gl.constexpr, V: gl.constexpr, row: gl.constexpr):
    """y = RMSNorm(o) * weight * sigmoid(gate) for every token; gate and y point at this head's first channel."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, layout))[:, None]
    v_V = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    offsets, mask = t_T1 * row + v_V[None, :], t_T1 < tokens
    gate_TV = gl.load(gate + offsets, mask=mask, other=0.0).to(gl.float32)
    weight_V = gl.load(norm_weight + v_V)
    o_TV = o_smem._reinterpret(gl.float32, [T, V], TILE).load(layout)
    scale_T = gl.rsqrt(gl.sum(o_TV * o_TV, 1) / V + eps)
    y_TV = o_TV * scale_T[:, None] * weight_V[None, :] * sigmoid(gate_TV)
    gl.store(y + offsets, y_TV.to(y.dtype.element_ty), mask=mask)


@gluon.jit
def clear(y, tokens, T: gl.constexpr, V: gl.constexpr, row: gl.constexpr):
    """A row without a sequence reads as 0."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, layout))[:, None]
    v_V = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    gl.store(y + t_T1 * row + v_V[None, :], gl.full([T, V], 0.0, y.dtype.element_ty, layout), mask=t_T1 < tokens)


@gluon.jit
def shift_tail(tail, channel_1K, x1_1K, W: gl.constexpr, C: gl.constexpr):
    """The tail's rows move up by one and x1 becomes the last; a thread reads its channels' rows before it writes."""
    for row in gl.static_range(W - 1):
        x_1K = x1_1K if row == W - 2 else gl.load(tail + (row + 1) * C + channel_1K)
        gl.store(tail + row * C + channel_1K, x_1K)


@gluon.jit
def decode(
    qkv, z, b, gate, y, conv_weight, A_log, dt_bias, norm_weight, tails, states, slots,
    lower_bound, eps, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BOUNDED: gl.constexpr,
):  # fmt: skip
    """Grid (H, B). One token of one head of one sequence; state and tail are read and written in place."""
    HK: gl.constexpr = H * K
    HV: gl.constexpr = H * V
    C: gl.constexpr = 2 * HK + HV
    dtype: gl.constexpr = qkv.dtype.element_ty
    head, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    slot = gl.load(slots + row).to(gl.int64)
    y += row * HV + head * V
    if slot < 0:
        clear(y, 1, 1, V, HV)
        return

    S_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    over_K: gl.constexpr = gl.SliceLayout(0, S_layout)
    over_V: gl.constexpr = gl.SliceLayout(1, S_layout)
    state = states + slot * state_slot + head * (V * K)
    state_VK = state + gl.arange(0, V, layout=over_V)[:, None] * K + gl.arange(0, K, layout=over_K)[None, :]
    S_VK = gl.load(state_VK)

    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    t_11 = gl.arange(0, 1, layout=gl.SliceLayout(1, layout))[:, None]
    k_1K = head * K + gl.arange(0, K, layout=gl.SliceLayout(0, layout))[None, :]
    v_1V = head * V + gl.arange(0, V, layout=gl.SliceLayout(0, layout))[None, :]
    tail, qkv = tails + slot * tail_slot, qkv + row * qkv_row
    q_1K = short_conv(qkv, qkv, tail, 0, t_11, k_1K, conv_weight, t_11 >= 0, C, W, dtype)
    key_1K = short_conv(qkv, qkv, tail, 0, t_11, k_1K + HK, conv_weight, t_11 >= 0, C, W, dtype)
    value_1V = short_conv(qkv, qkv, tail, 0, t_11, v_1V + 2 * HK, conv_weight, t_11 >= 0, C, W, dtype)
    rate = gl.exp(gl.load(A_log + head))
    z_1K = gl.load(z + row * z_row + k_1K).to(gl.float32)
    alpha_1K = decay(z_1K, gl.load(dt_bias + k_1K), rate, lower_bound, BOUNDED)
    beta = sigmoid(gl.load(b + row * b_row + head).to(gl.float32))

    q_smem, k_smem, alpha_smem = rows(1, K, q_1K), rows(1, K, key_1K), rows(1, K, alpha_1K)
    v_smem, o_smem = rows(1, V, value_1V), gl.allocate_shared_memory(gl.float32, [1, V], ROW)
    shift_tail(tail, k_1K, gl.load(qkv + k_1K), W, C)
    shift_tail(tail, k_1K + HK, gl.load(qkv + k_1K + HK), W, C)
    shift_tail(tail, v_1V + 2 * HK, gl.load(qkv + v_1V + 2 * HK), W, C)

    k_K, alpha_K = k_smem.index(0).load(over_K), alpha_smem.index(0).load(over_K)
    S_VK = advance(S_VK, k_K, v_smem.index(0).load(over_V), alpha_K, beta)
    gl.store(state_VK, S_VK)
    o_V = read(S_VK, q_smem.index(0).load(over_K), K)
    o_smem.index(0).store(o_V.to(dtype).to(gl.float32))
    finish(o_smem, gate + row * gate_row + head * V, y, norm_weight, eps, 1, 1, V, HV)


@gluon.jit
def commit_tail(past, tail, count, channel_1K, W: gl.constexpr, C: gl.constexpr):
    """The tail after `count` >= 1 rows of `past`: a row moves up by `count`; a thread reads before it writes, since a
    row comes from itself or from a later one."""
    for row in gl.static_range(W - 1):
        index = count + row - (W - 1)
        source = gl.where(index >= 0, past + index * C, tail + (index + (W - 1)) * C)
        gl.store(tail + row * C + channel_1K, gl.load(source + channel_1K))


@gluon.jit
def remember(new, past, t_T1, channel_1K, tokens, row: gl.constexpr):
    offsets, mask = t_T1 * row + channel_1K, t_T1 < tokens
    gl.store(past + offsets, gl.load(new + offsets, mask=mask), mask=mask)


@gluon.jit
def verify(
    qkv, z, b, gate, y, past_qkv, past_z, past_b, accepted, conv_weight, A_log, dt_bias, norm_weight,
    tails, states, slots, lower_bound, eps, tokens, past_tokens, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BOUNDED: gl.constexpr,
    T: gl.constexpr, P: gl.constexpr,
):  # fmt: skip
    """Grid (H, B). Commit, then try, as in the twin. T and P: powers of two that hold `tokens` and `past_tokens`."""
    HK: gl.constexpr = H * K
    HV: gl.constexpr = H * V
    C: gl.constexpr = 2 * HK + HV
    dtype: gl.constexpr = qkv.dtype.element_ty
    head, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    slot = gl.load(slots + row).to(gl.int64)
    y += row * tokens * HV + head * V
    if slot < 0:
        clear(y, tokens, T, V, HV)
        return

    S_layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [gl.num_warps(), 1], [1, 0])
    over_K: gl.constexpr = gl.SliceLayout(0, S_layout)
    over_V: gl.constexpr = gl.SliceLayout(1, S_layout)
    state = states + slot * state_slot + head * (V * K)
    state_VK = state + gl.arange(0, V, layout=over_V)[:, None] * K + gl.arange(0, K, layout=over_K)[None, :]
    S_VK = gl.load(state_VK)

    # What was remembered, as far as it was accepted.
    count = gl.minimum(gl.maximum(gl.load(accepted + row).to(gl.int32), 0), past_tokens)
    P_layout: gl.constexpr = gl.BlockedLayout([P, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    p_P1 = gl.arange(0, P, layout=gl.SliceLayout(1, P_layout))[:, None]
    k_1K = head * K + gl.arange(0, K, layout=gl.SliceLayout(0, P_layout))[None, :]
    v_1V = head * V + gl.arange(0, V, layout=gl.SliceLayout(0, P_layout))[None, :]
    tail, past_qkv = tails + slot * tail_slot, past_qkv + slot * past_tokens * C
    past_z, past_b = past_z + slot * past_tokens * HK, past_b + slot * past_tokens * H + head
    rate = gl.exp(gl.load(A_log + head))
    used = p_P1 < count
    x_PK = short_conv(past_qkv, past_qkv, tail, 0, p_P1, k_1K + HK, conv_weight, used, C, W, dtype)
    k_past = rows(P, K, x_PK)
    x_PV = short_conv(past_qkv, past_qkv, tail, 0, p_P1, v_1V + 2 * HK, conv_weight, used, C, W, dtype)
    v_past = rows(P, V, x_PV)
    z_PK = gl.load(past_z + p_P1 * HK + k_1K, mask=used, other=0.0).to(gl.float32)
    z_PK = decay(z_PK, gl.load(dt_bias + k_1K), rate, lower_bound, BOUNDED)
    alpha_past = rows(P, K, z_PK)

    # The new tokens: their convolution reaches back into the accepted ones and the tail.
    T_layout: gl.constexpr = gl.BlockedLayout([T, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, T_layout))[:, None]
    k_1K = head * K + gl.arange(0, K, layout=gl.SliceLayout(0, T_layout))[None, :]
    v_1V = head * V + gl.arange(0, V, layout=gl.SliceLayout(0, T_layout))[None, :]
    used = t_T1 < tokens
    qkv, z, b = qkv + row * qkv_row, z + row * z_row, b + row * b_row + head
    x_TK = short_conv(qkv, past_qkv, tail, count, t_T1, k_1K, conv_weight, used, C, W, dtype)
    q_smem = rows(T, K, x_TK)
    x_TK = short_conv(qkv, past_qkv, tail, count, t_T1, k_1K + HK, conv_weight, used, C, W, dtype)
    k_smem = rows(T, K, x_TK)
    x_TV = short_conv(qkv, past_qkv, tail, count, t_T1, v_1V + 2 * HK, conv_weight, used, C, W, dtype)
    v_smem = rows(T, V, x_TV)
    z_TK = gl.load(z + t_T1 * HK + k_1K, mask=used, other=0.0).to(gl.float32)
    z_TK = decay(z_TK, gl.load(dt_bias + k_1K), rate, lower_bound, BOUNDED)
    alpha_smem = rows(T, K, z_TK)

    gl.thread_barrier()  # tail and remembered inputs are read before they are written
    if count > 0:
        commit_tail(past_qkv, tail, count, k_1K, W, C)
        commit_tail(past_qkv, tail, count, k_1K + HK, W, C)
        commit_tail(past_qkv, tail, count, v_1V + 2 * HK, W, C)
    remember(qkv, past_qkv, t_T1, k_1K, tokens, C)
    remember(qkv, past_qkv, t_T1, k_1K + HK, tokens, C)
    remember(qkv, past_qkv, t_T1, v_1V + 2 * HK, tokens, C)
    remember(z, past_z, t_T1, k_1K, tokens, HK)

    for t in range(count):
        beta = sigmoid(gl.load(past_b + t * H).to(gl.float32))
        k_K, alpha_K = k_past.index(t).load(over_K), alpha_past.index(t).load(over_K)
        S_VK = advance(S_VK, k_K, v_past.index(t).load(over_V), alpha_K, beta)
    if count > 0:
        gl.store(state_VK, S_VK)
    gl.thread_barrier()  # the same for past_b, which the loop above read
    o_smem = gl.allocate_shared_memory(gl.float32, [T, V], ROW)
    for t in range(tokens):
        b_t = gl.load(b + t * H)
        gl.store(past_b + t * H, b_t)
        k_K, alpha_K = k_smem.index(t).load(over_K), alpha_smem.index(t).load(over_K)
        S_VK = advance(S_VK, k_K, v_smem.index(t).load(over_V), alpha_K, sigmoid(b_t.to(gl.float32)))
        o_V = read(S_VK, q_smem.index(t).load(over_K), K)
        o_smem.index(t).store(o_V.to(dtype).to(gl.float32))
    finish(o_smem, gate + row * gate_row + head * V, y, norm_weight, eps, tokens, T, V, HV)
