"""What training minimises: -log p, in nats, summed over the targets of a batch. Axes: N packed tokens.

    L = sum -log p(t_{i+1})  +  w / K * sum over k = 1..K of sum -log p_k(t_{i+k+1})        w = mtp_weight

p is the head's, p_k that of MTP layer k (`model/mtp.py`); a step divides L by the number of its next-token targets, so
that the last rows of a sequence, which have no token k + 1 ahead, count as zero (DeepSeek-V3, equations 24 and 25).
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from rille.data.loader import Batch
from rille.model.balance import Counts
from rille.model.context import Context
from rille.model.model import K3
from rille.model.mtp import mtp_loss
from rille.ops.cross_entropy import IGNORED, CrossEntropy, linear_cross_entropy
from rille.packing import Packing, moved


def next_token_loss(model: K3, batch: Batch, counts: Counts | None = None) -> CrossEntropy:
    """Head and loss in one op: the logits of all tokens never exist. With `counts` the experts' load is counted."""
    return _losses(model, batch, counts, further=False)[0]


def all_losses(model: K3, batch: Batch, counts: Counts) -> list[CrossEntropy]:
    """The next token's loss, then that of each MTP layer. The experts' load is counted, MTP layers' too."""
    return _losses(model, batch, counts, further=model.mtp is not None)


def _losses(model: K3, batch: Batch, counts: Counts | None, further: bool) -> list[CrossEntropy]:
    packing = Packing.of(batch.lengths, device=model.device)
    tokens_N, targets_N = moved(batch.tokens, model.device), moved(batch.targets, model.device)
    hidden_ND = model(tokens_N, Context(packing, counts=counts))
    next_token = linear_cross_entropy(hidden_ND, model.head_weight, targets_N)
    return [next_token, *(mtp_loss(model, hidden_ND, tokens_N, targets_N, packing, counts) if further else ())]


def weighted(losses: list[CrossEntropy], mtp_weight: float) -> Tensor:
    """L above, a scalar with gradients into trunk and MTP layers."""
    next_token, *further = losses
    if not further:
        return next_token.loss_sum
    return next_token.loss_sum + mtp_weight / len(further) * torch.stack([loss.loss_sum for loss in further]).sum()


def count_targets(batch: Batch) -> int:
    """Targets that count, from the host's copy: nothing waits for the device."""
    return int((batch.targets != IGNORED).sum())


def domain_sums(log_probs_N: Tensor, batch: Batch, domains: int) -> Tensor:
    """The loss of each domain, summed: [domains], in the dtype of log_probs. The batch must have domains."""
    labels_N = torch.from_numpy(np.repeat(np.array(batch.domains, dtype=np.int64), batch.lengths))
    own_GN = moved(labels_N, log_probs_N.device) == torch.arange(domains, device=log_probs_N.device)[:, None]
    return -(log_probs_N * own_GN).sum(1)


def domain_targets(batch: Batch, domains: int) -> np.ndarray:
    """int64 [domains]: the targets of each domain that count."""
    labels_N = np.repeat(np.array(batch.domains, dtype=np.int64), batch.lengths)
    return np.bincount(labels_N[batch.targets.numpy() != IGNORED], minlength=domains)


def mean_loss(model: K3, batches: Iterable[Batch]) -> float:
    """Nats a target over all batches, without gradients and without counting."""
    return mean_losses(model, batches)[0]


@torch.no_grad()
def mean_losses(model: K3, batches: Iterable[Batch], names: tuple[str, ...] = ()) -> tuple[float, dict[str, float]]:
    """`mean_loss`, and the same of each domain of `names` that has targets in the batches."""
    total, targets = torch.zeros((), dtype=torch.float64, device=model.device), 0
    sums_G, targets_G = torch.zeros(len(names), dtype=torch.float64, device=model.device), np.zeros(len(names))
    for batch in batches:
        result = next_token_loss(model, batch)
        total += result.loss_sum.double()
        targets += count_targets(batch)
        if names:
            sums_G += domain_sums(result.log_probs.double(), batch, len(names))
            targets_G += domain_targets(batch, len(names))
    total, *sums = torch.cat([total[None], sums_G]).tolist()
    return total / targets, {
        name: value / count for name, value, count in zip(names, sums, targets_G.tolist(), strict=True) if count
    }
