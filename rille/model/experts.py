"""The routed experts' stacked weights, and the activation that all feed-forward parts share (report §2.3).

    E(z) = W_2 act(W_1 z, W_3 z)

Suffixes: N tokens, A experts of a token, E experts, F width of an expert, L what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from rille.model.allocate import Allocate
from rille.model.config import K3Config
from rille.ops.moe import ExpertOperands, expert_glu, expert_glu_normed
from rille.ops.situ import situ_glu, swiglu

Glu = Callable[[Tensor, Tensor], Tensor]


def activation(c: K3Config) -> Glu:
    """The GLU activation (gate, up) -> product that the config names."""
    return swiglu if c.activation == "swiglu" else partial(situ_glu, cap_gate=c.gate_cap, cap_up=c.up_cap)


class ExpertWeights(nn.Module):
    """The stacked routed experts, and what the expert product asks of them.

    w13 [E, 2F, L] (gate rows, then up rows), w2 [E, L, F]. The scale buffers hold the MXFP4 group exponents that the
    weights were loaded with (uint8, one for each 32 input columns), or None; saving reuses them.
    """

    w13_scale: Tensor | None
    w2_scale: Tensor | None

    def __init__(self, c: K3Config, new: Allocate) -> None:
        super().__init__()
        e, f, io = c.num_experts, c.expert_width, c.expert_io
        self.w13, self.w2 = new(e, 2 * f, io), new(e, io, f)
        self.register_buffer("w13_scale", None, persistent=False)
        self.register_buffer("w2_scale", None, persistent=False)
        self.act = activation(c)

    def forward(self, x_NL: Tensor, ids_NA: Tensor, weights_NA: Tensor) -> Tensor:
        """The weighted sum of each row's experts, [N, L] in fp32."""
        return expert_glu(x_NL, ids_NA, weights_NA, self._operands())

    def normed(self, x_NL: Tensor, ids_NA: Tensor, weights_NA: Tensor, gain_L: Tensor, eps: float) -> Tensor:
        """That sum in x's dtype, behind its RMS norm."""
        return expert_glu_normed(x_NL, ids_NA, weights_NA, self._operands(), gain_L, eps)

    def _operands(self) -> ExpertOperands:
        return ExpertOperands(self.w13, self.w2, self.act)
