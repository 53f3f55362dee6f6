"""The decode kernel for the card, in Gluon: `decode_kernels.py` with every layout chosen by hand; and what the verify
kernel (`verify_gluon.py`) has in common with it.

One program is one head of one sequence. Its state [V, K] lies in registers, a row of V in LANES lanes (4 or 8).

    1  the loads of the state are issued
    2  all tokens at once: convolution, SiLU, decay; a thread has one channel of every token; to shared memory, where
       a warp normalises a token
    3  token by token: S <- S diag(alpha), u, S <- S + beta u k^T, o to shared memory
    4  all tokens at once: the output's norm and gate; a warp has a token

The interpreter has no Gluon; the twin in `decode_kernels.py` has the same equations, roundings and arguments.

Suffixes: T tokens, K key channels, V value channels, 1 a broadcast axis; C channels of the convolution, W taps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from rille.ops.barriers_gluon import barrier
from rille.ops.chain_gluon import meet

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
def load_rows(pointer, channel_N, step: gl.constexpr, count, T: gl.constexpr):
    """T rows, `step` apart, as a tuple; anything from row `count` on. A thread has the same channels of every row."""
    rows = ()
    for t in gl.static_range(T):
        here_N = gl.full([channel_N.shape[0]], t, gl.int32, channel_N.type.layout) < count
        rows = rows + (gl.load(pointer + t * step + channel_N, mask=here_N),)
    return rows


@gluon.jit
def stack(rows, T: gl.constexpr, LOG_T: gl.constexpr):
    """A tuple of T rows [N] as a tile [T, N], without a move: joined by halves, so the first axis made is t's
    highest bit."""
    for level in gl.static_range(LOG_T):
        joined = ()
        for t in gl.static_range(T >> (level + 1)):
            joined = joined + (gl.join(rows[t], rows[t + (T >> (level + 1))]),)
        rows = joined
    N: gl.constexpr = rows[0].numel // T
    return rows[0].reshape([N, T]).permute((1, 0))


@gluon.jit
def load_taps(weight_N, W: gl.constexpr):
    """Four weights of each channel, the current token's first; absent ones repeat it and are never used."""
    w0_N = gl.load(weight_N + (W - 1))
    w1_N = gl.load(weight_N + (W - 2)) if W > 1 else w0_N
    w2_N = gl.load(weight_N + (W - 3)) if W > 2 else w0_N
    w3_N = gl.load(weight_N + (W - 4)) if W > 3 else w0_N
    return w0_N, w1_N, w2_N, w3_N


@gluon.jit
def rounded(x, kind: gl.constexpr, PAIRS: gl.constexpr):
    """x in fp32, rounded to `kind`. bf16 in PAIRS: one number by itself goes through the unit for exponentials."""
    if PAIRS and kind == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "{ .reg .b32 pair, low, high; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 low, pair, 16;"
            " and.b32 high, pair, 0xffff0000; mov.b32 $0, low; mov.b32 $1, high; }",
            "=f,=f,f,f", [x], gl.float32, True, 2,
        )  # fmt: skip
    else:
        return x.to(kind).to(gl.float32)


@gluon.jit
def short_conv(rows, x1_N, x2_N, x3_N, taps, W: gl.constexpr, T: gl.constexpr, LOG_T: gl.constexpr):
    """silu(conv) [T, N] of a tuple of rows whose last inputs before them are x1, x2, x3 (oldest tap first); in fp32,
    rounded to the rows' dtype."""
    w0_N, w1_N, w2_N, w3_N = taps
    x1_N, x2_N, x3_N, convolved = x1_N.to(gl.float32), x2_N.to(gl.float32), x3_N.to(gl.float32), ()
    for t in gl.static_range(T):
        x0_N = rows[t].to(gl.float32)
        if W == 1:
            total_N = x0_N * w0_N
        if W == 2:
            total_N = gl.fma(x0_N, w0_N, x1_N * w1_N)
        if W == 3:
            total_N = gl.fma(x0_N, w0_N, gl.fma(x1_N, w1_N, x2_N * w2_N))
        if W == 4:
            total_N = gl.fma(x0_N, w0_N, gl.fma(x1_N, w1_N, gl.fma(x2_N, w2_N, x3_N * w3_N)))
        convolved = convolved + (total_N * sigmoid(total_N),)
        x1_N, x2_N, x3_N = x0_N, x1_N, x2_N
    return rounded(stack(convolved, T, LOG_T), rows[0].dtype, T > 1)


@gluon.jit
def decays(rows, dt_bias_N, rate, lower_bound, BOUNDED: gl.constexpr, T: gl.constexpr, LOG_T: gl.constexpr):
    """alpha [T, N] of a tuple of rows of decay logits."""
    alphas = ()
    for t in gl.static_range(T):
        alphas = alphas + (decay(rows[t].to(gl.float32), dt_bias_N, rate, lower_bound, BOUNDED),)
    return stack(alphas, T, LOG_T)


@gluon.jit
def new_scales(T: gl.constexpr):
    per_k = gl.allocate_shared_memory(gl.float32, [T, 1], TILE)
    per_q = gl.allocate_shared_memory(gl.float32, [T, 1], TILE)
    return per_k, per_q, gl.allocate_shared_memory(gl.float32, [T, 1], TILE)


@gluon.jit
def store_scales(k_smem, q_smem, scales, T: gl.constexpr, K: gl.constexpr):
    """Of every token 1/|k|, K^-0.5/|q| and the product of both with k.q (epsilon 1e-6 inside the roots), each a column
    [T, 1] in shared memory; a warp has a token. The vectors themselves stay as they are."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    k_TK, q_TK = k_smem.load(layout), q_smem.load(layout)
    per_k_T = gl.rsqrt(gl.sum(k_TK * k_TK, 1) + 1e-6)
    per_q_T = gl.rsqrt(gl.sum(q_TK * q_TK, 1) + 1e-6) * (K**-0.5)
    kq_T = gl.sum(k_TK * q_TK, 1) * per_k_T * per_q_T
    scales[0].store(per_k_T[:, None])
    scales[1].store(per_q_T[:, None])
    scales[2].store(kq_T[:, None])


@gluon.jit
def decay(z, dt_bias, rate, lower_bound, BOUNDED: gl.constexpr):
    """alpha = exp(g) of each key channel."""
    x = z + dt_bias
    if BOUNDED:
        return exp2(lower_bound * 1.4426950408889634 * sigmoid(rate * x))
    softplus = gl.maximum(x, 0.0) + gl.log(1.0 + gl.exp(-gl.abs(x)))
    return gl.exp(-rate * softplus)


@gluon.jit
def write(S_VK, alpha_K, u_V, k_K):
    """S <- S diag(alpha) + u k^T, in one rounding for the product and sum: a replay is bit for bit the first pass."""
    return gl.fma(u_V[:, None], k_K[None, :], S_VK * alpha_K[None, :])


@gluon.jit
def halves(x, N: gl.constexpr, P: gl.constexpr, half: gl.constexpr):
    """[N, P, 2 half] -> two of [N, P, half]."""
    return gl.split(x.reshape([N, P, 2, half]).permute((0, 1, 3, 2)))


@gluon.jit
def by_part(x_VK, V: gl.constexpr, K: gl.constexpr, LOG: gl.constexpr):
    """Rows as eight parts, each of every eighth group of four channels: a tuple of its 2^LOG channels, [V, 8, 1] each.
    All are registers of one thread, nothing moves."""
    parts: gl.constexpr = min(8, K // 4)
    wide = (x_VK.reshape([V, K // (4 * parts), parts, 4]).permute((0, 2, 1, 3)).reshape([V, parts, K // parts]),)
    for level in gl.static_range(LOG):
        narrow = ()
        for i in gl.static_range(1 << level):
            first, second = halves(wide[i], V, parts, 1 << (LOG - level - 1))
            narrow = narrow + (first, second)
        wide = narrow
    return wide


@gluon.jit
def partial_dots(S_VK, k_K, q_K, V: gl.constexpr, K: gl.constexpr):
    """S k and S q as eight sums a row [V, 8]. Each is a chain of fused products and sums, spelled out: a sum of
    products is for the compiler to contract, and it does so as it likes in each kernel."""
    parts: gl.constexpr = min(8, K // 4)
    k_VK, _ = gl.broadcast(k_K[None, :], S_VK)
    q_VK, _ = gl.broadcast(q_K[None, :], S_VK)
    log: gl.constexpr = 2 if K < 64 else 3 if K < 128 else 4 if K < 256 else 5  # of K / parts
    S, k, q = by_part(S_VK, V, K, log), by_part(k_VK, V, K, log), by_part(q_VK, V, K, log)
    k_sum, q_sum = S[0] * k[0], S[0] * q[0]
    for i in gl.static_range(1, K // parts):
        k_sum, q_sum = gl.fma(S[i], k[i], k_sum), gl.fma(S[i], q[i], q_sum)
    return k_sum.reshape([V, parts]), q_sum.reshape([V, parts])


@gluon.jit
def dots(S_VK, k_K, q_K, V: gl.constexpr, K: gl.constexpr, MEET: gl.constexpr):
    """S k and S q. A row's products are added in one order whatever the layouts are, the eight sums by halves: decode
    and verify may lie differently and agree bit for bit. Every lane of a row adds the eight, in the layout of the
    state's rows, three shuffles for each of a thread's rows; or they MEET in one lane, after a trip through shared
    memory, which is less, and what follows is not repeated by every lane of a row."""
    k_sums, q_sums = partial_dots(S_VK, k_K, q_K, V, K)
    if MEET:
        return join_by_row(gl.join(k_sums, q_sums), V, min(8, K // 4))
    else:
        over_V: gl.constexpr = gl.SliceLayout(1, S_VK.type.layout)
        k_V = gl.convert_layout(gl.sum(k_sums, 1), over_V, assert_trivial=True)
        return k_V, gl.convert_layout(gl.sum(q_sums, 1), over_V, assert_trivial=True)


@gluon.jit
def join_by_row(sums, V: gl.constexpr, parts: gl.constexpr):
    """Sums over the middle axis of [V, parts, 2], by halves as shuffles would add them, one row a lane."""
    one_row: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0]))
    meet: gl.constexpr = gl.BlockedLayout([1, parts, 2], [32, 1, 1], [gl.num_warps(), 1, 1], [2, 1, 0])
    sums = gl.convert_layout(sums, meet)
    for level in gl.static_range(3 if parts == 8 else 2):
        sums = gl.sum(sums.reshape([V, 2, parts >> (level + 1), 2]), 1)
    first_V, second_V = gl.split(sums.reshape([V, 2]))
    first_V = gl.convert_layout(first_V, one_row, assert_trivial=True)
    return first_V, gl.convert_layout(second_V, one_row, assert_trivial=True)


@gluon.jit
def advance(S_VK, alpha_K, k_K, q_K, v_V, beta, per_k, per_q, kq, V: gl.constexpr, K: gl.constexpr, MEET: gl.constexpr):
    """One token: S, what it wrote (u), and o. Both products read the decayed state, so they do not wait for each
    other: o = S q = S' q + u (k.q)."""
    S_VK = S_VK * alpha_K[None, :]
    said_V, read_V = dots(S_VK, k_K, q_K, V, K, MEET)
    error_V = beta * gl.fma(said_V, -per_k, v_V)
    u_V = error_V * per_k
    where_rows_are_V = gl.convert_layout(u_V, gl.SliceLayout(1, S_VK.type.layout))
    return gl.fma(where_rows_are_V[:, None], k_K[None, :], S_VK), u_V, gl.fma(error_V, kq, read_V * per_q)


@gluon.jit
def outputs_of(tokens, T: gl.constexpr, V: gl.constexpr, row: gl.constexpr):
    """Where a warp has a token: offsets [T, V], which of them exist, and the channels [V]."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, layout))[:, None]
    v_V = gl.arange(0, V, layout=gl.SliceLayout(0, layout))
    return t_T1 * row + v_V[None, :], (t_T1 < tokens) & (v_V >= 0)[None, :], v_V


@gluon.jit
def gated_norm(o_TV, gate_TV, weight_V, eps, V: gl.constexpr):
    """RMSNorm(o) * weight * sigmoid(gate)."""
    scale_T = gl.rsqrt(gl.sum(o_TV * o_TV, 1) / V + eps)
    return o_TV * scale_T[:, None] * weight_V[None, :] * sigmoid(gate_TV.to(gl.float32))


@gluon.jit
def clear(y, tokens, T: gl.constexpr, V: gl.constexpr, row: gl.constexpr):
    """A row without a sequence reads as 0."""
    offsets, here, _ = outputs_of(tokens, T, V, row)
    gl.store(y + offsets, (offsets * 0).to(y.dtype.element_ty), mask=here)


@gluon.jit
def load_tail(tail, channel_N, W: gl.constexpr, C: gl.constexpr):
    """The inputs one, two and three tokens ago; absent ones repeat the one before and are never used."""
    x1_N = gl.load(tail + (W - 2) * C + channel_N) if W > 1 else channel_N
    x2_N = gl.load(tail + (W - 3) * C + channel_N) if W > 2 else x1_N
    x3_N = gl.load(tail + (W - 4) * C + channel_N) if W > 3 else x2_N
    return x1_N, x2_N, x3_N


@gluon.jit
def store_tail(tail, channel_N, x1_N, x2_N, x3_N, W: gl.constexpr, C: gl.constexpr):
    if W > 1:
        gl.store(tail + (W - 2) * C + channel_N, x1_N)
    if W > 2:
        gl.store(tail + (W - 3) * C + channel_N, x2_N)
    if W > 3:
        gl.store(tail + (W - 4) * C + channel_N, x3_N)


@gluon.jit
def decode(
    qkv, z, b, gate, y, conv_weight, A_log, dt_bias, norm_weight, tails, states, slots,
    lower_bound, eps, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BOUNDED: gl.constexpr, LANES: gl.constexpr,
    CHAINED: gl.constexpr = False,
):  # fmt: skip
    """Grid (H, B). One token of one head of one sequence; state and tail are read and written in place. In a chain
    nobody else writes states, tails and slots."""
    HK: gl.constexpr = H * K
    HV: gl.constexpr = H * V
    C: gl.constexpr = 2 * HK + HV
    head, row = gl.program_id(0), gl.program_id(1).to(gl.int64)
    slot = gl.load(slots + row).to(gl.int64)
    y += row * HV + head * V
    if slot < 0:
        meet(CHAINED)
        clear(y, 1, 1, V, HV)
        return

    rows: gl.constexpr = max(1, V * LANES // (32 * gl.num_warps()))
    S_layout: gl.constexpr = gl.BlockedLayout([rows, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    over_K: gl.constexpr = gl.SliceLayout(0, S_layout)
    over_V: gl.constexpr = gl.SliceLayout(1, S_layout)
    state = states + slot * state_slot + head * (V * K)
    state_VK = state + gl.arange(0, V, layout=over_V)[:, None] * K + gl.arange(0, K, layout=over_K)[None, :]
    S_VK = gl.load(state_VK)
    meet(CHAINED)

    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    q_K = head * K + gl.arange(0, K, layout=line)
    k_K = HK + q_K
    v_V = 2 * HK + head * V + gl.arange(0, V, layout=line)
    tail, qkv = tails + slot * tail_slot, qkv + row * qkv_row
    xq, xk, xv = load_rows(qkv, q_K, C, 1, 1), load_rows(qkv, k_K, C, 1, 1), load_rows(qkv, v_V, C, 1, 1)
    q1, q2, q3 = load_tail(tail, q_K, W, C)
    k1, k2, k3 = load_tail(tail, k_K, W, C)
    v1, v2, v3 = load_tail(tail, v_V, W, C)
    beta = sigmoid(gl.load(b + row * b_row + head).to(gl.float32))
    rate = gl.exp(gl.load(A_log + head))
    offsets, here, norm_V = outputs_of(1, 1, V, HV)
    gate_1V, weight_V = gl.load(gate + row * gate_row + head * V + offsets, mask=here), gl.load(norm_weight + norm_V)

    q_smem = gl.allocate_shared_memory(
        gl.float32, [1, K], TILE, short_conv(xq, q1, q2, q3, load_taps(conv_weight + q_K * W, W), W, 1, 0)
    )
    k_smem = gl.allocate_shared_memory(
        gl.float32, [1, K], TILE, short_conv(xk, k1, k2, k3, load_taps(conv_weight + k_K * W, W), W, 1, 0)
    )
    v_smem = gl.allocate_shared_memory(
        gl.float32, [1, V], TILE, short_conv(xv, v1, v2, v3, load_taps(conv_weight + v_V * W, W), W, 1, 0)
    )
    dt_bias_K = gl.load(dt_bias + q_K)
    z_rows = load_rows(z + row * z_row, q_K, HK, 1, 1)
    alpha_smem = gl.allocate_shared_memory(
        gl.float32, [1, K], TILE, decays(z_rows, dt_bias_K, rate, lower_bound, BOUNDED, 1, 0)
    )
    barrier()  # a tail is read before it is written
    store_tail(tail, q_K, xq[0], q1, q2, W, C)
    store_tail(tail, k_K, xk[0], k1, k2, W, C)
    store_tail(tail, v_V, xv[0], v1, v2, W, C)
    scales = new_scales(1)
    store_scales(k_smem, q_smem, scales, 1, K)
    barrier()

    S_VK, _, o_V = advance(
        S_VK, row_of(alpha_smem, 0, over_K), row_of(k_smem, 0, over_K), row_of(q_smem, 0, over_K),
        row_of(v_smem, 0, over_V), beta, row_of(scales[0], 0, over_V), row_of(scales[1], 0, over_V),
        row_of(scales[2], 0, over_V), V, K, False,
    )  # fmt: skip
    gl.store(state_VK, S_VK)
    o_smem = gl.allocate_shared_memory(gl.float32, [1, V], TILE)
    as_rows(o_smem).index(0).store(o_V.to(y.dtype.element_ty).to(gl.float32))
    y_1V = gated_norm(o_smem.load(gate_1V.type.layout), gate_1V, weight_V, eps, V)
    gl.store(y + offsets, y_1V.to(y.dtype.element_ty), mask=here)
