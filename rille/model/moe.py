"""Feed-forward parts: the dense GLU and Stable LatentMoE (report §2.3, equations 11 to 13).

    s = sigmoid(W_r x) in fp32;   T = top-k of s + bias;   p = s_T / sum(s_T)
    u = sum_{e in T} p_e E_e(W_down x);     y = W_up RMSNorm(u) + Shared(x)
    E(z) = W_2 SiTU(W_1 z, W_3 z)

The scores choose with the bias and weigh without it. Without a latent width the experts read x itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rille.model.allocate import Allocate, lay_together
from rille.model.beside import beside
from rille.model.config import K3Config
from rille.model.context import Context, LocalExchange, no_tap
from rille.model.experts import ExpertWeights, activation
from rille.ops.joint_linear import joint_linear
from rille.ops.linear import linear, linear_onto, normed_linear_onto, norms_on_its_way
from rille.ops.moe import route, route_logits, route_weights, router_logits
from rille.ops.norm import rms_norm


class DenseGLU(nn.Module):
    """y = W_down act(W_gate x, W_up x): the first layers' feed-forward, and the shared experts as one."""

    def __init__(self, c: K3Config, width: int, new: Allocate) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = new.together(c.hidden_size, width, width)
        self.down_proj = new(c.hidden_size, width)
        self.act = activation(c)

    def forward(self, x_ND: Tensor, ctx: Context) -> Tensor:
        return linear(self.act(*joint_linear(x_ND, [[self.gate_proj], [self.up_proj]])), self.down_proj)

    def derive(self) -> None:
        lay_together(self.gate_proj, self.up_proj)


class LatentMoE(nn.Module):
    """One layer: router, experts in the latent width, shared experts at full width."""

    def __init__(self, c: K3Config, layer: int, new: Allocate) -> None:
        super().__init__()
        self.router = new(c.num_experts, c.hidden_size)
        self.router_bias = new.f32(c.num_experts, requires_grad=False)
        self.latent = c.latent_width is not None
        if c.latent_width is not None:
            self.latent_down = new(c.latent_width, c.hidden_size)
            self.latent_up = new(c.hidden_size, c.latent_width)
        self.normed = self.latent and c.latent_norm
        if self.normed:
            self.latent_norm = new(c.expert_io)
        self.experts = ExpertWeights(c, new)
        self.shared = DenseGLU(c, c.shared_width, new) if c.shared_experts else None
        self.layer, self.eps = layer, c.norm_eps
        self.active, self.scale, self.renormalise = c.active_experts, c.routed_scale, c.renormalise

    def forward(self, x_ND: Tensor, ctx: Context) -> Tensor:
        if ctx.tap is no_tap and isinstance(ctx.exchange, LocalExchange) and not torch.is_grad_enabled():
            return self._without_gradients(x_ND, ctx)
        name, shared = f"layers.{self.layer}.", self.shared
        shared_ND = None if shared is None else beside(lambda: shared(x_ND, ctx), x_ND)
        ids_NA, weights_NA = self._route(x_ND, ctx)
        z_NL = linear(x_ND, self.latent_down) if self.latent else x_ND
        z_NL = ctx.tap(f"{name}routed_expert_down_proj.out", z_NL)
        u_NL = ctx.tap(f"{name}routed_expert_sum", self._routed(z_NL, ids_NA, weights_NA, ctx))
        if self.normed:
            u_NL = ctx.tap(f"{name}routed_expert_norm.out", rms_norm(u_NL, self.latent_norm, self.eps))
        y_ND = ctx.tap(f"{name}routed_expert_up_proj.out", linear(u_NL, self.latent_up) if self.latent else u_NL)
        return y_ND if shared_ND is None else y_ND + ctx.tap(f"{name}shared_experts.out", shared_ND())

    def _without_gradients(self, x_ND: Tensor, ctx: Context) -> Tensor:
        """The same in fewer launches. The way into the latent width runs while the router chooses, then the shared
        experts; sum, rounding and norm are one kernel, or the next product norms, and what is added last belongs to
        that product."""
        latent_NL = beside(lambda: linear(x_ND, self.latent_down), x_ND) if self.latent else lambda: x_ND
        shared = self.shared
        shared_ND = None if shared is None else beside(lambda: shared(x_ND, ctx), x_ND)
        routed = self._route(x_ND, ctx)
        z_NL = latent_NL()
        if self.normed and shared_ND is not None and norms_on_its_way(z_NL, self.latent_up, self.latent_norm):
            u_NL = self.experts(z_NL, *routed)
            return normed_linear_onto(u_NL, self.latent_norm, self.eps, self.latent_up, shared_ND())
        if self.normed:
            u_NL = self.experts.normed(z_NL, *routed, self.latent_norm, self.eps)
        else:
            u_NL = self.experts(z_NL, *routed).to(z_NL.dtype)
        if not self.latent:
            return u_NL if shared_ND is None else u_NL + shared_ND()
        return linear(u_NL, self.latent_up) if shared_ND is None else linear_onto(u_NL, self.latent_up, shared_ND())

    def _route(self, x_ND: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        logits_NE = router_logits(x_ND, self.router)
        ids_NA, weights_NA = self._choose(logits_NE, ctx) if ctx.routes is None else self._replay(logits_NE, ctx)
        ids_NA = ctx.tap(f"layers.{self.layer}.router_topk_idx", ids_NA)
        return ids_NA, ctx.tap(f"layers.{self.layer}.router_topk_weight", weights_NA)

    def _choose(self, logits_NE: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        bins = 0 if ctx.counts is None else ctx.counts.bins
        counted = ctx.counts is not None
        weighing = (self.active, self.scale, self.renormalise)
        routed = route_logits(logits_NE, self.router_bias, *weighing, bins, loaded=counted)
        if ctx.counts is not None:
            ctx.counts.add_counted(self.layer, routed.load, routed.histogram)
        return routed.ids, routed.weights

    def _replay(self, logits_NE: Tensor, ctx: Context) -> tuple[Tensor, Tensor]:
        """The experts that `ctx.routes` holds or is to hold: weights and load are theirs, the histogram is not."""
        assert ctx.routes is not None
        scores_NE = torch.sigmoid(logits_NE)
        routing = route(scores_NE, self.router_bias, self.active)
        ids_NA = ctx.routes.pick(self.layer, routing.ids)
        if ctx.counts is not None:
            ctx.counts.add(self.layer, ids_NA, scores_NE.detach(), routing.cutoff, self.router_bias)
        return ids_NA, route_weights(scores_NE, ids_NA, self.scale, self.renormalise)

    def _routed(self, z_NL: Tensor, ids_NA: Tensor, weights_NA: Tensor, ctx: Context) -> Tensor:
        """Weighted sum of the experts' outputs, [N, L], summed in fp32 and cast back."""
        rows_NL, ids_NA, weights_NA = ctx.exchange.dispatch(z_NL, ids_NA, weights_NA)
        experts = ctx.exchange.weights(self.experts)
        sum_NL = experts(rows_NL, ids_NA, weights_NA)
        return ctx.exchange.combine(sum_NL).to(z_NL.dtype)
