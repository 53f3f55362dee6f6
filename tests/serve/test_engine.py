"""The engine against the slow twin: the same tokens for any batching, cutting, reuse, shortage and draft."""

import math

import pytest
import torch

from rille.model.model import new_model
from rille.serve.audit import audit_scheduler
from rille.serve.engine import Engine
from rille.serve.generate import generate
from rille.serve.schema import Request, SamplingParams, TooLarge
from rille.serve.score import score
from rille.serve.speculation import Draft
from tests.train.small import MODEL

GREEDY = SamplingParams(max_tokens=20, temperature=0)


@pytest.fixture(scope="module")
def model():
    """Weights large enough that the likeliest token is no tie."""
    return new_model(MODEL.replace(init_std=0.2), seed=3)


def engine(model, **settings):
    """Small, and with NaN in all memory that is free."""
    return Engine(model, **{"num_pages": 120, "hash_unit": 64, "checkpoint_interval": 0, "poison": True, **settings})


def prompt(length, seed=0):
    return torch.randint(0, 320, (length,), generator=torch.Generator().manual_seed(seed * 1000 + 1)).tolist()


def alone(model, ids, count=20):
    return tuple(generate(model, torch.tensor(ids), count).tolist())


LENGTHS = [1, 2, 63, 64, 65, 100, 128, 200]


@pytest.mark.parametrize("budget", [16, 64, 512])
def test_a_batch_writes_what_each_would_alone(model, budget):
    served = engine(model, token_budget=budget, max_running=5)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    results = served.generate(prompts, GREEDY)
    assert [one.tokens for (one,) in results] == [alone(model, ids) for ids in prompts]
    assert all(
        one.reason == "length" and one.usage.prompt_tokens == n for (one,), n in zip(results, LENGTHS, strict=True)
    )
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == 120


def test_the_rate_of_prompts_is_that_of_all_their_steps(model, monkeypatch):
    """Nobody waits for a step that draws nothing, so it has no time of its own."""
    served, seen = engine(model, token_budget=64), []
    monkeypatch.setattr(served.scheduler, "note_rate", lambda tokens, seconds: seen.append((tokens, seconds > 0)))
    served.generate([prompt(150)], GREEDY)
    served.generate([prompt(60, seed=2)], GREEDY)
    assert seen == [(150, True), (60, True)]


@pytest.mark.parametrize("exact", [True, False])
def test_what_is_reused_changes_nothing(model, exact):
    served = engine(model, exact_ends=exact)
    history = prompt(130)
    cached = []
    for turn in range(4):
        [[one]] = served.generate([history], GREEDY)
        assert one.tokens == alone(model, history)
        cached.append(one.usage.cached_tokens)
        [[again]] = served.generate([history], GREEDY)
        last = len(history) - 1
        assert again.tokens == one.tokens and again.usage.cached_tokens == (last if exact else last // 64 * 64)
        history = history + list(one.tokens) + prompt(30, seed=50 + turn)
    assert cached == ([0, 149, 199, 249] if exact else [0, 128, 192, 192])


@pytest.mark.parametrize("exact", [True, False])
def test_prompts_that_part_share_their_beginning(model, exact):
    served = engine(model, exact_ends=exact)
    common = prompt(150)
    prompts = [common + prompt(100, seed=n) for n in range(4)]
    results = [served.generate([ids], GREEDY)[0][0] for ids in prompts]
    assert [one.tokens for one in results] == [alone(model, ids) for ids in prompts]
    assert [one.usage.cached_tokens for one in results] == [0, 0, *([150, 150] if exact else [128, 128])]


@pytest.mark.parametrize("settings", [{}, {"host_gib": 0.01, "preemption": "offload"}, {"host_gib": 0.01}])
def test_short_memory_changes_nothing(model, settings):
    served = engine(model, num_pages=14, **settings)
    prompts = [prompt(50 + n, seed=n) for n in range(6)]
    results = served.generate(prompts, SamplingParams(max_tokens=90, temperature=0))
    assert [one.tokens for (one,) in results] == [alone(model, ids, 90) for ids in prompts]
    assert served.stats().preemptions > 0
    audit_scheduler(served.scheduler)


def test_choices_and_seeds(model):
    served = engine(model)
    sampled = SamplingParams(max_tokens=12, temperature=1.5, seed=4, n=3)
    ids = prompt(80)
    [choices] = served.generate([ids], sampled)
    assert len({one.tokens for one in choices}) == 3
    assert [one.usage.cached_tokens for one in choices] == [0, 79, 79]
    others = [(prompt(30, seed=n), SamplingParams(max_tokens=12, temperature=1.5, seed=n)) for n in range(5)]
    mixed = served.generate([*(p for p, _ in others), ids], [*(s for _, s in others), sampled])
    assert [one.tokens for one in mixed[-1]] == [one.tokens for one in choices]


def test_figures_are_those_of_the_model(model):
    served = engine(model)
    ids = prompt(70)
    params = SamplingParams(max_tokens=10, temperature=0.7, seed=1, top_logprobs=4, expert_ids=True)
    [[one]] = served.generate([ids], params)
    logits = model.logits(torch.tensor([*ids, *one.tokens]))[69:-1].detach()
    want = torch.log_softmax(logits, -1)
    assert one.logprobs == pytest.approx([float(want[i, t]) for i, t in enumerate(one.tokens)], abs=1e-4)
    for place, top in enumerate(one.top_logprobs):
        best = want[place].sort(descending=True)
        assert [token for token, _ in top] == best.indices[:4].tolist()
    trace = model.trace(torch.tensor([*ids, *one.tokens]))
    for layer, experts in one.experts[3].items():
        assert experts == tuple(trace[f"layers.{layer}.router_topk_idx"][72].tolist())
    assert set(one.experts[0]) == {1, 2} and one.versions == (0,) * 10


def test_stops(model):
    served = engine(model)
    ids = prompt(40)
    free = alone(model, ids)
    stop = free[6]
    first = free.index(stop)
    ended = SamplingParams(max_tokens=20, temperature=0, stop_ids=(stop,))
    [[one]] = served.generate([ids], ended)
    assert (one.tokens, one.reason, one.matched) == (free[: first + 1], "stop", stop)
    held = SamplingParams(max_tokens=20, temperature=0, stop_ids=(stop,), min_tokens=first + 2)
    [[late]] = served.generate([ids], held)
    assert len(late.tokens) >= first + 2 and stop not in late.tokens[: first + 1]


def test_a_fault_of_one_is_its_own(model):
    """A token whose embedding is no number: its request fails, at once and again; all others are right."""
    good = [prompt(90, seed=n) for n in range(3)]
    replies = [alone(model, ids) for ids in good]
    unused = min(set(range(320)) - {token for ids in (*good, *replies) for token in ids})
    bad = new_model(MODEL.replace(init_std=0.2), seed=3)
    with torch.no_grad():
        bad.embed[unused] = math.nan
    served = engine(bad)
    faulty = [*good[0][:80], unused]
    for _ in range(2):
        results = [r[0] for r in served.generate([*good, faulty], GREEDY)]
        assert [one.tokens for one in results[:3]] == replies
        assert results[3].reason == "error" and "not a number" in results[3].error and results[3].tokens == ()
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == 120


@pytest.mark.parametrize("host_gib", [0.0, 0.01])
@pytest.mark.parametrize("kind", ["states", "latents"])
@pytest.mark.parametrize("length", [63, 128, 200])
def test_what_is_stored_and_no_number_fails_once(kind, length, host_gib):
    """A bit that fell over in a checkpoint, in a page, in what was written back: who goes on from there fails, and the
    next one computes it anew."""
    served = engine(new_model(MODEL.replace(init_std=0.2), seed=3), num_pages=40, host_gib=host_gib)
    ids = prompt(length + 64)
    served.generate([ids], GREEDY)
    for entry in served.scheduler.cache.store.entries():
        for layer, pool in getattr(served.pages, kind).items() if entry.is_state == (kind == "states") else ():
            pool[entry.pages[served.pages.group_of[layer] if entry.is_state else 0]] = math.nan
    if host_gib:
        store = served.scheduler.cache.store
        store.pool.give(store.allocate(40))
    longer = [[*ids, n] for n in range(3)]
    results = [served.generate([one], GREEDY)[0][0] for one in longer]
    assert [one.reason for one in results] == ["error", "length", "length"]
    assert [one.tokens for one in results[1:]] == [alone(served.model, one) for one in longer[1:]]
    assert results[2].usage.cached_tokens >= length // 64 * 64
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == 40


def test_a_list_that_grows_meanwhile_is_another_prompt(model):
    """Whoever gives a list goes on writing in it."""
    served, ids = engine(model), prompt(70)
    want = alone(model, ids)
    for output in served.submit(Request(prompt=ids, params=GREEDY)):
        ids.append(output.token if hasattr(output, "token") else 0)
    assert tuple(ids[70:]) == (*want, 0) and output.usage.prompt_tokens == 70


@pytest.mark.parametrize("queued", [0, 1, 8])
def test_more_than_may_wait_are_handed_in_as_others_finish(model, queued):
    """Requests of one choice and of many, and others who fill the queue."""
    served = engine(model, max_running=2, max_queued=queued)
    every = [SamplingParams(max_tokens=1 + n % 3, temperature=0, n=(1, 2, max(queued, 2))[n % 3]) for n in range(9)]
    others = [served.submit(Request(prompt=prompt(9), params=GREEDY)) for _ in range(2)]
    results = served.generate([prompt(5 + n) for n in range(9)], every)
    for n, (some, params) in enumerate(zip(results, every, strict=True)):
        assert [one.tokens for one in some] == [alone(model, prompt(5 + n), params.max_tokens)] * params.n
    assert [list(handle)[-1].reason for handle in others] == ["length"] * 2 and not served.stats().refused


def test_new_weights(model):
    other = new_model(MODEL.replace(init_std=0.2), seed=9)
    served = engine(new_model(MODEL.replace(init_std=0.2), seed=3))
    ids = prompt(100)
    before = served.generate([ids], GREEDY)[0][0]
    with pytest.raises(ValueError, match="no parameter 'nothing'"):
        served.update_weights({"nothing": torch.zeros(1)}, 1)
    with pytest.raises(ValueError, match="norm has shape"):
        served.update_weights({"norm": torch.zeros(1)}, 1)
    with pytest.raises(ValueError, match="version is 0; give a whole number that was not used"):
        served.update_weights({}, 0)
    with pytest.raises(ValueError, match="embed is torch.complex64"):
        served.update_weights({"embed": other.embed.to(torch.complex64)}, 1)
    for none in (torch.empty_like(other.norm, device="meta"), other.norm.detach().to_sparse()):
        with pytest.raises(
            ValueError, match="norm holds no plain values"
        ):  # with half of it copied it would be neither
            served.update_weights({**dict(other.named_parameters()), "norm": none}, 1)
    assert served.generate([ids], GREEDY)[0][0].tokens == before.tokens
    address = served.model.embed.data_ptr()
    served.update_weights(other.named_parameters(), 5)
    after = served.generate([ids], GREEDY)[0][0]
    assert (before.tokens, after.tokens) == (alone(model, ids), alone(other, ids))
    assert after.usage.cached_tokens == 0 and after.versions == (5,) * 20
    assert served.model.embed.data_ptr() == address
    with pytest.raises(ValueError, match="version is 0"):  # what a tier has of it would match, whatever the weights are
        served.update_weights(other.named_parameters(), 0)


def test_weights_that_change_under_a_reply(model):
    served = engine(new_model(MODEL.replace(init_std=0.2), seed=3))
    handle = served.submit(Request(prompt=prompt(70), params=SamplingParams(max_tokens=100, temperature=0)))
    outputs = iter(handle)
    versions = [next(outputs).version for _ in range(4)]
    served.update_weights([(n, p * 1.01) for n, p in served.model.named_parameters()], 1)
    versions += [output.version for output in outputs if hasattr(output, "version")]
    assert versions == [0] * 4 + [1] * 96
    assert served.scheduler.cache.store.num_states == 0


def test_what_cannot_be_is_refused(model):
    served = engine(model)
    for params, message in [
        (dict(stop_ids=(320,)), "stop_ids has ids from 320 to 320"),
        (dict(logit_bias={-1: 1.0}), "logit_bias has ids from -1"),
        (dict(stop=("x",)), "stop strings need a tokenizer"),
    ]:
        with pytest.raises(ValueError, match=message):
            served.generate([[1]], SamplingParams(**params))
    with pytest.raises(ValueError, match="prompt has ids from 320 to 320"):
        served.generate([[320]])
    with pytest.raises(ValueError, match="no tokens"):
        served.generate([[]])
    with pytest.raises(TooLarge, match="make 7,562 tokens"):
        served.generate([prompt(7552)], SamplingParams(max_tokens=10))
    assert served.stats().refused == 1
    with pytest.raises(ValueError, match="deterministic goes without a drafter"):
        engine(model, deterministic=True, drafter="ngram")
    with pytest.raises(ValueError, match="hash_unit is 100"):
        engine(model, hash_unit=100)
    with pytest.raises(ValueError, match="no multi-token-prediction layer"):
        engine(model, drafter="mtp")
    with pytest.raises(ValueError, match="a pool of 2 pages, of which the state of a sequence takes 2"):
        Engine(model, num_pages=2)


def test_prompts_beside_a_refused_one_do_not_run(model):
    served = engine(model)
    for wrong, error in (([1] * 7552, TooLarge), ([], ValueError), (7, ValueError)):
        with pytest.raises(error):
            served.generate([[1, 2], wrong], SamplingParams(max_tokens=10))
        served.step()
        stats = served.stats()
        assert not (stats.running or stats.waiting or stats.pages_used or served._handles)


def test_deterministic_is_the_same_bits(model):
    """Whatever runs beside it, is cached, or is set aside."""
    params = SamplingParams(max_tokens=30, temperature=0.9, seed=2)
    prompts = [prompt(n, seed=n) for n in (30, 64, 100, 200)]
    lonely = [engine(model, deterministic=True).generate([ids], params)[0][0] for ids in prompts]
    together = engine(model, deterministic=True, num_pages=14)
    for _ in range(2):
        for one, (other,) in zip(lonely, together.generate(prompts, params), strict=True):
            assert (one.tokens, one.logprobs) == (other.tokens, other.logprobs)
    longer = prompts[2] + list(lonely[2].tokens) + prompt(50, seed=77)
    fresh = engine(model, deterministic=True).generate([longer], params)[0][0]
    warm = engine(model, deterministic=True)
    warm.generate([prompts[2]], params)
    [[reused]] = warm.generate([longer], params)
    assert reused.usage.cached_tokens == 64 and (fresh.tokens, fresh.logprobs) == (reused.tokens, reused.logprobs)


def test_deterministic_figures_are_those_of_the_slow_twin_to_the_bit(model):
    params = SamplingParams(max_tokens=25, temperature=1.0, seed=5)
    prompts = [prompt(n, seed=n) for n in (1, 63, 64, 65, 200)]
    served = engine(model, deterministic=True)
    for _ in range(2):  # the second time from the cache
        for ids, (one,) in zip(prompts, served.generate(prompts, params), strict=True):
            assert score(model, ids, one.tokens, unit=64) == one.logprobs
    plain = engine(model).generate(prompts, params)
    for ids, (one,) in zip(prompts, plain, strict=True):
        assert score(model, ids, one.tokens, unit=64) == pytest.approx(one.logprobs, abs=1e-4)
    assert score(model, [1], []) == ()
    default = Engine(model, num_pages=120, deterministic=True, token_budget=500)
    [[one]] = default.generate([prompts[-1]], params)
    assert score(model, prompts[-1], one.tokens) == one.logprobs, "the unit that is left to the model"
    for wrong, message in (
        (dict(prompt=[]), "no tokens"),
        (dict(reply=[-1]), "an id of the reply is -1"),
        (dict(reply=[320]), "an id of the reply is 320; it must be at least 0 and at most 319"),
        (dict(prompt=None), "prompt is None"),
        (dict(unit=-1), "unit is -1"),
    ):
        with pytest.raises(ValueError, match=message):
            score(model, **{"prompt": [1], "reply": [1], **wrong})


class Scripted:
    """Guesses from the true continuation, spoilt where `spoil(place)` says so."""

    reads_hidden = False

    def __init__(self, model, spoil=lambda place: False):
        self.model, self.spoil, self.known = model, spoil, {}

    def propose(self, sequence, limit):
        first = tuple(sequence.request.prompt)
        if first not in self.known:
            self.known[first] = alone(self.model, list(first), 60)
        place = sequence.num_written
        guesses = self.known[first][place : place + limit]
        return Draft(tuple((t + 1) % 320 if self.spoil(place + i) else t for i, t in enumerate(guesses)))

    def observe(self, sequence, start, hidden_ND, following):
        raise AssertionError("it does not read them")

    def forget(self, sequence):
        pass


SPOIL = {"perfect": lambda place: False, "wrong": lambda place: True, "right then wrong": lambda place: place % 3 == 2}


@pytest.mark.parametrize("kind", SPOIL)
def test_drafts_change_nothing(model, kind):
    served = engine(model, drafter=Scripted(model, SPOIL[kind]), adaptive_drafts=False, draft_length=5)
    prompts = [prompt(n, seed=n) for n in (1, 30, 63, 64, 120)]
    results = served.generate(prompts, SamplingParams(max_tokens=40, temperature=0))
    assert [one.tokens for (one,) in results] == [alone(model, ids, 40) for ids in prompts]
    stats = served.stats()
    if kind == "wrong":
        assert stats.accepted == 0 < stats.drafted
    else:
        assert stats.accepted > 0 and sum(stats.accepted_at) == stats.accepted
    if kind == "perfect":
        assert stats.accepted == stats.drafted
    audit_scheduler(served.scheduler)
    again = served.generate([prompts[-1]], GREEDY)[0][0]
    assert again.usage.cached_tokens == 119 and again.tokens == alone(model, prompts[-1])


def test_prompt_lookup_repeats_what_repeats(model):
    biased = SamplingParams(max_tokens=50, temperature=0, logit_bias={5: 1000.0})
    served = engine(model, drafter="ngram", adaptive_drafts=False)
    [[one]] = served.generate([prompt(20)], biased)
    stats = served.stats()
    assert one.tokens == (5,) * 50 and stats.accepted == stats.drafted > 30 and stats.steps < 20


def test_a_seed_gives_the_same_with_drafts_and_without(model):
    params = SamplingParams(max_tokens=40, temperature=0.4, seed=6)
    ids = prompt(50)
    [[plain]] = engine(model).generate([ids], params)
    served = engine(model, drafter=Scripted(model), adaptive_drafts=False)
    [[drafted]] = served.generate([ids], params)
    assert plain.tokens == drafted.tokens and served.stats().drafted > 0


def test_the_mtp_layer_drafts(model):
    with_mtp = new_model(MODEL.replace(init_std=0.2, mtp_layers=1), seed=3)
    served = engine(with_mtp, drafter="mtp", adaptive_drafts=False, draft_length=3)
    prompts = [prompt(n, seed=n) for n in (1, 50, 130)]
    results = served.generate(prompts, GREEDY)
    assert [one.tokens for (one,) in results] == [alone(with_mtp, ids) for ids in prompts]
    assert served.stats().drafted > 0
    [[again]] = served.generate([prompts[2]], GREEDY)
    assert again.tokens == results[2][0].tokens and again.usage.cached_tokens == 129
