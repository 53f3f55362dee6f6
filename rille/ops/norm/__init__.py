"""RMS normalisation of the residual stream, and the gated form that closes KDA. `reference` is the definition."""

import torch
from torch import Tensor

from rille.ops.norm import reference


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, times a gain.

    x [..., D] of any float dtype, weight [D] or None; the result has the dtype and shape of x. The mean and the scaling
    are fp32 (float64 for float64 input); the normed value is rounded to x's dtype before the gain, cast to the same
    dtype, multiplies it, as the released model does. eps is added to the mean of squares, inside the root.

    Raises ValueError when the gain's length is not D.
    """
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: gain of shape {tuple(weight.shape)} for a last axis of {x.shape[-1]}")
    return reference.rms_norm(x, weight, eps)


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, eps: float, dtype: torch.dtype | None = None) -> Tensor:
    """RMS norm over each head's V channels, times the gain, times sigmoid(gate): the output stage of KDA.

    o [N, H, V] and gate [N, H, V] (raw, before the sigmoid), weight [V] shared by all heads. Everything is fp32
    (float64 if an input is) and rounded once, to `dtype`, by default the gate's. Technical report section 2.1.1,
    released model code.

    Raises ValueError when the shapes do not agree.
    """
    if o.shape != gate.shape:
        raise ValueError(f"gated_rms_norm: o {tuple(o.shape)} and gate {tuple(gate.shape)} differ in shape")
    if weight.shape != o.shape[-1:]:
        raise ValueError(f"gated_rms_norm: gain of shape {tuple(weight.shape)} for {o.shape[-1]} value channels")
    return reference.gated_rms_norm(o, gate, weight, eps, gate.dtype if dtype is None else dtype)
