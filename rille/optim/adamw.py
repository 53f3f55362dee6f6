"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter 2019, algorithm 2).

For update t = 1, 2, ... with gradient g, learning rate a and decay w:

    m = b1 m + (1 - b1) g                      v = b2 v + (1 - b2) g^2
    x = x - a w x - a (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

torch.optim.AdamW computes it; here it gets its groups and its learning rate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from rille.optim.config import OptimConfig
from rille.optim.groups import Named, decay_groups


def adamw(parameters: Iterable[Named], config: OptimConfig) -> torch.optim.AdamW:
    """AdamW over all parameters; its state is keyed by name (`param_names` in the state dict).

    Errors: see `decay_groups`.
    """
    groups = decay_groups(parameters, config.weight_decay)
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step in every group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
