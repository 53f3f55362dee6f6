"""The learning rate as a pure function of the step: lr(t) = peak * f(t).

Steps count from 0 to T - 1; u = warm-up steps, m = the smallest share of the peak. Every f rises linearly over the
warm-up, f(t) = (t + 1) / u for t < u (so that the first step already moves and step u - 1 has the peak), then:

    constant  f = 1
    cosine    f = m + (1 - m) (1 + cos(pi p)) / 2,   p = (t + 1 - u) / (T - u):  f(T - 1) = m
    wsd       f = 1, and over the last d steps       f = 1 - (1 - m) p,  p = (t + 1 - (T - d)) / d

After step T - 1, f stays where it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from rille.optim.config import OptimConfig


def constant(step: int, total: int, warmup: int, config: OptimConfig) -> float:
    return 1.0


def cosine(step: int, total: int, warmup: int, config: OptimConfig) -> float:
    passed = min(1.0, (step + 1 - warmup) / max(1, total - warmup))
    return config.min_lr_ratio + (1 - config.min_lr_ratio) * (1 + math.cos(math.pi * passed)) / 2


def wsd(step: int, total: int, warmup: int, config: OptimConfig) -> float:
    """Warm-up, stable, decay."""
    steps = round(config.decay_fraction * total)
    passed = min(1.0, max(0.0, (step + 1 - (total - steps)) / max(1, steps)))
    return 1 - (1 - config.min_lr_ratio) * passed


SCHEDULES: dict[str, Callable[[int, int, int, OptimConfig], float]] = {
    "constant": constant,
    "cosine": cosine,
    "wsd": wsd,
}


def learning_rate(step: int, total: int, config: OptimConfig) -> float:
    """The learning rate of update `step` (from 0) of a run of `total` steps."""
    assert step >= 0
    assert total >= 1
    warmup = round(config.warmup_fraction * total)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    return config.lr * SCHEDULES[config.schedule](step, total, warmup, config)
