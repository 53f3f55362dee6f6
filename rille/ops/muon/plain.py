"""Muon's step in plain PyTorch: all matrices of a batch through Newton-Schulz together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from rille.ops.newton_schulz import newton_schulz

if TYPE_CHECKING:
    from rille.ops.muon import Matrices


def muon_step(
    batch: Sequence[Matrices], momentum: float, keep: float, step: float, eps: float, dtype: torch.dtype | None
) -> None:
    sizes = [len(piece.weight) for piece in batch]
    u_BPQ = batch[0].gradient.new_empty(sum(sizes), *batch[0].gradient.shape[1:])
    for piece, part in zip(batch, u_BPQ.split(sizes), strict=True):
        piece.momentum.mul_(momentum).add_(piece.gradient)
        torch.add(piece.gradient, piece.momentum, alpha=momentum, out=part)
    o_BPQ = newton_schulz(u_BPQ, eps=eps, dtype=dtype)
    for piece, o in zip(batch, o_BPQ.split(sizes), strict=True):
        piece.weight.mul_(keep).sub_(o, alpha=step)
