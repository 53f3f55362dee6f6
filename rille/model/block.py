"""A transformer layer: two sub-layers, each reading a mixture of the depth and adding to its running sum (report §2.2).

    x = Mix(depth);  p += Attention(RMSNorm(x));      x = Mix(depth);  p += FFN(RMSNorm(x))

With standard residuals the mixture is p itself. Where nobody taps the tensors in between, sum, mixture and norm are one
pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from rille.model.allocate import Allocate
from rille.model.attn_res import Depth, Mix, Plain
from rille.model.config import K3Config
from rille.model.context import Context, no_tap
from rille.model.kda import KDA
from rille.model.mla import MLA
from rille.model.moe import DenseGLU, LatentMoE
from rille.ops.attn_res.form import Form, check_form
from rille.ops.norm import rms_norm


def site(c: K3Config, new: Allocate) -> Mix | Plain:
    return Mix(new, c.hidden_size, c.norm_eps) if c.attends_depth else Plain()


class Block(nn.Module):
    """`layer(depth, ctx) -> depth`: attention (KDA or MLA), then feed-forward (dense or LatentMoE)."""

    def __init__(self, c: K3Config, layer: int, new: Allocate) -> None:
        super().__init__()
        self.layer, self.eps = layer, c.norm_eps
        self.opens_block, self.keeps_every_output = c.opens_block(layer), c.residual == "attn_res_full"
        self.attn_mix, self.attn_norm = site(c, new), new(c.hidden_size)
        self.attn = MLA(c, layer, new) if c.is_mla(layer) else KDA(c, layer, new)
        self.ffn_mix, self.ffn_norm = site(c, new), new(c.hidden_size)
        self.ffn = DenseGLU(c, c.dense_width, new) if c.is_dense(layer) else LatentMoE(c, layer, new)
        self.sites_ahead: tuple[Mix, ...] = ()  # see `share_mixtures`
        self.form: Form = "auto"

    def forward(self, depth: Depth, ctx: Context) -> Depth:
        return self.untapped(depth, ctx) if ctx.tap is no_tap else self.tapped(depth, ctx)

    def untapped(self, depth: Depth, ctx: Context) -> Depth:
        x_ND, depth = self.attn_mix.normed(*depth.take_pending(), self.attn_norm, self.eps)
        if self.opens_block or self.keeps_every_output:
            depth = depth.close().look_ahead(self.sites_ahead, self.form)  # after the mixture was read
        output_ND = self.attn(x_ND, ctx)
        x_ND, depth = self.ffn_mix.normed(depth, output_ND, self.ffn_norm, self.eps)
        if self.keeps_every_output:
            depth = depth.close()
        return depth.add_later(self.ffn(x_ND, ctx))

    def tapped(self, depth: Depth, ctx: Context) -> Depth:
        """The same with every tensor on its own."""
        x_ND = ctx.tap(f"layers.{self.layer}.attn_mix", self.attn_mix(depth))
        if self.opens_block or self.keeps_every_output:
            depth = depth.close()  # after the mixture was read
        depth = depth.add(self._sublayer("attn", self.attn, x_ND, self.attn_norm, ctx))
        x_ND = ctx.tap(f"layers.{self.layer}.mlp_mix", self.ffn_mix(depth))
        if self.keeps_every_output:
            depth = depth.close()
        depth = depth.add(self._sublayer("mlp", self.ffn, x_ND, self.ffn_norm, ctx))
        return replace(depth, partial=ctx.tap(f"layers.{self.layer}.prefix_sum_out", depth.sum))

    def _sublayer(self, name: str, part: nn.Module, x_ND: Tensor, gain_D: Tensor, ctx: Context) -> Tensor:
        normed_ND = ctx.tap(f"layers.{self.layer}.{name}_norm", rms_norm(x_ND, gain_D, self.eps))
        return ctx.tap(f"layers.{self.layer}.{name}_out", part(normed_ND, ctx))


def share_mixtures(blocks: Sequence[Block], output: Mix | Plain, form: Form = "auto") -> None:
    """Tell each layer that opens a block of layers which sites read the finished blocks until the next one opens.

    blocks: the layers in order, output: the site behind them. form: "one_phase" or "two_phase" for all sites, by
    default the one that moves fewer bytes, block by block. Raises ValueError for another form.
    """
    check_form(form)
    readers = [site for block in blocks for site in (block.attn_mix, block.ffn_mix)] + [output]
    opens = [2 * i for i, block in enumerate(blocks) if block.opens_block] + [2 * len(blocks)]
    for block in blocks:
        block.form, block.sites_ahead = form, ()
    for first, last in zip(opens, opens[1:], strict=False):
        # From the layer's second site to the first site of the layer that opens the next block, or the output.
        blocks[first // 2].sites_ahead = tuple(site for site in readers[first + 1 : last + 1] if isinstance(site, Mix))
