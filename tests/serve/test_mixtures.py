"""Requests of any parameters side by side, read, aborted, late and set aside at any moment, with guesses from anywhere:
each writes what it would write in an engine of its own. And models of one kind of layer, and guesses that are drawn."""

import math
import random
from collections import Counter
from contextlib import suppress

import pytest
import torch

from rille.model.model import new_model
from rille.serve.audit import audit_scheduler
from rille.serve.engine import Engine
from rille.serve.requests import collect
from rille.serve.sampler import Row, probabilities
from rille.serve.schema import Request, SamplingParams, TooLarge
from rille.serve.speculation import Draft
from rille.text.grammar import continuations
from tests.serve.lively import FORM, lively_model, lively_tokenizer
from tests.serve.test_engine import alone, engine, prompt
from tests.serve.test_overlap import overlapped
from tests.serve.test_speculation import close
from tests.train.small import MODEL

GRAMMAR = continuations("response", response_format=FORM)
WORDS = MODEL.vocab_size


model = pytest.fixture(lively_model, scope="module")
tokenizer = pytest.fixture(lively_tokenizer, scope="module")


class Anything:
    """Guesses that are words or none, or stand somewhere in the text."""

    reads_hidden = False

    def __init__(self, draws):
        self.draws = draws

    def propose(self, sequence, limit):
        count, ids = self.draws.randrange(limit + 1), sequence.chain.ids
        if self.draws.random() < 0.5:
            start = self.draws.randrange(len(ids))
            return Draft(tuple(ids[start : start + count]))
        return Draft(tuple(self.draws.randrange(-2, WORDS + 5) for _ in range(count)))

    def observe(self, sequence, start, hidden_ND, following):
        raise AssertionError("it does not read them")

    def forget(self, sequence):
        pass


def any_params(draws):
    """Every field at one time or another, alone and with others."""
    p = dict(
        max_tokens=draws.choice([1, 2, 5, 12, 25]),
        temperature=draws.choice([0, 0.7, 1.3, 3]),
        n=draws.choice([1, 1, 3]),
    )
    p |= dict(seed=draws.randrange(5), ignore_eos=draws.random() < 0.3, expert_ids=draws.random() < 0.15)
    some = [
        dict(top_p=draws.choice([0.5, 0.9]), top_k=draws.choice([0, 5, 400]), min_p=draws.choice([0, 0.1, 1.0])),
        dict(presence_penalty=draws.choice([-2, 0.5]), frequency_penalty=1.5),
        dict(repetition_penalty=draws.choice([0.5, 1.3])),
        dict(logit_bias={n: draws.choice([-100, 100]) for n in draws.sample(range(WORDS), draws.choice([3, WORDS]))}),
        dict(top_logprobs=draws.choice([1, 20])),
        dict(stop=tuple(draws.sample(["e", "th", "ab", "a", "\n", "\ufffd", "  "], 2))),
        dict(stop_ids=tuple(draws.sample(range(WORDS), 40))),
    ]  # fmt: skip
    for one in some:
        p |= one if draws.random() < 0.3 else {}
    if draws.random() < 0.15:
        return SamplingParams(**p, grammar=GRAMMAR)
    return SamplingParams(**p, min_tokens=draws.choice([0, draws.randrange(p["max_tokens"] + 1)]))


def any_engine(model, tokenizer, draws):
    drafter = draws.choice([None, "ngram", Anything(draws)])
    settings = dict(max_running=draws.choice([2, 5]), token_budget=draws.choice([16, 64, 500]), drafter=drafter)
    settings |= dict(num_pages=draws.choice([14, 20, 60]), adaptive_drafts=draws.random() < 0.5)
    settings |= dict(exact_ends=draws.random() < 0.5, tokenizer=tokenizer)
    if draws.random() < 0.4:
        settings |= dict(host_gib=0.01, preemption=draws.choice(["recompute", "offload"]))
    return draws.choice([engine, overlapped])(model, **settings)


@pytest.mark.parametrize("seed", range(5))
def test_any_mixture_writes_what_each_would_alone(model, tokenizer, seed):
    draws = random.Random(seed)
    served, asked = any_engine(model, tokenizer, draws), []
    free = served.scheduler.cache.available
    bases = [prompt(length, seed=seed * 7 + length) for length in draws.sample([1, 2, 63, 64, 65, 130], 3)]
    for _ in range(10):
        ids = draws.choice(bases) + prompt(draws.randrange(4), seed=draws.randrange(3))
        late = dict(deadline_s=draws.choice([None, None, None, 0.02]), priority=draws.randrange(2))
        request = Request(prompt=ids, params=any_params(draws), **late)
        with suppress(TooLarge):
            asked.append((served.submit(request), request))
        for _ in range(draws.randrange(6)):
            served.step()
        if asked and draws.random() < 0.2:
            served.abort(draws.choice(asked)[0].id, draws.choice([None, 0, 1]))
    while served.step():
        pass
    lonely = Engine(model, tokenizer=tokenizer, num_pages=60, hash_unit=64)
    for handle, request in asked:
        lonely.scheduler.cache.store.clear()
        [want] = lonely.generate([request.prompt], request.params)
        for one, other in zip(collect(handle, request), want, strict=True):
            compare(one, other, request)
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == free and not served._handles and not served._replies


def compare(one, want, request):
    figures = [*one.logprobs, *(value for top in one.top_logprobs for _, value in top)]
    assert all(map(math.isfinite, figures)) and 0 <= one.usage.cached_tokens < len(request.prompt)
    if one.reason == "abort":
        assert one.tokens == want.tokens[: len(one.tokens)]
        return
    assert (one.tokens, one.reason, one.matched, one.text) == (want.tokens, want.reason, want.matched, want.text)
    assert one.logprobs == pytest.approx(want.logprobs, rel=1e-3, abs=1e-3) and one.experts == want.experts


@pytest.mark.parametrize("mla_layers", [(), (0, 1, 2), (0,)])
def test_models_of_one_kind_of_layer(mla_layers):
    """Without latents that differ by layer, without states: resumed at any place, with guesses."""
    one = new_model(MODEL.replace(init_std=0.2, mla_layers=mla_layers), seed=3)
    served = engine(one, num_pages=40, drafter="ngram", adaptive_drafts=False, max_running=3, token_budget=50)
    prompts = [prompt(n, seed=n) for n in (1, 64, 65, 130)]
    for cached in ([0] * 4, [0, 0, 64, 129 if served.scheduler.cache.groups else 128]):
        results = served.generate(prompts, SamplingParams(max_tokens=20, temperature=0))
        assert [reply.tokens for (reply,) in results] == [alone(one, ids) for ids in prompts]
        assert [reply.usage.cached_tokens for (reply,) in results] == cached
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == 40


class Drawn:
    """Guesses that are drawn: mostly the word that the model finds second, or any word at all."""

    reads_hidden = False

    def __init__(self, model):
        self.model, self.known = model, {}
        self.draws = torch.Generator().manual_seed(1)

    def propose(self, sequence, limit):
        ids, masses, guesses = list(sequence.chain.ids), [], []
        for _ in range(limit):
            masses.append(self.masses((*ids, *guesses)))
            guesses.append(int(torch.multinomial(masses[-1], 1, generator=self.draws)))
        return Draft(tuple(guesses), torch.stack(masses))

    @torch.no_grad()
    def masses(self, ids):
        if ids not in self.known:
            logits_W = self.model.logits(torch.tensor(ids))[-1]
            self.known[ids] = torch.full((WORDS,), 0.1 / WORDS)
            self.known[ids][logits_W.topk(3).indices] += torch.tensor([0.1, 0.7, 0.1])
        return self.known[ids]

    def observe(self, sequence, start, hidden_ND, following):
        raise AssertionError("it does not read them")

    def forget(self, sequence):
        pass


@torch.no_grad()
def test_drawn_guesses_leave_the_distribution_of_replies(model):
    """Of the first two tokens the second is guessed, under a bias, a cut and a penalty."""
    ids, rest = prompt(12), dict(max_tokens=3, temperature=0.6, top_k=4, frequency_penalty=1.0, logit_bias={5: 2.0})
    drafter = Drawn(model)
    served = engine(model, drafter=drafter, adaptive_drafts=False, draft_length=1, num_pages=600, poison=False)
    counts = Counter()
    for seed in range(4):
        [choices] = served.generate([ids], SamplingParams(seed=seed, n=128, **rest))
        counts.update(choice.tokens[:2] for choice in choices)
    first_W = probabilities(model.logits(torch.tensor(ids))[-1:], [Row(SamplingParams(**rest), 0)])[0]
    expected = {}
    for token in first_W.nonzero()[:, 0].tolist():
        row = Row(SamplingParams(**rest), 0, place=1, written=(token,))
        second_W = probabilities(model.logits(torch.tensor([*ids, token]))[-1:], [row])[0] * first_W[token]
        expected |= {(token, word): float(second_W[word]) for word in second_W.nonzero()[:, 0].tolist()}
    pairs = list(expected)
    assert set(counts) <= set(pairs) and sum(expected.values()) == pytest.approx(1)
    close(Counter({pairs.index(pair): n for pair, n in counts.items()}), list(expected.values()), 4 * 128)
    stats = served.stats()
    assert stats.drafted == 4 * 128 and 0.2 < stats.accepted / stats.drafted < 0.9
