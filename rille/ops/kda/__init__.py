"""Kimi Delta Attention over packed sequences: `kda`, its `Gate`, and the `PooledState` it can read and write in place.

`reference.py` is the definition, `chunk.py` the blocked form; README.md derives the second from the first.
"""

import torch
from torch import Tensor

from rille.ops.kda import chunk, reference
from rille.ops.kda.arguments import Gate, Kda, PooledState, check, with_pool
from rille.packing import Packing

__all__ = ["Gate", "PooledState", "kda"]

BACKENDS: dict[str, Kda] = {"reference": with_pool(reference.kda), "chunk": with_pool(chunk.kda)}

# A chunk costs as much for one token as for 64: up to here the recurrence takes fewer steps than the blocked form.
LONGEST_FOR_RECURRENCE = 4
# Without gradients the definition itself serves whatever fits one chunk: prompts and continuations of that size are never slow.
LONGEST_WITHOUT_GRADIENT = 64


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
        is read and overwritten in place. It is read whatever the packing's history says: whoever owns it clears it.
    backend: "reference" (token by token) or "chunk" (blocks of 64). By default the first for batches whose longest
        sequence has at most 4 tokens, else the second.

    Returns o [N, H, V] in v's dtype, and the final states [S, H, V, K] in fp32 or None with a pool. A sequence without
    tokens keeps its state. Arithmetic and states are fp32, float64 if q, k, v, z or b is. Differentiable in every
    tensor but a pool.

    Raises ValueError for shapes that do not fit, for an unknown backend, and in "chunk" for a lower bound below -5
    (README.md says why).
    Source: Kimi K3 report section 2.1.1; Kimi Linear report, arXiv 2510.26692.
    """
    check(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
    if backend is None:
        longest = LONGEST_FOR_RECURRENCE if torch.is_grad_enabled() else LONGEST_WITHOUT_GRADIENT
        backend = "reference" if packing.longest <= longest else "chunk"
    if backend not in BACKENDS:
        raise ValueError(f"kda: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    return BACKENDS[backend](q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
