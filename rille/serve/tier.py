"""Memory behind the pool: pages written back when they are evicted, fetched before they are used again. No torch here.

The cache decides what moves and when; a tier keeps content under keys. What was put together comes back whole or not at
all, so that a state never meets the latents of another length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Tier(Protocol):
    """put copies pages out, under every one of the keys, before it returns (what it cannot hold it leaves out); get
    copies them into other pages."""

    def put(self, keys: Sequence[bytes], pages: Sequence[int]) -> None: ...
    def has(self, key: bytes) -> bool: ...
    def get(self, key: bytes, pages: Sequence[int]) -> None: ...
    def drop(self, key: bytes) -> None: ...


class HostTier:
    """At most `num_pages` pages in this process's memory, the oldest forgotten first.

    read(page) gives a page's content, write(page, content) puts it into another page.
    """

    def __init__(self, num_pages: int, read: Callable[[int], Any], write: Callable[[int, Any], None]) -> None:
        self.num_pages, self.num_used = num_pages, 0
        self._read, self._write = read, write
        self._held: OrderedDict[tuple[bytes, ...], list[Any]] = OrderedDict()
        self._names: dict[bytes, tuple[bytes, ...]] = {}

    def put(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        if len(pages) > self.num_pages or all(self.has(key) for key in keys):
            return
        for key in keys:
            self.drop(key)
        while self.num_used + len(pages) > self.num_pages:
            self.drop(next(iter(self._held))[0])
        name = tuple(keys)
        self._held[name] = [self._read(page) for page in pages]
        self._names |= dict.fromkeys(name, name)
        self.num_used += len(pages)

    def has(self, key: bytes) -> bool:
        return key in self._names

    def get(self, key: bytes, pages: Sequence[int]) -> None:
        name = self._names[key]
        held = self._held[name]
        assert len(held) == len(pages), f"{len(held)} pages are kept under this key, {len(pages)} asked"
        self._held.move_to_end(name)
        for page, content in zip(pages, held, strict=True):
            self._write(page, content)

    def drop(self, key: bytes) -> None:
        """Forget what lies under a key, and with it under the keys of the same content."""
        if key in self._names:
            name = self._names[key]
            self.num_used -= len(self._held.pop(name))
            for other in name:
                del self._names[other]
