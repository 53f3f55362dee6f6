"""Gated activations, literally.

    situ_glu(g, u) = [a tanh(g / a) sigmoid(g)] * [b tanh(u / b)]          a = 4, b = 25 in Kimi K3
    swiglu(g, u)   = g sigmoid(g) u                                        (a, b -> infinity)

Technical report equation 12. The sigmoid sees the uncapped gate. fp32 inside (float64 for float64), one rounding at the
end.
"""

import torch
from torch import Tensor


def situ_glu(gate: Tensor, up: Tensor, cap_gate: float, cap_up: float) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    return (cap_gate * torch.tanh(g / cap_gate) * torch.sigmoid(g) * (cap_up * torch.tanh(u / cap_up))).to(gate.dtype)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    wide = torch.promote_types(gate.dtype, torch.float32)
    g, u = gate.to(wide), up.to(wide)
    return (g * torch.sigmoid(g) * u).to(gate.dtype)
