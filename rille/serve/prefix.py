"""The prefix cache: what of a prompt need not be computed again. No torch here.

To go on after b tokens takes the latents of all b and the state of every KDA group after exactly b; `lookup.py` finds
them. What was matched is pinned before anything is allocated. Whole pages are shared; a page on which the sequence will
write is copied, and so is the state: what is stored is never written. Only a sequence that runs alone, in a pool too
small for copies, takes over what it would copy, which then is stored no more. Nothing can match before the step that
wrote it is over (`landed`). All lengths and positions are tokens. Source: Kimi K3 report section 5.4.
"""

from __future__ import annotations

from itertools import islice

from rille.serve.chain import Chain
from rille.serve.holding import Admission, CacheCounts, Holding
from rille.serve.lookup import Match, find
from rille.serve.pages import Copy
from rille.serve.retention import Retention
from rille.serve.store import Entry, Store
from rille.serve.tier import Tier


class PrefixCache:
    """The pool of pages and everything that is stored in it."""

    def __init__(
        self,
        num_pages: int,
        page_tokens: int,
        groups: int,
        *,
        unit: int = 512,
        retention: Retention | None = None,
        tier: Tier | None = None,
        remember: int = 1 << 18,
    ) -> None:
        """page_tokens: latents to a page. groups: pages of one state. unit: tokens between the boundaries that can
        match; any number, it need not fit the pages. remember: boundaries that are known after their pages are gone,
        to tell evicted from cold; some 160 bytes each. Raises ValueError for sizes below 1 and a retention that does
        not fit the unit."""
        if page_tokens < 1 or groups < 0 or unit < 1:
            raise ValueError(f"prefix cache: page_tokens {page_tokens}, groups {groups}, unit {unit} must be positive")
        self.retention = retention if retention is not None else Retention(interval=max(1, 32_768 // unit) * unit)
        self.retention.check(unit)
        self.store = Store(num_pages, page_tokens, tier, remember)
        self.page_tokens, self.groups, self.unit = page_tokens, groups, unit
        self.counts = CacheCounts()
        self.reserved = 0  # pages of the pool that somebody else has for good

    @property
    def available(self) -> int:
        return self.store.available

    def pages_for(self, tokens: int) -> int:
        """Pages that a sequence of so many tokens holds while it runs."""
        return -(-tokens // self.page_tokens) + self.groups

    def cost(self, chain: Chain) -> int:
        """Pages that a sequence takes out of what is available, from its admission to the end of its chain; those among
        them that are only read at its admission, to be copied."""
        inside = self._cost(chain, self.lookup(chain))
        return inside if self.store.tier is None else max(inside, self._cost(chain, self.lookup(chain, external=True)))

    def _cost(self, chain: Chain, match: Match) -> int:
        whole = match.latents[: match.resumed // self.page_tokens]
        pinned = [entry for entry in (*match.latents, match.checkpoint) if isinstance(entry, Entry)]
        shared = sum(isinstance(source, Entry) for source in whole)
        return self.pages_for(len(chain)) - shared + sum(len(e.pages) for e in pinned if not e.refs)

    def describe(self) -> list[str]:
        """Sizes, the least prefix that can be used again, and the retention."""
        return [
            f"memory: {self.store.pool.num_pages:,} pages of {self.page_tokens:,} tokens; the state of a sequence "
            f"takes {self.groups}",
            f"prefix cache: hash unit {self.unit:,} tokens; a prefix of {self.unit:,} is the shortest that is reused",
            f"checkpoints: {self.retention.describe()}",
        ]

    # --- lookup ---

    def lookup(self, chain: Chain, external: bool = False) -> Match:
        """As `lookup.find`; with `external` the tier counts too."""
        return find(self.store, chain, self.page_tokens, self.groups, external)

    # --- a sequence comes ---

    def admit(self, chain: Chain, *, counted: bool = True, alone: bool = False) -> Admission | None:
        """Take a sequence in, at the deepest place where it can go on. None where the pool has too few pages now; then
        nothing has changed.

        counted: False for one that was counted before. alone: what would be copied is taken over, for a sequence beside
        which there is no room for a copy; it then fits wherever all of its chain does.
        """
        inside = self.lookup(chain)
        match = self.lookup(chain, external=True) if self.store.tier is not None else inside
        if match.resumed == inside.resumed:
            match = inside
        taken = self._take_in(chain, match, alone)
        if taken is None and match is not inside:
            match = inside = self.lookup(chain)  # again: room was made for the other one
            taken = self._take_in(chain, match, alone)
        if taken is None:
            return None
        holding, copies = taken
        seen, checkpointed = self._seen_lengths(chain)
        if counted:
            self._count(len(chain), match, inside.resumed, seen, checkpointed)
        self._supersede(chain, match.resumed)
        clear = holding.state if match.resumed == 0 else ()
        return Admission(holding, match.resumed, tuple(copies), clear, self._fork(chain, match.resumed, seen))

    def _take_in(self, chain: Chain, match: Match, alone: bool) -> tuple[Holding, list[Copy]] | None:
        """Pin, allocate, and say what must be copied; all or nothing, where the tier fails too."""
        whole = match.resumed // self.page_tokens
        own = [place for place, source in enumerate(match.latents) if place >= whole or isinstance(source, bytes)]
        pinned = [entry for entry in (*match.latents, match.checkpoint) if isinstance(entry, Entry)]
        sources = [*(match.latents[place] for place in own), match.checkpoint]
        spent = [source for source in sources if alone and isinstance(source, Entry) and not source.refs]
        names = [name for name in (*match.latents, match.checkpoint) if isinstance(name, bytes)]
        for entry in pinned:
            self.store.pin(entry)
        pages = taken = None
        try:
            pages = self.store.allocate(self.groups + len(own) - sum(len(entry.pages) for entry in spent))
            if pages is not None and self._are_outside(names):
                taken = self._hold(chain, match, own, spent, pages)
            return taken
        finally:
            if taken is None:
                self.store.pool.give(pages or ())
                for entry in pinned:
                    self.store.unpin(entry)

    def _hold(
        self, chain: Chain, match: Match, own: list[int], spent: list[Entry], pages: list[int]
    ) -> tuple[Holding, list[Copy]]:
        """own: places of a match whose latents are copied or fetched, to `pages`; spent: what is taken over."""
        for entry in spent:
            self.store.withdraw(entry)
        fresh, copies = iter(pages), []
        is_spent = match.checkpoint in spent
        state = match.checkpoint.pages if isinstance(match.checkpoint, Entry) and is_spent else None
        holding = Holding(chain, match.resumed, state=state or tuple(islice(fresh, self.groups)))
        holding.shared = own[0] if own else len(match.latents)
        holding.registered = holding.shared * self.page_tokens
        for place, source in enumerate(match.latents):
            if place not in own:
                assert isinstance(source, Entry)
                source.uses += 1
                holding.latents.append(source)
            elif isinstance(source, Entry) and source in spent:
                holding.latents.append(Entry(source.pages, (place + 1) * self.page_tokens))
            else:
                copies += self._own_page(holding, source, next(fresh), match.resumed)
        return holding, copies + self._own_state(holding, None if is_spent else match.checkpoint)

    def _are_outside(self, names: list[bytes]) -> bool:
        """Whether the tier still has them all: what an allocation evicts may have taken their place there."""
        return not names or (self.store.tier is not None and all(map(self.store.tier.has, names)))

    def _own_page(self, holding: Holding, source: Entry | bytes, page: int, resumed: int) -> list[Copy]:
        start = len(holding.latents) * self.page_tokens
        holding.latents.append(Entry((page,), start + self.page_tokens))
        if isinstance(source, bytes):
            assert self.store.tier is not None
            self.store.tier.get(source, (page,))
            return []
        holding.pinned.append(source)
        return [Copy(source.pages[0], page, rows=resumed - start)]

    def _own_state(self, holding: Holding, source: Entry | bytes | None) -> list[Copy]:
        if source is None:
            return []
        if isinstance(source, bytes):
            assert self.store.tier is not None
            self.store.tier.get(source, holding.state)
            return []
        source.uses += 1
        holding.pinned.append(source)
        holding.made.append(source)
        return [Copy(a, z) for a, z in zip(source.pages, holding.state, strict=True)]

    def _seen_lengths(self, chain: Chain) -> tuple[int, int]:
        """How far a sequence was there before, and up to where with a checkpoint."""
        seen = 0
        for position in range((len(chain) - 1) // self.unit * self.unit, 0, -self.unit):
            was = self.store.was_seen(chain.at(position))
            seen = seen or (position if was is not None else 0)
            if was:
                return seen, position
        return seen, 0

    def _fork(self, chain: Chain, resumed: int, seen: int) -> int:
        """Where a sequence leaves what was seen before, and further than it can go on; 0: nowhere. Where ends are exact
        so are forks, if that is an eighth of a unit or more."""
        if self.retention.exact and seen:
            exact = min(seen + chain.agreement(seen, self.store.unit(chain.at(seen))), len(chain) - 1)
            if exact - max(seen, resumed) > self.unit // 8:
                return exact
        return seen if seen > resumed else 0

    def _count(self, length: int, match: Match, inside: int, seen: int, checkpointed: int) -> None:
        counts, b = self.counts, match.resumed
        last = max((length - 1) // self.unit * self.unit, b)
        counts.queries += length
        counts.hits += b
        counts.external += b - inside
        counts.latent_hits += match.latent_length
        evicted, known = max(checkpointed, b), max(checkpointed, seen, match.latent_length, b)
        counts.misses["evicted"] += evicted - b
        counts.misses["no_checkpoint"] += known - evicted
        counts.misses["cold"] += last - known
        counts.misses["below_unit"] += length - last

    def _supersede(self, chain: Chain, resumed: int) -> None:
        """Of checkpoints that a conversation has passed those go first that served nobody else."""
        for place, key in enumerate(chain.boundaries(resumed)):
            passed = [key] if 0 < place * self.unit < resumed else []
            ends = (place * self.unit + rest for rest in self.store.ends(key))
            for found in (*passed, *(chain.at(end) for end in ends if end < resumed)):
                entry = self.store.state(found)
                if entry is not None and not entry.is_fork and entry.uses <= 1:
                    self.store.touch(entry, last=True)

    # --- it grows ---

    def extend(self, holding: Holding, length: int) -> bool:
        """Pages for the latents of the first `length` tokens. False where there are too few; then nothing changed."""
        missing = -(-length // self.page_tokens) - len(holding.latents)
        pages = self.store.allocate(missing) if missing > 0 else []
        if pages is None:
            return False
        for page in pages:
            holding.latents.append(Entry((page,), (len(holding.latents) + 1) * self.page_tokens))
        return True

    def checkpoint(self, holding: Holding, position: int, *, moving: bool = False, fork: bool = False) -> list[Copy]:
        """Copies that keep the state after `position` tokens, where this step leaves it, for the end of the step.

        moving: it replaces the one before and is kept once the sequence has ended. No copies where there is no room or
        the same is there already.
        """
        key = holding.chain.at(position)
        if not self.groups or holding.is_private or self.store.state(key) is not None:
            return []
        if moving and holding.moving is not None and holding.moving not in holding.pending:
            self.forget_moving(holding)
        pages = self.store.allocate(self.groups)
        if pages is None:
            return []
        entry = Entry(tuple(pages), position, is_state=True, is_fork=fork)
        holding.pending.append(entry)
        holding.moving = entry if moving else holding.moving
        return [Copy(a, z) for a, z in zip(holding.state, pages, strict=True)]

    def landed(self, holding: Holding, length: int, publish: int | None = None) -> None:
        """A step is over: its copies are done and the sequence stands at `length` tokens. From now on others find its
        first `publish` tokens (default: all)."""
        self.store.tick()
        for entry in holding.pinned:
            self.store.unpin(entry)
        holding.pinned = []
        holding.length = length
        pending, holding.pending = holding.pending, []
        if not holding.is_private:
            self._publish(holding, length if publish is None else min(publish, length), pending)
        for entry in pending:
            self._land(holding, entry)

    def _publish(self, holding: Holding, length: int, ends: list[Entry]) -> None:
        """Let others find the latents of the first tokens by the boundaries, and by the places of checkpoints."""
        P, u, known = self.page_tokens, self.unit, holding.registered
        holding.registered = max(known, length)
        if known // P == length // P and known // u == length // u and not ends:
            return  # no boundary was passed
        for place in range(known // P, -(-length // P)):
            start, stop = place * P, min(place * P + P, length)
            boundaries = list(range(max(start, known) // u * u + u, stop + 1, u))
            for position in {*boundaries, *(p for p in (start + P, *(e.position for e in ends)) if start < p <= stop)}:
                self.store.file(holding.latents[place], holding.chain.at(position))
            for position in boundaries:
                self.store.note(holding.chain.at(position))
                if self.retention.exact:
                    self.store.note_unit(holding.chain.at(position - u), holding.chain.ids[position - u : position])

    def _land(self, holding: Holding, entry: Entry) -> None:
        key = holding.chain.at(entry.position)
        assert entry.position <= holding.length, f"checkpoint after {entry.position} of {holding.length} tokens"
        if holding.is_private or self.store.state(key) is not None:
            holding.moving = None if entry is holding.moving else holding.moving
            self.store.drop(entry)
            return
        self._file_state(holding, entry, key)
        if entry is not holding.moving:
            self.store.unpin(entry)

    def _file_state(self, holding: Holding, entry: Entry, key: bytes) -> None:
        self.store.file(entry, key)
        boundary, rest = entry.position // self.unit * self.unit, entry.position % self.unit
        if rest:
            self.store.note_end(holding.chain.at(boundary), rest)
        else:
            self.store.note(key, had_state=True)
        if self.store.watcher is not None:
            self.store.watcher.resumable(holding.chain, entry.position)
        holding.made.append(entry)

    def forget_moving(self, holding: Holding) -> bool:
        """Give up the checkpoint that moves along, for its pages. Whether there was one."""
        entry = holding.moving
        if entry is None or entry in holding.pending:
            return False
        holding.made.remove(entry)
        holding.moving = None
        self.store.drop(entry)
        return True

    # --- it leaves ---

    def release(self, holding: Holding) -> None:
        """The sequence ends or is set aside: what others may use stays as long as its memory is not needed."""
        store = self.store
        store.tick()
        for entry in holding.pending:
            holding.moving = None if entry is holding.moving else holding.moving
            store.drop(entry)
        if self._keep_end(holding) or not self.retention.turn_end:
            self.forget_moving(holding)
        for entry in (*holding.pinned, *((holding.moving,) if holding.moving is not None else ())):
            store.unpin(entry)
        store.pool.give(holding.state)
        deepest = self._deepest_state(holding)
        for place, entry in enumerate(holding.latents):
            beyond = not entry.uses and place * self.page_tokens >= deepest
            if entry.refs == 1 and (beyond or store.yields(entry)):
                store.withdraw(entry)
            store.unpin(entry)
        for entry in holding.made:
            store.touch(entry)
            store.touch_latents(holding.chain.at(entry.position))
        holding.latents, holding.pinned, holding.pending, holding.made = [], [], [], []
        holding.state, holding.moving = (), None

    def _keep_end(self, holding: Holding) -> bool:
        """Where an exact end is wanted the state that moved along stays as it is, a checkpoint without a copy."""
        end = max(holding.reach, holding.length)
        wanted = self.retention.exact and self.retention.turn_end and holding.state and not holding.is_private
        if not wanted or not self.unit <= end <= len(holding.chain):
            return False
        if self.store.state(key := holding.chain.at(end)) is not None:
            return True
        entry = Entry(holding.state, end, is_state=True)
        self._publish(holding, end, [entry])
        self._file_state(holding, entry, key)
        self.store.unpin(entry)
        holding.state = ()
        return True

    def withdraw(self, holding: Holding) -> None:
        """Let nobody find any of its tokens: neither what it has written itself nor what it went on from, which may be
        where the fault came from, and would be one for ever."""
        holding.is_private = True
        chain, P = holding.chain, self.page_tokens
        keys = dict.fromkeys(chain.boundaries(len(chain)))
        ends = [place * self.unit + rest for place, key in enumerate(keys) for rest in self.store.ends(key)]
        for position in (*range(P, len(chain) + 1, P), *(end for end in ends if end <= len(chain))):
            keys[chain.at(position)] = None
        for key in keys:
            self.store.forget(key)

    def _deepest_state(self, holding: Holding) -> int:
        if not self.groups:
            return holding.length
        ends = [entry.position for entry in holding.made if entry.keys]
        for position in range(holding.registered // self.unit * self.unit, 0, -self.unit):
            if self.store.state(holding.chain.at(position)) is not None:
                return max([position, *ends])
        return max(ends, default=0)
