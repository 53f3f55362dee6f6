"""Safetensors shards of a checkpoint directory: what they hold (headers only), and their tensors one at a time.

Writing streams too: the header needs names, dtypes and shapes only, so a shard is never in memory, only one tensor.

A file is eight bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data. Headers are
read and held against the file's size first, so that a truncated shard is found before anything is loaded.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Official spelling of the dtypes that are written; the library lays the last ones out first.
DTYPES = {
    torch.uint8: "U8",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int64: "I64",
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded or saved as asked; the message lists what is wrong."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a shard: file name, safetensors dtype (`BF16`, `F32`, `U8`, ...), shape."""

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_headers(directory: Path) -> dict[str, Stored]:
    """name -> Stored for every tensor of a checkpoint directory.

    Raises FileNotFoundError without an index or single file, CheckpointError for shards that are absent, truncated or
    damaged, and for an index that disagrees with its shards.
    """
    if not directory.is_dir():
        raise FileNotFoundError(f"{directory}: no such checkpoint directory")
    if not (directory / INDEX).is_file():
        if (directory / SINGLE).is_file():
            return _header(directory / SINGLE)
        raise FileNotFoundError(f"{directory}: neither {INDEX} nor {SINGLE} is there; is it a checkpoint directory?")
    try:
        weight_map: dict[str, str] = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
        files = sorted(set(weight_map.values()))
        absent = [f for f in files if not (directory / f).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{directory / INDEX}: not a valid shard index ({error!r})") from error
    if absent:
        raise CheckpointError(f"{directory}: the index names shards that are not there: {shorten(absent)}")
    stored: dict[str, Stored] = {}
    for file in files:
        stored |= _header(directory / file)
    wrong = [n for n, f in weight_map.items() if n not in stored or stored[n].file != f]
    if wrong:
        raise CheckpointError(f"{directory}: the index places tensors where they are not: {shorten(wrong)}")
    return stored


def _header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            raise CheckpointError(f"{path}: truncated or not a safetensors file ({size} bytes)")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            stored = {name: Stored(path.name, e["dtype"], tuple(e["shape"])) for name, e in header.items()}
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: damaged safetensors header ({error!r})") from error
    if end != size:
        fault = "truncated" if end > size else "damaged"
        raise CheckpointError(f"{path}: {fault}: the header describes {end} bytes, the file has {size}")
    return stored


class ShardReader:
    """Reads tensors by name and keeps one shard open at a time: ask in the order of the files."""

    def __init__(self, directory: Path, stored: dict[str, Stored]) -> None:
        self._directory, self._stored = directory, stored
        self._file, self._open = "", None

    def __call__(self, name: str) -> Tensor:
        file = self._stored[name].file
        if file != self._file:
            self.close()
            try:
                self._open = safe_open(self._directory / file, framework="pt")
            except SafetensorError as error:
                raise CheckpointError(f"{self._directory / file}: damaged safetensors file ({error})") from error
            self._open.__enter__()
            self._file = file
        assert self._open is not None
        return self._open.get_tensor(name)

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
        self._file, self._open = "", None


@contextmanager
def reading(directory: Path, stored: dict[str, Stored]) -> Iterator[ShardReader]:
    reader = ShardReader(directory, stored)
    try:
        yield reader
    finally:
        reader.close()


def shorten(names: list[str], most: int = 8) -> str:
    """A list for a message: the first few names, and how many more."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


@dataclass(frozen=True)
class Pending:
    """A tensor that is to be written: what the header says of it, and `make`, which gives it when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], Tensor]

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Pending:
        """One that is there already."""
        return cls(name, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def save_shard(pending: Iterable[Pending], path: Path) -> None:
    """Write one safetensors file, byte for byte as the library lays it out, with one tensor in memory at a time.

    Tensors are made in the order of the file: wider dtypes first, then by name. Raises OSError, with the path, where
    the disk is full or cannot be written.
    """
    rank = {dtype: number for number, dtype in enumerate(DTYPES)}
    ordered = sorted(pending, key=lambda p: (-rank[p.dtype], p.name))
    try:
        with path.open("wb") as file:
            file.write(_header_bytes(ordered))
            for p in ordered:
                tensor = p.make()
                assert tensor.dtype == p.dtype and tuple(tensor.shape) == p.shape, p.name
                file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
                del tensor  # before the next one is made
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def _header_bytes(ordered: Iterable[Pending]) -> bytes:
    """Length and JSON header, filled up with spaces so that the data begins at a multiple of 8."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for p in ordered:
        start, end = end, end + p.nbytes
        header[p.name] = {"dtype": DTYPES[p.dtype], "shape": list(p.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
