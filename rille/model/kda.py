"""The Kimi Delta Attention layer (report §2.1.1).

    q, k, v = SiLU(ShortConv(W x))          z = W_up W_down x          b = W_b x
    S <- (I - beta k k^T) Diag(alpha) S + beta k v^T,   o = S^T q      (`rille.ops.kda`: L2 norms, decay, beta too)
    y = W_o [ sigmoid(W_g x) * RMSNorm_head(o) ]

The output gate has full rank in K3 and low rank in Kimi Linear, whose decay is a softplus without bound.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rille.model.allocate import Allocate
from rille.model.config import K3Config
from rille.model.context import Context
from rille.model.names import padded_heads
from rille.ops.conv import short_conv
from rille.ops.kda import Gate, kda
from rille.ops.norm import gated_rms_norm


class KDA(nn.Module):
    """One layer. Sizes come from the parameters: H heads of K = V channels."""

    def __init__(self, c: K3Config, layer: int, new: Allocate) -> None:
        super().__init__()
        width, d = c.kda_width, c.hidden_size
        self.q_proj, self.k_proj, self.v_proj = new(width, d), new(width, d), new(width, d)
        self.qkv_conv = new.f32(3 * width, c.conv_width)
        self.decay_down, self.decay_up = new(c.kda_head_dim, d), new(width, c.kda_head_dim)
        self.beta_proj = new(c.kda_heads, d)
        self.A_log = new.f32(padded_heads(c))
        self.dt_bias = new.f32(width)
        self.full_rank_gate = c.kda_gate_rank is None
        if c.kda_gate_rank is None:
            self.gate_proj = new(width, d)
        else:
            self.gate_down, self.gate_up = new(c.kda_gate_rank, d), new(width, c.kda_gate_rank)
        self.out_norm = new.f32(c.kda_head_dim)
        self.out_proj = new(d, width)
        self.A_log_stored = (1, 1, c.kda_heads, 1) if c.is_bare else self.A_log.shape  # its axes in the checkpoint
        self.layer, self.lower_bound, self.eps = layer, c.decay_lower_bound, c.norm_eps

    def forward(self, x_ND: Tensor, ctx: Context) -> Tensor:
        heads = self.beta_proj.shape[0]
        q_NHK, k_NHK, v_NHV = (t.unflatten(-1, (heads, -1)) for t in self._convolved(x_ND, ctx))
        z_NHK = linear(linear(x_ND, self.decay_down), self.decay_up).unflatten(-1, (heads, -1))
        inputs = {"q": q_NHK, "k": k_NHK, "v": v_NHV, "g_raw": z_NHK, "beta_raw": linear(x_ND, self.beta_proj)}
        tapped = [ctx.tap(f"layers.{self.layer}.kda.{name}", tensor) for name, tensor in inputs.items()]
        q_NHK, k_NHK, v_NHV, z_NHK, b_NH = tapped
        state = ctx.shard.kda_state(ctx.memory.state(self.layer) if ctx.memory else None)
        gate = Gate(self.A_log, self.dt_bias.view(heads, -1), self.lower_bound)
        o_NHV, _ = kda(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, ctx.packing, state)
        o_NHV = ctx.tap(f"layers.{self.layer}.kda.o", o_NHV)
        y_NHV = gated_rms_norm(o_NHV, self._gate(x_ND).unflatten(-1, (heads, -1)), self.out_norm, self.eps)
        return linear(y_NHV.flatten(1), self.out_proj)

    def _convolved(self, x_ND: Tensor, ctx: Context) -> tuple[Tensor, ...]:
        """q, k, v [N, H K] after convolution and SiLU; the three share one convolution and one tail."""
        rows = [self.q_proj.shape[0], self.k_proj.shape[0], self.v_proj.shape[0]]
        qkv_NC = torch.cat([linear(x_ND, w) for w in (self.q_proj, self.k_proj, self.v_proj)], dim=-1)
        tail = ctx.shard.conv_tail(qkv_NC, ctx.memory.tail(self.layer) if ctx.memory else None)
        y_NC, _ = short_conv(qkv_NC, self.qkv_conv, ctx.packing, tail)
        return y_NC.split(rows, dim=-1)

    def _gate(self, x_ND: Tensor) -> Tensor:
        if self.full_rank_gate:
            return linear(x_ND, self.gate_proj)
        return linear(linear(x_ND, self.gate_down), self.gate_up)
