"""Equal and nearly equal documents, found on disk, so that memory does not grow with the corpus.

Equal: the same 128-bit fingerprint of the cleaned text; the one that was read first stays.

Near: J(A, B) = |A & B| / |A | B| over the sets of 5-word shingles (small letters, no punctuation). MinHash (Broder
1997) keeps 128 numbers a document whose equal places estimate J; they are cut into b bands of r = 128 / b, and
documents that share a band are looked at (Indyk and Motwani 1998):

    P(looked at) = 1 - (1 - J^r)^b        r: the largest power of two with P >= 0.9 at J = similarity

A pair that is looked at counts if its estimate reaches `similarity`. Pairs make components; of each component one
document stays: of the first domain, then the longest, then the lowest fingerprint. So the outcome does not depend on
the order of documents inside a domain. The signatures are those of the library rensa; the bands are sorted in files,
since an index in memory would grow with the corpus.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from itertools import combinations
from pathlib import Path

import numpy as np

from rille.data.spool import SIGNATURE, Spool
from rille.data.words import grams, mix, words_of

KEPT, EQUAL, NEAR = 0, 1, 2
SHINGLE = 5
_SEED = 20_241
_ALL_PAIRS = 32  # members of a bucket up to which every pair is compared; beyond, a star and a chain
_PARTITION = 4_000_000  # records that are sorted in memory at once
_MOST_PARTITIONS = 256
_RECORD = np.dtype([("key", "<u8"), ("number", "<i8")])


def signatures(contents: list[bytes], fingerprints: np.ndarray) -> np.ndarray:
    """MinHash of UTF-8 texts, uint32 [n, 128]. fingerprints: uint64 [n], the one shingle of a text without words."""
    try:
        minhash = import_module("rensa").RMinHash
    except ModuleNotFoundError:
        raise ValueError("near-duplicates need the library rensa: pip install 'rille[data]', or similarity 1") from None
    if not contents:
        return np.empty((0, SIGNATURE), np.uint32)
    sets = [_shingles(content, fingerprints[i : i + 1]) for i, content in enumerate(contents)]
    offsets = np.cumsum([0, *map(len, sets)]).astype(np.uint64)
    matrix = minhash.digest_matrix_from_flat_token_hashes(np.concatenate(sets), offsets, SIGNATURE, _SEED)
    return np.array(matrix.to_rows(), dtype=np.uint32)


def _shingles(content: bytes, alone: np.ndarray) -> np.ndarray:
    hashes = words_of(content, bare=True).hashes
    if not len(hashes):
        return alone
    return np.unique(grams(hashes, min(SHINGLE, len(hashes))))


def rows_a_band(similarity: float) -> int:
    """r of the head of this file: 1, 2, 4 ... 128."""
    fits = [r for r in (2, 4, 8, 16, 32, 64, 128) if 1 - (1 - similarity**r) ** (SIGNATURE // r) >= 0.9]
    return max(fits, default=1)


class Buckets:
    """(key, document) records in files by key; `groups` gives the documents that share a key, file by file."""

    def __init__(self, directory: Path, expected: int):
        """directory: made anew, gone after `groups`. expected: about how many records will come."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._directory = directory
        count = min(_MOST_PARTITIONS, expected // _PARTITION + 1)
        self._files = [(directory / f"{i}").open("wb") for i in range(count)]

    def add(self, keys: np.ndarray, numbers: np.ndarray) -> None:
        records = np.empty(len(keys), _RECORD)
        records["key"], records["number"] = keys, numbers
        owner = keys % np.uint64(len(self._files))
        for i, file in enumerate(self._files):
            file.write(records[owner == i].tobytes())

    def groups(self) -> Iterator[np.ndarray]:
        """Numbers, rising, of the documents that share a key with another; int64 [at least 2]."""
        for file in self._files:
            file.close()
            records = np.sort(np.fromfile(file.name, _RECORD), order=("key", "number"))
            edges = np.flatnonzero(np.diff(records["key"])) + 1
            starts, ends = np.append(0, edges), np.append(edges, len(records))
            for start, end in zip(starts[ends - starts > 1], ends[ends - starts > 1], strict=True):
                yield records["number"][start:end]
        shutil.rmtree(self._directory)


@dataclass(frozen=True)
class Pair:
    """Two near-duplicates: the numbers of the one that stays and of the one that goes, and their similarity."""

    kept: int
    dropped: int
    similarity: float


def find_duplicates(spool: Spool, ranks: list[int], similarity: float, work: Path) -> tuple[np.ndarray, list[Pair]]:
    """What becomes of each document, uint8 [documents] (KEPT, EQUAL, NEAR), and some near pairs to look at.

    ranks: of each chunk, the place of its domain: lower stays. similarity: 1 finds only equal documents. work: a folder
    for files that go again. Memory: a byte a document, and the near-duplicates themselves.
    """
    fate = np.zeros(spool.num_documents, dtype=np.uint8)
    _mark_equal(spool, fate, work)
    if similarity == 1:
        return fate, []
    parents = _components(spool, fate, similarity, work)
    components: dict[int, list[int]] = {}
    for number in parents:
        components.setdefault(_root(parents, number), []).append(number)
    pairs = []
    for members in components.values():
        best = min(members, key=lambda number: _preference(spool, ranks, number))
        for number in members:
            if number != best:
                fate[number] = NEAR
                pairs.append((int(spool.row(number)["high"]), best, number))
    looked_at = [Pair(best, number, estimate(spool, best, number)) for _, best, number in sorted(pairs)[:8]]
    return fate, looked_at


def estimate(spool: Spool, one: int, other: int) -> float:
    """The share of equal places in two signatures."""
    return float((spool.signature(one) == spool.signature(other)).mean())


def _mark_equal(spool: Spool, fate: np.ndarray, work: Path) -> None:
    buckets = Buckets(work, spool.num_documents)
    for chunk in range(len(spool)):
        rows = spool.rows(chunk)
        buckets.add(np.asarray(rows["high"]), spool.first[chunk] + np.arange(len(rows)))
    for numbers in buckets.groups():
        seen = set()
        for number in numbers.tolist():
            low = int(spool.row(number)["low"])
            if low in seen:
                fate[number] = EQUAL
            seen.add(low)


def band_keys(signatures: np.ndarray, rows: int) -> Iterator[np.ndarray]:
    """For each band a key of every document, uint64 [n]; keys of different bands differ but by chance."""
    for band in range(SIGNATURE // rows):
        keys = np.full(len(signatures), band, dtype=np.uint64)
        for column in range(band * rows, (band + 1) * rows):
            keys = mix(keys + np.uint64(1)) ^ signatures[:, column].astype(np.uint64)
        yield mix(keys)


def _components(spool: Spool, fate: np.ndarray, similarity: float, work: Path) -> dict[int, int]:
    """Union-find over all pairs that are similar enough: the parent of each document that is in one."""
    rows = rows_a_band(similarity)
    buckets = Buckets(work, spool.num_documents * SIGNATURE // rows)
    for chunk in range(len(spool)):
        numbers = spool.first[chunk] + np.arange(len(spool.rows(chunk)))
        alive = fate[numbers] == KEPT
        for keys in band_keys(np.asarray(spool.signatures(chunk))[alive], rows):
            buckets.add(keys, numbers[alive])
    parents: dict[int, int] = {}
    for members in buckets.groups():
        for one, other in _pairs(spool, members.tolist()):
            if estimate(spool, one, other) >= similarity:
                _join(parents, one, other)
    return parents


def _pairs(spool: Spool, members: list[int]) -> Iterator[tuple[int, int]]:
    if len(members) <= _ALL_PAIRS:
        yield from combinations(members, 2)
        return
    members = sorted(members, key=lambda number: int(spool.row(number)["high"]))
    yield from ((members[0], other) for other in members[1:])
    yield from zip(members[1:], members[2:], strict=False)


def _preference(spool: Spool, ranks: list[int], number: int) -> tuple[int, int, int, int]:
    row = spool.row(number)
    return ranks[spool.place(number)[0]], -int(row["length"]), int(row["high"]), int(row["low"])


def _root(parents: dict[int, int], number: int) -> int:
    while parents[number] != number:
        parents[number] = number = parents[parents[number]]
    return number


def _join(parents: dict[int, int], one: int, other: int) -> None:
    for number in (one, other):
        parents.setdefault(number, number)
    parents[_root(parents, other)] = _root(parents, one)
