"""Launches of `segment_pass.py`, and the state pass over segments in place of sequences.

Suffixes: N packed tokens, S sequences, M chunks, G segments, P transitions, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rille.ops.kda.arguments import Gate
from rille.ops.kda.chunk import CHUNK, check_lower_bound
from rille.ops.kda.forward import Intra, intra, packed_heads, packed_states, state_pass, types
from rille.ops.kda.segment_pass import fold_kernel, segment_kernel
from rille.ops.kda.segments import Segments, by_row, flat, on_device
from rille.packing import Packing

ROWS = 64  # of a state or a transition in one program of the segment kernel
SEGMENT_OPTIONS: dict[str, Any] = {"STAGES": 2, "num_warps": 4}  # two programs share a multiprocessor
FOLD_OPTIONS: dict[str, Any] = {"BV": 16, "num_warps": 8}


def segmented_state_pass(
    chunks: Intra,
    v_NHV: Tensor,
    segments: Segments,
    initial: Tensor | None,
    final: Tensor | None,
    slots_S: Tensor | None = None,
    checkpoints_M: Tensor | None = None,
) -> Tensor:
    """`forward.state_pass` with the same arguments and results, all segments at once."""
    states_GHVK = border_states(chunks, v_NHV, segments, initial, slots_S)
    indices = (segments.starts_G1, segments.order_G, segments.first_G)
    saved = final if checkpoints_M is not None else None
    o_NHV = state_pass(chunks, v_NHV, *indices, states_GHVK, states_GHVK, None, checkpoints_M, saved)
    if final is not None:
        last_SHVK = states_GHVK.index_select(0, segments.last_S)
        if slots_S is None:
            final.copy_(last_SHVK)
        else:
            final.index_copy_(0, slots_S, last_SHVK.to(final.dtype))
    return o_NHV


def border_states(
    chunks: Intra, v_NHV: Tensor, segments: Segments, initial: Tensor | None, slots_S: Tensor | None = None
) -> Tensor:
    """fp32 [G, H, V, K]: the state before each segment."""
    (_, H, V), K, G = v_NHV.shape, chunks.decay_MHK.shape[2], segments.first_G.shape[0]
    states_GHVK = v_NHV.new_empty(G, H, V, K, dtype=torch.float32)
    tables = (segments.jobs_J6, segments.products_P2)
    transitions_PHKK = run_segments(chunks, v_NHV, *tables, initial, slots_S, states_GHVK)
    fold(states_GHVK, transitions_PHKK, segments.chains_Q3)
    return states_GHVK


def run_segments(
    chunks: Intra,
    v_NHV: Tensor,
    jobs_J6: Tensor,
    products_P2: Tensor,
    initial: Tensor | None,
    slots_S: Tensor | None,
    states_GHVK: Tensor,
) -> Tensor:
    """Launch `segment_kernel`: fills rows of the states, returns the transitions fp32 [P, H, K, K]."""
    (_, H, V), K, dtype = v_NHV.shape, chunks.decay_MHK.shape[2], chunks.t_MHCC.dtype
    v_NHV, initial = packed_heads(v_NHV), packed_states(initial)
    transitions_PHKK = v_NHV.new_empty(products_P2.shape[0], H, K, K, dtype=torch.float32)
    operands = (chunks.t_MHCC, chunks.minus_w_MHCK, chunks.k_end_MHCK)
    tiles = [TensorDescriptor.from_tensor(x.view(-1, x.shape[-1]), [CHUNK, x.shape[-1]]) for x in operands]
    locals_ = jobs_J6.shape[0] * H * (V // ROWS)
    launch: Any = segment_kernel[(locals_ + products_P2.shape[0] * H * (K // ROWS),)]
    launch(
        *tiles, v_NHV, chunks.decay_MHK, jobs_J6, products_P2, initial, slots_S, states_GHVK, transitions_PHKK,
        locals_, v_NHV.stride(0), initial.stride(0) if initial is not None else 0,
        H=H, K=K, V=V, BV=ROWS, **types(dtype), **SEGMENT_OPTIONS,
    )  # fmt: skip
    return transitions_PHKK


def fold(states_GHVK: Tensor, transitions_PHKK: Tensor, chains_Q3: Tensor) -> None:
    """Launch `fold_kernel`: the states after the first of each chain, in place."""
    _, H, V, K = states_GHVK.shape
    if chains_Q3.shape[0]:
        launch: Any = fold_kernel[(chains_Q3.shape[0] * H * (V // FOLD_OPTIONS["BV"]),)]
        launch(states_GHVK, transitions_PHKK, chains_Q3, H=H, K=K, V=V, **FOLD_OPTIONS)


def transition(
    k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, packing: Packing
) -> tuple[Tensor, Tensor]:
    """`segments.segment_transition` by the kernels."""
    check_lower_bound(gate)
    chunks = packing.chunks(CHUNK)
    (_, H, K), V, S = k_NHK.shape, v_NHV.shape[2], packing.num_sequences
    local_SHVK = v_NHV.new_empty(S, H, V, K, dtype=torch.float32)
    if packing.num_tokens * H == 0:
        return torch.eye(K, device=v_NHV.device).repeat(S, H, 1, 1), local_SHVK.zero_()
    made = intra(k_NHK, k_NHK, z_NHK, b_NH, gate.A_log, gate.dt_bias, gate.lower_bound, chunks.spans)
    return transition_of_chunks(made, v_NHV, packing, local_SHVK)


def transition_of_chunks(made: Intra, v_NHV: Tensor, packing: Packing, local_SHVK: Tensor) -> tuple[Tensor, Tensor]:
    """P and local of each sequence from what the first kernel has made of its chunks; fills local [S, H, V, K]."""
    jobs, products, start, first = [], [], 0, 0
    for s, (tokens, count) in enumerate(zip(packing.lengths, packing.chunks(CHUNK).per_sequence, strict=True)):
        jobs.append((start, tokens, first, -1, -1, s))
        products.append((first, count))
        start, first = start + tokens, first + count
    jobs_J6, products_P2 = by_row(on_device([flat(jobs), flat(products)], torch.int32, packing.device), (6, 2))
    return run_segments(made, v_NHV, jobs_J6, products_P2, None, None, local_SHVK), local_SHVK
