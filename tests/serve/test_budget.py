"""The budget of a step: what runs in it is never more, with guesses and without."""

import pytest

from rille.serve.limits import KINDS, Kind, Shares
from tests.serve.test_scheduler import DRAFTERS, FakeServer, ids

THREE = (Kind("short", 20, 0.4), Kind("medium", 45, 0.35), Kind("long", share=0.25))


@pytest.mark.parametrize("kinds", [KINDS, THREE], ids=["one kind", "three kinds"])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_no_step_has_more_tokens_than_the_budget(drafter, kinds):
    """Guesses count like tokens, and leave room for the token of everybody else; what kinds of prompts share is what is
    left."""
    server = FakeServer(num_pages=200, max_running=6, token_budget=11, drafter=drafter, kinds=kinds)
    made = [server.submit(ids(3 + 7 * n, seed=n), max_tokens=12)[0] for n in (9, 0, 4, 8, 1, 5, 7, 2, 6, 3)]
    assert {sequence.kind for sequence in made} == ({"short"} if kinds is KINDS else {"short", "medium", "long"})
    sizes = []
    while server.scheduler.running or server.scheduler.num_waiting:
        writing = [s for s in server.scheduler.running if s.num_left == 1]
        step = server.step()
        assert {id(s) for s in writing} <= {id(part.sequence) for part in step.parts}
        sizes.append(sum(part.num_tokens for part in step.parts))
    assert max(sizes) == 11
    server.check()


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 6, 10, 1000])
def test_shares_hold_however_few_tokens_a_step_has(budget):
    """Tokens are whole: what rounding gave one kind too much the others get in later steps."""
    shares, given = Shares(KINDS), dict.fromkeys((kind.name for kind in KINDS), 0)
    for steps in range(1, 201):
        for kind, tokens in shares.divide(budget, dict.fromkeys(given, 10**9)):
            given[kind.name] += tokens
        assert sum(given.values()) == steps * budget
        for kind in KINDS:
            assert abs(given[kind.name] - kind.share * steps * budget) < len(KINDS)


def test_what_a_kind_does_not_want_it_is_not_owed():
    shares = Shares(KINDS)
    for _ in range(50):
        assert [n for _, n in shares.divide(3, {"short": 0, "medium": 0, "long": 9})] == [0, 0, 3]
        assert [n for _, n in shares.divide(90, {"short": 2, "medium": 5, "long": 0})] == [2, 5, 0]
    assert sum(n for _, n in shares.divide(10, {"short": 99, "medium": 0, "long": 99})) == 10


@pytest.mark.parametrize("budget", [2, 3, 4, 7])
def test_a_share_that_finds_no_memory_goes_to_who_has_some(budget):
    """A long prompt under way holds the pool; those who wait for it would get all of a small budget."""
    kinds = (Kind("short", 8, 5.0), Kind("medium", 32, 1.0), Kind("long", share=0.01))
    server = FakeServer(9, 16, 2, token_budget=budget, max_running=2, kinds=kinds)
    server.submit(ids(100), max_tokens=4)
    server.step()
    for n in range(3):
        server.submit(ids(7, seed=n), max_tokens=100)
        server.submit(ids(30, seed=n), max_tokens=70)
    server.finish(3000).check()


def test_short_prompts_that_keep_coming_do_not_starve_a_long_one():
    """With one or two tokens of each step for all prompts, the rest being for those who write."""
    server = FakeServer(400, token_budget=8, max_running=8, kinds=(Kind("short", 32, 0.5), Kind("long", share=0.5)))
    for n in range(5):
        server.submit(ids(3, seed=n), max_tokens=900)
    for _ in range(20):
        server.step()
    (long_one,) = server.submit(ids(120), max_tokens=2)
    server.step_beside(150, waiting=3, length=30, max_tokens=1)
    assert long_one.is_done
