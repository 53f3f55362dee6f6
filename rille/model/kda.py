"""The Kimi Delta Attention layer (report §2.1.1).

    q, k, v = SiLU(ShortConv(W x))          z = W_up W_down x          b = W_b x
    S <- (I - beta k k^T) Diag(alpha) S + beta k v^T,   o = S^T q      (`rille.ops.kda`: L2 norms, decay, beta too)
    y = W_o [ sigmoid(W_g x) * RMSNorm_head(o) ]

The output gate has full rank in K3 and low rank in Kimi Linear, whose decay is a softplus without bound.

While a GPU generates, one token a sequence, everything between the projections is one launch (`rille.ops.kda.decode`).

Suffixes: N packed tokens, D width, H heads, K key channels, V value channels, C channels of the convolution.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor, nn

from rille.model.allocate import Allocate, lay_together
from rille.model.config import K3Config
from rille.model.context import Context, ConvTail, KdaState, no_tap
from rille.model.names import padded_heads
from rille.ops.conv import PooledTail, short_conv
from rille.ops.joint_linear import joint_linear
from rille.ops.kda import DecodeLayer, Gate, PooledState, Pools, Projected, kda, kda_decode
from rille.ops.kda.decode import choose_backend as choose_decode
from rille.ops.linear import linear
from rille.ops.norm import gated_rms_norm


class KDA(nn.Module):
    """One layer. Sizes come from the parameters: H heads of K = V channels."""

    def __init__(self, c: K3Config, layer: int, new: Allocate) -> None:
        super().__init__()
        width, d = c.kda_width, c.hidden_size
        heights = (*[width] * 3, c.kda_gate_rank or width, c.kda_head_dim, c.kda_heads)
        self.q_proj, self.k_proj, self.v_proj, gate_first, decay_down, beta_proj = new.together(d, *heights)
        self.qkv_conv = new.f32(3 * width, c.conv_width)
        self.decay_down, self.decay_up = decay_down, new(width, c.kda_head_dim)
        self.beta_proj = beta_proj
        self.A_log = new.f32(padded_heads(c))
        self.dt_bias = new.f32(width)
        self.full_rank_gate = c.kda_gate_rank is None
        if c.kda_gate_rank is None:
            self.gate_proj = gate_first
        else:
            self.gate_down, self.gate_up = gate_first, new(width, c.kda_gate_rank)
        self.out_norm = new.f32(c.kda_head_dim)
        self.out_proj = new(d, width)
        self.A_log_stored = (1, 1, c.kda_heads, 1) if c.is_bare else self.A_log.shape  # its axes in the checkpoint
        self.layer, self.lower_bound, self.eps = layer, c.decay_lower_bound, c.norm_eps

    def forward(self, x_ND: Tensor, ctx: Context) -> Tensor:
        inputs = self._projected(x_ND)
        if ctx.memory is not None:
            ctx.memory.remember(self.layer, inputs)
        return linear(self.replay(inputs, ctx), self.out_proj)

    def replay(self, inputs: Projected, ctx: Context) -> Tensor:
        """From the projections to the layer's output before its last product [N, H V]; the memory moves on by these
        tokens. An engine calls it for inputs that it remembered, with drafts that came true."""
        decay = Gate(self.A_log, self.dt_bias.view(self.heads, -1), self.lower_bound)
        state = ctx.shard.kda_state(ctx.memory.state(self.layer) if ctx.memory else None)
        tail = ctx.shard.conv_tail(inputs.qkv, ctx.memory.tail(self.layer) if ctx.memory else None)
        layer = DecodeLayer(self.qkv_conv, decay, self.out_norm, self.eps)
        if ctx.memory is not None and (verified := ctx.memory.verify(self.layer, inputs, layer)) is not None:
            return verified
        if isinstance(state, PooledState) and isinstance(tail, PooledTail) and one_launch(inputs, layer, state, ctx):
            return kda_decode(inputs, layer, Pools(state.pool, tail.pool), state.slots)
        return self._composed(inputs, decay, state, tail, ctx)

    def _composed(self, inputs: Projected, decay: Gate, state: KdaState, tail: ConvTail, ctx: Context) -> Tensor:
        """The same op by op."""
        y_NC, _ = short_conv(inputs.qkv, self.qkv_conv, ctx.packing, tail)
        N, H, K = y_NC.shape[0], self.heads, self.out_norm.shape[0]
        q_NHK, k_NHK, v_NHV = y_NC.view(N, 3, H, K).unbind(1)
        z_NHK, gate_NHV = inputs.z.view(N, H, K), inputs.gate.view(N, H, K)
        seen = {"q": q_NHK, "k": k_NHK, "v": v_NHV, "g_raw": z_NHK, "beta_raw": inputs.b}
        q_NHK, k_NHK, v_NHV, z_NHK, b_NH = (ctx.tap(f"layers.{self.layer}.kda.{n}", t) for n, t in seen.items())
        o_NHV, _ = kda(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, decay, ctx.packing, state)
        o_NHV = ctx.tap(f"layers.{self.layer}.kda.o", o_NHV)
        return gated_rms_norm(o_NHV, gate_NHV, self.out_norm, self.eps).flatten(1)

    @property
    def heads(self) -> int:
        return self.beta_proj.shape[0]

    def derive(self) -> None:
        lay_together(*chain(*self._read_together()))

    def _read_together(self) -> tuple[tuple[nn.Parameter, ...], ...]:
        """The matrices that read the layer's input, as they lie in memory. q, k and v share one convolution."""
        gate = self.gate_proj if self.full_rank_gate else self.gate_down
        return (self.q_proj, self.k_proj, self.v_proj), (gate,), (self.decay_down,), (self.beta_proj,)

    def _projected(self, x_ND: Tensor) -> Projected:
        qkv_NC, gate_NV, z_NK, b_NH = joint_linear(x_ND, self._read_together())
        gate_NV = gate_NV if self.full_rank_gate else linear(gate_NV, self.gate_up)
        return Projected(qkv_NC, linear(z_NK, self.decay_up), b_NH, gate_NV)


def one_launch(inputs: Projected, layer: DecodeLayer, state: PooledState, ctx: Context) -> bool:
    """Whether this batch is one token of every sequence that nobody looks into, keeps another state of or
    differentiates, and the kernel for that runs here."""
    if state.keeps or ctx.tap is not no_tap or any(n != 1 for n in ctx.packing.lengths):
        return False
    if torch.is_grad_enabled() and (inputs.qkv.requires_grad or layer.conv_weight.requires_grad):
        return False
    return choose_decode(inputs.qkv, layer)[0] != "reference"
