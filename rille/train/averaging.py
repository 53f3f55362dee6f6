"""The running mean of the weights (EMA), fp32:  m = d m + (1 - d) w  after each update t, d = min(decay, t / (t + 9)).

The rising d keeps the initial weights from weighing on the mean of a short run. Every parameter is averaged, the
router's biases too. The mean is saved in checkpoints, measured on held-out text, and written as a model of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from rille.model.model import K3


class Average:
    """The mean of a model's weights. `weights` are what the optimiser moves: fp32 masters where there are some."""

    def __init__(self, weights: Mapping[str, Tensor], decay: float):
        self.decay = decay
        self.names = list(weights)
        self.mean = [weight.detach().float().clone() for weight in weights.values()]

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor], updates: int) -> None:
        """Take in the weights after so many updates."""
        share = 1 - min(self.decay, updates / (updates + 9))
        for name, mean in self.named():
            mean.lerp_(weights[name].detach().float(), share)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """(name of the parameter, its mean)."""
        yield from zip(self.names, self.mean, strict=True)

    @torch.no_grad()
    def restore(self, means: Mapping[str, Tensor]) -> None:
        """Continue from saved means, all of them."""
        for name, mean in self.named():
            mean.copy_(means[name])

    @contextmanager
    def worn_by(self, model: K3) -> Iterator[None]:
        """The model has the mean's weights in its own dtypes meanwhile, and its own bits again after that."""
        parameters = dict(model.named_parameters())
        own = {name: parameters[name].detach().clone() for name in self.names}
        _put(parameters, dict(self.named()))
        model.prepare()
        try:
            yield
        finally:
            _put(parameters, own)
            model.prepare()


@torch.no_grad()
def _put(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    for name, value in values.items():
        parameters[name].copy_(value)
