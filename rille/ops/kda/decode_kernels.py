"""The decode and verify kernels in Triton: one program is one head of one sequence and holds its whole state.

    x~ = silu(conv(x));  k, q normalised;  alpha = exp(g);  beta = sigmoid(b)
    S <- S diag(alpha);  u = beta (v - S k);  o = S q + u (k.q);  S <- S + u k^T       (S is [V, K], value-first)
    y  = RMSNorm(o) * weight * sigmoid(gate)

The equations are those of `reference.py`, `conv/reference.py` and `norm/reference.py`, with the same roundings: q, k, v
and o pass through the activations' dtype, everything else is fp32.

A step is bound by the state: 64 KB in and out of a program at K = V = 128, so its loads come first and all the small
work waits behind them. These kernels are what the interpreter tests and what runs where Gluon does not; the card runs
`decode_gluon.py`, the same steps with layouts chosen by hand.

What a token wrote, u, is all that its replay needs besides k and alpha: two operations an element and no sums. Both
kernels go through `advance` and every write through `write`, so verifying k tokens equals k single steps bit for bit.

Suffixes: B rows of the batch, T tokens of a row, H heads, K key channels, V value channels, C = 2HK + HV channels of
the convolution, W taps. x1, x2, x3: the input one, two, three tokens ago.
"""

import triton
import triton.language as tl


@triton.jit
def conv_weights(weight, channel, W: tl.constexpr):
    """Four weights of each channel, the current token's first; absent taps are 0 (and never multiply an input)."""
    w0 = tl.load(weight + channel * W + (W - 1))
    w1 = tl.load(weight + channel * W + (W - 2)) if W > 1 else w0 * 0.0
    w2 = tl.load(weight + channel * W + (W - 3)) if W > 2 else w0 * 0.0
    w3 = tl.load(weight + channel * W + (W - 4)) if W > 3 else w0 * 0.0
    return w0, w1, w2, w3


@triton.jit
def load_tail(tail, channel, C: tl.constexpr, W: tl.constexpr):
    """The inputs one, two and three tokens ago; absent ones are 0."""
    none = channel.to(tl.float32) * 0.0
    x1 = tl.load(tail + (W - 2) * C + channel).to(tl.float32) if W > 1 else none
    x2 = tl.load(tail + (W - 3) * C + channel).to(tl.float32) if W > 2 else none
    x3 = tl.load(tail + (W - 4) * C + channel).to(tl.float32) if W > 3 else none
    return x1, x2, x3


@triton.jit
def store_tail(tail, channel, x1, x2, x3, C: tl.constexpr, W: tl.constexpr):
    dtype = tail.dtype.element_ty
    if W > 1:
        tl.store(tail + (W - 2) * C + channel, x1.to(dtype))
    if W > 2:
        tl.store(tail + (W - 3) * C + channel, x2.to(dtype))
    if W > 3:
        tl.store(tail + (W - 4) * C + channel, x3.to(dtype))


@triton.jit
def convolve(x, x1, x2, x3, w, W: tl.constexpr, dtype: tl.constexpr):
    """silu(sum of the taps), oldest first like the reference, rounded to the activations' dtype."""
    if W == 1:
        total = x * w[0]
    elif W == 2:
        total = x1 * w[1] + x * w[0]
    elif W == 3:
        total = x2 * w[2] + x1 * w[1] + x * w[0]
    else:
        total = x3 * w[3] + x2 * w[2] + x1 * w[1] + x * w[0]
    return (total * tl.sigmoid(total)).to(dtype).to(tl.float32)


@triton.jit
def scales(k, q, K: tl.constexpr):
    """1/|k|, K^-0.5/|q|, and the product of both with k.q; the vectors themselves stay as they are."""
    per_k, per_q = tl.rsqrt(tl.sum(k * k, 0) + 1e-6), tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * (K**-0.5)
    return per_k, per_q, tl.sum(k * q, 0) * per_k * per_q


@triton.jit
def decay(z, dt_bias, rate, lower_bound, BOUNDED: tl.constexpr):
    """alpha = exp(g) of each key channel."""
    x = z + dt_bias
    if BOUNDED:
        return tl.exp(lower_bound * tl.sigmoid(rate * x))
    softplus = tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))
    return tl.exp(-rate * softplus)


@triton.jit
def write(S_VK, alpha_K, u_V, k_K):
    """S <- S diag(alpha) + u k^T."""
    return S_VK * alpha_K[None, :] + u_V[:, None] * k_K[None, :]


@triton.jit
def advance(S_VK, alpha_K, k_K, q_K, v_V, beta, K: tl.constexpr):
    """One token: S, what it wrote (u, over |k|), and o; both products read the decayed state."""
    per_k, per_q, kq = scales(k_K, q_K, K)
    S_VK = S_VK * alpha_K[None, :]
    error_V = beta * (v_V - tl.sum(S_VK * k_K[None, :], 1) * per_k)
    u_V = error_V * per_k
    o_V = tl.sum(S_VK * q_K[None, :], 1) * per_q + error_V * kq
    return S_VK + u_V[:, None] * k_K[None, :], u_V, o_V


@triton.jit
def gated_norm(o_V, gate_V, weight_V, eps, V: tl.constexpr):
    normed_V = o_V * tl.rsqrt(tl.sum(o_V * o_V, 0) / V + eps)
    return normed_V * weight_V * tl.sigmoid(gate_V)


@triton.jit
def decode(
    qkv, z, b, gate, y, conv_weight, A_log, dt_bias, norm_weight, tails, states, slots,
    lower_bound, eps, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (H, B). One token of one head of one sequence; state and tail are read and written in place."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    v_channel = head * V + tl.arange(0, V)
    if slot < 0:
        tl.store(y + row * (H * V) + v_channel, tl.zeros([V], y.dtype.element_ty))
        return
    state = states + slot * state_slot + head * (V * K) + tl.arange(0, V)[:, None] * K + tl.arange(0, K)[None, :]
    S_VK = tl.load(state)

    C: tl.constexpr = 2 * H * K + H * V
    dtype: tl.constexpr = qkv.dtype.element_ty
    channel = head * K + tl.arange(0, K)
    tail, qkv = tails + slot * tail_slot, qkv + row * qkv_row
    x_q = tl.load(qkv + channel).to(tl.float32)
    x_k = tl.load(qkv + H * K + channel).to(tl.float32)
    x_v = tl.load(qkv + 2 * H * K + v_channel).to(tl.float32)
    q1, q2, q3 = load_tail(tail, channel, C, W)
    k1, k2, k3 = load_tail(tail, H * K + channel, C, W)
    v1, v2, v3 = load_tail(tail, 2 * H * K + v_channel, C, W)
    beta = tl.sigmoid(tl.load(b + row * b_row + head).to(tl.float32))
    rate = tl.exp(tl.load(A_log + head))
    z_K = tl.load(z + row * z_row + channel).to(tl.float32)
    alpha = decay(z_K, tl.load(dt_bias + channel), rate, lower_bound, BOUNDED)
    gate_V = tl.load(gate + row * gate_row + v_channel).to(tl.float32)
    weight_V = tl.load(norm_weight + tl.arange(0, V))

    q = convolve(x_q, q1, q2, q3, conv_weights(conv_weight, channel, W), W, dtype)
    k = convolve(x_k, k1, k2, k3, conv_weights(conv_weight, H * K + channel, W), W, dtype)
    v_V = convolve(x_v, v1, v2, v3, conv_weights(conv_weight, 2 * H * K + v_channel, W), W, dtype)
    tl.debug_barrier()  # a tail moves by one row: every row is read before one is written
    store_tail(tail, channel, x_q, q1, q2, C, W)
    store_tail(tail, H * K + channel, x_k, k1, k2, C, W)
    store_tail(tail, 2 * H * K + v_channel, x_v, v1, v2, C, W)

    S_VK, _, o_V = advance(S_VK, alpha, k, q, v_V, beta, K)
    tl.store(state, S_VK)
    y_V = gated_norm(o_V.to(dtype).to(tl.float32), gate_V, weight_V, eps, V)
    tl.store(y + row * (H * V) + v_channel, y_V.to(y.dtype.element_ty))


@triton.jit
def verify(
    qkv, z, b, gate, y, past_qkv, past_z, past_u, accepted, conv_weight, A_log, dt_bias, norm_weight,
    tails, states, slots, lower_bound, eps, tokens, past_tokens, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr, BOUNDED: tl.constexpr,
):  # fmt: skip
    """Grid (H, B). Commit, then try: replay the accepted tokens remembered from the last call and store the state
    and the tail they lead to; then run `tokens` new ones from there, whose inputs and writes u are remembered and whose
    state is not stored. Inputs are [B, T, .] with dense tokens inside a row; past_* are dense."""
    head, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    v_channel = head * V + tl.arange(0, V)
    y = y + row * tokens * (H * V) + v_channel
    if slot < 0:
        for t in range(tokens):
            tl.store(y + t * (H * V), tl.zeros([V], y.dtype.element_ty))
        return
    state = states + slot * state_slot + head * (V * K) + tl.arange(0, V)[:, None] * K + tl.arange(0, K)[None, :]
    S_VK = tl.load(state)

    C: tl.constexpr = 2 * H * K + H * V
    dtype: tl.constexpr = qkv.dtype.element_ty
    channel = head * K + tl.arange(0, K)
    tail = tails + slot * tail_slot
    q1, q2, q3 = load_tail(tail, channel, C, W)
    k1, k2, k3 = load_tail(tail, H * K + channel, C, W)
    v1, v2, v3 = load_tail(tail, 2 * H * K + v_channel, C, W)
    wq = conv_weights(conv_weight, channel, W)
    wk = conv_weights(conv_weight, H * K + channel, W)
    wv = conv_weights(conv_weight, 2 * H * K + v_channel, W)
    rate, dt_bias_K = tl.exp(tl.load(A_log + head)), tl.load(dt_bias + channel)

    past_qkv, past_z = past_qkv + slot * past_tokens * C, past_z + slot * past_tokens * (H * K) + channel
    past_u = past_u + slot * past_tokens * (H * V) + v_channel
    count = tl.minimum(tl.maximum(tl.load(accepted + row).to(tl.int32), 0), past_tokens)
    for t in range(count):
        x_q = tl.load(past_qkv + t * C + channel).to(tl.float32)
        x_k = tl.load(past_qkv + t * C + H * K + channel).to(tl.float32)
        x_v = tl.load(past_qkv + t * C + 2 * H * K + v_channel).to(tl.float32)
        alpha = decay(tl.load(past_z + t * (H * K)).to(tl.float32), dt_bias_K, rate, lower_bound, BOUNDED)
        k = convolve(x_k, k1, k2, k3, wk, W, dtype)
        S_VK = write(S_VK, alpha, tl.load(past_u + t * (H * V)), k)
        q1, q2, q3, k1, k2, k3, v1, v2, v3 = x_q, q1, q2, x_k, k1, k2, x_v, v1, v2
    tl.debug_barrier()  # what was remembered and the tail are read before they are written
    if count > 0:
        tl.store(state, S_VK)
        store_tail(tail, channel, q1, q2, q3, C, W)
        store_tail(tail, H * K + channel, k1, k2, k3, C, W)
        store_tail(tail, 2 * H * K + v_channel, v1, v2, v3, C, W)

    qkv, z, b = qkv + row * qkv_row, z + row * z_row + channel, b + row * b_row + head
    gate, weight_V = gate + row * gate_row + v_channel, tl.load(norm_weight + tl.arange(0, V))
    for t in range(tokens):
        x_q = tl.load(qkv + t * C + channel)
        x_k = tl.load(qkv + t * C + H * K + channel)
        x_v = tl.load(qkv + t * C + 2 * H * K + v_channel)
        z_K, b_t = tl.load(z + t * (H * K)), tl.load(b + t * H)
        tl.store(past_qkv + t * C + channel, x_q)
        tl.store(past_qkv + t * C + H * K + channel, x_k)
        tl.store(past_qkv + t * C + 2 * H * K + v_channel, x_v)
        tl.store(past_z + t * (H * K), z_K)
        x_q, x_k, x_v = x_q.to(tl.float32), x_k.to(tl.float32), x_v.to(tl.float32)
        alpha = decay(z_K.to(tl.float32), dt_bias_K, rate, lower_bound, BOUNDED)
        beta = tl.sigmoid(b_t.to(tl.float32))
        q = convolve(x_q, q1, q2, q3, wq, W, dtype)
        k = convolve(x_k, k1, k2, k3, wk, W, dtype)
        v_V = convolve(x_v, v1, v2, v3, wv, W, dtype)
        S_VK, u_V, o_V = advance(S_VK, alpha, k, q, v_V, beta, K)
        tl.store(past_u + t * (H * V), u_V)
        o_V = o_V.to(dtype).to(tl.float32)
        y_V = gated_norm(o_V, tl.load(gate + t * (H * V)).to(tl.float32), weight_V, eps, V)
        tl.store(y + t * (H * V), y_V.to(y.dtype.element_ty))
        q1, q2, q3, k1, k2, k3, v1, v2, v3 = x_q, q1, q2, x_k, k1, k2, x_v, v1, v2
