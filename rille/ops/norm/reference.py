"""RMS normalisation, literally.

    rms_norm(x; w, eps)          = cast(x * rsqrt(mean(x^2) + eps)) * w
    gated_rms_norm(o, g; w, eps) = cast(o * rsqrt(mean(o^2) + eps) * w * sigmoid(g))

The first is the norm of the language model: normalise in fp32, round to the input's dtype, then multiply by the gain in
that dtype (the order changes bf16 results). The second closes KDA: all of it in fp32 and one rounding at the end.

Axes: N tokens, D width, H heads, V value channels.
"""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight_D: Tensor | None, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)
    return normed if weight_D is None else normed * weight_D.to(x.dtype)


def gated_rms_norm(o_NHV: Tensor, gate_NHV: Tensor, weight_V: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    wide = torch.promote_types(torch.promote_types(o_NHV.dtype, gate_NHV.dtype), torch.float32)
    o_NHV = o_NHV.to(wide)
    normed_NHV = o_NHV * torch.rsqrt(o_NHV.square().mean(-1, keepdim=True) + eps) * weight_V.to(wide)
    return (normed_NHV * torch.sigmoid(gate_NHV.to(wide))).to(dtype)
