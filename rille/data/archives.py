"""The bytes of .gz, .xz and .zst files in blocks of bounded size, whatever state the files are in; lines out of blocks.

An archive is members (gzip), streams (xz) or frames (zstd) end to end; zeros may stand between and after those of the
first two. Every one of them must be whole. The libraries' own readers take a cut frame for a whole one (zstandard) and
pass over what does not begin as a second stream (lzma), so the members are fed here.

A member's checksum stands at its end: a byte that is wrong in the middle is known when all of the member has been read,
and may look like a missing end. Who must not take wrong bytes for text reads `checked`, which decompresses twice.
"""

from __future__ import annotations

import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

_READ = 1 << 16
_BLOCK = 1 << 20
_ZSTD_READ = 1 << 8  # zstandard bounds no output: so much input holds at most 8 MiB of it (128 KiB for four bytes)
_ZSTD_WINDOW = 2**31  # archives made with --long


class Damaged(ValueError):
    """An archive that does not decompress."""


class CutShort(Damaged):
    """An archive whose end is missing."""


class Member(Protocol):
    """One member on its way. rest: what followed its end."""

    def feed(self, data: bytes) -> Iterator[bytes]: ...

    @property
    def ended(self) -> bool: ...

    @property
    def rest(self) -> bytes: ...


class OfStandardLibrary:
    """What zlib's and lzma's decompressors say in the same words."""

    _inner: Any

    @property
    def ended(self) -> bool:
        return self._inner.eof

    @property
    def rest(self) -> bytes:
        return self._inner.unused_data


class GzipMember(OfStandardLibrary):
    def __init__(self):
        self._inner = zlib.decompressobj(wbits=31)

    def feed(self, data: bytes) -> Iterator[bytes]:
        while True:
            block = self._inner.decompress(data, _BLOCK)
            yield block
            data = self._inner.unconsumed_tail
            if self._inner.eof or (not data and len(block) < _BLOCK):
                return


class XzStream(OfStandardLibrary):
    def __init__(self):
        self._inner = lzma.LZMADecompressor()

    def feed(self, data: bytes) -> Iterator[bytes]:
        while True:
            yield self._inner.decompress(data, _BLOCK)
            data = b""
            if self._inner.eof or self._inner.needs_input:
                return


class ZstdFrame:
    def __init__(self):
        import zstandard

        self._inner = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW).decompressobj()
        self.rest = b""

    def feed(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_READ):
            yield self._inner.decompress(data[start : start + _ZSTD_READ])
            if self._inner.eof:
                self.rest = self._inner.unused_data + data[start + _ZSTD_READ :]
                return

    @property
    def ended(self) -> bool:
        return self._inner.eof


def blocks_of(file: Path, *, checked: bool = False) -> Iterator[bytes]:
    """The file's bytes, decompressed where its name ends in .gz, .xz or .zst, at most 8 MiB at once.

    Raises Damaged, CutShort where the end is missing, after what could be read, with `checked` after the whole members.
    Raises ValueError where the library for .zst is not installed.
    """
    kind = file.suffix.lower()
    if kind not in (".gz", ".xz", ".zst"):
        with open(file, "rb") as stream:
            while block := stream.read(_BLOCK):
                yield block
        return
    if not checked:
        yield from (block for block, _ in _members(file, kind))
        return
    room, fault = _trusted(_members(file, kind))
    for block, _ in _members(file, kind):
        yield block[:room]
        room -= len(block)
        if room <= 0:
            break
    if fault is not None:
        raise fault


def _trusted(members: Iterator[tuple[bytes, bool]]) -> tuple[int, Damaged | None]:
    """How many bytes may be taken for what was written, and what is wrong after them."""
    read = whole = 0
    try:
        for block, ended in members:
            read += len(block)
            whole = read if ended else whole
    except Damaged as fault:
        return whole, fault
    return read, None


def _zstd_error(file: Path) -> type[Exception]:
    try:
        import zstandard
    except ModuleNotFoundError:
        raise ValueError(f"{file} needs zstandard to be read: pip install 'rille[data]'") from None
    return zstandard.ZstdError


def _members(file: Path, kind: str) -> Iterator[tuple[bytes, bool]]:
    """Blocks, and whether a member has ended with them. Raises as `blocks_of` does."""
    begin: Callable[[], Member] = {".gz": GzipMember, ".xz": XzStream, ".zst": ZstdFrame}[kind]
    fault = zlib.error if kind == ".gz" else lzma.LZMAError if kind == ".xz" else _zstd_error(file)
    padding = b"" if kind == ".zst" else b"\0"
    member: Member | None = None
    with open(file, "rb") as stream:
        while data := stream.read(_READ):
            while data := data if member else data.lstrip(padding):
                member = member or begin()
                try:
                    for block in member.feed(data):
                        yield block, member.ended
                except fault as error:
                    raise Damaged(str(error)) from None
                data, member = (member.rest, None) if member.ended else (b"", member)
    if member is not None:
        raise CutShort("its end is missing")


def limited_lines(blocks: Iterator[bytes], limit: int) -> Iterator[bytes | None]:
    """Lines without their line feed; None for one that is longer than `limit`, of which no more is held than that."""
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        *lines, rest = block.split(b"\n")
        for line in lines:
            size += len(line)
            yield b"".join([*parts, line]) if size <= limit else None
            parts, size = [], 0
        size += len(rest)
        if size <= limit:
            parts.append(rest)
        else:
            parts = []
    if size:
        yield b"".join(parts) if size <= limit else None
