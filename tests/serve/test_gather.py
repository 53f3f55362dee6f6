"""Prompts that come while others write start together, where a step with prompts costs much more than one without."""

import pytest

from rille.serve.ahead import follow
from rille.serve.gather import LONGEST_WAIT_S, RISE, Gather
from rille.serve.schema import Request, SamplingParams
from tests.serve.test_engine import engine, prompt
from tests.serve.test_overlap import check_books, model, overlapped
from tests.serve.test_scheduler import FakeServer

__all__ = ["model"]  # a fixture

READS, WRITES = 0.040, 0.002


def ids(count: int, seed: int = 0) -> list[int]:
    return [(7 * n + seed) % 50 for n in range(count)]


def slow_starts(**settings) -> FakeServer:
    """Two sequences write, and a step with prompts was just over."""
    server = FakeServer(**settings)
    for seed in (1, 2):
        server.submit(ids(20, seed), max_tokens=30)
    while any(s.num_left > 1 for s in server.scheduler.running) or server.scheduler.num_waiting:
        server.step()
    server.scheduler.gather.note(False, WRITES, server.now)
    server.scheduler.gather.note(True, READS, server.now)
    return server


def joins(server: FakeServer, seconds: float) -> list[int]:
    """Lengths of the prompts in a step that begins so much later, on a clock of seconds."""
    server.now += seconds - 1
    return [part.count for part in server.step().parts if part.count > 1]


def test_prompts_wait_for_each_other_and_no_longer_than_a_start_takes():
    server = slow_starts()
    server.submit(ids(9, 3))
    assert joins(server, 0.010) == []
    server.submit(ids(11, 4))
    assert joins(server, 0.020) == [], "38 ms after the last start, which are not over"
    assert len(server.scheduler.running) == 2 and server.scheduler.num_waiting == 2, "the others write on"
    assert sorted(joins(server, 0.010)) == [9, 11]
    server.finish().check()


def test_who_finds_nobody_writing_waits_for_nothing():
    server = slow_starts()
    for sequence in list(server.scheduler.running):
        server.scheduler.finish(sequence)
        del server.written[sequence]
    server.submit(ids(9, 3))
    assert joins(server, 0.001) == [9]


def test_prompts_that_fill_a_step_wait_for_nothing():
    server = slow_starts(token_budget=64)
    for seed, length in ((3, 40), (4, 20)):
        server.submit(ids(length, seed))
        assert joins(server, 0.001) == []
    server.submit(ids(30, 5))
    assert sum(joins(server, 0.001)) == 62, "two of the budget are for those that write"
    assert joins(server, 0.001), "and what is half read goes on"
    server.finish().check()


def test_further_choices_of_a_prompt_that_was_read_wait_for_nothing():
    """Though they would not fill a step."""
    server = slow_starts(token_budget=512)
    server.submit(ids(33, 3), n=3)
    server.now += 0.05 - 1
    server.step()
    server.scheduler.gather.note(True, READS, server.now)
    assert server.scheduler.num_waiting == 2
    server.now += 0.001 - 1
    server.step()
    assert server.scheduler.num_waiting == 0
    server.finish().check()


@pytest.mark.parametrize("settings", [{}, {"max_running": 2}])
def test_steps_are_launched_ahead_while_prompts_wait(settings):
    server = slow_starts(**settings)
    step = server.scheduler.step(server.now)
    server.submit(ids(9, 3))
    ahead = follow(server.scheduler, step, server.now + 0.001)
    assert ahead is not None and [part.source for part in ahead.parts] == [0, 1]
    assert (follow(server.scheduler, step, server.now + 1) is None) == (not settings), "now the prompt may run"


@pytest.mark.parametrize("notes, wait", [
    ([], 0), ([(True, READS)], 0), ([(False, WRITES)], 0),  # nobody waits without figures
    ([(False, WRITES), (True, READS)], READS - WRITES),
    ([(False, WRITES), (True, READS), (True, 9.0)], LONGEST_WAIT_S),
    ([(False, WRITES), (True, 9.0), (True, READS)], READS - WRITES),  # kernels compiled in the first one
    ([(False, WRITES), (True, READS), (True, 2 * READS)], (1 + RISE) * READS - WRITES),
    ([(False, READS), (True, READS)], 0), ([(False, READS), (True, WRITES)], 0),  # steps cost what they cost
])  # fmt: skip
def test_how_long(model, notes, wait):
    gather, now = Gather(), 10.0
    for reads, seconds in notes:
        gather.note(reads, seconds, now)
    server = FakeServer()
    (writer,), (comer,) = server.submit(ids(1)), server.submit(ids(9))
    assert writer.num_left == 1 and comer.num_left == 9
    for later in (0.0005, 0.99 * wait, 1.01 * wait + 0.0005):
        assert gather.waits([writer], [comer], 64, now + later) == (later < wait)
    assert not gather.waits([], [comer], 64, now) and not gather.waits([writer, comer], [comer], 64, now)


class Held(Gather):
    """Whoever comes waits until nobody writes."""

    def note(self, reads, seconds, now):
        self._until = float("inf")


def test_the_engine_gives_the_same_replies(model):
    """Eight requests, the last seven while the first one is written: they start in one step."""
    served, plain = overlapped(model), engine(model)
    served.scheduler.gather = Held()
    prompts = [prompt(20 + 9 * n, seed=n) for n in range(8)]
    params, handles, starts = SamplingParams(max_tokens=12, temperature=0), [], []
    step = served.scheduler.step

    def seen(now):
        made = step(now)
        starts.append(sum(part.count > 1 for part in made.parts))
        return made

    served.scheduler.step = seen
    for one in prompts:
        handles.append(served.submit(Request(prompt=one, params=params)))
        served.step()
    while served.step():
        pass
    assert [count for count in starts if count] == [1, 7]
    replies = [tuple(output.token for output in list(handle)[:-1]) for handle in handles]
    assert replies == [one.tokens for (one,) in plain.generate(prompts, params)]
    check_books(served)


@pytest.mark.parametrize("gathers", [True, False])
def test_it_knows_times_only_where_it_is_asked_to(model, gathers):
    served = overlapped(model, gather_prompts=gathers)
    served.generate([prompt(20)], SamplingParams(max_tokens=12, temperature=0))
    gather = served.scheduler.gather
    assert ((gather._reads_s or 0) > 0, (gather._writes_s or 0) > 0) == (gathers, gathers)
    unrecorded = engine(model)
    unrecorded.generate([prompt(20)], SamplingParams(max_tokens=12, temperature=0))
    assert unrecorded.scheduler.gather._reads_s is None, "there a step with prompts is a step like others"
