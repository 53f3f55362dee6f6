"""Steps launched before the tokens of the step before are known: the same replies as with steps one by one."""

import json
from itertools import count

import pytest
import torch

from rille.model.model import new_model
from rille.serve.ahead import follow
from rille.serve.audit import audit_scheduler
from rille.serve.engine import Engine
from rille.serve.graphs import DecodeGraphs
from rille.serve.schema import Finished, Request, SamplingParams
from rille.text.grammar import continuations
from rille.text.parser import parse
from tests.serve.lively import FORM, lively_model, lively_tokenizer
from tests.serve.test_engine import Scripted, alone, engine, prompt
from tests.serve.test_engine_text import only
from tests.train.small import MODEL

PAGES = 60


model = pytest.fixture(lively_model, scope="module")
tokenizer = pytest.fixture(lively_tokenizer, scope="module")


class Counted(DecodeGraphs):
    """ahead: steps launched behind one whose tokens nobody had seen; plain: others that drew by themselves."""

    ahead = plain = 0

    def launch(self, parts, lots):
        self.ahead += parts[0].source >= 0
        self.plain += parts[0].source < 0
        return super().launch(parts, lots)


def overlapped(model, **settings):
    """An engine that does on a CPU what it does with recorded steps on a GPU; NaN in all memory that is free."""
    served = Engine(
        model, **{"num_pages": PAGES, "hash_unit": 64, "checkpoint_interval": 0, "poison": True, **settings}
    )
    (spare,) = served.scheduler.cache.store.allocate(1)
    served.scheduler.cache.reserved = 1
    sizes = range(1, served.config.max_running + 1)
    most = served.config.draft_length if served.drafter is not None else 0
    graphs = Counted(model, served.pages, spare, served.longest, sizes, most, captures=False)
    served.runner.graphs, served.scheduler.takes_copies = graphs, not most
    return served


def check_books(served):
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == served.scheduler.cache.store.pool.num_pages - 1


PARAMS = {
    "greedy": [SamplingParams(max_tokens=n, temperature=0) for n in (30, 1, 2, 25, 40, 7)],
    "drawn": [SamplingParams(max_tokens=20, temperature=0.9, seed=n) for n in range(6)],
    "cut": [
        SamplingParams(max_tokens=20, temperature=n % 3, top_p=0.8 if n % 2 else 1, top_k=9 * (n // 2), seed=n)
        for n in range(6)
    ],
}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", PARAMS)
def test_tokens_and_figures_are_the_same(model, kind, overlap):
    """Twice, the second time from the cache, with five at once of six."""
    prompts = [prompt(n, seed=n) for n in (1, 60, 64, 150, 90, 20)]
    plain, served = engine(model, max_running=5), overlapped(model, max_running=5, overlap=overlap)
    for _ in range(2):
        want, got = (one.generate(prompts, PARAMS[kind]) for one in (plain, served))
        for (one,), (other,) in zip(want, got, strict=True):
            assert (one.tokens, one.reason, one.usage) == (other.tokens, other.reason, other.usage)
            assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)
        check_books(served)
    graphs = served.runner.graphs
    assert graphs.ahead > 20 if overlap else graphs.ahead == 0 < graphs.plain


def test_a_reply_that_ends_in_the_middle_leaves_no_trace(model):
    """Stop ids are seen one step late: the others go on, the next turn finds what it would have found."""
    prompts = [prompt(n, seed=n) for n in (40, 62, 63, 127, 100)]
    free = [alone(model, ids, 30) for ids in prompts]
    params = [
        SamplingParams(max_tokens=30, temperature=0, stop_ids=(reply[4 + 3 * n],)) for n, reply in enumerate(free)
    ]
    plain, served = engine(model), overlapped(model)
    for _ in range(3):
        want, got = (one.generate(prompts, params) for one in (plain, served))
        for (one,), (other,) in zip(want, got, strict=True):
            assert (one.tokens, one.reason, one.matched) == (other.tokens, other.reason, other.matched)
            assert 0 <= other.usage.cached_tokens - one.usage.cached_tokens <= 1  # it has read the stop id too
        assert any(one.reason == "stop" for (one,) in got)
        check_books(served)
        prompts = [[*ids, *one.tokens, *prompt(5, seed=9)] for ids, (one,) in zip(prompts, got, strict=True)]
    assert served.runner.graphs.ahead > 10
    assert served.stats().cache_hits > plain.stats().cache_hits > 0


def test_text_needs_no_waiting_but_grammars_do(model, tokenizer):
    params = [
        SamplingParams(max_tokens=60, temperature=5.0, seed=1, logit_bias=only(tokenizer, "abc"), stop=("ca", "zz")),
        SamplingParams(max_tokens=40, temperature=2.0, seed=2, stop=("e", "th")),
        SamplingParams(max_tokens=40, temperature=2.0, seed=3, stop_ids=tuple(range(0, 320, 2)), min_tokens=12),
        SamplingParams(max_tokens=20, seed=4, frequency_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(max_tokens=20, temperature=0, top_logprobs=3),
        SamplingParams(max_tokens=12, temperature=0, expert_ids=True),
    ]
    prompts = [prompt(20 + n, seed=n) for n in range(len(params))]
    plain, served = (make(model, tokenizer=tokenizer) for make in (engine, overlapped))
    for at_once in (1, len(params)):
        for first in range(0, len(params), at_once):
            some = slice(first, first + at_once)
            before = served.runner.graphs.ahead
            want, got = (one.generate(prompts[some], params[some]) for one in (plain, served))
            for (one,), (other,) in zip(want, got, strict=True):
                assert (one.tokens, one.text, one.reason, one.matched) == (
                    other.tokens, other.text, other.reason, other.matched,
                )  # fmt: skip
            if at_once == 1:
                assert (served.runner.graphs.ahead > before) == (first in (1, 2))
    check_books(served)


def test_grammars_wait_for_each_token(model, tokenizer):
    close = {tokenizer.specials["<|close|>"]: 30.0, **dict.fromkeys(tokenizer.encode(" \n\t0123456789"), -30.0)}
    grammar = continuations("response", response_format=FORM)
    params = SamplingParams(max_tokens=400, seed=0, grammar=grammar, logit_bias=close)
    served = overlapped(model, tokenizer=tokenizer)
    [[form], [free]] = served.generate([[1, 2]] * 2, [params, SamplingParams(max_tokens=90, seed=3, ignore_eos=True)])
    assert form.reason == "stop" and len(free.tokens) == 90
    assert set(json.loads(parse(form.tokens, tokenizer, start="response").content)) == {"ok"}
    [[alone_]] = overlapped(model, tokenizer=tokenizer).generate(
        [[1, 2]], [SamplingParams(max_tokens=90, seed=3, ignore_eos=True)]
    )
    assert alone_.tokens == free.tokens
    check_books(served)


@pytest.mark.parametrize("settings", [{}, {"host_gib": 0.01, "preemption": "offload"}])
def test_short_memory_changes_nothing(model, settings):
    served = overlapped(model, num_pages=15, **settings)
    prompts = [prompt(50 + n, seed=n) for n in range(6)]
    results = served.generate(prompts, SamplingParams(max_tokens=90, temperature=0))
    assert [one.tokens for (one,) in results] == [alone(model, ids, 90) for ids in prompts]
    assert served.stats().preemptions > 0 and served.runner.graphs.ahead > 20
    check_books(served)


def test_aborts_and_arrivals_between_steps(model):
    """Requests come and go while a step is under way; each reply that is whole is the right one."""
    served = overlapped(model, max_running=4)
    lengths = [30, 12, 40, 25, 33, 18, 21, 9]
    handles, outputs = {}, {n: [] for n in range(len(lengths))}

    def read():
        for n, handle in handles.items():
            while (output := handle._next()) is not None:
                outputs[n].append(output)

    for step in range(400):
        if step % 7 == 0 and len(handles) < len(lengths):
            n = len(handles)
            params = SamplingParams(max_tokens=lengths[n], temperature=0)
            handles[n] = served.submit(Request(prompt=prompt(30 + 17 * n, seed=n), params=params))
        if step in (13, 26, 40):
            served.abort(handles[step // 13 - 1].id)
        served.step()
        read()
    ends = [out[-1] for out in outputs.values()]
    assert all(isinstance(end, Finished) for end in ends) and {end.reason for end in ends} == {"length", "abort"}
    for n, out in outputs.items():
        want = alone(model, prompt(30 + 17 * n, seed=n), lengths[n])
        tokens = tuple(output.token for output in out[:-1])
        assert tokens == want[: len(tokens)] and (len(tokens) == lengths[n] or out[-1].reason == "abort")
    assert served.runner.graphs.ahead > 30 and not served.step()
    check_books(served)


def test_a_deadline_passes_under_way(model):
    served = overlapped(model)
    late = served.submit(Request(prompt=prompt(9), params=SamplingParams(max_tokens=3000), deadline_s=0.3))
    fine = served.submit(Request(prompt=prompt(8), params=SamplingParams(max_tokens=30, temperature=0)))
    *_, end = late
    assert end.reason == "abort" and "deadline" in end.error
    tokens = tuple(output.token for output in fine if not isinstance(output, Finished))
    assert tokens == alone(model, prompt(8), 30)
    check_books(served)


def test_new_weights_wait_for_what_runs(model):
    """Tokens that were drawn with the old weights say so."""
    first, second = (new_model(MODEL.replace(init_std=0.2), seed=n) for n in (3, 9))
    served = overlapped(first)
    handle = served.submit(Request(prompt=prompt(30), params=SamplingParams(max_tokens=20, temperature=0)))
    for _ in range(8):
        served.step()
    served.update_weights(second.named_parameters(), 5)
    outputs = [output for output in handle if not isinstance(output, Finished)]
    versions = [output.version for output in outputs]
    old = versions.count(0)
    assert versions == [0] * old + [5] * (20 - old) and 5 <= old <= 8
    assert tuple(output.token for output in outputs[:old]) == alone(model, prompt(30), old)
    check_books(served)


def test_a_fault_of_one_is_its_own(model):
    """A token whose embedding is no number, drawn by the device while the next step is under way."""
    good = [prompt(30 + n, seed=n) for n in range(3)]
    replies = [alone(model, ids, 25) for ids in good]
    bad = lively_model()
    place = next(n for n in range(3, 20) if replies[0][n] not in {*replies[1], *replies[2], *sum(good, [])})
    with torch.no_grad():
        bad.embed[replies[0][place]] = float("nan")
    served = overlapped(bad)
    for _ in range(2):
        results = [one for (one,) in served.generate(good, SamplingParams(max_tokens=25, temperature=0))]
        assert [one.tokens for one in results[1:]] == replies[1:]
        first = replies[0].index(replies[0][place])
        assert results[0].reason == "error" and results[0].tokens == replies[0][: first + 1]
    check_books(served)


SPOIL = {"perfect": lambda place: False, "wrong": lambda place: True, "right then wrong": lambda place: place % 3 == 2}


@pytest.mark.parametrize("kind", SPOIL)
def test_drafts_are_verified_where_they_are_drawn(model, kind):
    """Steps that take back what did not come true, for rows with many drafts and with none."""
    served = overlapped(model, drafter=Scripted(model, SPOIL[kind]), adaptive_drafts=False, draft_length=5)
    prompts = [prompt(n, seed=n) for n in (1, 30, 63, 64, 120)]
    for _ in range(2):
        results = served.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
        assert [one.tokens for (one,) in results] == [alone(model, ids, 40) for ids in prompts]
        check_books(served)
    stats = served.stats()
    assert served.runner.graphs.plain > 10 and served.runner.graphs._bench._pools
    assert stats.drafted > 0 and (stats.accepted > 0) == (kind != "wrong")
    assert (stats.accepted == stats.drafted) == (kind == "perfect")
    longer = [[*prompts[-1], *results[-1][0].tokens, 7]]
    [[one]] = served.generate(longer, SamplingParams(max_tokens=9, temperature=0))
    assert one.usage.cached_tokens == 159 and one.tokens == alone(model, longer[0], 9)


def test_a_seed_and_a_stop_give_the_same_with_drafts(model):
    ids = prompt(50)
    free = alone(model, ids, 60)
    for params in (
        SamplingParams(max_tokens=40, temperature=0.4, seed=6),
        SamplingParams(max_tokens=40, temperature=0.4, seed=6, top_p=0.9),
        SamplingParams(max_tokens=60, temperature=0, stop_ids=(free[21],)),
        SamplingParams(max_tokens=30, temperature=0, stop_ids=tuple(free[3:9]), min_tokens=12),
    ):
        [[plain]] = engine(model).generate([ids], params)
        served = overlapped(model, drafter=Scripted(model), adaptive_drafts=False)
        [[drafted]] = served.generate([ids], params)
        assert (plain.tokens, plain.reason) == (drafted.tokens, drafted.reason) and served.stats().drafted > 0
        again = [*ids, *drafted.tokens, 5]
        [[one]] = served.generate([again], SamplingParams(max_tokens=9, temperature=0))
        assert one.tokens == alone(model, again, 9)
        check_books(served)


@pytest.mark.parametrize("spoil", [lambda place: False, lambda place: place % 2 == 0])
def test_drafts_and_overlap_take_turns(model, spoil):
    served, turns = overlapped(model, drafter=Scripted(model, spoil), draft_length=3), count()
    served._stepper.odds.choose = lambda rows, found: 3 if next(turns) % 9 < 3 else 0
    prompts = [prompt(n, seed=n) for n in (1, 30, 63, 64, 120)]
    results = served.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
    assert [one.tokens for (one,) in results] == [alone(model, ids, 40) for ids in prompts]
    assert served.stats().drafted > 0 and served.runner.graphs.ahead > 3
    check_books(served)


def test_drafts_with_short_memory(model):
    served = overlapped(model, num_pages=16, drafter="ngram", adaptive_drafts=False)
    prompts = [prompt(50 + n, seed=n) for n in range(5)]
    results = served.generate(prompts, SamplingParams(max_tokens=90, temperature=0))
    assert [one.tokens for (one,) in results] == [alone(model, ids, 90) for ids in prompts]
    assert served.stats().preemptions > 0 and served.stats().drafted > 0
    check_books(served)


def test_what_is_planned_ahead(model):
    """Nothing where somebody may start, and nobody who ends with the token that is being drawn."""
    served = overlapped(model, max_running=2)
    for number in (6, 9):
        served.submit(Request(prompt=prompt(10), params=SamplingParams(max_tokens=number, temperature=0)))
    while served._stepper._flight is None:
        served.step()
    step = served._stepper._flight.step
    planned = follow(served.scheduler, step)
    assert [(part.source, part.start) for part in planned.parts] == [(n, p.start + 1) for n, p in enumerate(step.parts)]
    served.submit(Request(prompt=prompt(5), params=SamplingParams(max_tokens=2)))
    served._drain()
    assert follow(served.scheduler, step) is not None  # it waits, but has no place
    while len(served._stepper._flight.step.parts) == 2:
        served.step()
    assert len(served.scheduler.running) == 1 and served._stepper._flight.step.parts[0].source >= 0
    while served.step():
        pass
    check_books(served)
