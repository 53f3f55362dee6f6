"""The rules that `optim.rule` chooses from. A new one is a file beside this one, a line here and in `OptimConfig.rule`,
and a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from rille.optim.adamw import adamw
from rille.optim.config import OptimConfig
from rille.optim.groups import Named
from rille.optim.masters import with_masters
from rille.optim.muon import muon

RULES: dict[str, Callable[[Iterable[Named], OptimConfig], torch.optim.Optimizer]] = {"adamw": adamw, "muon": muon}


def optimizer(parameters: Iterable[Named], config: OptimConfig) -> torch.optim.Optimizer:
    """The optimiser that the config asks for, over all parameters; those of 16 bits move with fp32 masters.

    Errors: see `decay_groups` and the rule.
    """
    return with_masters(RULES[config.rule], parameters, config)
