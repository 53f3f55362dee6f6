"""KDA forward on a GPU: two kernels, `intra.py` for what chunks do alone, `state_pass.py` for the recurrence.

What the backward pass reads besides the op's inputs is T and A of the chunks m of `packing.chunks(64)`:

    T [D, M, H, 64, 64] bf16   (I + L)^-1          A [M, H, 64, 64] bf16   scores times beta, diagonal included

both lower triangular, zeros above the diagonal and in the rows and columns of a tail that hold no token, but for T's
diagonal of ones. Where gradients are wanted T has two digits, D = 2: the second is what rounding took from the first,
and only the backward pass reads it. -W, q 2^G, beta k 2^(Gc-G) and 2^Gc live only from one kernel to the next; `intra`
makes them again from a given T, without the solve.

Suffixes: N packed tokens, S sequences, M chunks, H heads, C = 64 rows of a chunk, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rille.ops.kda.arguments import Between, Gate, PooledState, State, copy
from rille.ops.kda.chunk import CHUNK, TILE, check_lower_bound
from rille.ops.kda.intra import intra_kernel
from rille.ops.kda.operands import (
    INTERPRET,
    Intra,
    dense_states,
    multiprocessors,
    operand_type,
    packed_heads,
    packed_states,
    types,
)
from rille.ops.kda.segment_launch import border_states
from rille.ops.kda.segments import Segments, segments_of
from rille.ops.kda.state_pass import state_pass_kernel
from rille.ops.launching import heads_of, launch, rows_of, tiles_of
from rille.ops.registering import op
from rille.packing import Packing

TILED = not INTERPRET  # the first kernel in Gluon; where this is False its Triton twin runs
RING = not INTERPRET  # the same of the state pass
KEY_WIDTHS, VALUE_WIDTHS = (64, 128), (64, 128, 256)


class Forward(NamedTuple):
    o_NHV: Tensor
    final_SHVK: Tensor | None
    t_DMHCC: Tensor  # as in `Intra`; D = 2 where gradients are wanted
    a_MHCC: Tensor


def unsupported(q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor) -> str:
    """Why these kernels cannot run on such tensors, or an empty string."""
    K, V = q_NHK.shape[2], v_NHV.shape[2]
    if K not in KEY_WIDTHS or V not in VALUE_WIDTHS:
        return f"head widths K {K}, V {V}; the kernels are made for K in {KEY_WIDTHS}, V in {VALUE_WIDTHS}"
    if not q_NHK.is_cuda and not INTERPRET:
        return f"tensors on {q_NHK.device.type}"
    if any(x.dtype == torch.float64 for x in (q_NHK, k_NHK, v_NHV, z_NHK, b_NH)):
        return "float64 tensors"
    return ""


def forward(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    state: State = None,
    through: Callable[..., tuple[Tensor, ...]] | None = None,
) -> Forward:
    """The op's arguments (`kda`) to its results and what the backward pass needs. No wait for the device anywhere.

    q, k, v, z of any float type but float64; products take bf16 operands and sum in fp32. Under Triton's interpreter
    operands of fp32 inputs stay fp32. final_SHVK is fp32; a pool is read and written in place and gives None. Raises
    ValueError for a lower bound below -5. through: takes the place of the op where gradients are wanted.
    """
    check_lower_bound(gate)
    chunks, between = packing.chunks(CHUNK), state.between if isinstance(state, PooledState) else None
    indices = (chunks.spans if between is None else between.spans, packing.starts, packing.longest_first, chunks.first)
    tensors, bound = (q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate.A_log, gate.dt_bias), gate.lower_bound
    inputs = (*tensors, bound if bound is None else float(bound), *indices)
    (_, H, K), V = q_NHK.shape, v_NHV.shape[2]
    gradients = differentiated(*tensors, state if isinstance(state, Tensor) else None)
    segments = list(segments_of(packing, H, multiprocessors(q_NHK.device), K, V, gradients) or ())
    if isinstance(state, PooledState):
        pooled = (state.pool, state.slots, state.checkpoints, segments, second_pass(between))
        o_NHV, t_DMHCC, a_MHCC = forward_in_pool_op(*inputs, *pooled)
        return Forward(o_NHV, None, t_DMHCC, a_MHCC)
    run, initial_SHVK = through or forward_op, None if state is None else dense_states(state)
    return Forward(*run(*inputs, initial_SHVK, segments, 2 if gradients else 1)[:4])


def differentiated(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def forward_from_states(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    spans_M2: Tensor,
    starts: Tensor,
    order_S: Tensor,
    first_S: Tensor,
    initial_SHVK: Tensor | None,
    segments: list[Tensor],
    digits: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """o, final states, T, A. segments: fields of `Segments`, or none; then `border_states` of them, else empty.
    digits: of T, 1, or 2 for a backward pass."""
    chunks = intra(q_NHK, k_NHK, z_NHK, b_NH, A_log, dt_bias, lower_bound, spans_M2, digits=digits)
    (_, H, V), K, S = v_NHV.shape, q_NHK.shape[2], first_S.shape[0]
    final_SHVK = v_NHV.new_empty(S, H, V, K, dtype=torch.float32)
    o_NHV, *borders = recurrence(segments, chunks, v_NHV, starts, order_S, first_S, initial_SHVK, final_SHVK)
    return o_NHV, final_SHVK, chunks.t_DMHCC, chunks.a_MHCC, borders[0], borders[1]


forward_op = op("rille::kda_forward")(forward_from_states)


@forward_op.register_fake
def _(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, A_log, dt_bias, lower_bound, spans_M2, starts, order_S, first_S, *rest):
    _, segments, digits = rest
    (_, H, V), K, S = v_NHV.shape, q_NHK.shape[2], first_S.shape[0]
    o_NHV, t_DMHCC, a_MHCC = fake_outputs(q_NHK, v_NHV, spans_M2, digits)
    borders = [(0,), (0,)]
    if segments:
        cut = Segments(*segments)
        borders = [(cut.first_G.shape[0], H, V, K), (cut.products_P2.shape[0], H, K, K)]
    states = [v_NHV.new_empty(size, dtype=torch.float32) for size in ((S, H, V, K), *borders)]
    return o_NHV, states[0], t_DMHCC, a_MHCC, states[1], states[2]


def forward_in_pool(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    spans_M2: Tensor,
    starts: Tensor,
    order_S: Tensor,
    first_S: Tensor,
    pool: Tensor,
    slots_S: Tensor,
    checkpoints_M: Tensor | None,
    segments: list[Tensor],
    between: list[Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """o, T, A; the states of the sequences and of the checkpoints in the pool. between: of `second_pass`, or none; its
    chunks are the last ones of the spans."""
    copied, rest = between[:4], between[4:]
    if rest:
        copy(pool, *copied[:2])
    chunks = intra(q_NHK, k_NHK, z_NHK, b_NH, A_log, dt_bias, lower_bound, spans_M2)
    o_NHV, *_ = recurrence(segments, chunks, v_NHV, starts, order_S, first_S, pool, pool, slots_S, checkpoints_M)
    if rest:
        rows_R, starts_Q1, order_Q, first_Q, slots_Q = rest
        copy(pool, *copied[2:])
        state_pass(chunks, v_NHV[rows_R], starts_Q1, order_Q, first_Q, pool, pool, slots_Q)
    return o_NHV, chunks.t_DMHCC, chunks.a_MHCC


def second_pass(between: Between | None) -> list[Tensor]:
    """The chunks that end at its places are made with all others; only the pass over them is one of its own."""
    if between is None:
        return []
    indices = (between.packing.starts, between.packing.longest_first, between.first)
    return [*between.before, *between.after, between.rows, *indices, between.slots]


forward_in_pool_op = op("rille::kda_forward_in_pool", mutated=("pool",))(forward_in_pool)


@forward_in_pool_op.register_fake
def _(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, A_log, dt_bias, lower_bound, spans_M2, *rest):
    return fake_outputs(q_NHK, v_NHV, spans_M2)


def fake_outputs(q_NHK: Tensor, v_NHV: Tensor, spans_M2: Tensor, digits: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    M, H = spans_M2.shape[0], q_NHK.shape[1]
    t_DMHCC = q_NHK.new_empty(digits, M, H, CHUNK, CHUNK, dtype=operand_type(q_NHK))
    return v_NHV.new_empty(v_NHV.shape), t_DMHCC, torch.empty_like(t_DMHCC[0])


def intra(
    q_NHK: Tensor,
    k_NHK: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    lower_bound: float | None,
    spans_M2: Tensor,
    t_DMHCC: Tensor | None = None,
    digits: int = 1,
) -> Intra:
    """The first kernel. With a given T its solve is left out and A comes back empty; only T's first digit is read."""
    (_, H, K), M = q_NHK.shape, spans_M2.shape[0]
    dtype, solved = operand_type(q_NHK), t_DMHCC is not None
    w_MHCK, q_MHCK, k_MHCK = (q_NHK.new_empty(M, H, CHUNK, K, dtype=dtype) for _ in range(3))
    if t_DMHCC is None:
        t_DMHCC = q_NHK.new_empty(digits, M, H, CHUNK, CHUNK, dtype=dtype)
    a_MHCC = q_NHK.new_empty(0 if solved else M, H, CHUNK, CHUNK, dtype=dtype)
    decay_MHK = q_NHK.new_empty(M, H, K, dtype=torch.float32)
    made = Intra(t_DMHCC, a_MHCC, w_MHCK, q_MHCK, k_MHCK, decay_MHK)
    if M * H:
        heads = [packed_heads(x) for x in (q_NHK, k_NHK, z_NHK)]
        others = (packed_heads(b_NH), A_log, dt_bias.contiguous(), spans_M2)
        if TILED and not solved and all(for_tma(x) for x in heads):
            launch_tiles(heads, others, made, lower_bound)
        else:
            launch_intra(heads, others, made, lower_bound, solved)
    return made


def for_tma(x_NHK: Tensor) -> bool:
    """bf16 that the TMA unit can address: rows and the first element at multiples of 16 bytes, and no row that begins
    inside another one, as those of an expanded tensor do."""
    row, width = x_NHK.stride(0), x_NHK.shape[1] * x_NHK.shape[2]
    return x_NHK.dtype == torch.bfloat16 and row % 8 == 0 and row >= width and x_NHK.data_ptr() % 16 == 0


def launch_tiles(heads: list[Tensor], others: tuple, made: Intra, lower_bound: float | None) -> None:
    from rille.ops.kda.intra_gluon import intra_tile_kernel
    from rille.ops.kda.intra_softplus_gluon import intra_softplus_kernel

    (_, H, K), M = heads[0].shape, made.decay_MHK.shape[0]
    squares = (made.t_DMHCC, made.a_MHCC, made.minus_w_MHCK)
    tiles = (*(heads_of(x, CHUNK, K) for x in heads), *(tiles_of(x, CHUNK) for x in squares))
    bounds = () if lower_bound is None else (lower_bound,)
    arguments = (*tiles, *others, *made[3:], others[0].stride(0), *bounds, K**-0.5)
    shape = dict(H=H, K=K, DIGITS=made.t_DMHCC.shape[0], **tile_options(K, bool(bounds)))
    launch(intra_tile_kernel if bounds else intra_softplus_kernel, M * H, arguments, **shape)


def tile_options(K: int, bounded: bool) -> dict[str, int]:
    """Of the first kernel in Gluon: three programs of 4 warps share a multiprocessor, or two of 8."""
    warps = 4 if bounded else K // 16
    return dict(num_warps=warps, maxnreg=168 if warps == 4 else 128)


def launch_intra(heads: list[Tensor], others: tuple, made: Intra, lower_bound: float | None, solved: bool) -> None:
    (_, H, K), M, dtype = heads[0].shape, made.decay_MHK.shape[0], made.t_DMHCC.dtype
    strides = [x.stride(0) for x in (*heads, others[0])]
    inputs = (*heads, *others, anchors(heads[0].device, dtype))
    shape = dict(H=H, K=K, BOUNDED=lower_bound is not None, **types(dtype), SOLVED=solved)
    shape |= dict(DIGITS=made.t_DMHCC.shape[0], num_warps=4)
    launch(intra_kernel, M * H, (*inputs, *made, *strides, lower_bound or 0.0, K**-0.5), **shape)


def recurrence(
    segments: list[Tensor],
    chunks: Intra,
    v_NHV: Tensor,
    starts: Tensor,
    order_S: Tensor,
    first_S: Tensor,
    initial: Tensor | None,
    final: Tensor,
    slots_S: Tensor | None = None,
    checkpoints_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`state_pass`, over segments where there are some: o, and what `border_states` gives."""
    if not segments:
        o_NHV = state_pass(chunks, v_NHV, starts, order_S, first_S, initial, final, slots_S, checkpoints_M)
        return o_NHV, v_NHV.new_empty(0, dtype=torch.float32), v_NHV.new_empty(0, dtype=torch.float32)
    cut = Segments(*segments)
    before_GHVK, transitions_PHKK = border_states(chunks, v_NHV, cut, initial, slots_S)
    after_GHVK = torch.empty_like(before_GHVK)
    indices, states = (cut.starts_G1, cut.order_G, cut.first_G), (before_GHVK, after_GHVK)
    o_NHV = state_pass(chunks, v_NHV, *indices, *states, None, checkpoints_M, final)
    if slots_S is None:
        torch.index_select(after_GHVK, 0, cut.last_S, out=final)
    else:
        final.index_copy_(0, slots_S, after_GHVK.index_select(0, cut.last_S).to(final.dtype))
    return o_NHV, before_GHVK, transitions_PHKK


def state_pass(
    chunks: Intra,
    v_NHV: Tensor,
    starts: Tensor,
    order_S: Tensor,
    first_S: Tensor,
    initial: Tensor | None,
    final: Tensor | None,
    slots_S: Tensor | None = None,
    checkpoints_M: Tensor | None = None,
    saved: Tensor | None = None,
) -> Tensor:
    """The second kernel: o. initial and final [slots, H, V, K] may be one pool; slots_S says which row a sequence has
    (its own number by default), checkpoints_M into which row of saved, or else of final, the state after each chunk
    goes (-1: none)."""
    (N, H, V), S = v_NHV.shape, first_S.shape[0]
    v_NHV = packed_heads(v_NHV)
    o_NHV = v_NHV.new_empty(N, H, V)
    if S * H == 0:
        return o_NHV
    if N == 0:
        if final is not None and final is not initial:
            final.zero_() if initial is None else final.copy_(initial)
        return o_NHV
    split = value_block(V, S * H, multiprocessors(v_NHV.device))
    initial, final, saved = packed_states(initial), packed_states(final), packed_states(saved)
    if checkpoints_M is None:
        saved = None
    elif saved is None:
        saved = final
    strides = [x.stride(0) if x is not None else 0 for x in (initial, final, saved)]
    indices = (starts, order_S, first_S, initial, final, slots_S, saved, checkpoints_M, *strides)
    launch_pass = launch_ring if RING and split.ring and for_tma(v_NHV) else launch_twin
    launch_pass(chunks, v_NHV, o_NHV, indices, S * H * (V // split.BV), split)
    return o_NHV


class Split(NamedTuple):
    """How the state pass divides V: value channels a program, warps, stages of the loads, in Gluon or not."""

    BV: int
    num_warps: int
    stages: int
    ring: bool


def value_block(V: int, programs: int, multiprocessors: int) -> Split:
    """128 channels share one read of the other operands. 64 give twice the programs, better as long as all of them run
    at once. Where those nearly fill the card (120 of 132 multiprocessors, not yet 96), memory is the limit and
    neighbours must read the same rows at the same time: Gluon's fetching warps run ahead and apart, Triton's do not."""
    programs *= V // 64
    if V > 64 and programs > multiprocessors:
        return Split(128, 8, 2, ring=True)
    return Split(64, 4, 3, ring=not 5 * multiprocessors < 6 * programs <= 6 * multiprocessors)


def launch_twin(
    chunks: Intra, v_NHV: Tensor, o_NHV: Tensor, indices: tuple[Any, ...], programs: int, split: Split
) -> None:
    (_, H, V), K, dtype = v_NHV.shape, chunks.decay_MHK.shape[2], chunks.t_DMHCC.dtype
    tiles = [rows_of(x, CHUNK) for x in chunks[:5]]
    # storing states takes the shared memory of a stage, and so do rows of fp32
    stages = split.stages if indices[6] is None and v_NHV.element_size() == 2 else 2
    shape = dict(H=H, K=K, V=V, BV=split.BV, **types(dtype), STAGES=stages, num_warps=split.num_warps)
    pointers = (v_NHV, chunks.decay_MHK, o_NHV, *indices[:8])
    launch(state_pass_kernel, programs, (*tiles, *pointers, v_NHV.stride(0), *indices[8:]), **shape)


def launch_ring(
    chunks: Intra, v_NHV: Tensor, o_NHV: Tensor, indices: tuple[Any, ...], programs: int, split: Split
) -> None:
    from rille.ops.kda.state_pass_gluon import state_pass_ring_kernel

    (_, H, V), K, BV = v_NHV.shape, chunks.decay_MHK.shape[2], split.BV
    tiles = [tiles_of(x, CHUNK) for x in chunks[:5]]
    tiles += [heads_of(v_NHV, CHUNK, BV), tiles_of(chunks.decay_MHK, 1), heads_of(o_NHV, CHUNK, BV)]
    shape = dict(H=H, K=K, V=V, BV=BV, STAGES=split.stages, num_warps=split.num_warps)
    launch(state_pass_ring_kernel, programs, (*tiles, o_NHV, *indices), **shape)


@lru_cache
def anchors(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[C, C]: row i times g is G_i minus G at the border between the two tiles of i's half."""
    row = torch.arange(CHUNK)
    i, j = row[:, None], row[None, :]
    border = i // (2 * TILE) * 2 * TILE + TILE  # first row after the border
    through, before = (j >= border) & (j <= i), (j > i) & (j < border)
    return (through.to(dtype) - before.to(dtype)).to(device)
