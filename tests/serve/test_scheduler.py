"""The scheduler against the fake model: whatever is batched, cut, cached, drafted, set aside or aborted, every sequence
writes what it would write alone, and no page is lost."""

import random
from contextlib import suppress
from dataclasses import replace

import pytest

from rille.serve.audit import audit_scheduler
from rille.serve.limits import KINDS, Kind, SchedulerConfig
from rille.serve.pages import Copy
from rille.serve.prefix import PrefixCache
from rille.serve.retention import Retention
from rille.serve.scheduler import Scheduler
from rille.serve.schema import QueueFull, Refused, Request, SamplingParams, TooLarge, Unavailable
from rille.serve.tier import HostTier
from tests.serve.fake_memory import FakeMemory, hashes, ids

WORDS = 50


def next_token(state: int) -> int:
    return state % WORDS


def alone(prompt, count):
    """What the model writes after a prompt."""
    tokens, written = list(prompt), []
    state = hashes(tokens)[-1]
    for _ in range(count):
        written.append(next_token(state))
        state = hash((state, written[-1]))
    return written


class FakeServer:
    """The engine's loop around the fake model. drafter(sequence) -> tokens."""

    def __init__(
        self, num_pages=64, page_tokens=16, groups=2, unit=16, tier=0, park=0, drafter=None, exact=False, **rest
    ):
        config = SchedulerConfig(**{"max_running": 8, "token_budget": 64, **rest})
        self.memory = FakeMemory(num_pages, page_tokens, groups)
        self.tier, parked = (HostTier(n, self.memory.read, self.memory.write) if n else None for n in (tier, park))
        retention = Retention(interval=4 * unit, exact=exact)
        self.cache = PrefixCache(num_pages, page_tokens, groups, unit=unit, retention=retention, tier=self.tier)
        self.scheduler = Scheduler(self.cache, config, parked)
        self.drafter, self.now, self.first_at, self.written, self.ended = drafter, 0, {}, {}, []
        self.drafted = self.accepted = 0

    def submit(self, prompt, max_tokens=8, n=1, **rest):
        request = Request(prompt=prompt, params=SamplingParams(max_tokens=max_tokens, n=n), **rest)
        made = self.scheduler.submit(request, f"r{self.scheduler._order}", self.now)
        self.written |= {sequence: [] for sequence in made}
        return made

    def step(self):
        self.now += 1
        for sequence in self.scheduler.running:
            if self.drafter is not None and sequence.num_left == 1:
                sequence.drafts = tuple(self.drafter(sequence))
        step = self.scheduler.step(self.now)
        self.memory.clear(step.clear)
        self.memory.copy(step.copies)
        assert len({id(part.sequence) for part in step.parts}) == len(step.parts)
        config = self.scheduler.config
        assert len(self.scheduler.running) <= config.max_running
        assert step.num_tokens <= config.token_budget or config.deterministic  # there whole units, whatever the budget
        done = [self._run(part) for part in step.parts]
        for part, (accepted, copies) in zip(step.parts, done, strict=True):
            self.memory.copy(copies)
            self.scheduler.landed(part, accepted)
            if len(self.written[part.sequence]) >= part.sequence.request.params.max_tokens:
                self.scheduler.finish(part.sequence)
                self.ended.append(part.sequence)
        return step

    def step_beside(self, steps, waiting, length, max_tokens):
        """Prompts of a length keep coming: so many wait at any time."""
        for n in range(steps):
            if self.scheduler.num_waiting < waiting:
                self.submit(ids(length, seed=10 + n), max_tokens=max_tokens)
            self.step()

    def _run(self, part):
        sequence, holding = part.sequence, part.sequence.holding
        tokens = [*sequence.chain.ids[part.start : part.start + part.count], *part.drafts]
        states, start = [], part.start
        for place, pages in part.saves:  # by the layers, on their way
            states += self.memory.run(holding, start, tokens[start - part.start : place - part.start])
            self.memory.copy([Copy(a, z) for a, z in zip(holding.state, pages, strict=True)])
            start = place
        assert not (part.saves and part.drafts)
        states += self.memory.run(holding, start, tokens[start - part.start :], part.scratch)
        accepted = 0
        if part.ends:
            drawn = next_token(states[part.count - 1])
            while accepted < len(part.drafts) and part.drafts[accepted] == drawn:
                self._write(sequence, drawn)
                accepted += 1
                drawn = next_token(states[part.count - 1 + accepted])
            self._write(sequence, drawn)
        self.drafted, self.accepted = self.drafted + len(part.drafts), self.accepted + accepted
        if part.drafts and accepted < len(part.drafts):
            replayed = tokens[: part.count + accepted]
            self.memory.run(holding, part.start, replayed)
        return accepted, self.scheduler.settle(part, accepted)

    def _write(self, sequence, token):
        self.first_at.setdefault(sequence, self.now)
        sequence.chain.append(token)
        self.written[sequence].append(token)

    def finish(self, steps=2000):
        for _ in range(steps):
            if not self.scheduler.running and not self.scheduler.num_waiting:
                return self
            assert self.step().parts or self.scheduler.running == [], "nothing runs"
        raise AssertionError("it does not end")

    def check(self):
        for sequence, written in self.written.items():
            count = sequence.request.params.max_tokens
            assert written == alone(sequence.request.prompt, count), sequence.id


def perfect(sequence):
    return alone(list(sequence.chain.ids), 5)


def wrong(sequence):
    return [(token + 1) % WORDS for token in perfect(sequence)]


def half(sequence):
    right = perfect(sequence)
    return [*right[:2], (right[2] + 1) % WORDS, *right[3:]]


DRAFTERS = {"none": None, "perfect": perfect, "wrong": wrong, "half": half}


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("page_tokens, groups, unit", [(16, 2, 16), (24, 3, 16), (64, 1, 16), (16, 2, 48), (10, 0, 7)])
def test_many_write_what_each_would_alone(page_tokens, groups, unit, drafter):
    server = FakeServer(200, page_tokens, groups, unit, drafter=drafter)
    for n in range(12):
        server.submit(ids(n * 17 + 1), max_tokens=1 + 3 * n)
    server.finish().check()
    audit_scheduler(server.scheduler)
    if drafter is perfect:
        assert server.accepted == server.drafted > 0
    if drafter is wrong:
        assert server.accepted == 0 < server.drafted


@pytest.mark.parametrize("park", [0, 100])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
@pytest.mark.parametrize("num_pages, page_tokens", [(14, 16), (40, 4)])
def test_short_memory_sets_sequences_aside_and_loses_nothing(num_pages, page_tokens, drafter, park):
    """Where pages are small some have one for guesses by then."""
    server = FakeServer(num_pages, page_tokens, 2, park=park, drafter=drafter)
    for n in range(6):
        server.submit(ids(20, seed=n), max_tokens=60)
    server.finish().check()
    assert server.scheduler.num_preempted > 0
    audit_scheduler(server.scheduler)
    assert server.cache.available == num_pages


def test_one_that_fits_the_pool_exactly_runs_after_anything():
    server = FakeServer(8, 16, 2)
    server.submit(ids(60), max_tokens=36)
    server.finish()
    server.submit(ids(70), max_tokens=26)
    server.finish().check()


def test_long_prompts_do_not_starve_short_ones():
    kinds = (Kind("short", 64, 0.5), Kind("long", share=0.5))
    server = FakeServer(2000, 64, 2, token_budget=64, max_running=32, kinds=kinds)
    longs = [server.submit(ids(8000, seed=n), max_tokens=2)[0] for n in range(4)]
    shorts = []
    for n in range(40):
        shorts.append(server.submit(ids(20, seed=100 + n), max_tokens=2)[0])
        came = server.now
        server.step()
        server.step()
        assert server.first_at.get(shorts[-1], server.now + 2) - came <= 3
    assert not any(s in server.first_at for s in longs)


def test_short_prompts_do_not_keep_the_memory_from_a_long_one():
    """It needs most of the pool, which short ones that keep coming would fill for ever."""
    kinds = (Kind("short", 64, 0.5), Kind("long", share=0.5))
    server = FakeServer(30, 16, 2, kinds=kinds)
    for n in range(4):
        server.submit(ids(40, seed=n), max_tokens=30)
    server.step()
    (long_one,) = server.submit(ids(400), max_tokens=4)
    server.step_beside(1000, waiting=5, length=40, max_tokens=30)
    assert long_one.is_done and server.written[long_one] == alone(ids(400), 4)
    server.finish().check()


def test_several_prompts_share_a_step_with_decoding():
    server = FakeServer(token_budget=48, unit=64)
    server.submit(ids(10), max_tokens=50)
    server.step()
    for n in range(3):
        server.submit(ids(15, seed=n), max_tokens=2)
    step = server.step()
    assert [part.count for part in step.parts] == [1, 15, 15, 15]
    assert step.num_tokens <= 48


def test_priorities_go_first_and_are_not_set_aside():
    server = FakeServer(14, 16, 2, max_running=2)
    low = [server.submit(ids(20, seed=n), max_tokens=40)[0] for n in range(3)]
    server.step()
    (high,) = server.submit(ids(20, seed=9), max_tokens=40, priority=5)
    server.finish().check()
    order = {sequence: place for place, sequence in enumerate(server.ended)}
    assert order[high] < order[low[2]]


def test_choices_share_the_prompt():
    server = FakeServer(200)
    first, *others = server.submit(ids(100), max_tokens=4, n=4)
    server.finish().check()
    assert first.cached == 0 and [s.cached for s in others] == [96] * 3


def test_a_choice_whose_leader_is_aborted_goes_on():
    server = FakeServer(200)
    first, second = server.submit(ids(100), max_tokens=4, n=2)
    server.step()
    server.scheduler.finish(first)
    del server.written[first]
    server.finish().check()


def test_what_cannot_ever_fit_is_refused_with_numbers():
    server = FakeServer(10, 16, 2, max_length=1000)
    with pytest.raises(
        TooLarge, match=r"120 tokens and max_tokens 10 make 130 tokens \(11 pages\).*128 tokens.*10 pages"
    ):
        server.submit(ids(120), max_tokens=10)
    server.submit(ids(118), max_tokens=10)
    server.finish().check()
    with pytest.raises(TooLarge, match="may have 50 tokens"):
        FakeServer(100, max_length=50).submit(ids(45), max_tokens=6)


@pytest.mark.parametrize(("running", "queued"), [(2, 5), (5, 2), (5, 0)])
def test_more_choices_than_there_is_ever_room_for_are_refused_for_good(running, queued):
    """Not with a time to come again: it would be the same then."""
    server = FakeServer(max_running=running, max_queued=queued)
    server.submit(ids(16), n=5)
    server.finish().check()
    with pytest.raises(Refused, match="n is 6; of one request at most 5 choices") as refused:
        server.submit(ids(16), n=6)
    assert refused.value.status == 400 and refused.value.retry_after_s is None


def test_the_queue_is_bounded_and_says_when_to_come_again():
    server = FakeServer(max_running=1, token_budget=16, max_queued=2)
    for n in range(3):
        server.submit(ids(16, seed=n))
        server.step() if not n else None
    with pytest.raises(QueueFull, match="2 sequences are waiting, 2 may") as refused:
        server.submit(ids(5))
    assert refused.value.status == 429 and refused.value.retry_after_s >= 1
    for seconds, wait in ((50, 16), (100 / 12, 11)):  # 2 tokens a second, then also 12, of which a tenth counts
        server.scheduler.note_rate(100, seconds)
        with pytest.raises(QueueFull) as refused:
            server.submit(ids(5))
        assert refused.value.retry_after_s == wait
    server.finish().check()
    server.scheduler.is_closed = True
    with pytest.raises(Unavailable) as refused:
        server.submit(ids(5))
    assert refused.value.status == 503


def test_kinds_have_queues_of_their_own():
    kinds = (replace(KINDS[0], up_to=32), replace(KINDS[1], up_to=10**9, max_queued_tokens=150), KINDS[2])
    server = FakeServer(max_running=1, kinds=kinds)
    server.submit(ids(10))
    server.step()
    server.submit(ids(100))
    with pytest.raises(QueueFull, match="100 prompt tokens of kind 'medium' are waiting, 150 may; 100 more"):
        server.submit(ids(100))
    server.submit(ids(20))
    with pytest.raises(ValueError, match="kind 'huge' is not one of short, medium, long"):
        server.submit(ids(5), kind="huge")


def test_deadlines_end_what_is_late():
    server = FakeServer()
    (running,) = server.submit(ids(20), max_tokens=500, deadline_s=10)
    server.finish()
    assert 5 < len(server.written[running]) < 12 and running.is_done
    audit_scheduler(server.scheduler)


def test_old_weights_match_nothing_new():
    server = FakeServer(200)
    (one,) = server.submit(ids(50), max_tokens=40)
    for _ in range(10):
        server.step()
    server.scheduler.renew(7)
    (two,) = server.submit(ids(50), max_tokens=40)
    server.finish().check()
    assert two.cached == 0
    (three,) = server.submit([*ids(50), *server.written[two], 1], max_tokens=1)
    server.finish()
    assert three.cached == 80


def test_settings_that_cannot_be_are_refused():
    kinds = ((), (Kind("a", 5),), (Kind("a", share=0),))
    for wrong_one in (dict(token_budget=7), dict(max_running=0), *(dict(kinds=some) for some in kinds)):
        with pytest.raises(ValueError, match="scheduler: "):
            FakeServer(**wrong_one)
    FakeServer(token_budget=8)


WALKS = [(0, 0, False, True), (40, 0, False, False), (40, 60, False, True), (0, 30, True, False)]


@pytest.mark.parametrize("tier, park, deterministic, exact", WALKS)
def test_a_random_walk_loses_no_page(tier, park, deterministic, exact):
    """10,000 steps of coming, leaving, being late, being set aside, in a pool that is too small."""
    rng = random.Random(tier + park)
    drafters = [None, perfect, wrong, half]
    limits = dict(token_budget=40, max_queued=12, deterministic=deterministic)
    server = FakeServer(40, 24, 2, tier=tier, park=park, exact=exact, **limits)
    families = [ids(300, seed=n) for n in range(4)]
    for turn in range(2500):
        server.drafter = None if deterministic else rng.choice(drafters)
        if rng.random() < 0.25:
            prompt = rng.choice(families)[: rng.randrange(1, 200)] + ids(rng.randrange(20), seed=rng.randrange(40))
            late = rng.choice([None, None, 30])
            n = rng.choice([1, 1, 3])
            with suppress(QueueFull, TooLarge):
                server.submit(prompt, rng.randrange(1, 60), n, priority=rng.randrange(2), deadline_s=late)
        if rng.random() < 0.03 and server.scheduler.running:
            server.scheduler.finish(rng.choice(server.scheduler.running))
        if rng.random() < 0.01:
            server.scheduler.renew(turn)
        server.step()
        if turn % 10 == 0:
            audit_scheduler(server.scheduler)
    server.finish()
    assert server.scheduler.num_preempted > 10 and len(server.ended) > 100
    for sequence in server.ended:
        assert server.written[sequence] == alone(sequence.request.prompt, sequence.request.params.max_tokens)
    assert server.cache.available == 40
    counts = server.cache.counts
    assert counts.queries == counts.hits + sum(counts.misses.values()) and counts.hits > 0


@pytest.mark.parametrize("budget", [1000, 37])
def test_a_prompt_leaves_its_checkpoints_in_as_few_steps_as_the_budget_allows(budget):
    """At marks, intervals, ends and, at a second sighting, where prompts part: each is where another prompt goes on."""
    server = FakeServer(400, token_budget=budget, exact=True)
    first, other = ids(150), [*ids(75), *ids(80, seed=8)]
    steps, wanted = [], {}
    for prompt in (first, other):
        server.submit(prompt, max_tokens=1, marks=(16, 100))
        while server.scheduler.num_waiting or server.scheduler.running:
            (part,) = server.step().parts
            steps.append(part.count)
            wanted.setdefault(len(prompt), set()).update(place for place, _ in part.saves)
    read = [150, 155 - 64]  # of the second one four units were there with a checkpoint
    if budget == 1000:
        assert steps == read
        assert wanted == {150: {16, 64, 100, 128, 144, 149}, 155: {75, 100, 128, 144, 154}}
    else:
        assert sum(steps) == sum(read) and set(steps[:4]) == {budget}
    for prompt, places in ((first, (16, 64, 100, 128, 144, 149)), (other, (75, 100, 144, 154))):
        for place in places:
            (sequence,) = server.submit([*prompt[:place], *ids(9, seed=place)], max_tokens=2)
            server.finish()
            assert sequence.cached == place
    server.check()
