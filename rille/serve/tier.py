"""Memory behind the pool: pages written back when they are evicted, fetched before they are used again. No torch here.

The cache decides what moves and when; a tier keeps content under keys. What was put together comes back whole or not at
all, so that a state never meets the latents of another length.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class Tier(Protocol):
    """put copies pages out, under every one of the keys, before it returns (what it cannot hold it leaves out); get
    copies them into other pages."""

    def put(self, keys: Sequence[bytes], pages: Sequence[int]) -> None: ...
    def has(self, key: bytes) -> bool: ...
    def get(self, key: bytes, pages: Sequence[int]) -> None: ...
    def drop(self, key: bytes) -> None: ...


@dataclass(eq=False, slots=True)
class _Kept:
    """keys: what it is still found by."""

    keys: set[bytes]
    contents: list[Any]


class HostTier:
    """At most `num_pages` pages in this process's memory, the oldest forgotten first.

    read(page) gives a page's content, write(page, content) puts it into another page.
    """

    def __init__(self, num_pages: int, read: Callable[[int], Any], write: Callable[[int, Any], None]) -> None:
        self.num_pages, self.num_used = num_pages, 0
        self._read, self._write = read, write
        self._held: dict[bytes, _Kept] = {}
        self._by_age: OrderedDict[_Kept, None] = OrderedDict()

    def put(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Of two contents under one key the newer one is found by it; the older one stays under its other keys: pages
        that begin alike and end otherwise are both needed."""
        if len(pages) > self.num_pages or all(self.has(key) for key in keys):
            return
        kept = _Kept(set(keys), [self._read(page) for page in pages])
        for key in keys:
            if (other := self._held.pop(key, None)) is not None:
                other.keys.remove(key)
                if not other.keys:
                    self._forget(other)
        while self.num_used + len(pages) > self.num_pages:
            self._forget(next(iter(self._by_age)))
        self._held |= dict.fromkeys(keys, kept)
        self._by_age[kept] = None
        self.num_used += len(pages)

    def has(self, key: bytes) -> bool:
        return key in self._held

    def get(self, key: bytes, pages: Sequence[int]) -> None:
        kept = self._held[key]
        assert len(kept.contents) == len(pages), f"{len(kept.contents)} pages are under this key, {len(pages)} asked"
        self._by_age.move_to_end(kept)
        for page, content in zip(pages, kept.contents, strict=True):
            self._write(page, content)

    def drop(self, key: bytes) -> None:
        """Forget what lies under a key, and with it under the keys of the same content."""
        if key in self._held:
            self._forget(self._held[key])

    def _forget(self, kept: _Kept) -> None:
        self.num_used -= len(kept.contents)
        del self._by_age[kept]
        for key in kept.keys:
            del self._held[key]
