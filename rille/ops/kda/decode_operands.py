"""What decode, verify and commit take: projected inputs, a layer's parameters, and the pools that they move on.

Suffixes as in `decode.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rille.ops.kda.arguments import Gate


@dataclass(frozen=True, eq=False)
class Projected:
    """What the layer's input projections gave, one dtype: qkv [B, C] (q, then k, then v), z [B, H K] (decay logits
    without dt_bias), b [B, H] (logits of beta), gate [B, H V] (raw). Verify takes [B, T, .]. Rows may lie apart, the
    rest is dense."""

    qkv: Tensor
    z: Tensor
    b: Tensor
    gate: Tensor


@dataclass(frozen=True, eq=False)
class DecodeLayer:
    """Parameters of one layer: conv_weight fp32 [C, W] (the current token's tap last), gate (of the decay), norm_weight
    fp32 [V] and eps of the output norm."""

    conv_weight: Tensor
    gate: Gate
    norm_weight: Tensor
    eps: float


@dataclass(frozen=True, eq=False)
class Remembered:
    """Of each slot's last verify call, dense: its inputs qkv [slots, P, C] and z [slots, P, H K], and what each token
    wrote, u fp32 [slots, P, H V]: beta (v - S k / |k|) / |k|, with k as the convolution left it."""

    qkv: Tensor
    z: Tensor
    u: Tensor

    @classmethod
    def new(cls, slots: int, tokens: int, layer: DecodeLayer, dtype: torch.dtype) -> Remembered:
        """Room for `tokens` tokens of each slot; nothing need be cleared."""
        (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
        kinds = (
            (layer.conv_weight.shape[0], dtype),
            (H * K, dtype),
            (H * V, torch.promote_types(dtype, torch.float32)),
        )
        device = layer.conv_weight.device
        return cls(*(torch.empty(slots, tokens, n, dtype=kind, device=device) for n, kind in kinds))


@dataclass(frozen=True, eq=False)
class Pools:
    """What the layer remembers of each slot: states fp32 [slots, H, V, K]; tails [slots, W-1, C], oldest first, in the
    inputs' dtype; axis 0 of either with any stride; `past` where verify is used. On a GPU verify and commit copy slots
    16 bytes at a time and states by TMA: a pool starts at a multiple of 16 bytes, its slots lie a multiple of 16
    elements apart, those of states a multiple of K; pools that torch has made whole do. Others raise ValueError."""

    states: Tensor
    tails: Tensor
    past: Remembered | None = None
