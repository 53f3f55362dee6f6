"""What is stored in the pool of pages: entries found by hashes, and who goes first when room is needed. No torch here.

    free  ->  held by sequences (refs > 0)  ->  stored and evictable (refs = 0)  ->  free

Evicted is what was used longest ago; of things used at one time the one deepest in its chain, since nothing reaches it
without what lies before it, and a state before the latents that it needs.
"""

from __future__ import annotations

import heapq
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from rille.serve.chain import Chain
from rille.serve.pages import PagePool
from rille.serve.tier import Tier


@dataclass(eq=False, slots=True)
class Entry:
    """Latents of one page, or a checkpoint: the state of all groups after `position` tokens, which lives and goes as
    one. keys: what finds it; none: nothing does. refs: sequences that use it now. stamp: when it was last used; uses:
    how often a sequence went on from it, or with it."""

    pages: tuple[int, ...]
    position: int
    keys: list[bytes] = field(default_factory=list)
    is_state: bool = False
    is_fork: bool = False
    refs: int = 1
    stamp: int = 0
    uses: int = 0


class Watcher(Protocol):
    """Who wants to know from where a sequence could go on: routers, indexers. Called between steps; must not wait."""

    def resumable(self, chain: Chain, position: int) -> None:
        """The first `position` tokens of this chain need not be computed again."""
        ...

    def gone(self, key: bytes) -> None:
        """That is over for the prefix with this hash (`chain.at(position)`)."""
        ...


KEPT_IDS = 1 << 20  # of units that were passed, to see where others leave them: 4 MiB


class Store:
    """Entries by hash, over a pool. page_tokens: latents to a page. tier: where evicted ones go. remember: boundaries
    that are known after their pages are gone."""

    def __init__(self, num_pages: int, page_tokens: int, tier: Tier | None = None, remember: int = 1 << 18) -> None:
        self.pool, self.tier = PagePool(num_pages), tier
        self.watcher: Watcher | None = None
        self.num_evictable = 0  # pages
        self._latents: dict[bytes, list[Entry]] = {}
        self._states: dict[bytes, Entry] = {}
        self._heap: list[tuple[int, int, int, Entry]] = []
        self._serial, self._now = count(), 0
        self._seen: OrderedDict[bytes, bool] = OrderedDict()
        self._ends: OrderedDict[bytes, list[int]] = OrderedDict()
        self._units: OrderedDict[bytes, array[int]] = OrderedDict()
        self._num_ids, self._remember, self._page_tokens = 0, remember, page_tokens

    @property
    def available(self) -> int:
        """Pages that an allocation can have: free ones and those that may be evicted."""
        return self.pool.num_free + self.num_evictable

    @property
    def num_states(self) -> int:
        return len(self._states)

    def entries(self) -> Iterator[Entry]:
        """Everything that a hash finds, once."""
        yield from {id(entry): entry for entries in self._latents.values() for entry in entries}.values()
        yield from self._states.values()

    # --- finding ---

    def latents(self, key: bytes) -> Entry | None:
        return next(iter(self._latents.get(key, ())), None)

    def state(self, key: bytes) -> Entry | None:
        return self._states.get(key)

    def outside(self, key: bytes, is_state: bool) -> bytes | None:
        """The name under which the tier has it, if it does."""
        name = _name(key, is_state)
        return name if self.tier is not None and self.tier.has(name) else None

    def file(self, entry: Entry, key: bytes) -> None:
        """Let a hash find an entry. Of checkpoints there is one to a hash; the caller has looked."""
        if key in entry.keys:
            return
        entry.keys.append(key)
        if entry.is_state:
            assert key not in self._states, "a second checkpoint of one boundary"
            self._states[key] = entry
        else:
            self._latents.setdefault(key, []).append(entry)

    def yields(self, entry: Entry) -> bool:
        """Whether nothing is lost without these latents: no hash finds them, or each finds others too, which nobody
        holds (who does may give them up). Those others count as used now."""
        others = [next((o for o in self._latents[key] if o is not entry and not o.refs), None) for key in entry.keys]
        found = [other for other in others if other is not None]
        if len(found) < len(others):
            return False
        for other in found:
            self.touch(other)
        return True

    def note(self, key: bytes, had_state: bool = False) -> None:
        """Remember that this boundary was there."""
        self._seen[key] = self._seen.pop(key, False) or had_state
        if len(self._seen) > self._remember:
            self._seen.popitem(last=False)

    def was_seen(self, key: bytes) -> bool | None:
        """None: never, as far as is remembered; else whether there was a checkpoint."""
        return self._seen.get(key)

    def note_end(self, key: bytes, rest: int) -> None:
        """Remember that `rest` tokens behind this boundary there was a checkpoint."""
        known = self._ends.pop(key, [])
        self._ends[key] = known if rest in known else sorted((*known, rest), reverse=True)
        if len(self._ends) > self._remember:
            self._ends.popitem(last=False)

    def ends(self, key: bytes) -> list[int]:
        """How far behind this boundary, but before the next one, there may be checkpoints; the farthest first."""
        return self._ends.get(key, [])

    def note_unit(self, key: bytes, ids: Sequence[int]) -> None:
        """Remember what stood behind this boundary."""
        self._num_ids += len(ids) - len(self._units.pop(key, ()))
        self._units[key] = array("i", ids)
        while self._num_ids > KEPT_IDS:
            self._num_ids -= len(self._units.popitem(last=False)[1])

    def unit(self, key: bytes) -> Sequence[int]:
        """What stood behind this boundary last, up to the next one, as far as is remembered."""
        return self._units.get(key, ())

    # --- using ---

    def pin(self, entry: Entry) -> None:
        """Nothing evicts it until it is unpinned as often."""
        if entry.refs == 0:
            self.num_evictable -= len(entry.pages)
        entry.refs += 1

    def unpin(self, entry: Entry) -> None:
        entry.refs -= 1
        if entry.refs:
            return
        if not entry.keys:  # it was given up while somebody used it
            self.pool.give(entry.pages)
            return
        self.num_evictable += len(entry.pages)
        self.touch(entry)

    def tick(self) -> None:
        """What is touched from now on was used later than what was touched before."""
        self._now += 1

    def touch(self, entry: Entry, last: bool = False) -> None:
        """Note that it was used now; or, with `last`, that it is the first to go."""
        if entry.refs == 0 and entry.keys:
            entry.stamp = -1 if last else self._now
            depth = entry.position + (self._page_tokens if entry.is_state else 0)  # before the latents that it needs
            heapq.heappush(self._heap, (entry.stamp, -depth, next(self._serial), entry))
            self._shrink_heap()

    def touch_latents(self, key: bytes) -> None:
        """The same of all latents that a hash finds."""
        for entry in self._latents.get(key, ()):
            self.touch(entry)

    def _shrink_heap(self) -> None:
        """Drop what was touched again or is gone, once that is most of the heap."""
        if len(self._heap) > 64 + 4 * self.pool.num_pages:
            self._heap = [item for item in self._heap if _is_current(item)]
            heapq.heapify(self._heap)

    def allocate(self, number: int) -> list[int] | None:
        """So many pages; None (and nothing evicted) where there are too few."""
        if number > self.available:
            return None
        while self.pool.num_free < number:
            self._evict()
        return self.pool.take(number)

    def _evict(self) -> None:
        while not _is_current(self._heap[0]):
            heapq.heappop(self._heap)
        entry = self._heap[0][-1]
        if self.tier is not None:  # before anything is changed: a tier may fail
            self.tier.put([_name(key, entry.is_state) for key in entry.keys], entry.pages)
        heapq.heappop(self._heap)
        self.num_evictable -= len(entry.pages)
        self.withdraw(entry)
        self.pool.give(entry.pages)

    def drop(self, entry: Entry) -> None:
        """One user of an entry gives it up for good: nothing finds it any more, its pages (of all groups) are free as
        soon as nobody else uses them."""
        self.withdraw(entry)
        self.unpin(entry)

    def abandon(self, entry: Entry) -> None:
        """Nothing finds it any more; its pages are free once nobody uses them."""
        self.withdraw(entry)
        if entry.refs == 0:
            self.num_evictable -= len(entry.pages)
            self.pool.give(entry.pages)

    def forget(self, key: bytes) -> None:
        """Abandon whatever a hash finds, here and in the tier."""
        state = self._states.get(key)
        for entry in (*self._latents.get(key, ()), *(() if state is None else (state,))):
            self.abandon(entry)
        if self.tier is not None:
            self.tier.drop(_name(key, True))
            self.tier.drop(_name(key, False))

    def withdraw(self, entry: Entry) -> None:
        for key in entry.keys:
            if entry.is_state:
                del self._states[key]
                if self.watcher is not None:
                    self.watcher.gone(key)
                continue
            self._latents[key].remove(entry)
            if not self._latents[key]:
                del self._latents[key]
        entry.keys = []

    def clear(self) -> None:
        """Evict everything that nobody uses, and forget what was seen."""
        tier, self.tier = self.tier, None
        while self.num_evictable:
            self._evict()
        self.tier = tier
        self._seen.clear()
        self._ends.clear()
        self._units.clear()
        self._num_ids = 0


def _name(key: bytes, is_state: bool) -> bytes:
    return (b"state " if is_state else b"latents ") + key


def _is_current(item: tuple[int, int, int, Entry]) -> bool:
    stamp, _, _, entry = item
    return entry.refs == 0 and entry.stamp == stamp and bool(entry.keys)
