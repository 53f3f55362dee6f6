"""The decode and verify kernels for the card, in Gluon: `decode_kernels.py` with every layout chosen by hand.

One program is one head of one sequence. Its state [V, K] lies in registers, a row of V in LANES = 4 lanes, so that each
of the two dot products of a row is 32 products inside a thread and 2 shuffles. Issue slots, not bytes, are what
verifying many tokens runs out of; per token that leaves hardly more than the four products an element needs.

    1  the loads of the state are issued
    2  all tokens at once: convolution, SiLU, decay; a thread has one channel of every token; to shared memory, where
       a warp normalises a token
    3  token by token, without a word between the warps: S <- S diag(alpha), u, S <- S + beta u k^T, o to shared memory
    4  all tokens at once: the output's norm and gate; a warp has a token

The interpreter has no Gluon; the twin in `decode_kernels.py` has the same equations, roundings and arguments.

Suffixes: T tokens, K key channels, V value channels, 1 a broadcast axis; C channels of the convolution, W taps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Triton 3.7 calls it `barrier`.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier

# Shared memory without swizzling: a tile [T, N], and the same bytes as T rows of N.
TILE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def as_rows(smem):
    """A tile [T, N] in shared memory as T rows of N, each in any layout."""
    return smem._reinterpret(smem.dtype, smem.shape, ROW)


@gluon.jit
def row_of(smem, t, layout: gl.constexpr):
    return as_rows(smem).index(t).load(layout)


@gluon.jit
def exp2(x):
    """2^x, 1e-7 of itself; results below 1e-38 are 0. The plain exp spends four more instructions on those."""
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, True, 1)


@gluon.jit
def sigmoid(x):
    below = 1.0 + exp2(x * -1.4426950408889634)
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [below], gl.float32, True, 1)


@gluon.jit
def unit_rows(smem, T: gl.constexpr, N: gl.constexpr, scale: gl.constexpr):
    """x <- scale x / sqrt(sum x^2 + 1e-6) for each row of a tile in shared memory; a warp has a row."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    x_TN = smem.load(layout)
    norm_T = gl.rsqrt(gl.sum(x_TN * x_TN, 1) + 1e-6) * scale
    smem.store(x_TN * norm_T[:, None])


@gluon.jit
def earlier(x_TN, new, row: gl.constexpr, t_T1, mask, x1_1N, x2_1N, x3_1N, back: gl.constexpr, T: gl.constexpr):
    """The inputs `back` tokens before those of the tile `x_TN` that was read from `new`. Which row lies before the
    tile is known to the compiler, because a thread has all rows of its channels."""
    last_1N = x1_1N if back == 1 else (x2_1N if back == 2 else x3_1N)
    shifted_TN = x_TN
    if back < T:
        shifted_TN = gl.load(new - back * row, mask=mask & (t_T1 >= back), other=0.0)
    shifted_TN = gl.where(t_T1 == 0, last_1N, shifted_TN)
    if back > 1:
        shifted_TN = gl.where(t_T1 == 1, x1_1N if back == 2 else x2_1N, shifted_TN)
    if back > 2:
        shifted_TN = gl.where(t_T1 == 2, x1_1N, shifted_TN)
    return shifted_TN.to(gl.float32)


@gluon.jit
def short_conv(
    x_TN, new, row: gl.constexpr, t_T1, mask, x1_1N, x2_1N, x3_1N, weight_1N, W: gl.constexpr, T: gl.constexpr
):  # fmt: skip
    """silu(conv) of a tile of tokens read from `new`, whose last inputs before it are x1, x2, x3 (oldest tap first);
    rounded to their dtype, in fp32."""
    x0_TN, w0_1N = x_TN.to(gl.float32), gl.load(weight_1N + (W - 1))
    if W == 1:
        total_TN = x0_TN * w0_1N
    if W == 2:
        total_TN = earlier(x_TN, new, row, t_T1, mask, x1_1N, x2_1N, x3_1N, 1, T) * gl.load(weight_1N)
        total_TN += x0_TN * w0_1N
    if W == 3:
        total_TN = earlier(x_TN, new, row, t_T1, mask, x1_1N, x2_1N, x3_1N, 2, T) * gl.load(weight_1N)
        total_TN += earlier(x_TN, new, row, t_T1, mask, x1_1N, x2_1N, x3_1N, 1, T) * gl.load(weight_1N + 1)
        total_TN += x0_TN * w0_1N
    if W == 4:
        total_TN = earlier(x_TN, new, row, t_T1, mask, x1_1N, x2_1N, x3_1N, 3, T) * gl.load(weight_1N)
        total_TN += earlier(x_TN, new, row, t_T1, mask, x1_1N, x2_1N, x3_1N, 2, T) * gl.load(weight_1N + 1)
        total_TN += earlier(x_TN, new, row, t_T1, mask, x1_1N, x2_1N, x3_1N, 1, T) * gl.load(weight_1N + 2)
        total_TN += x0_TN * w0_1N
    return (total_TN * sigmoid(total_TN)).to(x_TN.dtype).to(gl.float32)


@gluon.jit
def decay(z, dt_bias, rate, lower_bound, BOUNDED: gl.constexpr):
    """alpha = exp(g) of each key channel."""
    x = z + dt_bias
    if BOUNDED:
        return exp2(lower_bound * 1.4426950408889634 * sigmoid(rate * x))
    softplus = gl.maximum(x, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(x)))
    return gl.exp(-rate * softplus)


@gluon.jit
def advance(S_VK, k_K, v_V, alpha_K, beta):
    """One token: S <- S diag(alpha), then S <- S + beta (v - S k) k^T."""
    S_VK = S_VK * alpha_K[None, :]
    u_V = beta * (v_V - gl.sum(S_VK * k_K[None, :], 1))
    return S_VK + u_V[:, None] * k_K[None, :]


@gluon.jit
def finish(o_smem, gate, y, norm_weight, eps, tokens, T: gl.constexpr, V: gl.constexpr, row: gl.constexpr):
    """y = RMSNorm(o) * weight * sigmoid(gate) for every token; gate and y point at this head's first channel."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, layout))[:, None]
    v_V = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    offsets, mask = t_T1 * row + v_V[None, :], t_T1 < tokens
    gate_TV = gl.load(gate + offsets, mask=mask, other=0.0).to(gl.float32)
    weight_V = gl.load(norm_weight + v_V)
    o_TV = o_smem.load(layout)
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
def load_tail(tail, channel_1N, W: gl.constexpr, C: gl.constexpr):
    """The inputs one, two and three tokens ago; absent ones repeat the one before and are never used."""
    x1_1N = gl.load(tail + (W - 2) * C + channel_1N) if W > 1 else channel_1N
    x2_1N = gl.load(tail + (W - 3) * C + channel_1N) if W > 2 else x1_1N
    x3_1N = gl.load(tail + (W - 4) * C + channel_1N) if W > 3 else x2_1N
    return x1_1N, x2_1N, x3_1N


@gluon.jit
def store_tail(tail, channel_1N, x1_1N, x2_1N, x3_1N, W: gl.constexpr, C: gl.constexpr):
    if W > 1:
        gl.store(tail + (W - 2) * C + channel_1N, x1_1N)
    if W > 2:
        gl.store(tail + (W - 3) * C + channel_1N, x2_1N)
    if W > 3:
        gl.store(tail + (W - 4) * C + channel_1N, x3_1N)


@gluon.jit
def past_row(past, tail, index, channel_1N, W: gl.constexpr, C: gl.constexpr):
    """An input of the committed past: row `index` of what was remembered, below 0 a row of the tail."""
    return gl.load(gl.where(index >= 0, past + index * C, tail + (index + (W - 1)) * C) + channel_1N)


@gluon.jit
def load_past(past, tail, count, channel_1N, W: gl.constexpr, C: gl.constexpr):
    """As `load_tail`, `count` tokens later."""
    x1_1N = past_row(past, tail, count - 1, channel_1N, W, C) if W > 1 else channel_1N
    x2_1N = past_row(past, tail, count - 2, channel_1N, W, C) if W > 2 else x1_1N
    x3_1N = past_row(past, tail, count - 3, channel_1N, W, C) if W > 3 else x2_1N
    return x1_1N, x2_1N, x3_1N


@gluon.jit
def decode(
    qkv, z, b, gate, y, conv_weight, A_log, dt_bias, norm_weight, tails, states, slots,
    lower_bound, eps, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BOUNDED: gl.constexpr, LANES: gl.constexpr,
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

    S_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    over_K: gl.constexpr = gl.SliceLayout(0, S_layout)
    over_V: gl.constexpr = gl.SliceLayout(1, S_layout)
    state = states + slot * state_slot + head * (V * K)
    state_VK = state + gl.arange(0, V, layout=over_V)[:, None] * K + gl.arange(0, K, layout=over_K)[None, :]
    S_VK = gl.load(state_VK)

    layout: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    t_11 = gl.arange(0, 1, layout=gl.SliceLayout(1, layout))[:, None]
    q_1K = head * K + gl.arange(0, K, layout=gl.SliceLayout(0, layout))[None, :]
    k_1K = HK + q_1K
    v_1V = 2 * HK + head * V + gl.arange(0, V, layout=gl.SliceLayout(0, layout))[None, :]
    tail, qkv = tails + slot * tail_slot, qkv + row * qkv_row
    xq_1K, xk_1K, xv_1V = gl.load(qkv + q_1K), gl.load(qkv + k_1K), gl.load(qkv + v_1V)
    q1, q2, q3 = load_tail(tail, q_1K, W, C)
    k1, k2, k3 = load_tail(tail, k_1K, W, C)
    v1, v2, v3 = load_tail(tail, v_1V, W, C)
    z_1K = gl.load(z + row * z_row + q_1K).to(gl.float32)
    alpha_1K = decay(z_1K, gl.load(dt_bias + q_1K), gl.exp(gl.load(A_log + head)), lower_bound, BOUNDED)
    beta = sigmoid(gl.load(b + row * b_row + head).to(gl.float32))

    y_1K = short_conv(xq_1K, qkv, C, t_11, t_11 >= 0, q1, q2, q3, conv_weight + q_1K * W, W, 1)
    q_smem = gl.allocate_shared_memory(gl.float32, [1, K], TILE, y_1K)
    y_1K = short_conv(xk_1K, qkv, C, t_11, t_11 >= 0, k1, k2, k3, conv_weight + k_1K * W, W, 1)
    k_smem = gl.allocate_shared_memory(gl.float32, [1, K], TILE, y_1K)
    y_1V = short_conv(xv_1V, qkv, C, t_11, t_11 >= 0, v1, v2, v3, conv_weight + v_1V * W, W, 1)
    v_smem = gl.allocate_shared_memory(gl.float32, [1, V], TILE, y_1V)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [1, K], TILE, alpha_1K)
    store_tail(tail, q_1K, xq_1K, q1, q2, W, C)
    store_tail(tail, k_1K, xk_1K, k1, k2, W, C)
    store_tail(tail, v_1V, xv_1V, v1, v2, W, C)
    unit_rows(q_smem, 1, K, K**-0.5)
    unit_rows(k_smem, 1, K, 1.0)

    S_VK = advance(S_VK, row_of(k_smem, 0, over_K), row_of(v_smem, 0, over_V), row_of(alpha_smem, 0, over_K), beta)
    gl.store(state_VK, S_VK)
    o_V = gl.sum(S_VK * row_of(q_smem, 0, over_K)[None, :], 1)
    o_smem = gl.allocate_shared_memory(gl.float32, [1, V], TILE)
    as_rows(o_smem).index(0).store(o_V.to(dtype).to(gl.float32))
    finish(o_smem, gate + row * gate_row + head * V, y, norm_weight, eps, 1, 1, V, HV)


@gluon.jit
def verify(
    qkv, z, b, gate, y, past_qkv, past_z, past_b, accepted, conv_weight, A_log, dt_bias, norm_weight,
    tails, states, slots, lower_bound, eps, tokens, past_tokens, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BOUNDED: gl.constexpr, LANES: gl.constexpr,
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

    S_layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    over_K: gl.constexpr = gl.SliceLayout(0, S_layout)
    over_V: gl.constexpr = gl.SliceLayout(1, S_layout)
    state = states + slot * state_slot + head * (V * K)
    state_VK = state + gl.arange(0, V, layout=over_V)[:, None] * K + gl.arange(0, K, layout=over_K)[None, :]
    S_VK = gl.load(state_VK)

    # What was remembered, as far as it was accepted.
    count = gl.minimum(gl.maximum(gl.load(accepted + row).to(gl.int32), 0), past_tokens)
    P_layout: gl.constexpr = gl.BlockedLayout([P, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    p_P1 = gl.arange(0, P, layout=gl.SliceLayout(1, P_layout))[:, None]
    q_1K = head * K + gl.arange(0, K, layout=gl.SliceLayout(0, P_layout))[None, :]
    k_1K = HK + q_1K
    v_1V = 2 * HK + head * V + gl.arange(0, V, layout=gl.SliceLayout(0, P_layout))[None, :]
    tail, past_qkv = tails + slot * tail_slot, past_qkv + slot * past_tokens * C
    past_z, past_b = past_z + slot * past_tokens * HK, past_b + slot * past_tokens * H + head
    rate = gl.exp(gl.load(A_log + head))
    used = p_P1 < count
    k_PK, v_PV = past_qkv + p_P1 * C + k_1K, past_qkv + p_P1 * C + v_1V
    x_PK, x_PV = gl.load(k_PK, mask=used, other=0.0), gl.load(v_PV, mask=used, other=0.0)
    z_PK = gl.load(past_z + p_P1 * HK + q_1K, mask=used, other=0.0).to(gl.float32)
    x1, x2, x3 = load_tail(tail, k_1K, W, C)
    y_PK = short_conv(x_PK, k_PK, C, p_P1, used, x1, x2, x3, conv_weight + k_1K * W, W, P)
    x1, x2, x3 = load_tail(tail, v_1V, W, C)
    y_PV = short_conv(x_PV, v_PV, C, p_P1, used, x1, x2, x3, conv_weight + v_1V * W, W, P)
    k_past = gl.allocate_shared_memory(gl.float32, [P, K], TILE, y_PK)
    v_past = gl.allocate_shared_memory(gl.float32, [P, V], TILE, y_PV)
    z_PK = decay(z_PK, gl.load(dt_bias + q_1K), rate, lower_bound, BOUNDED)
    alpha_past = gl.allocate_shared_memory(gl.float32, [P, K], TILE, z_PK)

    # The new tokens: their convolution reaches back into the accepted ones and the tail.
    T_layout: gl.constexpr = gl.BlockedLayout([T, 1], [1, 32], [1, gl.num_warps()], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, T_layout))[:, None]
    Q_1K = head * K + gl.arange(0, K, layout=gl.SliceLayout(0, T_layout))[None, :]
    K_1K = HK + Q_1K
    V_1V = 2 * HK + head * V + gl.arange(0, V, layout=gl.SliceLayout(0, T_layout))[None, :]
    used = t_T1 < tokens
    qkv, z, b = qkv + row * qkv_row + t_T1 * C, z + row * z_row + t_T1 * HK, b + row * b_row + head
    xq_TK = gl.load(qkv + Q_1K, mask=used, other=0.0)
    xk_TK = gl.load(qkv + K_1K, mask=used, other=0.0)
    xv_TV = gl.load(qkv + V_1V, mask=used, other=0.0)
    z_TK = gl.load(z + Q_1K, mask=used, other=0.0)
    q1, q2, q3 = load_past(past_qkv, tail, count, Q_1K, W, C)
    k1, k2, k3 = load_past(past_qkv, tail, count, K_1K, W, C)
    v1, v2, v3 = load_past(past_qkv, tail, count, V_1V, W, C)
    barrier()  # tail and remembered inputs are read before they are written
    if count > 0:
        store_tail(tail, Q_1K, q1, q2, q3, W, C)
        store_tail(tail, K_1K, k1, k2, k3, W, C)
        store_tail(tail, V_1V, v1, v2, v3, W, C)
    gl.store(past_qkv + t_T1 * C + Q_1K, xq_TK, mask=used)
    gl.store(past_qkv + t_T1 * C + K_1K, xk_TK, mask=used)
    gl.store(past_qkv + t_T1 * C + V_1V, xv_TV, mask=used)
    gl.store(past_z + t_T1 * HK + Q_1K, z_TK, mask=used)
    y_TK = short_conv(xk_TK, qkv + K_1K, C, t_T1, used, k1, k2, k3, conv_weight + K_1K * W, W, T)
    k_smem = gl.allocate_shared_memory(gl.float32, [T, K], TILE, y_TK)
    y_TV = short_conv(xv_TV, qkv + V_1V, C, t_T1, used, v1, v2, v3, conv_weight + V_1V * W, W, T)
    v_smem = gl.allocate_shared_memory(gl.float32, [T, V], TILE, y_TV)
    y_TK = short_conv(xq_TK, qkv + Q_1K, C, t_T1, used, q1, q2, q3, conv_weight + Q_1K * W, W, T)
    q_smem = gl.allocate_shared_memory(gl.float32, [T, K], TILE, y_TK)
    a_TK = decay(z_TK.to(gl.float32), gl.load(dt_bias + Q_1K), rate, lower_bound, BOUNDED)
    alpha_smem = gl.allocate_shared_memory(gl.float32, [T, K], TILE, a_TK)
    unit_rows(k_past, P, K, 1.0)
    unit_rows(k_smem, T, K, 1.0)
    unit_rows(q_smem, T, K, K**-0.5)

    for t in range(count):
        beta = sigmoid(gl.load(past_b + t * H).to(gl.float32))
        k_K, alpha_K = row_of(k_past, t, over_K), row_of(alpha_past, t, over_K)
        S_VK = advance(S_VK, k_K, row_of(v_past, t, over_V), alpha_K, beta)
    if count > 0:
        gl.store(state_VK, S_VK)
    barrier()  # the same for past_b, which the loop above read
    o_smem = gl.allocate_shared_memory(gl.float32, [T, V], TILE)
    for t in range(tokens):
        b_t = gl.load(b + t * H)
        gl.store(past_b + t * H, b_t)
        k_K, alpha_K = row_of(k_smem, t, over_K), row_of(alpha_smem, t, over_K)
        S_VK = advance(S_VK, k_K, row_of(v_smem, t, over_V), alpha_K, sigmoid(b_t.to(gl.float32)))
        o_V = gl.sum(S_VK * row_of(q_smem, t, over_K)[None, :], 1)
        as_rows(o_smem).index(t).store(o_V.to(dtype).to(gl.float32))
    finish(o_smem, gate + row * gate_row + head * V, y, norm_weight, eps, tokens, T, V, HV)
