"""What training minimises: -log p, in nats, summed over the targets of a batch. Axes: N packed tokens.

    L = sum -log p(t_{i+1})  +  w / K * sum over k = 1..K of sum -log p_k(t_{i+k+1})        w = mtp_weight

p is the head's, p_k that of MTP layer k (`model/mtp.py`); a step divides L by the number of its next-token targets, so
that the last rows of a sequence, which have no token k + 1 ahead, count as zero (DeepSeek-V3, equations 24 and 25).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rille.data.loader import Batch
from rille.model.balance import Counts
from rille.model.context import Context
from rille.model.model import K3
from rille.model.mtp import mtp_loss
from rille.ops.cross_entropy import CrossEntropy, linear_cross_entropy
from rille.packing import Packing


def next_token_loss(model: K3, batch: Batch, counts: Counts | None = None) -> CrossEntropy:
    """Head and loss in one op: the logits of all tokens never exist. With `counts` the experts' load is counted."""
    return _losses(model, batch, counts, further=False)[0]


def all_losses(model: K3, batch: Batch, counts: Counts) -> list[CrossEntropy]:
    """The next token's loss, then that of each MTP layer. The experts' load is counted, MTP layers' too."""
    return _losses(model, batch, counts, further=model.mtp is not None)


def _losses(model: K3, batch: Batch, counts: Counts | None, further: bool) -> list[CrossEntropy]:
    packing = Packing.of(batch.lengths, device=model.device)
    tokens_N, targets_N = batch.tokens.to(model.device), batch.targets.to(model.device)
    hidden_ND = model(tokens_N, Context(packing, counts=counts))
    next_token = linear_cross_entropy(hidden_ND, model.head_weight, targets_N)
    return [next_token, *(mtp_loss(model, hidden_ND, tokens_N, targets_N, packing, counts) if further else ())]


def weighted(losses: list[CrossEntropy], mtp_weight: float) -> Tensor:
    """L above, a scalar with gradients into trunk and MTP layers."""
    next_token, *further = losses
    if not further:
        return next_token.loss_sum
    return next_token.loss_sum + mtp_weight / len(further) * torch.stack([loss.loss_sum for loss in further]).sum()


@torch.no_grad()
def mean_loss(model: K3, batches: Iterable[Batch]) -> float:
    """Nats a target over all batches, without gradients and without counting."""
    results = [next_token_loss(model, batch) for batch in batches]
    return float(sum(result.loss_sum.double() for result in results) / sum(result.count for result in results))
