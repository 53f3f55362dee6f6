"""The gated NoPE MLA layer (report §2.1.2).

    q = W_qu RMSNorm(W_qd x)                  per head [own part | shared part]
    [c | s] = W_kv x;  c = RMSNorm(c)         cached: c (latent) and s (shared key slice), never rotated
    [k | v] = W_ku c per head;  key = [k | s]
    y = W_o [ sigmoid(W_g x) * softmax(q key^T / sqrt(width)) v ]

Without history the keys and values are expanded. With history the up-projection moves into the query and behind the
softmax ("absorbed"): q_own W_k meets the latent itself, so only the latents are read.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from rille.model.allocate import Allocate
from rille.model.config import K3Config
from rille.model.context import Context
from rille.ops.mla import attention, gated_attention, largest_logits, latent_attention, mixed_values
from rille.ops.norm import rms_norm


class MLA(nn.Module):
    """One layer. H heads; query width = own part (`key_dim`) + shared part."""

    def __init__(self, c: K3Config, layer: int, new: Allocate) -> None:
        super().__init__()
        d, h = c.hidden_size, c.mla_heads
        self.low_rank_query, self.gated = c.q_rank is not None, c.mla_gate
        if c.q_rank is None:
            self.q_proj = new(h * c.query_dim, d)
        else:
            self.q_down, self.q_norm, self.q_up = new(c.q_rank, d), new(c.q_rank), new(h * c.query_dim, c.q_rank)
        self.kv_down, self.kv_norm = new(c.cache_dim, d), new(c.kv_rank)
        self.kv_up = new(h * (c.key_dim + c.value_dim), c.kv_rank)
        if c.mla_gate:
            self.gate_proj = new(h * c.value_dim, d)
        self.out_proj = new(d, h * c.value_dim)
        self.layer, self.eps = layer, c.inner_norm_eps
        self.key_dim, self.value_dim, self.query_dim = c.key_dim, c.value_dim, c.query_dim

    def forward(self, x_ND: Tensor, ctx: Context) -> Tensor:
        q_NHK = self._queries(x_ND)
        gate_NHV = linear(x_ND, self.gate_proj).unflatten(-1, (q_NHK.shape[1], -1)) if self.gated else None
        latent_NR = ctx.shard.latents(self._latents(x_ND))
        if ctx.memory is None:
            o_NHV = self._expanded(q_NHK, latent_NR, gate_NHV, ctx)
        else:
            cache = ctx.memory.latents(self.layer)
            cache.write(latent_NR, ctx.packing)
            fresh = not any(ctx.packing.consumed)
            o_NHV = self._expanded(q_NHK, latent_NR, gate_NHV, ctx) if fresh else self._absorbed(q_NHK, gate_NHV, ctx)
        return linear(o_NHV.flatten(1).to(x_ND.dtype), self.out_proj)

    @property
    def query(self) -> nn.Parameter:
        """The matrix whose rows are the heads' queries."""
        return self.q_up if self.low_rank_query else self.q_proj

    def _queries(self, x_ND: Tensor) -> Tensor:
        if self.low_rank_query:
            q = linear(rms_norm(linear(x_ND, self.q_down), self.q_norm, self.eps), self.q_up)
        else:
            q = linear(x_ND, self.q_proj)
        return q.unflatten(-1, (-1, self.query_dim))

    def _latents(self, x_ND: Tensor) -> Tensor:
        """[N, R + shared]: the row that the cache keeps for a token."""
        rank = self.kv_norm.shape[0]
        both_NR = linear(x_ND, self.kv_down)
        return torch.cat([rms_norm(both_NR[:, :rank], self.kv_norm, self.eps), both_NR[:, rank:]], dim=-1)

    def _expanded(self, q_NHK: Tensor, latent_NR: Tensor, gate_NHV: Tensor | None, ctx: Context) -> Tensor:
        """The output [N, H, V], fp32 until the gate has been applied: bf16 here rounds with a bias (report §2.1.2)."""
        rank = self.kv_norm.shape[0]
        kv_NHC = linear(latent_NR[:, :rank], self.kv_up).unflatten(-1, (q_NHK.shape[1], -1))
        k_NHK, v_NHV = kv_NHC.split([self.key_dim, self.value_dim], dim=-1)
        shared_NHK = latent_NR[:, None, rank:].expand(-1, q_NHK.shape[1], -1)
        key_NHK = torch.cat([k_NHK, shared_NHK], dim=-1)
        if ctx.counts is not None and ctx.counts.attention:
            ctx.counts.add_logits(self.layer, largest_logits(q_NHK, key_NHK, ctx.packing, self.query_dim**-0.5))
        scale = self.query_dim**-0.5
        if gate_NHV is None:
            return attention(q_NHK, key_NHK, v_NHV, ctx.packing, scale)
        return gated_attention(q_NHK, key_NHK, v_NHV, gate_NHV, ctx.packing, scale)

    def _absorbed(self, q_NHK: Tensor, gate_NHV: Tensor | None, ctx: Context) -> Tensor:
        """As `_expanded`, from the cache."""
        assert ctx.memory is not None
        rank = self.kv_norm.shape[0]
        up_HCR = self.kv_up.unflatten(0, (q_NHK.shape[1], -1))
        key_HKR, value_HVR = up_HCR.split([self.key_dim, self.value_dim], dim=1)
        own_NHR = torch.einsum("nhk,hkr->nhr", q_NHK[..., : self.key_dim], key_HKR)
        q_NHR = torch.cat([own_NHR, q_NHK[..., self.key_dim :]], dim=-1)
        cache = ctx.memory.latents(self.layer)
        o_NHR = latent_attention(q_NHR, cache, ctx.packing, self.query_dim**-0.5, rank)
        o_NHV = mixed_values(o_NHR, value_HVR)
        return o_NHV if gate_NHV is None else o_NHV * torch.sigmoid(gate_NHV.to(o_NHV.dtype))
