"""What a stretch of tokens does to any state before it: the piece from which context parallelism over devices is made,
as `segments.py` makes it inside one.

Suffixes: N packed tokens, S sequences, H heads, K key channels, V value channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rille.ops.kda.arguments import Gate, check
from rille.ops.kda.chunk import CHUNK, check_lower_bound
from rille.ops.kda.segments import by_row, flat, on_device, transition_in_chunks
from rille.ops.settling import without_autocast
from rille.packing import Packing


def segment_transition(
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """What the tokens of each sequence do to any state before them, as (P, local):

        state after = state before @ P + local

    Arguments as for `kda`, which queries do not concern. P [S, H, K, K]: row c is the state that unit state e_c turns
    into if nothing is written; local [S, H, V, K]: the state from a zero start. Both fp32 (float64 if k, v, z or b is);
    identity and zeros for a sequence without tokens. Two stretches of a sequence after one another give P_1 P_2 and
    local_1 P_2 + local_2. backend: "chunk" or "triton", by default the kernels for CUDA tensors. Not differentiable
    with "triton". Raises ValueError as `kda` does.
    Source: Kimi K3 report, context parallelism of KDA; README.md derives it.
    """
    check(k_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, None)
    if backend is None:
        backend = "triton" if k_NHK.is_cuda else "chunk"
    if backend == "chunk":
        return without_autocast(transition_in_chunks)(k_NHK, v_NHV, z_NHK, b_NH, gate, packing)
    if backend != "triton":
        raise ValueError(f'kda: unknown backend {backend!r} of segment_transition; there are "chunk" and "triton"')
    from rille.ops.kda import forward

    if reason := forward.unsupported(k_NHK, k_NHK, v_NHV, z_NHK, b_NH):
        raise ValueError(f"kda: backend 'triton' cannot run: {reason}")
    return transition_by_kernels(k_NHK, v_NHV, z_NHK, b_NH, gate, packing)


def transition_by_kernels(
    k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, packing: Packing
) -> tuple[Tensor, Tensor]:
    """`segment_transition` by the first kernel of the forward pass and `segment_pass.py`."""
    from rille.ops.kda.forward import intra
    from rille.ops.kda.segment_launch import run_segments

    check_lower_bound(gate)
    chunks = packing.chunks(CHUNK)
    (_, H, K), V, S = k_NHK.shape, v_NHV.shape[2], packing.num_sequences
    local_SHVK = v_NHV.new_empty(S, H, V, K, dtype=torch.float32)
    if packing.num_tokens * H == 0:
        return torch.eye(K, device=v_NHV.device).repeat(S, H, 1, 1), local_SHVK.zero_()
    made = intra(k_NHK, k_NHK, z_NHK, b_NH, gate.A_log, gate.dt_bias, gate.lower_bound, chunks.spans)
    jobs, products, start, first = [], [], 0, 0
    for s, (tokens, count) in enumerate(zip(packing.lengths, chunks.per_sequence, strict=True)):
        jobs.append((start, tokens, first, -1, -1, s))
        products.append((first, count))
        start, first = start + tokens, first + count
    jobs_J6, products_P2 = by_row(on_device([flat(jobs), flat(products)], torch.int32, packing.device), (6, 2))
    return run_segments(made, v_NHV, jobs_J6, products_P2, None, None, local_SHVK), local_SHVK
