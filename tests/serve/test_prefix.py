"""The prefix cache against a model whose state is a hash of what it consumed: whatever is restored must be right, and
what can be reused is reused."""

import pytest

from rille.serve.audit import audit
from rille.serve.chain import Chain
from rille.serve.prefix import PrefixCache
from rille.serve.retention import Retention
from tests.serve.fake_memory import FakeEngine, ids

UNIT = 16


# --- lengths ---


@pytest.mark.parametrize("first, then, least", [(2, 0, 1), (2, 1, 2), (2, -1, 1), (3, 0, 2), (3, 1, 3)])
def test_one_token_more_or_less_does_not_lose_the_prefix(first, then, least):
    engine = FakeEngine()
    prompt = ids(first * UNIT + 1)
    engine.serve(prompt[: first * UNIT])
    assert engine.serve(prompt[: first * UNIT + then]) == least * UNIT


def test_reuse_never_falls_as_a_prompt_grows():
    for page_tokens in (16, 24, 40, 64):
        for length in (15, 16, 17, 47, 48, 49, 64, 65):
            engine = FakeEngine(page_tokens=page_tokens)
            prompt = ids(100)
            engine.serve(prompt[:length], reply=ids(20, seed=1))
            found = [engine.cache.lookup(Chain(prompt[:n], UNIT)).resumed for n in range(1, 100)]
            assert found == sorted(found)
            assert found[length - 1] == (length - 1) // UNIT * UNIT


@pytest.mark.parametrize("page_tokens, unit", [(16, 16), (64, 16), (24, 16), (16, 48), (100, 7), (528, 16), (1056, 16)])
def test_a_resent_prompt_computes_at_most_a_unit_and_a_token(page_tokens, unit):
    for length in (1, 2, unit - 1, unit, unit + 1, 2 * unit, 100, 101, 480, 908):
        engine = FakeEngine(200, page_tokens, 3, unit)
        prompt = ids(max(length, 1))
        assert engine.serve(prompt) == 0
        resumed = engine.serve(prompt)
        assert 0 <= resumed < len(prompt) and len(prompt) - resumed <= unit
        assert resumed % unit == 0


def test_a_prefix_below_a_page_hits():
    """480 shared tokens in pages of 528 and 908 in pages of 1056: whole units of it, never nothing."""
    for shared, page_tokens in ((480, 528), (908, 1056)):
        engine = FakeEngine(64, page_tokens, 2)
        common = ids(shared)
        engine.serve(common + ids(40, seed=1))
        engine.serve(common + ids(40, seed=2))  # the second sighting leaves a checkpoint at the fork
        assert engine.serve(common + ids(40, seed=3)) == shared // UNIT * UNIT


def test_the_report_example():
    engine = FakeEngine(16, 6144, 3, 512)
    prompt = ids(2800)
    engine.serve(prompt)
    assert engine.serve(prompt + ids(100, seed=1)) == 2560


def test_a_conversation_goes_on_where_it_was():
    """The prompt ends with tokens that open the reply and that the next turn replaces: marked, they cost nothing."""
    engine = FakeEngine()
    history, stub = ids(100), [7, 7, 7]
    for turn in range(1, 5):
        reply = ids(37, seed=turn)
        resumed = engine.serve(history + stub, reply, marks=[len(history)])
        if turn > 1:
            assert len(history) - resumed <= 37 + 20 + 3 + 2 * UNIT
        history = history + [8, 8] + reply + ids(20, seed=100 + turn)


def test_a_reply_is_reused_up_to_its_last_unit():
    engine = FakeEngine()
    prompt, reply = ids(50), ids(75, seed=1)
    engine.serve(prompt, reply)
    assert engine.serve(prompt + reply + ids(10, seed=2)) == 112


# --- state and latents together ---


def test_without_a_checkpoint_latents_are_of_no_use():
    engine = FakeEngine(retention=Retention(prompt_end=False, forks=False, turn_end=False, interval=0))
    holding, _ = engine.prefill(ids(100))
    match = engine.cache.lookup(Chain(ids(100), UNIT))
    assert match.latent_length == 96 and match.resumed == 0 and not match.latents
    engine.cache.release(holding)
    assert engine.cache.store.pool.num_free == engine.cache.store.pool.num_pages, "latents that nothing can use stay"


def test_the_deepest_boundary_with_both():
    """Latents up to 96 and checkpoints at 32 and 80: 80, and 32 for one that ends at 80."""
    engine = FakeEngine(page_tokens=48, retention=Retention(prompt_end=False, interval=0))
    prompt = ids(100)
    holding, _ = engine.prefill(prompt, marks=[32, 80])
    for length, resumed in ((100, 80), (81, 80), (80, 32), (33, 32), (32, 0)):
        assert engine.cache.lookup(Chain(prompt[:length], UNIT)).resumed == resumed
    engine.cache.release(holding)


def test_a_checkpoint_beyond_the_latents_does_not_count():
    """Checkpoints at 32 and 80, and the latents of 48 to 64 gone: both groups agree on 32 and on nothing deeper."""
    engine = FakeEngine(retention=Retention(prompt_end=False, interval=0))
    prompt = ids(100)
    holding, _ = engine.prefill(prompt, marks=[32, 80])
    engine.cache.release(holding)
    chain = Chain(prompt, UNIT)
    assert engine.cache.lookup(chain).resumed == 80
    engine.cache.store.abandon(engine.cache.store.latents(chain.at(64)))
    match = engine.cache.lookup(chain)
    assert (match.latent_length, match.resumed, len(match.latents)) == (48, 32, 2)
    assert engine.serve(prompt) == 32
    engine.cache.store.abandon(engine.cache.store.state(chain.at(32)))
    assert engine.cache.lookup(Chain(prompt[:50], UNIT)).resumed == 0


def test_a_checkpoint_goes_as_a_whole():
    engine = FakeEngine(10, groups=3, retention=Retention(interval=0))
    engine.serve(ids(40))
    assert engine.cache.store.num_states == 1
    free = engine.cache.store.pool.num_free
    pages = engine.cache.store.allocate(engine.cache.available)
    assert pages is not None and len(pages) == 10 > free
    assert engine.cache.store.num_states == 0 and list(engine.cache.store.entries()) == []
    assert engine.cache.lookup(Chain(ids(40), UNIT)).resumed == 0


def test_what_a_step_writes_matches_only_when_it_is_over():
    engine = FakeEngine()
    prompt = ids(40)
    one = engine.admit(prompt)
    engine.cache.extend(one.holding, 32)
    copies = engine.cache.checkpoint(one.holding, 32)
    assert copies and engine.cache.lookup(Chain(prompt, UNIT)).resumed == 0
    engine.memory.run(one.holding, 0, prompt[:32])
    engine.memory.copy(copies)
    assert engine.cache.lookup(Chain(prompt, UNIT)).resumed == 0
    engine.cache.landed(one.holding, 32)
    assert engine.cache.lookup(Chain(prompt, UNIT)).resumed == 32


def test_a_sequence_that_leaves_before_its_copies_landed_publishes_nothing():
    engine = FakeEngine()
    one = engine.admit(ids(40))
    engine.cache.extend(one.holding, 32)
    engine.cache.checkpoint(one.holding, 32)
    engine.cache.release(one.holding)
    assert engine.cache.store.pool.num_free == 64
    assert engine.cache.lookup(Chain(ids(40), UNIT)).resumed == 0


def test_what_is_stored_is_never_written():
    """Two sequences go on from one place inside a page, differently; a third finds the original."""
    engine = FakeEngine(page_tokens=64)
    common = ids(48)
    engine.serve(common + [1])
    one, b = engine.prefill(common + [2, 2, 2])
    two, c = engine.prefill(common + [3] * 30)
    assert b == c == 48
    assert one.latents[0] is not two.latents[0]
    for holding in (one, two):
        engine.cache.release(holding)
    assert engine.serve(common + [4]) == 48


def test_what_matched_is_pinned_before_room_is_made():
    """The pool is so small that an allocation could evict what was just matched."""
    engine = FakeEngine(9, 16, 2, retention=Retention(interval=0))
    prompt = ids(33)
    engine.serve(prompt)
    holding, resumed = engine.prefill(prompt + ids(20, seed=1))
    assert resumed == 32
    engine.cache.release(holding)


def test_a_failed_admission_changes_nothing():
    engine = FakeEngine(9, 16, 3)
    one, _ = engine.prefill(ids(40))
    before = engine.cache.store.pool.num_free, engine.cache.available, engine.cache.counts.queries
    assert engine.admit(ids(40)) is None
    assert before == (engine.cache.store.pool.num_free, engine.cache.available, engine.cache.counts.queries)
    audit(engine.cache, [one])
    engine.cache.release(one)
    assert engine.serve(ids(40)) == 32


# --- what counts as the same ---


def test_pictures_count_by_their_whole_digest():
    prompt = ids(64)
    engine = FakeEngine()
    one, two = "ab12" + "0" * 60, "ab12" + "0" * 59 + "1"
    engine.serve(prompt, pictures=((20, 40, one),))
    assert engine.serve(prompt, pictures=((20, 40, one),)) == 48
    assert engine.serve(prompt, pictures=((20, 40, two),)) == 0  # the same up to 16, where it leaves a checkpoint
    assert engine.serve(prompt) == 16
    assert engine.serve(prompt, pictures=((20, 40, two),)) == 48


def test_weights_begin_chains_of_their_own():
    engine = FakeEngine()
    engine.serve(ids(64), version=1)
    assert engine.serve(ids(64), version=2) == 0
    assert engine.serve(ids(64), version=1) == 48


def test_a_sequence_of_two_versions_publishes_nothing():
    engine = FakeEngine()
    one = engine.admit(ids(64))
    engine.consume(one.holding, 32, save=True)
    one.holding.is_private = True
    engine.consume(one.holding, 64, save=True)
    engine.cache.release(one.holding)
    assert engine.cache.lookup(Chain(ids(64), UNIT)).resumed == 32


def test_hashes_depend_on_all_before():
    one, two = Chain([1, 2, 3, 4, 5], 2), Chain([9, 2, 3, 4, 5], 2)
    assert all(one.at(n) != two.at(n) for n in range(1, 6)) and one.at(0) == two.at(0)
    grown = Chain([1, 2], 2)
    for token in (3, 4, 5):
        grown.append(token)
    assert [grown.at(n) for n in range(6)] == [one.at(n) for n in range(6)]
    with pytest.raises(IndexError, match="position 6"):
        one.at(6)


# --- retention ---


def test_every_multiple_of_the_unit_is_a_legal_interval():
    for unit in (16, 128, 512):
        for times in (1, 3, 1000, 6144):
            PrefixCache(4, 6144, 3, unit=unit, retention=Retention(interval=times * unit))
    with pytest.raises(ValueError, match="interval 100 must be a multiple of the hash unit of 16 tokens"):
        PrefixCache(4, 16, 3, unit=16, retention=Retention(interval=100))


def test_forks_are_kept_at_the_second_sighting():
    engine = FakeEngine(retention=Retention(prompt_end=False, turn_end=False, interval=0))
    common = ids(80)
    assert [engine.serve(common + ids(30, seed=n)) for n in (1, 2, 3, 4)] == [0, 0, 80, 80]


@pytest.mark.parametrize("branches", [0, 1], ids=["passed", "others go on from there too"])
def test_what_a_conversation_has_passed_goes_before_what_is_older(branches):
    """The third turn goes on from the end of the second: who but others would ask for the end of the first?"""
    engine, older, talk = FakeEngine(200, retention=Retention(interval=0)), ids(40, seed=5), ids(120)
    branch = [talk[:36] + ids(4, seed=9)] * branches
    for text in (older, talk[:40], *branch, talk[:80], talk):
        engine.serve(text)
    store, states = engine.cache.store, [Chain(one, UNIT).at(32) for one in (talk, older)]
    assert None not in map(store.state, states)
    store.allocate(store.pool.num_free + 3)  # what the second turn left inside goes first, then one of these
    assert [store.state(key) is None for key in states] == [not branches, bool(branches)]


def exact_forks(**rest):
    retention = Retention(prompt_end=False, turn_end=False, interval=0, exact=True)
    return FakeEngine(**{"num_pages": 200, "page_tokens": 24, "unit": 48, "retention": retention, **rest})


@pytest.mark.parametrize("common", [48, 49, 53, 54, 55, 80, 95, 96, 97, 191])
@pytest.mark.parametrize("page_tokens", [16, 24, 100])
def test_exact_forks_cost_no_part_of_a_unit(common, page_tokens):
    """Parts of an eighth of a unit are not worth a place of their own."""
    engine = exact_forks(page_tokens=page_tokens)
    prompts = [ids(common) + [n, *ids(100, seed=n)] for n in (1, 2, 3, 4)]
    least = common if common % 48 > 6 else common // 48 * 48
    assert [engine.serve(prompt) for prompt in prompts] == [0, 0, least, least]
    assert engine.cache.store.num_states == 1
    audit(engine.cache, [])


def test_an_exact_fork_is_no_deeper_than_what_is_known_to_agree():
    """The end of a prompt, a picture, what is remembered."""
    engine = exact_forks()
    engine.serve(ids(200))
    engine.serve(ids(90))
    assert engine.serve(ids(200)) == 89
    chain = Chain(ids(100), 48, pictures=((70, 80, "ab"),))
    assert chain.agreement(48, ids(100)[48:96]) == 22 and chain.agreement(72, ids(100)[72:96]) == 0
    assert chain.agreement(80, ids(100)[80:96]) == 16 and chain.agreement(90, ids(200)[90:]) == 10
    assert chain.agreement(48, []) == 0
    engine.cache.store.clear()
    engine.serve(ids(90))
    assert engine.serve(ids(90)) == 0


def test_units_that_were_passed_are_forgotten_in_time(monkeypatch):
    monkeypatch.setattr("rille.serve.store.KEPT_IDS", 100)
    engine = exact_forks()
    engine.serve(ids(300))
    store = engine.cache.store
    assert store._num_ids == 96 == sum(map(len, store._units.values()))
    chain = Chain(ids(300), 48)
    assert [list(store.unit(chain.at(n))) for n in (144, 192, 240)] == [[], *(ids(300)[n : n + 48] for n in (192, 240))]
    store.clear()
    assert store._num_ids == len(store._units) == 0


def test_the_moving_checkpoint_of_a_reply_never_evicts_anything_for_good():
    """A long reply has one checkpoint at a time, and it cannot be evicted or found stale while the reply goes on."""
    engine = FakeEngine(40, retention=Retention(interval=0))
    hot = ids(64)
    engine.serve(hot)
    one, _ = engine.prefill(ids(20, seed=5))
    for token in ids(200, seed=6):
        one.chain.append(token)
        until = one.length + 1
        assert engine.consume(one, until, save=until % UNIT == 0, moving=True)
        assert engine.cache.store.num_states <= 4
    assert engine.cache.lookup(Chain(hot, UNIT)).resumed == 48
    engine.cache.release(one)
    assert engine.serve(hot) == 48


def test_many_turns_do_not_drown_in_checkpoints():
    """Hit rate of the last third of a long run at least 90 % of the first third's, though the pool holds but a part."""
    engine = FakeEngine(160, 64, 3)
    chats = {n: ids(300, seed=n) for n in range(6)}
    rates = []
    for turn in range(60):
        for n, chat in chats.items():
            resumed = engine.serve(chat, ids(12, seed=1000 + turn))
            if turn:
                rates.append(resumed / len(chat))
            chats[n] = (chat + ids(12, seed=1000 + turn) + ids(15, seed=2000 + turn * 7 + n))[:1000]
    third = len(rates) // 3
    assert sum(rates[-third:]) >= 0.9 * sum(rates[:third]) and sum(rates[:third]) / third > 0.5


# --- misses ---


def misses(engine):
    return {reason: n for reason, n in engine.cache.counts.misses.items() if n}


def test_every_miss_has_a_reason():
    engine = FakeEngine(12, 16, 2, retention=Retention(interval=0, forks=False))
    prompt = ids(40)
    engine.serve(prompt)
    assert misses(engine) == {"cold": 32, "below_unit": 8}
    engine.serve(prompt[:20])  # latents are there, the only checkpoint is at 32
    assert misses(engine) == {"cold": 32, "no_checkpoint": 16, "below_unit": 12}
    engine.cache.store.pool.give(engine.cache.store.allocate(12))  # everything goes
    engine.serve(prompt)
    assert misses(engine) == {"cold": 32, "no_checkpoint": 16, "below_unit": 20, "evicted": 32}
    counts = engine.cache.counts
    assert counts.queries == counts.hits + sum(counts.misses.values())


def test_latents_and_checkpoints_are_counted_apart():
    engine = FakeEngine(retention=Retention(interval=0, forks=False))
    engine.serve(ids(64))
    engine.serve(ids(64)[:40])
    assert (engine.cache.counts.latent_hits, engine.cache.counts.hits) == (32, 0)


def test_the_start_says_what_is_the_least():
    lines = "\n".join(PrefixCache(100, 6144, 3, unit=512).describe())
    assert "100 pages of 6,144 tokens" in lines and "a prefix of 512 is the shortest" in lines
    assert "prompt end, marks, turn end, forks, every 32,768 tokens" in lines


class Index:
    """What a router would know."""

    def __init__(self):
        self.lengths = {}

    def resumable(self, chain, position):
        assert chain.at(position) not in self.lengths
        self.lengths[chain.at(position)] = position

    def gone(self, key):
        del self.lengths[key]


def test_who_watches_knows_what_can_be_resumed():
    engine = FakeEngine(30, retention=Retention(interval=32))
    index = engine.cache.store.watcher = Index()
    prompts = [ids(100, seed=n) for n in range(4)]
    for prompt in prompts:
        engine.serve(prompt, ids(20, seed=9))
        for known in prompts:
            chain = Chain(known, UNIT)
            best = max((n for n in range(0, 97, UNIT) if chain.at(n) in index.lengths), default=0)
            assert engine.cache.lookup(chain).resumed == best
    engine.cache.store.clear()
    assert index.lengths == {}
