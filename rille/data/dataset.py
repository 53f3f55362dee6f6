"""A training set that `rille data build` made: streams of shards, read by mapping files, never whole.

    dataset.json        what is where, the mixture, counts          report.html, report.json    for people
    tokenizer.json      the vocabulary                              counts.npy                 int64 [W]: of all targets
    train/              shards (see shards.py)                      held_out.tokens, .boundaries.npy, .domains.npy

A document is cut into pieces of at most `sequence_length` tokens, all but its last one full. Pieces of a stream are
numbered in order; `Stream.piece` finds one by its number.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from rille.data.arrays import load_array
from rille.data.mixture import Mixture, StreamSize
from rille.text.tokenizer import load_tokenizer
from rille.text.vocabulary import Tokenizer

MANIFEST = "dataset.json"
FORMAT = 1
PARTS = ("dtype", "vocab_size", "tokenizer", "digest", "domains", "streams", "held_out", "mixture", "request")
_OPEN_SHARDS = 256


def _load(file: Path, *, mapped: bool = False) -> np.ndarray:
    try:
        return load_array(file, mapped=mapped)
    except ValueError as error:
        raise ValueError(f"{error}; build the data set again") from None


class Shard:
    """One file of tokens and its boundaries, mapped."""

    def __init__(self, base: Path, dtype: str, facts: dict[str, Any]):
        self.boundaries = _load(Path(f"{base}.boundaries.npy"), mapped=True)
        tokens = Path(f"{base}.tokens")
        size = tokens.stat().st_size if tokens.is_file() else 0
        expected = (facts["targets"] + 1) * np.dtype(dtype).itemsize
        if size != expected or int(self.boundaries[-1]) != facts["targets"]:
            raise ValueError(
                f"{base}.tokens has {size:,} bytes, not {expected:,}: the data set is damaged; build it again"
            )
        self.tokens = np.memmap(f"{base}.tokens", dtype=dtype, mode="r")

    def piece_ends(self, sequence_length: int) -> np.ndarray:
        """int64 [documents]: pieces up to the end of each document."""
        return np.cumsum(-(-np.diff(self.boundaries) // sequence_length))


class Stream:
    """The short or the long documents of one domain, cut at a sequence length."""

    def __init__(self, directory: Path, facts: dict[str, Any], dtype: str, sequence_length: int):
        self._directory, self._facts, self._dtype = directory, facts, dtype
        self._length = sequence_length
        self.domain, self.long = facts["domain"], facts["long"]
        self._shard = lru_cache(maxsize=_OPEN_SHARDS)(self._open)
        counts = [int(self._shard(i)[1][-1]) for i in range(len(facts["shards"]))]
        self._first = [0, *accumulate(counts)]

    @property
    def size(self) -> StreamSize:
        return StreamSize(self.domain, self.long, self._facts["targets"], self._first[-1])

    def _open(self, number: int) -> tuple[Shard, np.ndarray]:
        facts = self._facts["shards"][number]
        shard = Shard(self._directory / "train" / facts["file"], self._dtype, facts)
        return shard, shard.piece_ends(self._length)

    def piece(self, number: int) -> tuple[int, int, int]:
        """(shard, start, length) of a piece: its inputs are tokens[start : start + length] of the shard."""
        shard = bisect_right(self._first, number) - 1
        opened, ends = self._shard(shard)
        inside = number - self._first[shard]
        document = int(np.searchsorted(ends, inside, side="right"))
        before = int(ends[document - 1]) if document else 0
        start = int(opened.boundaries[document]) + (inside - before) * self._length
        return shard, start, min(self._length, int(opened.boundaries[document + 1]) - start)

    def read(self, shard: int, start: int, length: int) -> np.ndarray:
        """tokens[start : start + length + 1] of a shard: inputs and, one further, targets."""
        return self._shard(shard)[0].tokens[start : start + length + 1]


class Dataset:
    """An opened training set. Raises ValueError where the folder is not a whole one."""

    def __init__(self, directory: str | Path):
        self.directory = Path(directory)
        if not is_dataset(self.directory):
            raise ValueError(f"{directory} holds no {MANIFEST}; make one with rille data build")
        try:
            self.manifest: dict[str, Any] = json.loads((self.directory / MANIFEST).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{self.directory / MANIFEST} is damaged ({error}); build the set again") from None
        if not isinstance(self.manifest, dict):
            raise ValueError(f"{self.directory / MANIFEST} is damaged (it describes no set); build the set again")
        if self.manifest.get("format") != FORMAT:
            raise ValueError(f"{directory} is of format {self.manifest.get('format')}, not {FORMAT}; build it again")
        if missing := [name for name in PARTS if name not in self.manifest]:
            raise ValueError(f"{self.directory / MANIFEST} is damaged (it lacks {', '.join(missing)}); build it again")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.directory)

    @property
    def digest(self) -> str:
        """Tells sets apart: it changes with any token."""
        return self.manifest["digest"]

    @property
    def mixture(self) -> Mixture:
        """The one that the build was told."""
        return Mixture(**self.manifest["mixture"])

    @property
    def domains(self) -> list[str]:
        return self.manifest["domains"]

    def streams(self, sequence_length: int) -> list[Stream]:
        """Every stream, its documents cut at `sequence_length`."""
        dtype = self.manifest["dtype"]
        return [Stream(self.directory, facts, dtype, sequence_length) for facts in self.manifest["streams"]]

    @property
    def num_targets(self) -> int:
        return sum(facts["targets"] for facts in self.manifest["streams"])

    @property
    def num_documents(self) -> int:
        return sum(facts["documents"] for facts in self.manifest["streams"])

    @property
    def counts(self) -> np.ndarray:
        """int64 [W]: how often each id is a target."""
        return _load(self.directory / "counts.npy")

    def held_out(self) -> Shard:
        """The held-out side, documents of all domains in the order of their hashes."""
        return Shard(self.directory / "held_out", self.manifest["dtype"], self.manifest["held_out"])

    def held_out_domains(self) -> np.ndarray:
        """uint16 [documents]: for each held-out document its place in `domains`."""
        return _load(self.directory / "held_out.domains.npy")


def is_dataset(path: str | Path | None) -> bool:
    """Whether a path is a folder that `rille data build` made."""
    return path is not None and (Path(path) / MANIFEST).is_file()
