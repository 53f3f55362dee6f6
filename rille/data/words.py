"""The words of a text as 64-bit hashes, all at once in numpy: what rules, classifiers and duplicates are counted on.

    H(w) = mix( sum_i (b_i + 1) P^i )  mod 2^64        over the bytes b of word w, P odd

A running sum of (b_j + 1) P^j over the whole text gives every word by a difference, times P^-start (P is odd, so it has
an inverse). Letters A to Z count as small ones. Words end at spaces, or at everything in ASCII that is no letter or
digit (bare). Characters of scripts that use no spaces (three bytes, U+3000 to U+CFFF) are words of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

_P = 0x9E3779B97F4A7C15
_P_INVERSE = pow(_P, -1, 2**64)
_SPACE = 32


def _folded(bare: bool) -> np.ndarray:
    """Each byte as it counts: small letters, one kind of space."""
    table = np.arange(256, dtype=np.uint8)
    table[65:91] += 32
    for byte in range(128):
        separates = not chr(byte).isalnum() if bare else chr(byte) in " \t\n\r\v\f"
        if separates:
            table[byte] = _SPACE
    return table


_SPACED, _BARE = _folded(False), _folded(True)
LETTERS = np.array([chr(b).isalpha() if b < 128 else True for b in range(256)])
LETTERS_AND_DIGITS = np.array([chr(b).isalnum() if b < 128 else True for b in range(256)])
CHARACTERS = np.array([(b & 0xC0) != 0x80 for b in range(256)])  # bytes that begin one


@dataclass(frozen=True, eq=False)
class Words:
    """starts, ends int64 [n]: places of the words in the bytes; hashes uint64 [n]; dense: most stand without spaces."""

    starts: np.ndarray
    ends: np.ndarray
    hashes: np.ndarray
    dense: bool

    def __len__(self) -> int:
        return len(self.starts)

    def count(self, kinds: np.ndarray, content: np.ndarray) -> np.ndarray:
        """How many bytes of each word are of a kind (a table such as LETTERS), int64 [n]."""
        sums = np.concatenate([[0], np.cumsum(kinds[content])])
        return sums[self.ends] - sums[self.starts]


def words_of(content: bytes, *, bare: bool = False) -> Words:
    """The words of UTF-8 bytes. bare: punctuation separates too."""
    folded = (_BARE if bare else _SPACED)[np.frombuffer(content, dtype=np.uint8)]
    inside = folded != _SPACE
    alone = (folded >= 0xE3) & (folded <= 0xEC)
    begins = inside.copy()
    begins[1:] &= ~inside[:-1]
    if alone.any():
        begins |= alone
        begins[3:] |= alone[:-3] & inside[3:]
    starts = np.flatnonzero(begins)
    stops = np.flatnonzero(~inside)
    ends = np.append(starts[1:], len(folded)) if len(starts) else starts
    if len(stops) and len(starts):
        place = np.searchsorted(stops, starts)
        ends = np.minimum(ends, np.where(place < len(stops), stops[np.minimum(place, len(stops) - 1)], len(folded)))
    return Words(starts, ends, _hashes(folded, starts, ends), int(alone.sum()) * 2 > len(starts))


def _hashes(folded: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    powers = _powers(_P, len(folded))
    sums = np.zeros(len(folded) + 1, dtype=np.uint64)
    np.cumsum((folded.astype(np.uint64) + np.uint64(1)) * powers, out=sums[1:])
    return mix((sums[ends] - sums[starts]) * _powers(_P_INVERSE, len(folded))[starts])


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, out=powers)


def mix(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 that spreads every bit over all (the finaliser of splitmix64, Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def grams(hashes: np.ndarray, size: int) -> np.ndarray:
    """Hashes of all runs of `size` neighbours, uint64 [n - size + 1] (empty where there are fewer)."""
    if len(hashes) < size:
        return hashes[:0]
    runs = hashes[: len(hashes) - size + 1].copy()
    for n in range(1, size):
        runs = mix(runs) + hashes[n : len(hashes) - size + 1 + n]
    return mix(runs)
