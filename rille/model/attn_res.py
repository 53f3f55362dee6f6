"""Attention Residuals: what travels through the depth, and the sites that read it (report §2.2, equations 8 to 10).

    sources V = [finished block sums ..., running sum p]
    a_j = softmax_j( q . (RMSNorm(V_j) * gain) )        out = sum_j a_j V_j

A layer has two sites (before attention, before the feed-forward) and the model one more at its output. A sub-layer
reads only the mixture and adds its output to p. In Block AttnRes p becomes a source when a block of layers is full; in
Full AttnRes after every sub-layer; with standard residuals there is only p.

The finished blocks do not change until the next one is full: where that moves fewer bytes, they are scored in one pass
for all sites that read them next (`Depth.look_ahead`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rille.model.allocate import Allocate
from rille.ops.attn_res import ScoredBlocks, attn_res, attn_res_handed, choose_phases, score_blocks, scored_site
from rille.ops.attn_res.form import Form
from rille.ops.norm import add_rms_norm, rms_norm


@dataclass(frozen=True, eq=False)
class Ahead:
    """The finished blocks, scored for the sites that read them next."""

    sites: tuple[Mix, ...]
    scored: ScoredBlocks


@dataclass(frozen=True, eq=False)
class Depth:
    """All that travels through the depth: the running sum and the entries of the finished blocks, [N, D] each.

    `partial` is None only between `close` and the next `add`; `ahead` only where the blocks were scored in one pass.
    `pending` is an output that the next site adds to the running sum in its own pass. Immutable; entries are shared,
    never copied.
    """

    partial: Tensor | None
    blocks: tuple[Tensor, ...] = ()
    ahead: Ahead | None = None
    pending: Tensor | None = None

    def close(self) -> Depth:
        """Make the running sum a source of its own; a new sum starts with the next output."""
        assert self.partial is not None and self.pending is None, "a block closes only after an output was added"
        return Depth(None, (*self.blocks, self.partial))

    def look_ahead(self, sites: tuple[Mix, ...], form: Form) -> Depth:
        """Score the finished blocks for all sites that read them until the next one is full, if that is the form."""
        chosen = choose_phases(self.blocks, len(sites))[0] if form == "auto" else form
        if chosen == "one_phase" or not sites:
            return self
        queries, gains = [site.query for site in sites], [site.gain for site in sites]
        scored = score_blocks(self.blocks, queries, gains, sites[0].eps)
        return Depth(self.partial, scored.blocks, Ahead(sites, scored))

    def add(self, output: Tensor) -> Depth:
        return replace(self, partial=output if self.partial is None else self.partial + output)

    def add_later(self, output: Tensor) -> Depth:
        """`add`, but without gradients the next site does it. (With them the sum is what recomputation keeps.)"""
        if torch.is_grad_enabled() or self.partial is None:
            return self.add(output)
        return Depth(self.partial, self.blocks, self.ahead, output)

    def take_pending(self) -> tuple[Depth, Tensor | None]:
        return Depth(self.partial, self.blocks, self.ahead), self.pending

    @property
    def sum(self) -> Tensor:
        assert self.partial is not None, "read between close and add"
        return self.partial if self.pending is None else self.partial + self.pending


class Mix(nn.Module):
    """One site: a learned query and the gain of the norm it is compared under."""

    def __init__(self, new: Allocate, width: int, eps: float) -> None:
        super().__init__()
        self.query = new(width)
        self.gain = new(width)
        self.eps = eps

    def forward(self, depth: Depth) -> Tensor:
        if not depth.blocks:
            return depth.sum
        return attn_res([*depth.blocks, depth.sum], self.query, self.gain, self.eps)

    def normed(self, depth: Depth, output: Tensor | None, norm_gain: Tensor, eps: float) -> tuple[Tensor, Depth]:
        """`add` the output, read the mixture, norm it, in one pass: (input of the sub-layer [N, D], depth)."""
        if not depth.blocks or eps != self.eps:
            return normed(self, depth, output, norm_gain, eps)
        depth, output = fitting(depth, output)
        if depth.ahead is not None and self in depth.ahead.sites:
            scored, site = depth.ahead.scored, depth.ahead.sites.index(self)
            x_ND, sum_ND = scored_site(scored, site, depth.sum, output, norm_gain)
            return x_ND, replace(depth, partial=sum_ND)
        sources = [*depth.blocks, depth.sum]
        x_ND, (*blocks, sum_ND) = attn_res_handed(sources, output, self.query, self.gain, norm_gain, eps)
        return x_ND, Depth(sum_ND, tuple(blocks), depth.ahead, depth.pending)


class Plain(nn.Module):
    """The site of a standard residual stream: reads the running sum."""

    def forward(self, depth: Depth) -> Tensor:
        return depth.sum

    def normed(self, depth: Depth, output: Tensor | None, norm_gain: Tensor, eps: float) -> tuple[Tensor, Depth]:
        """As `Mix.normed`."""
        return normed(self, depth, output, norm_gain, eps)


def fitting(depth: Depth, output: Tensor | None) -> tuple[Depth, Tensor | None]:
    """The output is added here where no kernel can: to nothing, or to a sum of another dtype."""
    if output is not None and (depth.partial is None or depth.partial.dtype != output.dtype):
        return depth.add(output), None
    return depth, output


def normed(
    site: Mix | Plain, depth: Depth, output: Tensor | None, norm_gain: Tensor, eps: float
) -> tuple[Tensor, Depth]:
    """Sum and norm in one pass where the site reads the sum alone."""
    depth, output = fitting(depth, output)
    if output is None:
        return rms_norm(site(depth), norm_gain, eps), depth
    if isinstance(site, Plain) or not depth.blocks:
        x_ND, sum_ND = add_rms_norm(depth.sum, output, norm_gain, eps)
        return x_ND, replace(depth, partial=sum_ND)
    depth = depth.add(output)
    return rms_norm(site(depth), norm_gain, eps), depth
