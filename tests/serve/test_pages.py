"""Pages: sizes, the tier behind the pool, what hashes tell apart, and random walks after which no page is lost."""

import random

import pytest

from rille.serve.audit import audit
from rille.serve.chain import Chain
from rille.serve.pages import Copy, PageLayout, PagePool
from rille.serve.retention import Retention
from rille.serve.tier import HostTier
from tests.serve.fake_memory import FakeEngine, FakeMemory, ids, with_tier

UNIT = 16


# --- the tier behind ---


@pytest.mark.parametrize("length, resumed", [(520, 512), (1030, 1024), (1671, 1536)])
def test_the_tier_gives_lengths_that_are_legal_here(length, resumed):
    engine = with_tier(24, 64, 1024, 3, unit=512, retention=Retention(interval=0))
    engine.serve(ids(length))
    engine.cache.store.pool.give(engine.cache.store.allocate(24))
    assert engine.cache.lookup(Chain(ids(length), 512)).resumed == 0
    assert engine.serve(ids(length)) == resumed
    assert engine.cache.counts.external == resumed


def test_the_tier_gives_all_or_nothing():
    engine = with_tier()
    prompt = ids(100)
    engine.serve(prompt)
    engine.cache.store.pool.give(engine.cache.store.allocate(64))
    tier = engine.cache.store.tier
    tier.drop(b"latents " + Chain(prompt, UNIT).at(32))
    assert engine.serve(prompt) == 0
    tier.drop(b"state " + Chain(prompt, UNIT).at(96))
    assert engine.cache.lookup(Chain(prompt, UNIT), external=True).resumed == 96  # computed again since


def test_a_tier_forgets_the_oldest():
    memory = FakeMemory(4, 2, 1)
    tier = HostTier(2, memory.read, memory.write)
    for page, key in enumerate((b"a", b"b", b"c")):
        memory.pages[page] = [page, page]
        tier.put([key, key + b"2"], [page])
    assert not tier.has(b"a") and not tier.has(b"a2") and tier.has(b"b2") and tier.num_used == 2
    tier.get(b"c2", [3])
    assert memory.pages[3] == [2, 2]
    tier.put([b"x"], [0, 1, 2])
    assert not tier.has(b"x") and tier.has(b"c")


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
@pytest.mark.parametrize("page_tokens", [16, 64, 100])
def test_the_tier_has_both_of_two_that_begin_alike(page_tokens, order):
    """Their pages have the hashes of the beginning in common, and each has its own end."""
    engine = with_tier(60, 300, page_tokens)
    ends = {n: [*ids(32), *ids(40, seed=n)] for n in order}
    for n in (*order, *order):
        engine.serve(ends[n])
    assert [engine.cache.lookup(Chain(ends[n], UNIT)).resumed for n in order] == [64, 64]
    engine.cache.store.pool.give(engine.cache.store.allocate(60))
    assert [engine.cache.lookup(Chain(ends[n], UNIT), external=True).resumed for n in order] == [64, 64]
    assert [engine.serve(ends[n]) for n in order] == [64, 64]


def test_of_contents_under_one_key_the_newer_is_found():
    memory = FakeMemory(4, 2, 1)
    tier = HostTier(3, memory.read, memory.write)
    for page, keys in enumerate(([b"a", b"b"], [b"a", b"c"], [b"b", b"d"])):
        memory.pages[page] = [page, page]
        tier.put(keys, [page])
    assert tier.num_used == 2, "nothing finds the first one any more"
    for key, page in ((b"a", 1), (b"c", 1), (b"b", 2), (b"d", 2)):
        tier.get(key, [3])
        assert memory.pages[3] == [page, page]
    tier.drop(b"d")
    assert not tier.has(b"b") and tier.has(b"a") and tier.num_used == 1


class Failing(HostTier):
    """At the call number `left` of one of its methods."""

    left = 0

    def fail(self):
        self.left -= 1
        if self.left == 0:
            raise OSError("the other side is gone")

    def get(self, key, pages):
        self.fail()
        super().get(key, pages)

    def put(self, keys, pages):
        self.fail()
        super().put(keys, pages)


@pytest.mark.parametrize("call", range(1, 9))
def test_a_tier_that_fails_half_way_leaves_everything_as_it_was(call):
    """To the caller it is a fault; no page is lost, nothing is half fetched, and the next time all of it works."""
    engine = FakeEngine(30, groups=2, retention=Retention(interval=0))
    tier = engine.cache.store.tier = Failing(100, engine.memory.read, engine.memory.write)
    first, second = ids(100), ids(300, seed=1)
    engine.serve(first)
    holding, _ = engine.prefill(second)  # evicts some
    tier.left = call
    with pytest.raises(OSError, match="gone"):
        while True:
            engine.cache.store.pool.give(engine.cache.store.allocate(engine.cache.available))
            admission = engine.admit(first)
            engine.cache.release(admission.holding)
    audit(engine.cache, [holding])
    assert engine.serve(first) == 96
    engine.cache.release(holding)
    assert len(engine.cache.store.allocate(30)) == 30, "all can be evicted"


# --- pages ---


def test_pages_are_equal_for_both_kinds():
    """The full model: 69 KDA layers in 3 groups, 24 MLA layers."""
    mla = [layer for layer in range(93) if layer % 4 == 3 or layer == 92]
    kda = [layer for layer in range(93) if layer not in mla]
    layout = PageLayout.of(mla, kda, 576 * 2, 96 * 128 * 128 * 4, 3 * 3 * 96 * 128 * 2)
    assert layout.groups == 3 and layout.page_tokens % 64 == 0
    assert layout.page_tokens * 576 * 2 * len(mla) <= layout.page_bytes
    per_group = [sum(group == g for group, _, _ in layout.state_at.values()) for g in range(3)]
    assert per_group == [23, 23, 23]
    assert 5200 < layout.page_tokens < 5600
    with pytest.raises(ValueError, match="no layers"):
        PageLayout.of([], [], 1, 1, 1)


def test_a_page_is_not_free_twice():
    pool = PagePool(2)
    (page, _) = pool.take(2)
    pool.give([page])
    with pytest.raises(AssertionError, match="free already"):
        pool.give([page])
    assert Copy(1, 2).rows is None


# --- chains ---


def test_two_pictures_are_not_one_whose_digest_says_both():
    places = [
        ((2, 4, "x"), (5, 6, "y")),
        ((2, 4, "y"), (5, 6, "x")),
        ((2, 4, "xpicture 5 y"),),
        ((2, 4, "xpicture 5 1 y"),),
    ]
    places += [((5, 6, "y"),), ((2, 4, "x"),), ((2, 4, "x"), (5, 6, ""))]
    assert len({Chain(ids(UNIT), UNIT, pictures=some).at(UNIT) for some in places}) == len(places)


# --- random walks ---


class Walk:
    """Sequences that come, read, write, are set aside, leave, in a pool that is always too small."""

    def __init__(self, seed: int, page_tokens: int, groups: int, unit: int, tier: bool):
        self.random = random.Random(seed)
        size = self.random.randrange(20, 60)
        retention = Retention(interval=unit * self.random.choice([0, 1, 4]), forks=self.random.random() < 0.7)
        make = with_tier if tier else FakeEngine
        rest = dict(tier_pages=30) if tier else {}
        self.engine = make(
            num_pages=size, page_tokens=page_tokens, groups=groups, unit=unit, retention=retention, **rest
        )
        self.running = []
        self.families = [ids(200, seed=seed * 31 + n) for n in range(3)]

    def step(self):
        actions = [self.come, self.grow, self.grow, self.grow, self.leave, self.set_aside, self.press]
        self.random.choice(actions)()

    def come(self):
        family = self.random.choice(self.families)
        prompt = family[: self.random.randrange(1, 150)] + ids(self.random.randrange(3), self.random.randrange(50))
        admission = self.engine.admit(prompt)
        if admission is not None:
            assert 0 <= admission.resumed < len(prompt)
            self.running.append(admission.holding)

    def grow(self):
        if not self.running:
            return
        holding = self.random.choice(self.running)
        if holding.length == len(holding.chain):
            holding.chain.append(self.random.randrange(5))
        until = min(len(holding.chain), holding.length + self.random.randrange(1, 70))
        if self.random.random() < 0.6:
            until = max(until // self.engine.cache.unit * self.engine.cache.unit, holding.length + 1)
        save = until % self.engine.cache.unit == 0
        self.engine.consume(holding, until, save, moving=self.random.random() < 0.5, fork=self.random.random() < 0.2)

    def leave(self):
        if self.running:
            self.engine.cache.release(self.running.pop(self.random.randrange(len(self.running))))

    def set_aside(self):
        if self.running:
            holding = self.running.pop(self.random.randrange(len(self.running)))
            self.engine.cache.release(holding)
            back = self.engine.admit(list(holding.chain.ids))
            if back is not None:
                self.running.append(back.holding)

    def press(self):
        store = self.engine.cache.store
        pages = store.allocate(self.random.randrange(store.available + 1))
        for page in pages:
            self.engine.memory.pages[page] = ["poison"] * self.engine.cache.page_tokens
        store.pool.give(pages)


@pytest.mark.parametrize("page_tokens, groups, unit", [(16, 2, 16), (24, 3, 16), (64, 1, 16), (16, 3, 48), (10, 0, 7)])
@pytest.mark.parametrize("tier", [False, True])
def test_random_walks_lose_no_page(page_tokens, groups, unit, tier):
    walk = Walk(page_tokens + tier, page_tokens, groups, unit, tier)
    for n in range(1000):
        walk.step()
        if n % 10 == 0:
            audit(walk.engine.cache, walk.running)
    while walk.running:
        walk.leave()
    store = walk.engine.cache.store
    audit(walk.engine.cache, [])
    store.clear()
    assert store.pool.num_free == store.pool.num_pages and not list(store.entries())
