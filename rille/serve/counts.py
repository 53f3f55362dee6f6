"""Histograms that grow, one value after another. No torch here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rille.serve.schema import Histogram


class Counts:
    """bounds: rising; values above the last one are counted too. Written by one thread, read by any."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._total = tuple(bounds), [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._total += value * times

    def read(self) -> Histogram:
        return Histogram(self._bounds, tuple(self._counts), self._total)
