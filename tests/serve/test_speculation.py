"""Drafts: the distribution stays, the lengths follow what was measured, guesses come from what was written."""

import math
import random
from collections import Counter

import pytest
import torch

from rille.model.model import new_model
from rille.serve.chain import Chain
from rille.serve.drawing import by_rejection, count_true
from rille.serve.sampler import Drawn, Row, probabilities
from rille.serve.schema import Request, SamplingParams
from rille.serve.sequences import Sequence
from rille.serve.speculation import Draft, MtpDrafter, NgramDrafter, accept
from tests.train.small import MODEL

W = 6
PARAMS = SamplingParams(temperature=1.3, top_p=0.9, max_tokens=500)


def sequence(ids):
    return Sequence(Request(prompt=tuple(ids)), "one", 0, 1, Chain(ids, 64), "short")


def close(counts, probabilities_W, total):
    """Chi-square, with a threshold that a right one misses once in some 10^5 runs."""
    expected = {w: p * total for w, p in enumerate(probabilities_W) if p * total >= 5}
    statistic = sum((counts[w] - e) ** 2 / e for w, e in expected.items())
    freedom = max(len(expected) - 1, 1)
    assert all(counts[w] == 0 for w, p in enumerate(probabilities_W) if p == 0)
    assert statistic < freedom + 4.3 * math.sqrt(2 * freedom) + 12


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 5.0])
def test_rejection_leaves_the_distribution_of_every_place(sharpness):
    """Drafts of two tokens from distributions that are nothing like the model's: the first token is distributed as p_0,
    the second, where it was reached, as p_1."""
    make = torch.Generator().manual_seed(3)
    logits_RW = torch.randn(3, W, generator=make) * 1.5
    q_KW = torch.softmax(torch.randn(2, W, generator=make) * sharpness, -1)
    total, first, second = 6000, Counter(), Counter()
    for trial in range(total):
        guesses = tuple(torch.multinomial(q_KW, 1, generator=make)[:, 0].tolist())
        rows = [Row(PARAMS, trial, place=place) for place in range(3)]
        tokens = [drawn.token for drawn in by_rejection(logits_RW, Draft(guesses, q_KW), rows)]
        first[tokens[0]] += 1
        if len(tokens) > 1:
            second[tokens[1]] += 1
    p_RW = probabilities(logits_RW, [Row(PARAMS, 0)] * 3)
    close(first, p_RW[0].tolist(), total)
    close(second, p_RW[1].tolist(), sum(second.values()))
    assert sum(second.values()) > (500 if sharpness < 5 else 5)


def test_a_draft_from_the_same_distribution_always_comes_true():
    p_RW = torch.softmax(torch.randn(3, W, generator=torch.Generator().manual_seed(1)).double(), -1)
    for trial in range(50):
        guesses = (trial % W, trial // W % W)
        tokens = accept(p_RW, Draft(guesses, p_RW[:2]), [Row(PARAMS, trial, place=n) for n in range(3)])
        assert tuple(tokens[:2]) == guesses and len(tokens) == 3


def test_greedy_by_rejection_is_greedy():
    logits_RW = torch.randn(3, W, generator=torch.Generator().manual_seed(2))
    greedy = logits_RW.argmax(-1).tolist()
    q_KW = torch.full((2, W), 1 / W)
    rows = [Row(SamplingParams(temperature=0), 1, place=n) for n in range(3)]
    drawn = by_rejection(logits_RW, Draft((greedy[0], (greedy[1] + 1) % W), q_KW), rows)
    assert [one.token for one in drawn] == greedy[:2]


@pytest.mark.parametrize("q", [0.0, 1.0, 1e30, math.nan, math.inf])
def test_guesses_from_no_distribution_change_nothing(q):
    """Masses that are none, or more than the model's everywhere: what is left of them to draw from is nothing."""
    logits_RW = torch.randn(3, W, generator=torch.Generator().manual_seed(2))
    for trial, params in enumerate([SamplingParams(temperature=0)] * 2 + [PARAMS] * 20):
        rows = [Row(params, trial, place=n) for n in range(3)]
        p_RW = probabilities(logits_RW, rows)
        guesses = (trial % W, (trial + 1) % W)
        drawn = by_rejection(logits_RW, Draft(guesses, torch.full((2, W), q)), rows)
        assert all(p_RW[place, one.token] > 0 for place, one in enumerate(drawn))


def test_k_drafts_need_k_and_one_rows():
    drawn = [Drawn(4), Drawn(5), Drawn(6)]
    assert [count_true(drawn, guesses) for guesses in ((4, 5), (4, 6), (5, 5), ())] == [2, 1, 0, 0]
    assert count_true([Drawn(error="x"), Drawn(5), Drawn(1)], (-1, 5)) == 0


def test_prompt_lookup():
    drafter = NgramDrafter(longest=3, shortest=2)
    one = sequence([1, 2, 3, 4, 5, 9, 2, 3])
    assert drafter.propose(one, 3).tokens == (4, 5, 9)
    one.chain.append(7)
    assert drafter.propose(one, 3).tokens == ()
    for token in (2, 3):
        one.chain.append(token)
    assert drafter.propose(one, 2).tokens == (7, 2)  # the newest sighting
    loop = sequence([8, 6, 8, 6, 8, 6])
    assert drafter.propose(loop, 5).tokens == (8, 6, 8, 6, 8)
    drafter.forget(one)
    assert drafter.propose(one, 2).tokens == (7, 2)
    with pytest.raises(ValueError, match="lengths 3 to 2"):
        NgramDrafter(2, 3)


def search(ids, longest=4, shortest=2):
    """The place behind the newest of the longest n-grams before the end that stand at the end too."""
    for n in range(min(longest, len(ids) - 1), shortest - 1, -1):
        for at in range(len(ids) - 1, n - 1, -1):
            if ids[at - n : at] == ids[len(ids) - n :]:
                return at
    return 0


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_guesses_are_those_of_a_literal_search(share):
    """Over texts that repeat themselves often, seldom, not at all, asked after every token or now and then. Where what
    was written since the last guess followed its place, the next one goes on from there."""
    draws = random.Random(5)
    texts = [[draws.randrange(words) for _ in range(250)] for words in (1, 2, 5, 40, 10_000)]
    texts.append([n * n % 23 for n in range(300)] + [7, 7, 7, *range(30), 2**40, 2**40 + 1])
    texts.append([*texts[4][:40], *texts[4][:40], 1, 2, *texts[4][10:60]])
    followed = 0
    for ids in texts:
        drafter, one, at, length = NgramDrafter(), sequence(ids[:1]), 0, 0
        for end in range(2, len(ids) + 1):
            one.chain.append(ids[end - 1])
            if draws.random() > share:
                continue
            news = ids[length:end]
            goes_on = at and ids[at : at + len(news)] == news
            followed += bool(goes_on)
            at, length = at + len(news) if goes_on else search(ids[:end]), end
            want = tuple(ids[at + i % (end - at)] for i in range(3)) if at else ()
            assert drafter.propose(one, 3).tokens == want
    assert followed > 100


def test_a_drafter_borrows_embedding_and_head():
    model = new_model(MODEL.replace(mtp_layers=1), seed=1)
    assert not [name for name, _ in model.mtp.named_parameters() if "embed." in name or "head" in name]
    drafter, one = MtpDrafter(model), sequence([1, 2, 3])
    assert drafter.propose(one, 2).tokens == ()  # nothing was observed
    hidden = model.hidden(torch.tensor([1, 2, 3])).detach()
    drafter.observe(one, 0, hidden[:2], [2, 3])
    drafter.observe(one, 2, hidden[2:], [9])
    want, _ = model.draft(hidden, torch.tensor([2, 3, 9]), count=2)
    assert drafter.propose(one, 2).tokens == tuple(want[0].tolist())
    with pytest.raises(ValueError, match="no multi-token-prediction layer"):
        MtpDrafter(new_model(MODEL, seed=1))
