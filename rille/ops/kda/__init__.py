"""Kimi Delta Attention over packed sequences: `kda`, its `Gate`, and the `PooledState` it can read and write in place.

`reference.py` is the definition, `chunk.py` the blocked form, `forward.py` launches its kernels; README.md derives
the second from the first.
"""

import warnings

import torch
from torch import Tensor

from rille.ops.kda import chunk, reference
from rille.ops.kda.arguments import HAS_TRITON, Gate, Kda, PooledState, State, check, with_pool
from rille.ops.kda.checkpoints import Places
from rille.ops.kda.decode import kda_commit, kda_decode, kda_verify
from rille.ops.kda.decode_operands import DecodeLayer, Pools, Projected, Remembered
from rille.ops.kda.segments import cutting
from rille.ops.kda.transition import segment_transition
from rille.ops.settling import without_autocast
from rille.packing import Packing

__all__ = ["DecodeLayer", "Gate", "Places", "PooledState", "Pools", "Projected", "Remembered", "choose_backend", "kda"]
__all__ += ["cutting", "kda_commit", "kda_decode", "kda_verify", "segment_transition"]


def triton_kda(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    state: State,
) -> tuple[Tensor, Tensor | None]:
    """The kernels; ValueError where they cannot run."""
    if reason := without_triton(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, state):
        raise ValueError(f"kda: backend 'triton' cannot run: {reason}")
    from rille.ops.kda import forward, function

    arguments = (q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
    if wants_gradients(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, state):
        return with_pool(function.differentiable)(*arguments)  # a pool is overwritten before backward reads it
    return forward.forward(*arguments)[:2]


def without_triton(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, state: State
) -> str:
    """Why the kernels cannot run, or an empty string."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.kda import forward

    return forward.unsupported(q_NHK, k_NHK, v_NHV, z_NHK, b_NH)


def wants_gradients(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, state: State
) -> bool:
    differentiable = (q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate.A_log, gate.dt_bias, state)
    return torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in differentiable)


BACKENDS: dict[str, Kda] = {
    "reference": with_pool(without_autocast(reference.kda)),
    "chunk": with_pool(without_autocast(chunk.kda)),
    "triton": triton_kda,
}

# A chunk costs as much for one token as for 64: up to here the recurrence takes fewer steps than the blocked form.
LONGEST_FOR_RECURRENCE = 4
# Without gradients the definition goes further: its order of operations is the release's, bit for bit, and a deep model
# amplifies rounding. That has a price from 16 tokens on: for 64 tokens 3.4 ms against 1.0 (H3 K32, CPU), for 256 tokens
# 28 against 6 (H4 K128).
LONGEST_WITHOUT_GRADIENT = 512


def choose_backend(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    state: State = None,
) -> tuple[str, str]:
    """The backend that `kda` takes by default for these arguments, and why."""
    steep = gate.lower_bound is not None and -chunk.TILE * gate.lower_bound > chunk.LARGEST_EXPONENT
    reasons = [f"a lower bound of {gate.lower_bound} is beyond what blocks hold"] if steep else []
    if not q_NHK.is_cuda:
        reasons.insert(0, "no CUDA tensors")
    elif obstacle := without_triton(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, state):
        reasons.insert(0, obstacle)
    if not reasons:
        return "triton", "CUDA tensors"
    reason = "; ".join(reasons)
    if steep:
        return "reference", reason
    longest = LONGEST_FOR_RECURRENCE if torch.is_grad_enabled() else LONGEST_WITHOUT_GRADIENT
    return ("reference" if packing.longest <= longest else "chunk"), reason


def kda(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    state: Tensor | PooledState | None = None,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule with a decay for each channel, over each sequence of a batch (`reference.py`: the equations).

    q, k [N, H, K], v [N, H, V]: after convolution and SiLU, not normalised: the op normalises q and k and scales q by
        K^-0.5.
    z [N, H, K]: decay logits as projected, without dt_bias. b [N, H]: logits of the write strength, beta = sigmoid(b).
    gate: parameters of the decay.
    state: what each sequence starts from: zeros (None), a differentiable tensor [S, H, V, K], or a `PooledState`, which
        is read and overwritten in place. It is read whatever the packing's history says: whoever owns it clears it. A
        pool also takes states from the way through the batch (`Places`), where no gradient is wanted.
    backend: "reference" (token by token), "chunk" (blocks of 64) or "triton" (the same in kernels, for K 64 or 128 and
        V 64, 128 or 256). By default `choose_backend` says: kernels for CUDA tensors, otherwise the recurrence for
        batches of short sequences and chunks for longer ones.

    Returns o [N, H, V] in v's dtype, and the final states [S, H, V, K] in fp32 or None with a pool. A sequence without
    tokens keeps its state. Arithmetic and states are fp32, float64 if q, k, v, z or b is. Differentiable in every
    tensor but a pool.

    Raises ValueError for shapes that do not fit, for tensors that are no floats or lie on several devices, for a
    backend that is unknown or cannot run, and in "chunk" and "triton" for a lower bound below -5 (README.md says why).
    Source: Kimi K3 report section 2.1.1; Kimi Linear report, arXiv 2510.26692.
    """
    check(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
    keeps = isinstance(state, PooledState) and state.keeps
    if keeps and wants_gradients(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, state):
        raise ValueError("kda: states are kept on the way only where no gradient is wanted; use torch.no_grad()")
    if backend is None:
        backend, reason = choose_backend(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
        if q_NHK.is_cuda and backend != "triton":
            warnings.warn(f"kda: backend {backend!r} runs on a GPU: {reason}", stacklevel=2)
    if backend not in BACKENDS:
        raise ValueError(f"kda: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[backend](q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
