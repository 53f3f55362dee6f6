"""A permutation of 0 ... n - 1 that needs no memory: any place of it is computed alone.

Six rounds of a Feistel network on 2 x h bits permute 0 ... 4^h - 1; a value outside 0 ... n - 1 goes through again
until it falls inside (cycle walking, at most four times on average, since 4^h < 4 n).
Source: Luby and Rackoff 1988; Black and Rogaway 2002 for the walk.
"""

from __future__ import annotations

import numpy as np

from rille.data.words import mix

_ROUNDS = 6


class Permutation:
    """A permutation of 0 ... n - 1 drawn from a key."""

    def __init__(self, n: int, key: tuple[int, ...]):
        """n: at least 1. key: non-negative integers; equal keys give equal permutations."""
        self._n = n
        self._half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
        self._mask = np.uint64((1 << int(self._half)) - 1)
        self._keys = np.random.default_rng(key).integers(0, 2**64, _ROUNDS, dtype=np.uint64)

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """The values at some places, int64; places in 0 ... n - 1."""
        values = self._encrypt(places.astype(np.uint64))
        while (outside := values >= self._n).any():
            values[outside] = self._encrypt(values[outside])
        return values.astype(np.int64)

    def __getitem__(self, place: int) -> int:
        return int(self(np.array([place]))[0])

    def _encrypt(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & self._mask)
        return (left << self._half) | right
