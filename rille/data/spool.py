"""Documents between reading and encoding: chunks of files on disk, each whole or absent.

    0007.text              the kept documents' UTF-8, end to end
    0007.rows.npy          a row each: length in bytes, fingerprint (128 bits)
    0007.signatures.npy    uint32 [rows, 128]: MinHash (absent where near-duplicates are not looked for)
    0007.json              counts, samples, how many records were read so far; written last: with it the chunk is there

A document's number is its row counted over all chunks. Numbers rise in the order of domains and of reading.
"""

from __future__ import annotations

import json
import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from rille.data.arrays import write_array

ROW = np.dtype([("length", "<i8"), ("high", "<u8"), ("low", "<u8")])
SIGNATURE = 128


@dataclass
class Gathered:
    """What came of a batch of records."""

    records: int = 0
    texts: list[bytes] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    signatures: list[np.ndarray] = field(default_factory=list)
    tally: dict[str, Any] = field(default_factory=dict)


class ChunkWriter:
    """Collects the documents of one chunk; `seal` gives it its name."""

    def __init__(self, directory: Path, number: int):
        self._base = directory / f"{number:05d}"
        self._text = self._file("text.partial").open("wb")
        self._rows: list[np.ndarray] = [np.empty(0, ROW)]
        self._signatures: list[np.ndarray] = []
        self.bytes = 0

    def add(self, batch: Gathered) -> None:
        for text in batch.texts:
            self._text.write(text)
            self.bytes += len(text)
        self._rows += batch.rows
        self._signatures += batch.signatures

    def seal(self, facts: dict[str, Any]) -> None:
        """Give the chunk its name. facts: JSON; `rows` and `bytes` are added."""
        self._flush(self._text, "text")
        rows = np.concatenate(self._rows)
        self._save(rows, "rows.npy")
        if self._signatures:
            self._save(np.concatenate(self._signatures), "signatures.npy")
        facts = {**facts, "rows": len(rows), "bytes": self.bytes}
        stream = self._file("json.partial").open("wb")
        stream.write(json.dumps(facts, indent=1, sort_keys=True).encode())
        self._flush(stream, "json")

    def _save(self, array: np.ndarray, kind: str) -> None:
        stream = self._file(f"{kind}.partial").open("wb")
        write_array(stream, array)
        self._flush(stream, kind)

    def _flush(self, stream, kind: str) -> None:
        stream.flush()
        os.fsync(stream.fileno())
        stream.close()
        os.replace(self._file(f"{kind}.partial"), self._file(kind))

    def _file(self, kind: str) -> Path:
        return self._base.with_name(f"{self._base.name}.{kind}")


class Spool:
    """The sealed chunks of a directory, in order."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.facts: list[dict[str, Any]] = []
        while (file := directory / f"{len(self.facts):05d}.json").exists():
            self.facts.append(json.loads(file.read_text(encoding="utf-8")))
        self.first = [0, *accumulate(facts["rows"] for facts in self.facts)]
        self.rows = lru_cache(maxsize=64)(self._rows)
        self.signatures = lru_cache(maxsize=64)(self._signatures)

    def __len__(self) -> int:
        return len(self.facts)

    @property
    def num_documents(self) -> int:
        return self.first[-1]

    def _rows(self, chunk: int) -> np.ndarray:
        return rows_of(self.directory, chunk)

    def _signatures(self, chunk: int) -> np.ndarray:
        """uint32 [rows, 128], or none at all for a chunk without documents."""
        file = self.directory / f"{chunk:05d}.signatures.npy"
        return np.load(file, mmap_mode="r") if file.exists() else np.empty((0, SIGNATURE), np.uint32)

    def place(self, number: int) -> tuple[int, int]:
        """The chunk and the row of a document."""
        chunk = bisect_right(self.first, number) - 1
        return chunk, number - self.first[chunk]

    def row(self, number: int) -> np.void:
        chunk, row = self.place(number)
        return self.rows(chunk)[row]

    def signature(self, number: int) -> np.ndarray:
        chunk, row = self.place(number)
        return self.signatures(chunk)[row]

    def text(self, number: int) -> str:
        chunk, row = self.place(number)
        lengths = self.rows(chunk)["length"]
        with open(self.directory / f"{chunk:05d}.text", "rb") as stream:
            stream.seek(int(lengths[:row].sum()))
            return stream.read(int(lengths[row])).decode()


def rows_of(directory: Path, chunk: int) -> np.ndarray:
    """The rows of one sealed chunk, mapped."""
    file = directory / f"{chunk:05d}.rows.npy"
    empty = not (directory / f"{chunk:05d}.text").stat().st_size  # of which there is nothing to map
    return np.load(file, mmap_mode=None if empty else "r")


def texts_of(directory: Path, chunk: int, wanted: np.ndarray) -> Iterator[str]:
    """The texts of a chunk's rows that are wanted (bool [rows]), in order, one at a time; reads no other chunk."""
    with open(directory / f"{chunk:05d}.text", "rb", buffering=1 << 20) as stream:
        for length, take in zip(rows_of(directory, chunk)["length"].tolist(), wanted.tolist(), strict=True):
            if take:
                yield stream.read(length).decode()
            else:
                stream.seek(length, os.SEEK_CUR)
