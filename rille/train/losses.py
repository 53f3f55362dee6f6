"""What training minimises: -log p(next token), in nats, summed over the targets of a batch. Axes: N packed tokens."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rille.data.loader import Batch
from rille.model.balance import Counts
from rille.model.context import Context
from rille.model.model import K3
from rille.ops.cross_entropy import CrossEntropy, linear_cross_entropy
from rille.packing import Packing


def next_token_loss(model: K3, batch: Batch, counts: Counts | None = None) -> CrossEntropy:
    """Head and loss in one op: the logits of all tokens never exist. With `counts` the experts' load is counted."""
    context = Context(Packing.of(batch.lengths, device=model.device), counts=counts)
    hidden_ND = model(batch.tokens.to(model.device), context)
    return linear_cross_entropy(hidden_ND, model.head_weight, batch.targets.to(model.device))


@torch.no_grad()
def mean_loss(model: K3, batches: Iterable[Batch]) -> float:
    """Nats a target over all batches, without gradients and without counting."""
    results = [next_token_loss(model, batch) for batch in batches]
    return float(sum(result.loss_sum.double() for result in results) / sum(result.count for result in results))
