"""A run: all that training a model holds between two steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from rille.data.loader import Batch
from rille.model.model import K3
from rille.optim.kinds import Kind
from rille.text.tokenizer import Tokenizer
from rille.train.averaging import Average
from rille.train.config import TrainConfig
from rille.train.curriculum import Curriculum
from rille.train.guard import Guard, GuardConfig
from rille.train.inspection import Inspections
from rille.train.metrics import Logger
from rille.train.saving import Saver
from rille.train.speed import StepFlops
from rille.train.stopping import Stop


@dataclass(eq=False)
class Run:
    """A run between two steps. `step` counts finished updates.

    domains: the names of those of its text. kinds: what each parameter is. inspections: where looks into the model go.
    """

    config: TrainConfig
    model: K3
    optimizer: torch.optim.Optimizer
    loader: Curriculum
    held_out: Callable[[], Sequence[Batch]]
    tokenizer: Tokenizer
    domains: tuple[str, ...] = ()
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    guard: Guard = field(default_factory=lambda: Guard(GuardConfig()))
    average: Average | None = None
    saver: Saver = field(default_factory=Saver)
    inspections: Inspections | None = None
    loggers: Sequence[Logger] = ()
    stop: Stop = field(default_factory=Stop)
    step: int = 0

    @cached_property
    def flops(self) -> StepFlops:
        """FLOPs of a step from the lengths of its sequences."""
        return StepFlops(self.model.config)
