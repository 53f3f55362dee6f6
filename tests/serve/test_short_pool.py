"""Pools that hold little more than one sequence, of sizes that nobody would choose: nothing fails, nothing is lost,
every sequence writes what it would write alone."""

import random
from contextlib import suppress

import pytest

from rille.model.model import new_model
from rille.serve.audit import audit_scheduler
from rille.serve.chain import Chain
from rille.serve.retention import Retention
from rille.serve.schema import QueueFull, SamplingParams, TooLarge
from tests.serve.fake_memory import FakeEngine, ids
from tests.serve.test_engine import MODEL, engine, prompt
from tests.serve.test_engine import alone as written_alone
from tests.serve.test_prefix import UNIT
from tests.serve.test_scheduler import DRAFTERS, FakeServer, alone


@pytest.mark.parametrize("page_tokens", [16, 24])
def test_what_has_no_room_for_a_copy_takes_over_what_is_stored(page_tokens):
    """The checkpoint, the pages that match and a state of its own are more than the pool has; the sequence is not."""
    engine = FakeEngine(7, page_tokens, 3, retention=Retention(interval=0))
    one = engine.admit(ids(40))
    engine.consume(one.holding, 16, save=True)
    engine.cache.release(one.holding)
    prompt = ids(64)
    assert engine.cache.lookup(Chain(prompt, UNIT)).resumed == 16
    engine.cache.store.pool.take(2)  # two more are in use elsewhere
    assert engine.admit(prompt) is None
    alone = engine.cache.admit(Chain(prompt[:32], UNIT), alone=True)
    engine.memory.begin(alone)
    assert alone.resumed == 16 and engine.consume(alone.holding, 32)
    assert engine.cache.lookup(Chain(prompt, UNIT)).resumed == 0, "it is another's no more"


@pytest.mark.parametrize("tier", [0, 3, 40])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize(("page_tokens", "groups", "unit"), [(16, 2, 16), (24, 3, 16), (100, 1, 48), (7, 5, 2)])
def test_a_conversation_as_long_as_the_pool_goes_on_to_its_end(page_tokens, groups, unit, exact, tier):
    """What is stored of it and what it writes on cannot both be there: what would be copied is taken over, and used."""
    pages = groups + 4
    for first in range(page_tokens, 4 * page_tokens, max(1, page_tokens // 5)):
        server = FakeServer(pages, page_tokens, groups, unit, exact=exact, tier=tier)
        prompt, longest = ids(first), server.scheduler.longest
        while len(prompt) + 5 <= longest:
            [turn] = server.submit(prompt, max_tokens=5)
            known = server.cache.lookup(turn.chain).resumed
            server.finish().check()
            assert turn.cached >= known
            prompt = [*turn.chain.ids, 7]
        audit_scheduler(server.scheduler)
        assert server.cache.available == pages


def test_what_has_not_begun_is_not_copied_out():
    """It has pages for its state, but nothing was written on them yet: set aside it begins again."""
    server = FakeServer(12, 16, 2, park=100)
    low = server.submit(ids(60), max_tokens=3)[0]
    server.now += 1
    assert server.scheduler._admit(low) and low.clear
    server.scheduler._set_aside(low)
    assert low.parked_at is None and not server.scheduler.park.num_used
    server.finish().check()


def test_weights_that_change_leave_nothing_copied_out():
    server = FakeServer(14, 16, 2, park=100)
    for n in range(6):
        server.submit(ids(50 + n, seed=n), max_tokens=40)
    while not server.scheduler.park.num_used:
        server.step()
    server.scheduler.renew(1)
    server.finish()
    assert not server.scheduler.park.num_used


@pytest.mark.parametrize("pages", [8, 12])
def test_an_engine_whose_pool_is_full_of_one_conversation(pages):
    model = new_model(MODEL.replace(init_std=0.2), seed=3)
    served = engine(model, num_pages=pages)
    history = prompt(64 * (pages - 4))
    params = SamplingParams(max_tokens=3, temperature=0)
    while len(history) + 3 <= served.longest:
        [[turn]] = served.generate([history], params)
        assert turn.tokens == written_alone(model, history, 3)
        history = [*history, *turn.tokens, *prompt(13, seed=len(history))]
    audit_scheduler(served.scheduler)


def a_server(rng):
    page_tokens, groups = rng.choice([1, 2, 3, 7, 16, 24, 64, 100]), rng.choice([1, 2, 3, 5])
    unit, longest = rng.choice([1, 2, 5, 16, 48, 64]), rng.choice([40, 150, 300])
    need = -(-longest // page_tokens) + groups
    deterministic = rng.random() < 0.25
    sizes = dict(
        num_pages=need + rng.choice([0, 1, 2, groups, 2 * groups + 3, need]),
        tier=rng.choice([0, 0, 1, groups, groups + 1, 10, 60]),
        park=rng.choice([0, 0, 1, groups, 10, 100]),
        exact=rng.random() < 0.5 and not deterministic,
    )
    limits = dict(token_budget=rng.choice([8, 9, 40, 400]), max_running=rng.choice([1, 2, 8]), max_queued=12)
    return FakeServer(
        page_tokens=page_tokens,
        groups=groups,
        unit=unit,
        deterministic=deterministic,
        max_length=longest,
        **sizes,
        **limits,
    )


def a_prompt(rng, server, families):
    """Of a family, or a turn that goes on from one that has ended, or from its middle."""
    base = rng.choice(families)[: rng.randrange(1, server.scheduler.longest)]
    if server.ended and rng.random() < 0.4:
        ended = list(rng.choice(server.ended).chain.ids)
        base = ended[: rng.choice([len(ended), rng.randrange(1, len(ended) + 1)])]
    return base + ids(rng.randrange(6), seed=rng.randrange(40))


@pytest.mark.parametrize("seed", range(24))
def test_a_random_walk_in_a_pool_of_any_sizes(seed):
    rng = random.Random(seed)
    for _ in range(5):
        server, families = a_server(rng), [ids(300, seed=rng.randrange(99)) for _ in range(3)]
        pages = server.cache.store.pool.num_pages
        for turn in range(120):
            server.drafter = None if server.scheduler.config.deterministic else rng.choice([*DRAFTERS.values()])
            if rng.random() < 0.3:
                text = a_prompt(rng, server, families)
                marks = tuple(sorted(rng.sample(range(len(text) + 1), min(2, len(text)))))
                rest = dict(priority=rng.randrange(3), deadline_s=rng.choice([None, None, 25]), marks=marks)
                with suppress(QueueFull, TooLarge):
                    server.submit(text, rng.randrange(1, 40), rng.choice([1, 1, 3]), **rest)
            if (alive := [*server.scheduler.running, *server.scheduler.all_waiting()]) and rng.random() < 0.05:
                server.scheduler.finish(rng.choice(alive))
            if rng.random() < 0.015:
                server.scheduler.renew(turn)
                server.cache.store.clear()
            server.step()
            audit_scheduler(server.scheduler)
        server.finish(6000)
        for sequence in server.ended:
            assert server.written[sequence] == alone(sequence.request.prompt, sequence.request.params.max_tokens)
        counts = server.cache.counts
        assert server.cache.available == pages and counts.queries == counts.hits + sum(counts.misses.values())
        assert min(counts.misses.values()) >= 0
        assert server.scheduler.park is None or not server.scheduler.park.num_used
