"""Steps that break off half-way, and who makes them: nobody goes on from what such a step has left, and readers in any
threads or event loop, with the engine's own thread or without, get what the slow twin writes."""

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from rille.model.model import new_model
from rille.serve.audit import audit_scheduler
from rille.serve.schema import Request, SamplingParams, TokenOutput
from tests.serve.test_engine import MODEL, alone, engine, prompt
from tests.serve.test_overlap import check_books, overlapped

GREEDY = SamplingParams(max_tokens=12, temperature=0)
LAYERS = MODEL.num_layers


@pytest.fixture(scope="module")
def model():
    return new_model(MODEL.replace(init_std=0.2), seed=3)


def is_whole(served):
    audit_scheduler(served.scheduler)
    return served.scheduler.cache.available == served.pages.bytes.shape[0] and not served._handles


class At:
    """Does something before the block number `place` of all that are run."""

    def __init__(self, model, place, action):
        self.left, self.action = place, action
        self.hooks = [block.register_forward_pre_hook(self) for block in model.blocks()]

    def __call__(self, *_):
        self.left -= 1
        if self.left == 0:
            self.action()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for hook in self.hooks:
            hook.remove()


def fail():
    raise ZeroDivisionError("a fault in a layer")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("place", [2, LAYERS + 1, LAYERS + 2, 2 * LAYERS + 2, 4 * LAYERS - 1])
@pytest.mark.parametrize(("action", "error"), [(fail, ZeroDivisionError), (interrupt, KeyboardInterrupt)])
def test_nobody_goes_on_from_a_step_that_broke_off(model, drafter, place, action, error):
    """Some layers had moved their states on: the next turns, from any place in the reply, are right all the same."""
    served = engine(model, drafter=drafter, adaptive_drafts=False)
    ids = prompt(100)
    want = alone(model, ids, 12)
    other = served.submit(Request(prompt=prompt(30, seed=1), params=GREEDY))
    with At(model, place, action) as at, pytest.raises(error):
        served.generate([ids], GREEDY)
    assert at.left <= 0
    for count in range(0, 5):
        history = [*ids, *want[:count], *([5] if count else [])]
        [[one]] = served.generate([history], GREEDY)
        assert one.tokens == alone(model, history, 12), (count, one.usage)
    *_, last = other
    assert last.reason == ("error" if error is ZeroDivisionError else "length")
    assert is_whole(served)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
@pytest.mark.parametrize("place", [LAYERS + 2, 2 * LAYERS + 1, 4 * LAYERS - 1])
def test_nor_from_a_recorded_one(model, drafter, place):
    """With the next step launched behind it."""
    served = overlapped(model, drafter=drafter, adaptive_drafts=False)
    ids = prompt(100)
    want = alone(model, ids, 12)
    with At(model, place, fail), pytest.raises(ZeroDivisionError):
        served.generate([ids, prompt(30, seed=1)], GREEDY)
    for count in range(4):
        history = [*ids, *want[:count], *([5] if count else [])]
        [[one]] = served.generate([history], GREEDY)
        assert one.tokens == alone(model, history, 12), (count, one.usage)
    check_books(served)


def test_a_fault_ends_what_ran_and_nothing_else(model):
    served = engine(model, max_running=2)
    prompts = [prompt(70 + n, seed=n) for n in range(4)]
    handles = [served.submit(Request(prompt=ids, params=GREEDY)) for ids in prompts]
    with At(model, LAYERS + 2, fail), pytest.raises(ZeroDivisionError):
        while True:
            served.step()
    ends = [list(handle) for handle in handles]
    assert [some[-1].reason for some in ends] == ["error", "error", "length", "length"]
    assert "after a fault" in ends[0][-1].error
    for ids, some in zip(prompts[2:], ends[2:], strict=True):
        assert tuple(one.token for one in some[:-1]) == alone(model, ids, 12)
    assert is_whole(served)


def written(handle):
    return tuple(one.token for one in handle if isinstance(one, TokenOutput))


def test_several_threads_may_ask_an_engine_without_one(model):
    served = engine(model, num_pages=20, max_running=2, max_queued=1)
    prompts = [prompt(40 + 11 * n, seed=n) for n in range(6)]
    with ThreadPoolExecutor(3) as pool:
        results = list(
            pool.map(lambda two: served.generate(two, GREEDY), zip(prompts[::2], prompts[1::2], strict=True))
        )
    assert [one.tokens for some in results for (one,) in some] == [alone(model, ids, 12) for ids in prompts]
    assert is_whole(served)


def test_an_event_loop_may_ask_an_engine_without_a_thread(model):
    served = engine(model)
    prompts = [prompt(40 + 11 * n, seed=n) for n in range(4)]

    async def read(ids):
        handle = served.submit(Request(prompt=ids, params=GREEDY))
        return tuple([one.token async for one in handle if isinstance(one, TokenOutput)])

    async def everybody():
        return await asyncio.wait_for(asyncio.gather(*map(read, prompts)), 30)

    assert asyncio.run(everybody()) == [alone(model, ids, 12) for ids in prompts]
    assert is_whole(served)


def test_the_thread_may_start_after_the_requests(model):
    """Who reads then waits for it and makes no steps beside it."""
    served = engine(model)
    prompts = [prompt(40 + 11 * n, seed=n) for n in range(4)]
    handles = [served.submit(Request(prompt=ids, params=GREEDY)) for ids in prompts]
    served.step()
    served.start()
    assert [written(handle) for handle in handles] == [alone(model, ids, 12) for ids in prompts]
    served.close()
    assert is_whole(served)


def test_many_may_start_and_close_it_at_once(model):
    """There is one thread, and whoever closes waits for it."""
    before = sys.getswitchinterval()

    def together(action):
        gate = threading.Barrier(6)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda _: (gate.wait(), action()), range(6)))

    sys.setswitchinterval(1e-6)  # threads change places between any two lines
    try:
        for _ in range(10):
            served = engine(model, num_pages=8)
            together(served.start)
            assert len(steppers()) == 1
            together(served.close)
            assert not steppers()
    finally:
        sys.setswitchinterval(before)


def steppers():
    return [thread for thread in threading.enumerate() if thread.name == "rille-engine"]
