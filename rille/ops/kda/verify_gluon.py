"""The verify kernel for the card, in Gluon: programs that stay, and fetch the next state while they work on this one.

A program is one head of one sequence at a time, as in `decode_gluon.py`, and as many programs as run at once share all
of them. What an item needs comes from memory into shared memory by asynchronous copies, asked for one item ahead, so
that memory is busy while programs compute; a program that loads, computes and stores in turn leaves one of both idle.

    state     by TMA, both ways through one buffer: out of it into registers, replayed, back into it, and from there to
              memory while drafts are tried; the next one is asked for when the third draft begins. Stores from
              registers would fill the queue that all programs on a multiprocessor share with reads of shared memory
    slots     and how many tokens are accepted: two items ahead, so that nothing waits for them
    tokens    inputs qkv and z, of new tokens and of those remembered: when the last item's are convolved, while its
              state is read out of shared memory
    gates     of an item's own output: with the next one's tokens
    writes    u of the remembered: before the last draft
    weights   stay in registers while the head does. Each program has a run of rows of one head, then of the next

Steps of an item: those of `decode_gluon.py`, with what was accepted before them.

Suffixes: T new tokens, P remembered ones, K key channels, V value channels, 1 a broadcast axis, N either; C channels of
the convolution, W taps.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from rille.ops.barriers_gluon import give_up
from rille.ops.kda.decode_gluon import (
    TILE,
    advance,
    as_rows,
    barrier,
    clear,
    decays,
    gated_norm,
    load_taps,
    new_scales,
    row_of,
    short_conv,
    sigmoid,
    store_scales,
    write,
)

# Begin, wait for tokens, convolve and ask for the next, wait for the state, replay and send, drafts, outputs.
SECTIONS = gl.constexpr(7)

FETCH_AT = gl.constexpr(2)  # the draft before which the next state is asked for: the last one has left by then


@gluon.jit
def places(smem, step: gl.constexpr):
    """Offsets of a tile [T, N] whose rows lie `step` apart, t and n; 16 bytes a thread at a time."""
    T: gl.constexpr = smem.shape[0]
    N: gl.constexpr = smem.shape[1]
    wide: gl.constexpr = 128 // smem.dtype.primitive_bitwidth
    lanes: gl.constexpr = min(32, N // wide)
    layout: gl.constexpr = gl.BlockedLayout([1, wide], [32 // lanes, lanes], [gl.num_warps(), 1], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, layout))[:, None]
    n_1N = gl.arange(0, N, layout=gl.SliceLayout(0, layout))[None, :]
    return t_T1 * step + n_1N, t_T1, n_1N


@gluon.jit
def fetch_rows(smem, pointer, step: gl.constexpr, count):
    """The first `count` rows of a tile [T, N]."""
    offsets, t_T1, n_1N = places(smem, step)
    async_copy.async_copy_global_to_shared(smem, pointer + offsets, (t_T1 < count) & (n_1N >= 0))


@gluon.jit
def fetch_before(smem, past, tail, count, wanted, W: gl.constexpr, C: gl.constexpr):
    """The W - 1 inputs before the token after `count` remembered ones, the last one first; `wanted` of them."""
    if W > 1:
        _, j_41, n_1N = places(smem, 0)
        index_41 = count - 1 - j_41
        row_41 = gl.where(index_41 >= 0, past + index_41 * C, tail + (index_41 + (W - 1)) * C)
        async_copy.async_copy_global_to_shared(smem, row_41 + n_1N, (j_41 < wanted) & (n_1N >= 0))


@gluon.jit
def copy_out(pointer, smem, step: gl.constexpr, count: gl.constexpr):
    offsets, t_T1, n_1N = places(smem, step)
    gl.store(pointer + offsets, smem.load(offsets.type.layout), mask=(t_T1 < count) & (n_1N >= 0))


@gluon.jit
def copy_tail(tail, smem, W: gl.constexpr, C: gl.constexpr):
    """`fetch_before` the other way: the tail of a slot."""
    if W > 1:
        offsets, j_41, n_1N = places(smem, 0)
        row_41 = tail + (W - 2 - j_41) * C
        gl.store(row_41 + n_1N, smem.load(offsets.type.layout), mask=(j_41 < W - 1) & (n_1N >= 0))


@gluon.jit
def rows_of(smem, layout: gl.constexpr):
    T: gl.constexpr = smem.shape[0]
    rows = ()
    for t in gl.static_range(T):
        rows = rows + (row_of(smem, t, layout),)
    return rows


@gluon.jit
def with_before(smem, before, W: gl.constexpr, layout: gl.constexpr):
    """The rows in shared memory, and the three inputs before them, the last one first; absent ones are never used."""
    rows = rows_of(smem, layout)
    if W == 1:
        return rows, rows[0], rows[0], rows[0]
    else:
        return rows, row_of(before, 0, layout), row_of(before, 1, layout), row_of(before, 2, layout)


@gluon.jit
def draft(S_VK, t, tiles, past_u, o_smem, HV: gl.constexpr, V: gl.constexpr, K: gl.constexpr):
    """S after new token t; its write goes to `past_u` and its o, rounded, to shared memory."""
    over_K: gl.constexpr = gl.SliceLayout(0, S_VK.type.layout)
    by_row: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0]))
    S_VK, u_V, o_V = advance(
        S_VK, row_of(tiles[0], t, over_K), row_of(tiles[1], t, over_K), row_of(tiles[2], t, over_K),
        row_of(tiles[3], t, by_row), row_of(tiles[4], t, by_row), row_of(tiles[5], t, by_row),
        row_of(tiles[6], t, by_row), row_of(tiles[7], t, by_row), V, K, True,
    )  # fmt: skip
    v_V = t * HV + gl.arange(0, V, layout=by_row)
    gl.store(past_u + v_V, u_V)
    as_rows(o_smem).index(t).store(o_V.to(o_smem.dtype))
    return S_VK


@gluon.jit
def first_place(items, H: gl.constexpr):
    """Head and row of a program's first item. Each program has a run of rows of one head, then of the next, so that it
    seldom needs other weights."""
    program, programs, rows = gl.program_id(0), gl.num_programs(0), items // H
    place = program * (items // programs) + gl.minimum(program, items % programs)
    return place // rows, place % rows


@gluon.jit
def place_after(head, row, items, H: gl.constexpr):
    """Head and row of a program's item after that of a head and row; where there is no such item, of any."""
    ends = row + 1 == items // H
    return gl.where(ends, (head + 1) % H, head), gl.where(ends, 0, row + 1)


@gluon.jit
def zero_of_lane(items):
    """0 [1], of which the compiler does not know that it is 0 in every lane. A number loaded from there stays in each
    lane's register until it is used; one known to be the same in all goes where it must be waited for at once."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    never_1 = gl.full([1], items >> 31, gl.int32, layout)
    return gl.inline_asm_elementwise(
        "{ .reg .b32 lane; mov.u32 lane, %laneid; and.b32 $0, lane, $1; }", "=r,r", [never_1], gl.int32, True, 1
    )


@gluon.jit
def ask_for(head, row, item, items, slots, accepted):
    """An item's head and row, and slot and count as they lie in memory, [1]; -1 and 0 past the end."""
    zero_1 = zero_of_lane(items)
    here_1 = zero_1 + item < items
    slot_1 = gl.load(slots + row + zero_1, mask=here_1, other=-1)
    return head, row, slot_1, gl.load(accepted + row + zero_1, mask=here_1, other=0)


@gluon.jit
def item_of(found, past_tokens: gl.constexpr):
    """Head and row of an item, its slot (-1 past the end) and how many remembered tokens it commits."""
    head, row, slot_1, count_1 = found
    slot, count = gl.sum(slot_1, 0).to(gl.int64), gl.sum(count_1, 0).to(gl.int32)
    count = gl.minimum(gl.maximum(count, 0), past_tokens)
    return head, row.to(gl.int64), slot, gl.where(slot >= 0, count, 0)


@gluon.jit
def state_of(states, slot, head, state_slot, V: gl.constexpr, K: gl.constexpr, layout: gl.constexpr):
    v_V1 = gl.arange(0, V, layout=gl.SliceLayout(1, layout))[:, None]
    k_1K = gl.arange(0, K, layout=gl.SliceLayout(0, layout))[None, :]
    return states + slot * state_slot + head * (V * K) + v_V1 * K + k_1K


@gluon.jit
def fetch_state(stage, arrived, states_desc, slot, head, state_slot, V: gl.constexpr, K: gl.constexpr):
    """Ask for a state, once every warp has read `stage` and what was to leave it has left."""
    tma.store_wait(0)
    barrier()
    row = (slot * (state_slot // K) + head * V).to(gl.int32)
    mbarrier.expect(arrived, states_desc.block_type.nbytes, pred=slot >= 0)
    tma.async_copy_global_to_shared(states_desc, [row, 0], arrived, stage, pred=slot >= 0)


@gluon.jit
def send_state(stage, S_VK, states_desc, slot, head, state_slot, V: gl.constexpr, K: gl.constexpr):
    """The state into its slot, by way of `stage`."""
    stage.store(S_VK)
    fence_async_shared()
    barrier()
    tma.async_copy_shared_to_global(states_desc, [(slot * (state_slot // K) + head * V).to(gl.int32), 0], stage)


@gluon.jit
def mark(clocks, item, section: gl.constexpr):
    """The clock at the end of one of an item's SECTIONS, for benchmarks; nothing where `clocks` is None."""
    if clocks is not None:
        thread = gl.arange(0, 32 * gl.num_warps(), layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        now = gl.inline_asm_elementwise("mov.u32 $0, %clock;", "=r,r", [thread], gl.int32, False, 1)
        gl.store(clocks + item * SECTIONS + section + thread * 0, now, mask=thread == 0)


@gluon.jit
def fetch_tokens(
    small, qkv, z, past_qkv, past_z, tails, head, row, slot, count, qkv_row, z_row, tail_slot,
    tokens, before, past_tokens: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Ask for an item's inputs, the remembered ones and what came `before` either."""
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    q, v = head * K, 2 * HK + head * V
    tail, past = tails + slot * tail_slot, past_qkv + slot * (past_tokens * C)
    qkv += row * qkv_row
    fetch_rows(small[0], past + HK + q, C, count)
    fetch_rows(small[1], past_z + slot * (past_tokens * HK) + q, HK, count)
    fetch_before(small[2], past + HK + q, tail + HK + q, 0, before, W, C)
    fetch_rows(small[3], qkv + HK + q, C, tokens)
    fetch_rows(small[4], qkv + v, C, tokens)
    fetch_rows(small[5], qkv + q, C, tokens)
    fetch_rows(small[6], z + row * z_row + q, HK, tokens)
    fetch_before(small[7], past + HK + q, tail + HK + q, count, before, W, C)
    fetch_before(small[8], past + v, tail + v, count, before, W, C)
    fetch_before(small[9], past + q, tail + q, count, before, W, C)


@gluon.jit
def keep_tokens(
    small, past_qkv, past_z, head, slot, tokens: gl.constexpr, past_tokens: gl.constexpr,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """Remember the new inputs."""
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    q, v = head * K, 2 * HK + head * V
    past = past_qkv + slot * (past_tokens * C)
    if tokens > 0:
        copy_out(past + HK + q, small[3], C, tokens)
        copy_out(past + v, small[4], C, tokens)
        copy_out(past + q, small[5], C, tokens)
        copy_out(past_z + slot * (past_tokens * HK) + q, small[6], HK, tokens)


@gluon.jit
def move_tail(
    small, tails, head, slot, tail_slot, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """The tail, past what is committed."""
    HK: gl.constexpr = H * K
    C: gl.constexpr = 2 * HK + H * V
    q, v = head * K, 2 * HK + head * V
    tail = tails + slot * tail_slot
    copy_tail(tail + HK + q, small[7], W, C)
    copy_tail(tail + v, small[8], W, C)
    copy_tail(tail + q, small[9], W, C)


@gluon.jit
def new_small(dtype: gl.constexpr, T: gl.constexpr, P: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """Shared memory for raw inputs: k, z and the tail's k of the remembered; k, v, q and z of the new, and what came
    before k, v and q."""
    return (
        gl.allocate_shared_memory(dtype, [P, K], TILE),
        gl.allocate_shared_memory(dtype, [P, K], TILE),
        gl.allocate_shared_memory(dtype, [4, K], TILE),
        gl.allocate_shared_memory(dtype, [T, K], TILE),
        gl.allocate_shared_memory(dtype, [T, V], TILE),
        gl.allocate_shared_memory(dtype, [T, K], TILE),
        gl.allocate_shared_memory(dtype, [T, K], TILE),
        gl.allocate_shared_memory(dtype, [4, K], TILE),
        gl.allocate_shared_memory(dtype, [4, V], TILE),
        gl.allocate_shared_memory(dtype, [4, K], TILE),
    )


@gluon.jit
def new_tiles(T: gl.constexpr, K: gl.constexpr, V: gl.constexpr):
    """alpha, k, q, v, beta and the scales of the new tokens."""
    alpha = gl.allocate_shared_memory(gl.float32, [T, K], TILE)
    k = gl.allocate_shared_memory(gl.float32, [T, K], TILE)
    q = gl.allocate_shared_memory(gl.float32, [T, K], TILE)
    v = gl.allocate_shared_memory(gl.float32, [T, V], TILE)
    beta = gl.allocate_shared_memory(gl.float32, [T, 1], TILE)
    per_k, per_q, kq = new_scales(T)
    return alpha, k, q, v, beta, per_k, per_q, kq


@gluon.jit
def weights_of(
    head, conv_weight, A_log, dt_bias,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The taps of q, k and v, the decay's rate (its logarithm) and bias: of every channel of a head."""
    q_K = head * K + gl.arange(0, K, layout=layout)
    v_V = 2 * H * K + head * V + gl.arange(0, V, layout=layout)
    q, k = load_taps(conv_weight + q_K * W, W), load_taps(conv_weight + (H * K + q_K) * W, W)
    return q, k, load_taps(conv_weight + v_V * W, W), gl.load(A_log + head), gl.load(dt_bias + q_K)


@gluon.jit
def betas(b, tokens: gl.constexpr, T: gl.constexpr, H: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [gl.num_warps(), 1], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, layout))[:, None]
    return gl.load(b + t_T1 * H, mask=t_T1 < tokens, other=0.0)


@gluon.jit
def new_inputs(
    small, tiles, weights, rate, b_T1, past_qkv, past_z, head, slot, lower_bound,
    tokens: gl.constexpr, past_tokens: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr, BOUNDED: gl.constexpr, LOG_T: gl.constexpr, line: gl.constexpr,
):  # fmt: skip
    """The tiles of the new tokens; and they are remembered. Everything is read before anything is written, so that the
    chains of the four tiles run beside one another: one alone waits at each step for exponentials and reciprocals."""
    T: gl.constexpr = 1 << LOG_T
    q_taps, k_taps, v_taps, _, dt_bias_K = weights
    k, k1_N, k2_N, k3_N = with_before(small[3], small[7], W, line)
    v, v1_N, v2_N, v3_N = with_before(small[4], small[8], W, line)
    q, q1_N, q2_N, q3_N = with_before(small[5], small[9], W, line)
    z = rows_of(small[6], line)
    keep_tokens(small, past_qkv, past_z, head, slot, tokens, past_tokens, H, K, V)
    k_TN = short_conv(k, k1_N, k2_N, k3_N, k_taps, W, T, LOG_T)
    v_TN = short_conv(v, v1_N, v2_N, v3_N, v_taps, W, T, LOG_T)
    q_TN = short_conv(q, q1_N, q2_N, q3_N, q_taps, W, T, LOG_T)
    alpha_TN = decays(z, dt_bias_K, rate, lower_bound, BOUNDED, T, LOG_T)
    beta_T1 = sigmoid(b_T1.to(gl.float32))
    tiles[1].store(k_TN)
    tiles[3].store(v_TN)
    tiles[2].store(q_TN)
    tiles[0].store(alpha_TN)
    tiles[4].store(beta_T1)


@gluon.jit
def past_inputs(
    small, k_past, alpha_past, weights, rate, lower_bound,
    W: gl.constexpr, BOUNDED: gl.constexpr, LOG_P: gl.constexpr, line: gl.constexpr,
):  # fmt: skip
    """k and alpha of the remembered tokens, in the same way."""
    P: gl.constexpr = 1 << LOG_P
    _, k_taps, _, _, dt_bias_K = weights
    k, k1_N, k2_N, k3_N = with_before(small[0], small[2], W, line)
    z = rows_of(small[1], line)
    k_PN = short_conv(k, k1_N, k2_N, k3_N, k_taps, W, P, LOG_P)
    alpha_PN = decays(z, dt_bias_K, rate, lower_bound, BOUNDED, P, LOG_P)
    k_past.store(k_PN)
    alpha_past.store(alpha_PN)


@gluon.jit
def store_outputs(y, o_smem, gate_smem, norm_smem, eps, tokens: gl.constexpr, HV: gl.constexpr, V: gl.constexpr):
    """The output's norm and gate; a warp has a token."""
    T: gl.constexpr = o_smem.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    t_T1 = gl.arange(0, T, layout=gl.SliceLayout(1, layout))[:, None]
    v_1V = gl.arange(0, V, layout=gl.SliceLayout(0, layout))[None, :]
    here = (t_T1 < tokens) & (v_1V >= 0)
    o_TV = o_smem.load(layout).to(gl.float32)
    weight_V = row_of(norm_smem, 0, gl.SliceLayout(0, layout))
    y_TV = gated_norm(o_TV, gate_smem.load(layout), weight_V, eps, V)
    gl.store(y + t_T1 * HV + v_1V, y_TV.to(y.dtype.element_ty), mask=here)


@gluon.jit
def verify(
    qkv, z, b, gate, y, past_qkv, past_z, past_u, accepted, conv_weight, A_log, dt_bias, norm_weight,
    tails, states, states_desc, slots, clocks, lower_bound, eps,
    tokens: gl.constexpr, past_tokens: gl.constexpr, qkv_row, z_row, b_row, gate_row, tail_slot, state_slot, items,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, W: gl.constexpr, BOUNDED: gl.constexpr, LANES: gl.constexpr,
    LOG_T: gl.constexpr, LOG_P: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Commit, then try, as in the twin, for every head of every row. Tiles have T = 2^LOG_T and P = 2^LOG_P rows.
    AHEAD: shared memory has room for a state, else it comes when it is needed."""
    T: gl.constexpr = 1 << LOG_T
    P: gl.constexpr = 1 << LOG_P
    HV: gl.constexpr = H * V
    line: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows: gl.constexpr = max(1, V * LANES // (32 * gl.num_warps()))
    S_layout: gl.constexpr = gl.BlockedLayout([rows, 4], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0])
    over_K: gl.constexpr = gl.SliceLayout(0, S_layout)
    over_V: gl.constexpr = gl.SliceLayout(1, S_layout)

    norm_smem = gl.allocate_shared_memory(gl.float32, [1, V], TILE)
    as_rows(norm_smem).index(0).store(gl.load(norm_weight + gl.arange(0, V, layout=line)))
    if AHEAD:
        stage = gl.allocate_shared_memory(gl.float32, [V, K], states_desc.layout)
        arrived = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(arrived, count=1)
        fence_async_shared()
    small = new_small(qkv.dtype.element_ty, T, P, K, V)
    u_smem = gl.allocate_shared_memory(gl.float32, [P, V], TILE)
    gate_smem = gl.allocate_shared_memory(gate.dtype.element_ty, [T, V], TILE)

    program, programs = gl.program_id(0), gl.num_programs(0)
    place = first_place(items, H)
    found = ask_for(place[0], place[1], program, items, slots, accepted)
    head, row, slot, count = item_of(found, past_tokens)
    place = place_after(place[0], place[1], items, H)
    found = ask_for(place[0], place[1], program + programs, items, slots, accepted)
    b_T1 = betas(b, 0, T, H)
    if AHEAD:
        fetch_state(stage, arrived, states_desc, slot, head, state_slot, V, K)
    if slot >= 0:
        fetch_tokens(
            small, qkv, z, past_qkv, past_z, tails, head, row, slot, count, qkv_row, z_row, tail_slot,
            tokens, W - 1, past_tokens, H, K, V, W,
        )  # fmt: skip
        b_T1 = betas(b + row * b_row + head, tokens, T, H)
    async_copy.commit_group()
    if slot >= 0:
        fetch_rows(u_smem, past_u + slot * (past_tokens * HV) + head * V, HV, count)
    async_copy.commit_group()

    weights, phase = weights_of(head, conv_weight, A_log, dt_bias, H, K, V, W, line), 0
    for item in range(program, items, programs):
        head1, row1, slot1, count1 = item_of(found, past_tokens)
        k_past = gl.allocate_shared_memory(gl.float32, [P, K], TILE)
        alpha_past = gl.allocate_shared_memory(gl.float32, [P, K], TILE)
        tiles = new_tiles(T, K, V)
        mark(clocks, item, 0)
        async_copy.wait_group(1)  # not for writes
        mark(clocks, item, 1)
        if slot >= 0:
            rate = gl.exp(weights[3])
            if count > 0:
                past_inputs(small, k_past, alpha_past, weights, rate, lower_bound, W, BOUNDED, LOG_P, line)
                move_tail(small, tails, head, slot, tail_slot, H, K, V, W)
            new_inputs(
                small, tiles, weights, rate, b_T1, past_qkv, past_z, head, slot, lower_bound,
                tokens, past_tokens, H, K, V, W, BOUNDED, LOG_T, line,
            )  # fmt: skip
        barrier()  # the raw inputs have been read
        store_scales(tiles[1], tiles[2], (tiles[5], tiles[6], tiles[7]), T, K)  # of an idle row, of nothing
        async_copy.wait_group(0)
        barrier()
        mark(clocks, item, 2)
        state_VK = state_of(states, gl.maximum(slot, 0), head, state_slot, V, K, S_layout)
        if AHEAD:
            mbarrier.wait(arrived, phase, pred=slot >= 0)
            phase = gl.where(slot >= 0, 1 - phase, phase)
            S_VK = stage.load(S_layout)
        else:
            S_VK = gl.load(state_VK)
        there = slot1 >= 0  # no branch: addresses are found while the state comes
        fetch_tokens(
            small, qkv, z, past_qkv, past_z, tails, head1, row1, gl.maximum(slot1, 0), count1,
            qkv_row, z_row, tail_slot, gl.where(there, tokens, 0), gl.where(there, W - 1, 0),
            past_tokens, H, K, V, W,
        )  # fmt: skip
        b_T1 = betas(b + row1 * b_row + head1, gl.where(there, tokens, 0), T, H)
        fetch_rows(gate_smem, gate + row * gate_row + head * V, HV, gl.where(slot >= 0, tokens, 0))
        place = place_after(found[0], found[1], items, H)
        found = ask_for(place[0], place[1], item + 2 * programs, items, slots, accepted)
        async_copy.commit_group()
        mark(clocks, item, 3)

        for t in range(count):
            S_VK = write(S_VK, row_of(alpha_past, t, over_K), row_of(u_smem, t, over_V), row_of(k_past, t, over_K))
        if count > 0:
            if AHEAD:
                send_state(stage, S_VK, states_desc, slot, head, state_slot, V, K)
            else:
                gl.store(state_VK, S_VK)
        mark(clocks, item, 4)
        y_row, u_row = y + row * (tokens * HV) + head * V, past_u + slot * (past_tokens * HV) + head * V
        o_smem = gl.allocate_shared_memory(y.dtype.element_ty, [T, V], TILE)
        if slot >= 0:
            for t in range(tokens - 1):
                if AHEAD and t == FETCH_AT:
                    fetch_state(stage, arrived, states_desc, slot1, head1, state_slot, V, K)
                S_VK = draft(S_VK, t, tiles, u_row, o_smem, HV, V, K)
        if AHEAD and (slot < 0 or tokens - 1 <= FETCH_AT):
            fetch_state(stage, arrived, states_desc, slot1, head1, state_slot, V, K)
        async_copy.wait_group(0)  # for gates
        barrier()  # every warp has replayed
        fetch_rows(u_smem, past_u + slot1 * (past_tokens * HV) + head1 * V, HV, count1)
        async_copy.commit_group()
        if slot >= 0 and tokens > 0:
            draft(S_VK, tokens - 1, tiles, u_row, o_smem, HV, V, K)  # nobody needs the state after it
        mark(clocks, item, 5)
        if slot >= 0:
            store_outputs(y_row, o_smem, gate_smem, norm_smem, eps, tokens, HV, V)
        else:
            clear(y_row, tokens, T, V, HV)
        if (head1 != head) & (item + programs < items):
            weights = weights_of(head1, conv_weight, A_log, dt_bias, H, K, V, W, line)
        mark(clocks, item, 6)
        head, row, slot, count = head1, row1, slot1, count1
    async_copy.wait_group(0)
    tma.store_wait(0)
    if AHEAD:
        give_up(arrived)
