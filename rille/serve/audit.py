"""Whether the books of the pool balance: for tests, and for a server that checks itself. No torch here."""

from __future__ import annotations

from collections.abc import Iterable

from rille.serve.prefix import Holding, PrefixCache
from rille.serve.scheduler import Scheduler


def audit(cache: PrefixCache, holdings: Iterable[Holding]) -> None:
    """Raise AssertionError unless every page is free, held by one of these or stored, once. Between steps."""
    holdings = list(holdings)
    entries = {id(e): e for h in holdings for e in (*h.latents, *h.pinned, *h.pending)}
    entries |= {id(h.moving): h.moving for h in holdings if h.moving is not None}
    entries |= {id(entry): entry for entry in cache.store.entries()}
    used = [page for entry in entries.values() for page in entry.pages]
    used += [page for holding in holdings for page in holding.state]
    assert len(used) == len(set(used)), "a page belongs to two"
    total, free = cache.store.pool.num_pages - cache.reserved, cache.store.pool.num_free
    assert len(used) + free == total, f"{len(used)} pages in use and {free} free are not {total}"
    evictable = sum(len(entry.pages) for entry in entries.values() if entry.refs == 0)
    assert evictable == cache.store.num_evictable, f"{evictable} evictable pages, {cache.store.num_evictable} counted"


def audit_scheduler(scheduler: Scheduler) -> None:
    """The same for everything that runs."""
    audit(scheduler.cache, [s.holding for s in scheduler.running if s.holding is not None])
