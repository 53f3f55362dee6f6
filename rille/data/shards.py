"""Files of tokens: one side of `corpus.py`'s stream a file, written by a worker, each whole or absent.

web-00007.tokens            little-endian uint16 or uint32 [N + 1]: e d d d e d d e, the token e between documents
web-00007.boundaries.npy    int64 [documents + 1]: where a document's inputs begin; the last is N
web-00007-long.tokens ...   the same of the documents that are long
web-00007.json              counts and digests; written last: with it the chunk is encoded
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from rille.data.arrays import save_array, write_array
from rille.data.dataset import Dataset
from rille.data.encode import Encoder
from rille.data.spool import texts_of
from rille.text.tokenizer import load_tokenizer

_SLICE = 1_000_000  # characters encoded at once


def token_dtype(vocab_size: int) -> str:
    """The narrowest of the two types that holds every id."""
    return "<u2" if vocab_size <= 1 << 16 else "<u4"


class ShardWriter:
    """Writes one file of tokens with its boundaries."""

    def __init__(self, base: Path, eos: int, dtype: str):
        self._base, self._dtype = base, dtype
        self._eos = np.array([eos], dtype=dtype)
        self._file = base.with_name(f"{base.name}.tokens.partial").open("wb")
        self._digest = hashlib.blake2b(digest_size=16)
        self._lengths: list[int] = [0]
        self.text_bytes = 0
        self._write(self._eos)

    def add(self, ids: np.ndarray, text_bytes: int) -> None:
        self._write(np.append(ids.astype(self._dtype), self._eos))
        self._lengths.append(len(ids) + 1)
        self.text_bytes += text_bytes

    def _write(self, ids: np.ndarray) -> None:
        content = ids.tobytes()
        self._digest.update(content)
        self._file.write(content)

    def finish(self) -> dict[str, Any]:
        """Give both files their names; returns what the manifest says of them."""
        boundaries = np.cumsum(self._lengths, dtype=np.int64)
        with open(f"{self._base}.boundaries.npy.partial", "wb") as stream:
            write_array(stream, boundaries)
            _sync(stream)
        _sync(self._file)
        self._file.close()
        for kind in ("boundaries.npy", "tokens"):
            os.replace(f"{self._base}.{kind}.partial", f"{self._base}.{kind}")
        return {
            "file": self._base.name,
            "documents": len(boundaries) - 1,
            "targets": int(boundaries[-1]),
            "text_bytes": self.text_bytes,
            "digest": self._digest.hexdigest(),
        }


def _sync(stream) -> None:
    stream.flush()
    os.fsync(stream.fileno())


@dataclass(frozen=True, eq=False)
class EncodeTask:
    """Encode some documents of one chunk. wanted: bool [rows]. base: where the files go, without their endings."""

    spool: Path
    chunk: int
    wanted: np.ndarray
    base: Path
    tokenizer: Path
    long_tokens: int


def encode_chunk(task: EncodeTask) -> dict[str, Any]:
    """Write the files of a chunk, unless they are there; returns what its .json says."""
    done = Path(f"{task.base}.json")
    if done.exists():
        return json.loads(done.read_text(encoding="utf-8"))
    encoder = _encoder(task.tokenizer)
    counts = np.zeros(encoder.vocab_size, dtype=np.int64)
    writers: dict[str, ShardWriter] = {}
    for text_bytes, ids in encoded(encoder, texts_of(task.spool, task.chunk, task.wanted)):
        kind = "long" if len(ids) >= task.long_tokens else "short"
        if kind not in writers:
            base = Path(f"{task.base}-long") if kind == "long" else task.base
            writers[kind] = ShardWriter(base, encoder.eos_id, token_dtype(encoder.vocab_size))
        writers[kind].add(ids, text_bytes)
        counts += np.bincount(ids, minlength=len(counts))
        counts[encoder.eos_id] += 1
    save_array(Path(f"{task.base}.counts.npy"), counts)
    facts = {kind: writers[kind].finish() for kind in sorted(writers)}
    partial = Path(f"{task.base}.json.partial")
    with open(partial, "w", encoding="utf-8") as stream:
        json.dump(facts, stream)
        _sync(stream)
    os.replace(partial, done)
    return facts


def encoded(encoder: Encoder, texts: Iterable[str]) -> Iterator[tuple[int, np.ndarray]]:
    """Bytes and ids of each text, in order."""
    for texts_of_slice in slices(texts):
        for text, ids in zip(texts_of_slice, encoder.encode_batch(texts_of_slice), strict=True):
            yield len(text.encode()), ids


def slices(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in slices of about a megabyte."""
    held: list[str] = []
    size = 0
    for text in texts:
        held.append(text)
        size += len(text)
        if size >= _SLICE:
            yield held
            held, size = [], 0
    if held:
        yield held


@lru_cache(maxsize=1)
def _encoder(path: Path) -> Encoder:
    return Encoder(load_tokenizer(path))


def check_shards(directory: Path) -> int:
    """Compare every token file of a set with its digest; returns how many. Raises ValueError for one that changed."""
    manifest = Dataset(directory).manifest
    shards = [directory / "train" / shard["file"] for stream in manifest["streams"] for shard in stream["shards"]]
    digests = [shard["digest"] for stream in manifest["streams"] for shard in stream["shards"]]
    for base, expected in zip(
        [*shards, directory / "held_out"], [*digests, manifest["held_out"]["digest"]], strict=True
    ):
        digest = hashlib.blake2b(digest_size=16)
        if not Path(f"{base}.tokens").is_file():
            raise ValueError(f"{base}.tokens is gone; build the set again")
        with open(f"{base}.tokens", "rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
        if digest.hexdigest() != expected:
            raise ValueError(f"{base}.tokens is not as it was written; build the set again")
    return len(shards) + 1
