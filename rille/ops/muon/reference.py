"""Muon's step, literally, piece by piece (report section 2.5; Moonlight section 2.2):

    B = mu B + G        U = G + mu B        O = NewtonSchulz(U)        W = keep W - step O

Axes: B matrices of P rows and Q columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rille.ops.newton_schulz.reference import newton_schulz

if TYPE_CHECKING:
    from rille.ops.muon import Matrices

STEPS = 5


def muon_step(batch: Sequence[Matrices], momentum: float, keep: float, step: float, eps: float) -> None:
    """In the matrices' own dtype."""
    for weight_BPQ, gradient_BPQ, momentum_BPQ in batch:
        momentum_BPQ.copy_(momentum * momentum_BPQ + gradient_BPQ)
        u_BPQ = gradient_BPQ + momentum * momentum_BPQ
        tall = u_BPQ.shape[1] > u_BPQ.shape[2]
        o_BPQ = newton_schulz(u_BPQ.mT, STEPS, eps).mT if tall else newton_schulz(u_BPQ, STEPS, eps)
        weight_BPQ.copy_(keep * weight_BPQ - step * o_BPQ)
