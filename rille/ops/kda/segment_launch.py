"""Launches of `segment_pass.py`: the states, or gradients of states, at the borders of segments.

Suffixes: N packed tokens, S sequences, M chunks, G segments, P transitions, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rille.ops.kda.chunk import CHUNK
from rille.ops.kda.operands import Intra, packed_heads, packed_states, types
from rille.ops.kda.segment_pass import fold_kernel, reverse_segment_kernel, segment_kernel
from rille.ops.kda.segments import Segments
from rille.ops.launching import launch, rows_of

ROWS = 64  # of a state or a transition in one program of the segment kernel
SEGMENT_OPTIONS: dict[str, Any] = {"STAGES": 3, "num_warps": 4}
FOLD_ROWS = 16  # the same of the fold


def border_states(
    chunks: Intra, v_NHV: Tensor, segments: Segments, initial: Tensor | None, slots_S: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The state before each segment, fp32 [G, H, V, K], and the transitions, fp32 [P, H, K, K]."""
    (_, H, V), K, G = v_NHV.shape, chunks.decay_MHK.shape[2], segments.first_G.shape[0]
    states_GHVK = v_NHV.new_empty(G, H, V, K, dtype=torch.float32)
    tables = (segments.jobs_J6, segments.products_P2)
    transitions_PHKK = run_segments(chunks, v_NHV, *tables, initial, slots_S, states_GHVK)
    fold(states_GHVK, transitions_PHKK, segments.chains_Q3)
    return states_GHVK, transitions_PHKK


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
    (_, H, V), K, dtype = v_NHV.shape, chunks.decay_MHK.shape[2], chunks.t_DMHCC.dtype
    v_NHV, initial = packed_heads(v_NHV), packed_states(initial)
    transitions_PHKK = v_NHV.new_empty(products_P2.shape[0], H, K, K, dtype=torch.float32)
    tiles = [rows_of(x, CHUNK) for x in (chunks.t_DMHCC, chunks.minus_w_MHCK, chunks.k_end_MHCK)]
    tables, states = (jobs_J6, products_P2), (initial, slots_S, states_GHVK, transitions_PHKK)
    local_programs = jobs_J6.shape[0] * H * (V // ROWS)
    numbers = (local_programs, v_NHV.stride(0), initial.stride(0) if initial is not None else 0)
    programs = local_programs + products_P2.shape[0] * H * (K // ROWS)
    arguments = (*tiles, v_NHV, chunks.decay_MHK, *tables, *states, *numbers)
    launch(segment_kernel, programs, arguments, H=H, K=K, V=V, BV=ROWS, **types(dtype), **SEGMENT_OPTIONS)
    return transitions_PHKK


def border_gradients(
    operands: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    do_NHV: Tensor,
    decay_MHK: Tensor,
    segments: Segments,
    transitions_PHKK: Tensor,
    dfinal_SHVK: Tensor | None,
) -> Tensor:
    """fp32 [G, H, V, K]: the gradient of the state after each segment. operands: T, A, q 2^G, -k 2^G, b k 2^(Gc-G)."""
    (_, H, V), (_, _, K), dtype = do_NHV.shape, decay_MHK.shape, operands[0].dtype
    dstates_GHVK = do_NHV.new_empty(segments.first_G.shape[0], H, V, K, dtype=torch.float32)
    tiles = [rows_of(x, CHUNK) for x in operands]
    states = (dfinal_SHVK.contiguous() if dfinal_SHVK is not None else None, dstates_GHVK)
    programs = segments.back_J6.shape[0] * H * (V // ROWS)
    arguments = (*tiles, do_NHV, decay_MHK, segments.back_J6, *states, do_NHV.stride(0))
    launch(reverse_segment_kernel, programs, arguments, H=H, K=K, V=V, BV=ROWS, **types(dtype), **SEGMENT_OPTIONS)
    fold(dstates_GHVK, transitions_PHKK, segments.back_Q3, back=True)
    return dstates_GHVK


def fold(states_GHVK: Tensor, transitions_PHKK: Tensor, chains_Q3: Tensor, back: bool = False) -> None:
    """Launch `fold_kernel`: the states after the first of each chain, in place."""
    _, H, V, K = states_GHVK.shape
    if chains_Q3.shape[0]:
        arguments = (states_GHVK, transitions_PHKK, chains_Q3)
        programs = chains_Q3.shape[0] * H * (V // FOLD_ROWS)
        launch(fold_kernel, programs, arguments, H=H, K=K, V=V, BV=FOLD_ROWS, BACK=back, num_warps=8)
