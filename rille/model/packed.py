"""A model whose routed experts stay in MXFP4, as the release stores them: a quarter of their bf16 bytes, for serving.

Codes and scale bytes are loaded as they are and saved as they are; `rille.ops.mx.experts` multiplies from them. Nothing
in such a model has a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from rille.model.config import K3Config
from rille.model.experts import ExpertWeights, activation
from rille.model.model import K3
from rille.model.moe import LatentMoE
from rille.model.shards import Pending
from rille.ops.mx import dequantise_mxfp4
from rille.ops.mx.experts import HIGHEST_SCALE, PackedExperts, packed_expert_glu
from rille.ops.norm import rms_norm

GROUP = 32  # input columns that share a scale
NOT_PACKED = "is not packed, and experts='mxfp4' takes no other; `rille convert SRC DST --experts mxfp4` packs them"


class PackedExpertWeights(ExpertWeights):
    """`ExpertWeights` with two codes in a byte: w13 [E, 2F, L / 2] and w2 [E, L, F / 2], uint8, and their scales."""

    def __init__(self, c: K3Config, device: torch.device | str) -> None:
        nn.Module.__init__(self)
        e, f, io = c.num_experts, c.expert_width, c.expert_io

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=torch.uint8, device=device)

        self.w13 = nn.Parameter(empty(e, 2 * f, io // 2), requires_grad=False)
        self.w2 = nn.Parameter(empty(e, io, f // 2), requires_grad=False)
        self.register_buffer("w13_scale", empty(e, 2 * f, io // GROUP), persistent=False)
        self.register_buffer("w2_scale", empty(e, io, f // GROUP), persistent=False)
        self.act = activation(c)

    def forward(self, x_NL: Tensor, ids_NA: Tensor, weights_NA: Tensor) -> Tensor:
        assert self.w13_scale is not None and self.w2_scale is not None
        experts = PackedExperts(self.w13, self.w13_scale, self.w2, self.w2_scale, self.act)
        return packed_expert_glu(x_NL, ids_NA, weights_NA, experts)

    def normed(self, x_NL: Tensor, ids_NA: Tensor, weights_NA: Tensor, gain_L: Tensor, eps: float) -> Tensor:
        return rms_norm(self(x_NL, ids_NA, weights_NA).to(x_NL.dtype), gain_L, eps)


def packed_model(
    config: K3Config, *, dtype: torch.dtype, device: torch.device | str, layers: range | None = None
) -> K3:
    """An uninitialised model with packed experts; no expert's values are ever allocated. Without gradients.

    Raises ValueError where MXFP4's groups do not divide the experts' widths.
    """
    if config.expert_io % GROUP or config.expert_width % GROUP:
        raise ValueError(
            f"experts: MXFP4 wants widths that {GROUP} divides, not {config.expert_io} and {config.expert_width}"
        )
    model = K3(config, dtype=dtype, device="meta", layers=layers)
    for module in model.modules():
        if isinstance(module, LatentMoE):
            module.experts = PackedExpertWeights(config, "meta")
    return model.to_empty(device=device).requires_grad_(False)


def has_packed_experts(model: K3) -> bool:
    """Whether its routed experts are held as codes."""
    return any(isinstance(module, PackedExpertWeights) for module in model.modules())


def fill_codes(target: Tensor, target_scale: Tensor, packed: Tensor, scale: Tensor) -> None:
    """Codes and scale bytes of one expert's tensor. Raises ValueError for a scale that the product cannot hold."""
    if int(scale.max()) > HIGHEST_SCALE:
        raise ValueError(f"scale byte {int(scale.max())}; packed experts are multiplied up to {HIGHEST_SCALE}")
    target.copy_(packed)
    target_scale.copy_(scale)


def pending_codes(name: str, packed: Tensor, scale: Tensor, plain: torch.dtype | None) -> Iterator[Pending]:
    """One expert's tensor to be saved: as it is, or its values in the dtype `plain`."""
    if plain is None:
        yield Pending.of(f"{name}.weight_packed", packed)
        yield Pending.of(f"{name}.weight_scale", scale)
    else:
        shape = (packed.shape[0], 2 * packed.shape[1])
        yield Pending(f"{name}.weight", plain, shape, lambda: dequantise_mxfp4(packed, scale, torch.float32).to(plain))
