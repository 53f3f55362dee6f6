"""Hashes of a growing sequence, each of which stands for everything before it. No torch here.

    h_0 = H(weight version)       h_i = H(h_{i-1}, ids of unit i, pictures in it)
    at(p) = h_i for p = i u;      between the boundaries H(h_i, ids up to p, pictures among them)

Two sequences with one hash at p agree in their first p tokens, in the pictures behind them and in the weights. A
picture counts by its whole digest, at the place of its rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

Span = tuple[int, int, str]  # first row of a picture, the row after its last, its digest
_SIZE = 16  # bytes: two of 2^40 chains share a hash with a probability of 2^-48


class Chain:
    """The ids of one sequence and their hashes. unit: tokens between the boundaries at which hashes are kept."""

    def __init__(self, ids: Iterable[int], unit: int, version: int = 0, pictures: Sequence[Span] = ()) -> None:
        if unit < 1:
            raise ValueError(f"hash unit is {unit} tokens; it must be at least 1")
        self.ids = array("q", ids)
        self.unit = unit
        self._pictures = tuple(pictures)
        self._hashes = [blake2b(b"weights %d" % version, digest_size=_SIZE).digest()]

    def __len__(self) -> int:
        return len(self.ids)

    def under(self, version: int) -> Chain:
        """The same ids under other weights."""
        return Chain(self.ids, self.unit, version, self._pictures)

    def append(self, token: int) -> None:
        self.ids.append(token)

    def at(self, position: int) -> bytes:
        """The hash of the first `position` tokens. Raises IndexError beyond the end."""
        if not 0 <= position <= len(self.ids):
            raise IndexError(f"position {position} of a chain of {len(self.ids)} tokens")
        whole, rest = divmod(position, self.unit)
        if len(self._hashes) <= whole:
            self._grow(whole)
        return self._next(position - rest, position) if rest else self._hashes[whole]

    def agreement(self, position: int, ids: Sequence[int]) -> int:
        """How many of `ids` stand from `position` on, the next picture excepted: its ids do not say which one it is."""
        stop = min([len(self.ids), *(first for first, end, _ in self._pictures if end > position)])
        mine = self.ids[position : max(stop, position)]
        return next((n for n, (a, b) in enumerate(zip(mine, ids, strict=False)) if a != b), min(len(mine), len(ids)))

    def boundaries(self, position: int) -> list[bytes]:
        """`at` of every boundary up to a position, from 0 on."""
        self.at(position)
        return self._hashes[: position // self.unit + 1]

    def _grow(self, whole: int) -> None:
        for start in range((len(self._hashes) - 1) * self.unit, whole * self.unit, self.unit):
            self._hashes.append(self._next(start, start + self.unit))

    def _next(self, start: int, stop: int) -> bytes:
        state = blake2b(self._hashes[start // self.unit], digest_size=_SIZE)
        state.update(self.ids[start:stop].tobytes())
        for first, end, digest in self._pictures:
            if first < stop and end > start:
                name = digest.encode()
                state.update(b"picture %d %d %s" % (first, len(name), name))
        return state.digest()
