"""Safetensors shards of a checkpoint directory: what they hold (headers only), and their tensors one at a time.

A file is eight bytes of header length, a JSON header {name: {dtype, shape, data_offsets}}, then the data. Headers are
read and held against the file's size first, so that a truncated shard is found before anything is loaded.
"""

from __future__ import annotations

import errno
import json
import re
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


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
        raise CheckpointError(f"{path}: truncated: the header describes {end} bytes, the file has {size}")
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


def save_shard(tensors: dict[str, Tensor], path: Path) -> None:
    """Write one safetensors file. Raises OSError where the disk is full or cannot be written."""
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:
        code = re.search(r"os error (\d+)", str(error))
        raise OSError(int(code[1]) if code else errno.EIO, str(error), str(path)) from error
