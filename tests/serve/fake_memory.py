"""A model whose memory shows every mistake: its state is a running hash of the tokens that it consumed.

    h_0 = 0      h_{n+1} = hash(h_n, token_n)      latent row n = h_{n+1}      state of group g after n tokens (g, h_n)

A wrong page, a page too many or too few, a state of another length: all make another number.
"""

import random
from collections.abc import Iterable, Sequence

from rille.serve.chain import Chain
from rille.serve.pages import Copy
from rille.serve.prefix import Admission, Holding, PrefixCache
from rille.serve.tier import HostTier

POISON = "poison"


def ids(count: int, seed: int = 0) -> list[int]:
    """Tokens of which the first ones are the same for any count."""
    return [random.Random(seed * 7919 + i).randrange(1000) for i in range(count)]


def hashes(ids: Iterable[int]) -> list[int]:
    """h_0 to h_n."""
    known = [0]
    for token in ids:
        known.append(hash((known[-1], int(token))))
    return known


class FakeMemory:
    """The pages of a cache, and a model that works on them."""

    def __init__(self, num_pages: int, page_tokens: int, groups: int):
        self.page_tokens, self.groups = page_tokens, groups
        self.pages: list[list] = [[POISON] * page_tokens for _ in range(num_pages)]

    def read(self, page: int) -> list:
        return list(self.pages[page])

    def write(self, page: int, content: list) -> None:
        self.pages[page] = list(content)

    def copy(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            if copy.rows is None:
                self.pages[copy.target] = list(self.pages[copy.source])
            else:
                rest = [POISON] * (self.page_tokens - copy.rows)
                self.pages[copy.target] = self.pages[copy.source][: copy.rows] + rest

    def begin(self, admission: Admission) -> None:
        self.copy(admission.copies)
        self.clear(admission.clear)

    def clear(self, pages: Sequence[int]) -> None:
        """States of nothing; they come in whole sets of groups."""
        for place, page in enumerate(pages):
            self.pages[page] = [(place % self.groups, 0)]

    def run(self, holding: Holding, start: int, tokens: Sequence[int], state: Sequence[int] = ()) -> list[int]:
        """Consume tokens at positions start, start + 1, ... ; every row and state before them must be right.

        state: other pages to work on than the sequence's own. Returns the hashes after each token.
        """
        state = state or holding.state
        expected = hashes([*holding.chain.ids[:start], *tokens])
        assert self.rows(holding, start) == expected[1 : start + 1], "latents of another prefix"
        for group, page in enumerate(state):
            assert self.pages[page][0] == (group, expected[start]), "a state of another prefix"
        for place, token in enumerate(tokens, start):
            for group, page in enumerate(state):
                self.pages[page] = [(group, hash((self.pages[page][0][1], int(token))))]
            (page,) = holding.latents[place // self.page_tokens].pages
            if len(self.pages[page]) != self.page_tokens:  # it held a state before
                self.pages[page] = [POISON] * self.page_tokens
            self.pages[page][place % self.page_tokens] = expected[place + 1]
        return expected[start + 1 :]

    def rows(self, holding: Holding, length: int) -> list:
        flat = [row for entry in holding.latents for row in self.pages[entry.pages[0]]]
        return flat[:length]


class FakeEngine:
    """A cache and its fake memory, driven by hand: one sequence after another, checkpoints where retention says."""

    def __init__(self, num_pages=64, page_tokens=16, groups=2, unit=16, **rest):
        self.memory = FakeMemory(num_pages, page_tokens, groups)
        self.cache = PrefixCache(num_pages, page_tokens, groups, unit=unit, **rest)

    def admit(self, ids: Sequence[int], **rest) -> Admission | None:
        admission = self.cache.admit(Chain(ids, self.cache.unit, **rest))
        if admission is not None:
            self.memory.begin(admission)
        return admission

    def consume(self, holding: Holding, until: int, save: bool = False, moving: bool = False, fork=False) -> bool:
        """One step: run to `until`, keeping a checkpoint there if asked to. False where there is no room."""
        start = holding.length
        if not self.cache.extend(holding, until):
            return False
        copies = self.cache.checkpoint(holding, until, moving=moving, fork=fork) if save else []
        self.memory.run(holding, start, holding.chain.ids[start:until])
        self.memory.copy(copies)
        self.cache.landed(holding, until)
        return True

    def prefill(self, ids: Sequence[int], marks: Sequence[int] = (), **rest) -> tuple[Holding, int]:
        """Read a prompt; returns what it holds, and how much of it was there."""
        admission = self.admit(ids, **rest)
        assert admission is not None, "no room"
        holding, b = admission.holding, admission.resumed
        fork = admission.fork
        stops = self.cache.retention.positions(len(ids), b, self.cache.unit, marks, fork)
        for stop in sorted({*stops, len(ids)}):
            save = stop in stops
            assert stop <= holding.length or self.consume(holding, stop, save, fork=save and stop == fork), "no room"
        return holding, b

    def serve(self, ids: Sequence[int], reply: Sequence[int] = (), marks: Sequence[int] = (), **rest) -> int:
        """Read a prompt, write a reply, leave; returns how much of the prompt was there."""
        holding, resumed = self.prefill(ids, marks, **rest)
        for token in reply:
            holding.chain.append(token)
            until = holding.length + 1
            assert self.consume(holding, until, save=until % self.cache.unit == 0, moving=True), "no room"
        self.cache.release(holding)
        return resumed


def with_tier(num_pages=64, tier_pages=64, page_tokens=16, groups=2, **rest) -> FakeEngine:
    """A fake engine with a tier behind its pool."""
    engine = FakeEngine(num_pages, page_tokens, groups, **rest)
    engine.cache.store.tier = HostTier(tier_pages, engine.memory.read, engine.memory.write)
    return engine
