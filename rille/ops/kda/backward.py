"""KDA backward on a GPU: four kernels and two sums, in the order of `chunk_backward.py`.

Saved by the forward pass: the op's inputs, T in two digits, A. Made again here, because they are larger and cheap:

    prepare   q 2^G, k 2^G, beta k 2^(Gc-G) in two digits, sums of the decay, norms
    states    S before each chunk, U                       first chunk to last
    reverse   dV, the gradient of the state after each chunk      last chunk to first
    local     dq, dk, dz, db; each chunk's part of ddt_bias and dA_log

No atomics: the parts of ddt_bias and dA_log lie one after another, fp32, and are summed in a fixed order, so that a
gradient is the same bit for bit in every run.

Suffixes: N packed tokens, S sequences, M chunks, H heads, C = 64 rows of a chunk, K key channels, V value channels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rille.ops.kda.backward_kernels import prepare_kernel, reverse_kernel, states_kernel
from rille.ops.kda.backward_local import local_kernel
from rille.ops.kda.chunk import CHUNK
from rille.ops.kda.forward import anchors, for_tma
from rille.ops.kda.operands import multiprocessors, operand_type, packed_heads, types
from rille.ops.kda.segment_launch import border_gradients
from rille.ops.kda.segments import Segments
from rille.ops.launching import launch, rows_of

TILED, TILED_PREPARE = True, True  # the last and the first kernel in Gluon where they can run, not their Triton twins
SOFTPLUS_TILED = True  # likewise the last one for the softplus gate


class Prepared(NamedTuple):
    """Operands of the two passes and numbers of the last kernel, in chunk layout."""

    q_start_MHCK: Tensor  # q 2^G, normalised and scaled
    k_start_MHCK: Tensor  # -k 2^G, normalised
    k_end_DMHCK: Tensor  # beta k 2^(Gc-G), normalised, in as many digits as T; `states` alone reads the second
    decay_MHK: Tensor  # 2^Gc
    totals_MH4K: Tensor  # log2-decay summed over each tile of 16 rows
    norms_MH4C: Tensor  # what normalises q (without K^-0.5), and k; beta; room for sum_V dV v


class Gradients(NamedTuple):
    q_NHK: Tensor
    k_NHK: Tensor
    v_NHV: Tensor
    z_NHK: Tensor
    b_NH: Tensor
    A_log: Tensor
    dt_bias_HK: Tensor
    initial_SHVK: Tensor | None


class Inputs(NamedTuple):
    """The op's arguments. spans_M2, starts, order_S, first_S: `packing.chunks(64).spans`, `packing.starts`,
    `packing.longest_first`, `packing.chunks(64).first`."""

    q_NHK: Tensor
    k_NHK: Tensor
    v_NHV: Tensor
    z_NHK: Tensor
    b_NH: Tensor
    A_log: Tensor
    dt_bias_HK: Tensor
    lower_bound: float | None
    spans_M2: Tensor
    starts: Tensor
    order_S: Tensor
    first_S: Tensor
    initial_SHVK: Tensor | None


class Cut(NamedTuple):
    """Sequences cut into segments (`segments.py`), and what the forward pass found at their borders: the state before
    each segment, the transitions of those in the middle."""

    before_GHVK: Tensor
    transitions_PHKK: Tensor
    segments: Segments


def backward(
    inputs: Inputs,
    t_DMHCC: Tensor,
    a_MHCC: Tensor,
    do_NHV: Tensor,
    dfinal_SHVK: Tensor | None,
    cut: Cut | None = None,
) -> Gradients:
    """Gradients of sum(o do) + sum(final dfinal), each in its input's type; those of A_log, dt_bias and the initial
    states in fp32. t, a: from `forward.forward`."""
    packed = (packed_heads(x) for x in inputs[:5])
    inputs = inputs._replace(
        **dict(zip(Inputs._fields[:5], packed, strict=True)), dt_bias_HK=inputs.dt_bias_HK.contiguous()
    )
    do_NHV = packed_heads(do_NHV)
    if inputs.spans_M2.shape[0] * inputs.q_NHK.shape[1] == 0:
        return without_tokens(inputs, dfinal_SHVK)
    prepared = prepare(inputs, digits=t_DMHCC.shape[0])
    walked = inputs
    if cut is not None:
        walked, dfinal_SHVK = segments_as_sequences(inputs, prepared, t_DMHCC, a_MHCC, do_NHV, dfinal_SHVK, cut)
    u_MHCV, states_MHVK = states(walked, prepared, t_DMHCC)
    dv_NHV, dstates_MHVK, dinitial_SHVK = reverse(walked, prepared, t_DMHCC, a_MHCC, do_NHV, dfinal_SHVK)
    if cut is not None and dinitial_SHVK is not None:
        wanted = inputs.initial_SHVK is not None
        dinitial_SHVK = dinitial_SHVK.index_select(0, cut.segments.head_S) if wanted else None
    operands = (u_MHCV, states_MHVK, dstates_MHVK)
    numbers = (prepared.totals_MH4K, prepared.norms_MH4C)
    del prepared
    return local(inputs, do_NHV, dv_NHV, dinitial_SHVK, *operands, *numbers)


def segments_as_sequences(
    inputs: Inputs,
    prepared: Prepared,
    t_DMHCC: Tensor,
    a_MHCC: Tensor,
    do_NHV: Tensor,
    dfinal_SHVK: Tensor | None,
    cut: Cut,
) -> tuple[Inputs, Tensor]:
    """Inputs of the two passes, in which each segment is a sequence with its own initial state, and the gradients of
    the states after segments."""
    operands = (t_DMHCC, a_MHCC, prepared.q_start_MHCK, prepared.k_start_MHCK, prepared.k_end_DMHCK)
    gradients = (prepared.decay_MHK, cut.segments, cut.transitions_PHKK, dfinal_SHVK)
    dafter_GHVK = border_gradients(operands, do_NHV, *gradients)
    indices = dict(starts=cut.segments.starts_G1, order_S=cut.segments.order_G, first_S=cut.segments.first_G)
    return inputs._replace(**indices, initial_SHVK=cut.before_GHVK), dafter_GHVK


def without_tokens(inputs: Inputs, dfinal_SHVK: Tensor | None) -> Gradients:
    zeros = [torch.zeros_like(x) for x in inputs[:5]]
    parameters = [torch.zeros_like(x, dtype=torch.float32) for x in (inputs.A_log, inputs.dt_bias_HK)]
    dinitial_SHVK = None
    if inputs.initial_SHVK is not None:
        dinitial_SHVK = torch.zeros_like(inputs.initial_SHVK, dtype=torch.float32)
        dinitial_SHVK = dinitial_SHVK if dfinal_SHVK is None else dinitial_SHVK + dfinal_SHVK
    return Gradients._make([*zeros, *parameters, dinitial_SHVK])


def prepare(inputs: Inputs, digits: int) -> Prepared:
    q_NHK, k_NHK, z_NHK = inputs.q_NHK, inputs.k_NHK, inputs.z_NHK
    (_, H, K), M, dtype = q_NHK.shape, inputs.spans_M2.shape[0], operand_type(q_NHK)
    rows = [q_NHK.new_empty(*size, H, CHUNK, K, dtype=dtype) for size in ((M,), (M,), (digits, M))]
    numbers = [q_NHK.new_empty(M, H, *size, dtype=torch.float32) for size in ((K,), (4, K), (4, CHUNK))]
    prepared = Prepared(*rows, *numbers)
    arguments = (
        q_NHK, k_NHK, z_NHK, inputs.b_NH, inputs.A_log, inputs.dt_bias_HK, inputs.spans_M2,
        ones_of_half(q_NHK.device, dtype), *prepared,
        *(x.stride(0) for x in (q_NHK, k_NHK, z_NHK, inputs.b_NH)), inputs.lower_bound or 0.0, K**-0.5,
    )  # fmt: skip
    bounded = inputs.lower_bound is not None
    if TILED_PREPARE and bounded and K == 128 and all(for_tma(x) for x in (q_NHK, k_NHK, z_NHK)):
        from rille.ops.kda.backward_prepare_gluon import prepare_tile_kernel

        launch(prepare_tile_kernel, M * H, arguments, H=H, DIGITS=digits, num_warps=8, maxnreg=80)
    else:
        shape = dict(H=H, K=K, BOUNDED=bounded, **types(dtype), DIGITS=digits, num_warps=K // 16)
        launch(prepare_kernel, M * H, arguments, **shape)
    return prepared


def states(inputs: Inputs, prepared: Prepared, t_DMHCC: Tensor) -> tuple[Tensor, Tensor]:
    """U [M, H, C, V] and the state before each chunk [M, H, V, K]."""
    v_NHV, initial_SHVK = inputs.v_NHV, inputs.initial_SHVK
    (_, H, V), (M, _, K), dtype = v_NHV.shape, prepared.decay_MHK.shape, t_DMHCC.dtype
    u_MHCV, states_MHVK = (v_NHV.new_empty(M, H, *size, dtype=dtype) for size in ((CHUNK, V), (V, K)))
    block, num_warps = value_block(V, inputs.first_S.shape[0] * H, multiprocessors(v_NHV.device))
    tiles = [rows_of(x, CHUNK) for x in (t_DMHCC, prepared.k_start_MHCK, prepared.k_end_DMHCK)]
    arguments = (
        *tiles, identity(v_NHV.device, dtype),
        v_NHV, prepared.decay_MHK, rows_of(u_MHCV, CHUNK, block), rows_of(states_MHVK, block),
        inputs.starts, inputs.order_S, inputs.first_S,
        initial_SHVK.contiguous() if initial_SHVK is not None else None, v_NHV.stride(0), M * H,
    )  # fmt: skip
    shape = dict(H=H, K=K, V=V, BV=block, **types(dtype), DIGITS=t_DMHCC.shape[0], STAGES=2, num_warps=num_warps)
    launch(states_kernel, inputs.first_S.shape[0] * H * (V // block), arguments, **shape)
    return u_MHCV, states_MHVK


def reverse(
    inputs: Inputs, prepared: Prepared, t_DMHCC: Tensor, a_MHCC: Tensor, do_NHV: Tensor, dfinal_SHVK: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dv, the gradient of the state after each chunk [M, H, V, K], and that of the initial states if there are any."""
    (N, H, V), (M, _, K), dtype = do_NHV.shape, prepared.decay_MHK.shape, t_DMHCC.dtype
    S = inputs.first_S.shape[0]
    dv_NHV = inputs.v_NHV.new_empty(N, H, V)
    dstates_MHVK = do_NHV.new_empty(M, H, V, K, dtype=dtype)
    dinitial_SHVK = None
    if inputs.initial_SHVK is not None:
        dinitial_SHVK = do_NHV.new_empty(S, H, V, K, dtype=torch.float32)
    block, num_warps = value_block(V, S * H, multiprocessors(do_NHV.device))
    tiles = [rows_of(x, CHUNK) for x in (t_DMHCC, a_MHCC, *prepared[:3])]
    arguments = (
        *tiles, do_NHV, prepared.decay_MHK, dv_NHV, rows_of(dstates_MHVK, block),
        inputs.starts, inputs.order_S, inputs.first_S,
        dfinal_SHVK.contiguous() if dfinal_SHVK is not None else None, dinitial_SHVK, do_NHV.stride(0), M * H,
    )  # fmt: skip
    shape = dict(H=H, K=K, V=V, BV=block, **types(dtype), DIGITS=t_DMHCC.shape[0], STAGES=2, num_warps=num_warps)
    launch(reverse_kernel, S * H * (V // block), arguments, **shape)
    return dv_NHV, dstates_MHVK, dinitial_SHVK


def local(
    inputs: Inputs,
    do_NHV: Tensor,
    dv_NHV: Tensor,
    dinitial_SHVK: Tensor | None,
    u_MHCV: Tensor,
    states_MHVK: Tensor,
    dstates_MHVK: Tensor,
    totals_MH4K: Tensor,
    norms_MH4C: Tensor,
) -> Gradients:
    q_NHK, k_NHK, v_NHV, z_NHK, b_NH, A_log = inputs[:6]
    (_, H, K), V, M, dtype = q_NHK.shape, v_NHV.shape[2], inputs.spans_M2.shape[0], u_MHCV.dtype
    dq_NHK, dk_NHK, dz_NHK, db_NH = (x.new_empty(x.shape) for x in (q_NHK, k_NHK, z_NHK, b_NH))
    dbias_MHK, drate_MHK = (q_NHK.new_empty(M, H, K, dtype=torch.float32) for _ in range(2))
    arguments = (
        q_NHK, k_NHK, z_NHK, v_NHV, do_NHV, dv_NHV, A_log, inputs.dt_bias_HK, inputs.spans_M2,
        ones_of_half(q_NHK.device, dtype), u_MHCV, states_MHVK, dstates_MHVK, totals_MH4K, norms_MH4C,
        dq_NHK, dk_NHK, dz_NHK, db_NH, dbias_MHK, drate_MHK,
        *(x.stride(0) for x in (q_NHK, k_NHK, z_NHK, v_NHV, do_NHV)), inputs.lower_bound or 0.0, K**-0.5,
    )  # fmt: skip
    bounded = inputs.lower_bound is not None
    in_tiles = K == V == 128 and all(for_tma(x) for x in (*inputs[:4], do_NHV))
    if TILED and bounded and in_tiles:
        from rille.ops.kda.backward_local_gluon import local_tile_kernel

        launch(local_tile_kernel, M * H, arguments, H=H, num_warps=8)
    elif SOFTPLUS_TILED and not bounded and in_tiles:
        from rille.ops.kda.backward_softplus_gluon import softplus_tile_kernel

        ones = ones_of_tile(q_NHK.device, dtype)
        launch(softplus_tile_kernel, M * H, (*arguments[:9], ones, *arguments[10:]), H=H, num_warps=8)
    else:
        shape = dict(H=H, K=K, V=V, BV=min(V, 128), BOUNDED=bounded, **types(dtype), num_warps=K // 16)
        launch(local_kernel, M * H, arguments, **shape)
    dA_log = torch.zeros_like(A_log, dtype=torch.float32)
    dA_log[:H] = drate_MHK.sum((0, 2))
    return Gradients(dq_NHK, dk_NHK, dv_NHV, dz_NHK, db_NH, dA_log, dbias_MHK.sum(0), dinitial_SHVK)


def value_block(V: int, programs: int, multiprocessors: int) -> tuple[int, int]:
    """Value channels and warps a program of `states` and `reverse`. Shared memory has room for two stages of loads."""
    if V == 64 or programs * (V // 64) <= multiprocessors:
        return 64, 4
    return 128, 8


@lru_cache
def identity(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.eye(CHUNK, dtype=dtype, device=device)


@lru_cache
def ones_of_half(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[3, 32, 32], right operands of x^T: the identity; sums from the border between the tiles; sums over a row and the
    rows after it."""
    half = CHUNK // 2
    anchored = anchors(device, dtype)[:half, :half].T
    return torch.stack([torch.eye(half, dtype=dtype, device=device), anchored, torch.ones_like(anchored).tril()])


@lru_cache
def ones_of_tile(device: torch.device, dtype: torch.dtype) -> Tensor:
    """[4, 16, 16], right operands of x^T, rows j that are summed for column i: i and later rows; earlier rows; from the
    middle of i's block of 8 to i, negative where i comes first; from rows of the first block after i to the middle of
    the second."""
    i, j = torch.arange(16, device=device)[None, :], torch.arange(16, device=device)[:, None]
    middle = i // 8 * 8 + 4
    from_middle = ((j >= middle) & (j <= i)).int() - ((j > i) & (j < middle)).int()
    beyond = (j > i) & (j < middle + 8) & (i < 8)
    return torch.stack([x.to(dtype) for x in (j >= i, j < i, from_middle, beyond)])
