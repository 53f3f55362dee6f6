"""The budget of a step: what runs in it is never more, with guesses and without."""

import pytest

from tests.serve.test_scheduler import DRAFTERS, FakeServer, ids


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_no_step_has_more_tokens_than_the_budget(drafter):
    """Guesses count like tokens, and leave room for the token of everybody else."""
    server = FakeServer(num_pages=200, max_running=6, token_budget=11, drafter=drafter)
    for n in range(10):
        server.submit(ids(3 + 7 * n, seed=n), max_tokens=12)
    sizes = []
    while server.scheduler.running or server.scheduler.num_waiting:
        writing = [s for s in server.scheduler.running if s.num_left == 1]
        step = server.step()
        assert {id(s) for s in writing} <= {id(part.sequence) for part in step.parts}
        sizes.append(sum(part.num_tokens for part in step.parts))
    assert max(sizes) == 11
    server.check()
