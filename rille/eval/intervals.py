"""Means and their 95 % intervals from few numbers (Student's t), and ratios of sums over documents. No torch here:

mean of n numbers       m +- t(n - 1) s / sqrt(n)
ratio sum(x) / sum(y)   R +- 1.96 sqrt(n / (n - 1) sum((x_i - R y_i)^2)) / sum(y)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

import numpy as np

# 97.5 % quantiles of Student's t by degrees of freedom, from 1; beyond them the last one is taken, which is wider.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120)

UNDECIDED = "not told apart"


@dataclass(frozen=True)
class Interval:
    """A mean and half the width of its 95 % interval; None where one number has none."""

    mean: float
    half: float | None

    def __str__(self) -> str:
        return f"{self.mean:.4g}" if self.half is None else f"{self.mean:.4g} ± {self.half:.2g}"

    @property
    def side(self) -> str:
        """Where the mean lies, seen from 0: above, below, or not told apart where the interval holds 0."""
        if self.half is None or abs(self.mean) <= self.half:
            return UNDECIDED
        return "above" if self.mean > 0 else "below"


def mean_interval(values: Sequence[float]) -> Interval:
    """The mean of independent numbers, such as one a seed. Raises ValueError without any."""
    if not values:
        raise ValueError("an interval of no numbers; give at least one")
    if len(values) == 1:
        return Interval(values[0], None)
    t = _T[min(len(values) - 1, len(_T)) - 1]
    return Interval(fmean(values), t * stdev(values) / sqrt(len(values)))


def ratio_interval(sums: np.ndarray, sizes: np.ndarray) -> Interval:
    """sum(sums) / sum(sizes), both [documents]; the interval is over the choice of documents."""
    ratio = float(sums.sum() / sizes.sum())
    n = len(sums)
    if n < 2:
        return Interval(ratio, None)
    spread = sqrt(n / (n - 1) * float(((sums - ratio * sizes) ** 2).sum()))
    return Interval(ratio, 1.96 * spread / float(sizes.sum()))
