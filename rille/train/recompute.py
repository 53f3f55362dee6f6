"""Activation checkpointing by layers: the forward pass keeps what enters a layer, the backward pass runs it again.

What a layer keeps for its gradients (most of a step's memory) then exists for one layer at a time; the price is about a
third more work. The numbers are the same bits, and the experts' load is counted in the first run alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.utils.checkpoint import checkpoint

from rille.model.attn_res import Depth
from rille.model.block import Block
from rille.model.context import Context
from rille.model.model import K3

Layer = Callable[[Depth, Context], Depth]


def recompute_layers(model: K3) -> None:
    """Make every layer of the model, those of MTP too, forget its inside until the backward pass."""
    for module in model.modules():
        if isinstance(module, Block):
            module.forward = forgetful(module.forward)  # pyright: ignore[reportAttributeAccessIssue]
            module.form = "one_phase"  # what sites share would have to be kept for the second run


def forgetful(layer: Layer) -> Layer:
    """A layer that is run again for its gradients. Without gradients it runs as it did."""

    def forward(depth: Depth, ctx: Context) -> Depth:
        if not torch.is_grad_enabled():
            return layer(depth, ctx)
        runs = 0

        def run(depth: Depth) -> Depth:
            nonlocal runs
            runs += 1
            return layer(depth, ctx if runs == 1 else replace(ctx, counts=None))

        # No random numbers are drawn in a layer: there is no generator to put back.
        result = checkpoint(run, depth, use_reentrant=False, preserve_rng_state=False)
        assert isinstance(result, Depth)
        return result

    return forward
