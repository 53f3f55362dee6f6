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

from rille.model.allocate import Allocate, lay_together
from rille.model.config import K3Config
from rille.model.context import Context, WholeSequences
from rille.ops.joint_linear import joint_linear
from rille.ops.linear import linear
from rille.ops.mla import (
    absorbed_queries,
    attention,
    gated_attention,
    gated_values,
    largest_logits,
    latent_attention,
    store_rows,
)
from rille.ops.norm import rms_norm


class MLA(nn.Module):
    """One layer. H heads; query width = own part (`key_dim`) + shared part."""

    def __init__(self, c: K3Config, layer: int, new: Allocate) -> None:
        super().__init__()
        d, h = c.hidden_size, c.mla_heads
        self.low_rank_query, self.gated = c.q_rank is not None, c.mla_gate
        heights = (c.q_rank or h * c.query_dim, c.cache_dim, *[h * c.value_dim] * c.mla_gate)
        query_first, kv_down, *gate_proj = new.together(d, *heights)
        if c.q_rank is None:
            self.q_proj = query_first
        else:
            self.q_down, self.q_norm, self.q_up = query_first, new(c.q_rank), new(h * c.query_dim, c.q_rank)
        self.kv_down, self.kv_norm = kv_down, new(c.kv_rank)
        self.kv_up = new(h * (c.key_dim + c.value_dim), c.kv_rank)
        if c.mla_gate:
            self.gate_proj = gate_proj[0]
        self.out_proj = new(d, h * c.value_dim)
        self.layer, self.eps = layer, c.inner_norm_eps
        self.key_dim, self.value_dim, self.query_dim = c.key_dim, c.value_dim, c.query_dim

    def forward(self, x_ND: Tensor, ctx: Context) -> Tensor:
        first_NC, both_NR, *gate = joint_linear(x_ND, [[w] for w in self._read_together()])
        gate_NHV = gate[0].unflatten(-1, (-1, self.value_dim)) if gate else None
        if any(ctx.packing.consumed) and ctx.memory is not None and isinstance(ctx.shard, WholeSequences):
            cache = ctx.memory.latents(self.layer)
            low_rank = (first_NC, self.q_norm) if self.low_rank_query else ()
            normed_NC = store_rows(both_NR, self.kv_norm, self.eps, cache, ctx.packing, *low_rank)
            first_NC = first_NC if normed_NC is None else linear(normed_NC, self.q_up)
            o_NHV = self._absorbed(first_NC.unflatten(-1, (-1, self.query_dim)), gate_NHV, ctx)
        else:
            o_NHV = self._whole(first_NC, both_NR, gate_NHV, ctx)
        return linear(o_NHV.flatten(1), self.out_proj)

    def _whole(self, first_NC: Tensor, both_NR: Tensor, gate_NHV: Tensor | None, ctx: Context) -> Tensor:
        """The output [N, H, V] of a batch without history, or with that of other ranks."""
        q_NHK, latent_NR = self._queries(first_NC), ctx.shard.latents(self._latents(both_NR))
        if ctx.memory is not None:
            ctx.memory.latents(self.layer).write(latent_NR, ctx.packing)
            if any(ctx.packing.consumed):
                return self._absorbed(q_NHK, gate_NHV, ctx)
        return self._expanded(q_NHK, latent_NR, gate_NHV, ctx).to(first_NC.dtype)

    @property
    def query(self) -> nn.Parameter:
        """The matrix whose rows are the heads' queries."""
        return self.q_up if self.low_rank_query else self.q_proj

    def derive(self) -> None:
        lay_together(*self._read_together())

    def _read_together(self) -> list[nn.Parameter]:
        """The matrices that read the layer's input, as they lie in memory."""
        first = [self.q_down if self.low_rank_query else self.q_proj, self.kv_down]
        return [*first, self.gate_proj] if self.gated else first

    def _queries(self, first_NC: Tensor) -> Tensor:
        """[N, H, K] from the product with the first of the query's matrices."""
        if self.low_rank_query:
            first_NC = linear(rms_norm(first_NC, self.q_norm, self.eps), self.q_up)
        return first_NC.unflatten(-1, (-1, self.query_dim))

    def _latents(self, both_NR: Tensor) -> Tensor:
        """[N, R + shared]: the row that the cache keeps for a token."""
        rank = self.kv_norm.shape[0]
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
        """As `_expanded`, from the cache, in q's dtype."""
        assert ctx.memory is not None
        rank = self.kv_norm.shape[0]
        up_HCR = self.kv_up.unflatten(0, (q_NHK.shape[1], -1))
        key_HKR, value_HVR = up_HCR.split([self.key_dim, self.value_dim], dim=1)
        q_NHR, cache = absorbed_queries(q_NHK, key_HKR), ctx.memory.latents(self.layer)
        o_NHR = latent_attention(q_NHR, cache, ctx.packing, self.query_dim**-0.5, rank)
        return gated_values(o_NHR, value_HVR, gate_NHV, q_NHK.dtype)
