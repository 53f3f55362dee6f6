"""Sampling: parameters obeyed, rows independent of each other, figures finite, faults of one row its own."""

import math
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from rille.serve.sampler import LEAST_LOGPROB, Row, draw, probabilities, uniform
from rille.serve.schema import SamplingParams
from rille.serve.stopping import StopStrings
from rille.text.grammar import Grammar

W = 12
LOGITS = torch.randn(W, generator=torch.Generator().manual_seed(4)) * 2


def row(seed=0, place=0, **params):
    rest = {key: params.pop(key) for key in ("prompt", "written", "allowed", "forbidden") if key in params}
    return Row(SamplingParams(**params), seed, place=place, **rest)


def frequencies(count=4000, logits=LOGITS, **rest):
    drawn = draw(logits.expand(count, -1), [row(seed=5, place=n, **rest) for n in range(count)])
    return Counter(d.token for d in drawn)


def expected(logits=LOGITS, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """The literal rule, token by token."""
    p = dict(enumerate(torch.softmax(logits.double() / temperature, -1).tolist()))
    ranked = sorted(p, key=lambda w: -p[w])[: top_k or None]
    total, kept, before = sum(p[w] for w in ranked), [], 0.0
    for w in ranked:
        if top_p < 1 and before >= top_p * total:
            break
        kept.append(w)
        before += p[w]
    kept = [w for w in kept if p[w] >= min_p * p[ranked[0]]]
    return {w: p[w] / sum(p[v] for v in kept) for w in kept}


CUTS = [
    {},
    {"temperature": 0.5},
    {"temperature": 3.0},
    {"top_k": 3},
    {"top_p": 0.7},
    {"min_p": 0.2},
    {"top_k": 5, "top_p": 0.8, "min_p": 0.1, "temperature": 1.5},
]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
def test_frequencies_are_those_of_the_rule(cuts):
    """Chi-square with a threshold that a right sampler misses once in 10^5 runs; the seeds are fixed."""
    want, count = expected(**cuts), 4000
    got = frequencies(count, **cuts)
    assert set(got) <= set(want)
    often = {w: p for w, p in want.items() if p * count >= 5}
    statistic = sum((got[w] - p * count) ** 2 / (p * count) for w, p in often.items())
    freedom = max(len(often) - 1, 1)
    assert statistic < freedom + 4.3 * math.sqrt(2 * freedom) + 12
    p_W = probabilities(LOGITS[None], [row(**cuts)])[0]
    assert p_W.tolist() == pytest.approx([want.get(w, 0.0) for w in range(W)], abs=1e-6)


def test_greedy_is_the_largest():
    (drawn,) = draw(LOGITS[None], [row(temperature=0)])
    assert drawn.token == int(LOGITS.argmax())
    assert drawn.logprob == pytest.approx(float(torch.log_softmax(LOGITS, -1).max()))


def test_a_row_does_not_depend_on_its_neighbours():
    rows = [row(seed=n, place=n, **CUTS[n % len(CUTS)], top_logprobs=n % 3) for n in range(40)]
    logits = torch.randn(40, W, generator=torch.Generator().manual_seed(1))
    together = draw(logits, rows)
    alone = [draw(logits[n : n + 1], [rows[n]])[0] for n in range(40)]
    assert together == alone
    order = list(reversed(range(40)))
    assert [draw(logits[order], [rows[n] for n in order])[39 - n] for n in range(40)] == alone


def test_seeds_places_and_choices_have_numbers_of_their_own():
    numbers = {uniform(s, c, p) for s in range(10) for c in range(10) for p in range(10)}
    assert len(numbers) == 1000 and all(0 <= u < 1 for u in numbers)
    assert abs(sum(numbers) / 1000 - 0.5) < 0.05
    assert uniform(3, 1, 4) == uniform(3, 1, 4) != uniform(3, 1, 4, b"other")


def test_penalties_bias_and_masks():
    flat = torch.tensor([1.0, 1.0, -1.0, 1.0])

    def changed(**rest):
        p = probabilities(flat[None], [row(**rest)])[0].log()
        return (p - p[3]).tolist()

    assert changed(presence_penalty=0.5, written=[0, 0]) == pytest.approx([-0.5, 0, -2, 0])
    assert changed(frequency_penalty=0.5, written=[0, 0]) == pytest.approx([-1, 0, -2, 0])
    assert changed(presence_penalty=1.0, prompt=[0]) == pytest.approx([0, 0, -2, 0])
    assert changed(repetition_penalty=2.0, prompt=[0], written=[2]) == pytest.approx([-0.5, 0, -3, 0])
    assert changed(logit_bias={1: 2.5}) == pytest.approx([0, 2.5, -2, 0])
    assert changed(forbidden=frozenset({1})) == pytest.approx([0, -math.inf, -2, 0])
    allowed = torch.tensor([False, True, True, True])
    assert changed(allowed=allowed) == pytest.approx([-math.inf, 0, -2, 0])
    (drawn,) = draw(flat[None], [row(temperature=0, logit_bias={2: 100.0})])
    assert drawn.token == 2 and drawn.logprob == pytest.approx(float(torch.log_softmax(flat, -1)[2]))


@pytest.mark.parametrize("temperature", [1e-30, 1e-99, 1e-308, 5e-324])
@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 1e-300}, {"min_p": 1.0}], ids=str)
def test_the_smallest_temperature_is_greedy(temperature, cut):
    """Logits divided by it must not become infinite, of which the softmax is no number, and the draw the first id."""
    assert LOGITS.argmax() != 0
    tokens = {
        d.token for d in draw(LOGITS.expand(20, -1) * 100, [row(n, temperature=temperature, **cut) for n in range(20)])
    }
    assert tokens == {int(LOGITS.argmax())}


@pytest.mark.parametrize("sign", [1, -1])
def test_extreme_biases_and_penalties_leave_a_distribution(sign):
    """All at their limits at once: probabilities are numbers and come to 1, and what was pushed up is drawn."""
    extreme = {"repetition_penalty": 0.01, "presence_penalty": -2.0, "frequency_penalty": -2.0, "written": [1] * 5000}
    one = row(3, logit_bias={3: sign * 1e6, 4: -1e6}, **extreme)
    p = probabilities(LOGITS[None] * 30, [one])[0]
    assert torch.isfinite(p).all() and float(p.sum()) == pytest.approx(1)
    assert draw(LOGITS[None] * 30, [one])[0].token == (3 if sign > 0 else 1)


def test_a_row_that_is_no_number_fails_alone():
    logits = LOGITS.repeat(5, 1)
    logits[1, 3], logits[2, 0] = math.nan, math.inf
    results = draw(logits, [row(top_logprobs=3), *[row(top_logprobs=3)] * 3, row(allowed=torch.zeros(W, dtype=bool))])
    assert "not a number" in results[1].error and "not a number" in results[2].error
    assert "nothing may follow" in results[4].error
    assert results[0] == results[3] and results[0].error is None


def test_figures_are_finite():
    logits = torch.full((1, W), -3e38)
    logits[0, 2] = 3e38
    (drawn,) = draw(logits, [row(top_logprobs=5, temperature=0, logit_bias={4: 1.0})])
    assert [logprob for _, logprob in drawn.top][1:] == [LEAST_LOGPROB] * 4
    (drawn,) = draw(logits, [row(allowed=torch.arange(W) == 7)])
    assert (drawn.token, drawn.logprob) == (7, LEAST_LOGPROB)


def test_top_logprobs_are_the_likeliest_in_order():
    (drawn,) = draw(LOGITS[None], [row(top_logprobs=4)])
    want = torch.log_softmax(LOGITS, -1).sort(descending=True)
    assert [token for token, _ in drawn.top] == want.indices[:4].tolist()
    assert [logprob for _, logprob in drawn.top] == pytest.approx(want.values[:4].tolist())


@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "stops, text, out, matched",
    [
        (["\n\n"], "one\ntwo\n\nthree", "one\ntwo", "\n\n"),
        (["abc", "bc"], "xxabc", "xx", "abc"),
        (["abcd", "bc"], "xabcd", "xa", "bc"),
        (["END"], "the EN the EN", "the EN the EN", None),
        ([], "anything", "anything", None),
        (["aab"], "aaab!", "a", "aab"),
    ],
)
def test_stop_strings(stops, text, out, matched, size):
    """However the text comes in pieces."""
    reader, given, found = StopStrings(stops), "", None
    for at in range(0, len(text), size):
        piece, found = reader.feed(text[at : at + size])
        given += piece
        if found:
            break
    given += reader.finish() if not found else ""
    assert (given, found) == (out, matched)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("early", range(12))
def test_a_stop_string_that_is_complete_too_early_is_text(early, size):
    """One that begins too early may still be completed: it ends the reply where its last character comes in time."""
    text, stops = "xabcabcdabcd!", ("bc", "abcd", "ca")
    reader, given, found, at = StopStrings(stops), "", None, 0
    while at < len(text) and not found:
        piece, found = reader.feed(text[at : at + size], counts=at + size > early)
        given, at = given + piece, at + size
    ends = [(place + len(stop), -len(stop), stop) for stop in stops for place in places(text, stop)]
    in_time = [end for end in ends if (end[0] - 1) // size * size + size > early]
    last, length, stop = min(in_time)
    assert (given, found) == (text[: last + length], stop)


def places(text, stop):
    return [at for at in range(len(text)) if text.startswith(stop, at)]


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(top_p=0), "top_p is 0"),
        (dict(temperature=-1), "temperature is -1"),
        (dict(temperature=math.nan), "temperature is nan"),
        (dict(max_tokens=0), "max_tokens is 0"),
        (dict(min_tokens=200), "min_tokens is 200; it must be from 0 to 128"),
        (dict(repetition_penalty=0), "repetition_penalty is 0"),
        (dict(repetition_penalty=1e-40), "repetition_penalty is 1e-40"),
        (dict(repetition_penalty=1e300), "repetition_penalty is 1e[+]300"),
        (dict(logit_bias={1: math.inf}), "logit_bias has the value inf; it must be from -1e[+]06 to 1e[+]06"),
        (dict(logit_bias={1: math.nan}), "logit_bias has the value nan"),
        (dict(logit_bias={1: 0.0, 2: -1e300}), "logit_bias has the value -1e[+]300"),
        (dict(logit_bias={1: 10**400}), "a value of logit_bias is a number of 1,329 bits"),
        (dict(temperature=10**400), "temperature is a number of 1,329 bits"),
        (dict(top_k=10**400), "top_k is 1000"),
        (dict(top_k=2**53 + 1), "top_k is 9007199254740993; it must be from 0 to"),
        (dict(stop=None), "stop is None; give a list"),
        (dict(ignore_eos="no"), "ignore_eos is 'no'; it must be True or False"),
        (dict(logprobs=5), "logprobs is 5"),
        (dict(expert_ids=None), "expert_ids is None"),
        (dict(grammar_prefix="{"), "grammar_prefix is '{', but there is no grammar"),
        (dict(stop="END"), "stop is 'END'; give a list"),
        (dict(min_tokens=1, grammar=Grammar("")), "min_tokens is 1, but a grammar"),
        (dict(top_logprobs=21), "top_logprobs is 21"),
        (dict(stop=("",)), "empty string"),
        (dict(stop=(5,)), "give a list of texts"),
        (dict(stop_ids=5), "stop_ids is 5; give a list"),
        (dict(stop_ids=(1.5,)), "an id of stop_ids is 1.5; it must be a whole number"),
        (dict(logit_bias={1.5: 1}), "an id of logit_bias is 1.5"),
        (dict(logit_bias={"5": 1}), "an id of logit_bias is '5'"),
        (dict(logit_bias={5: "1"}), "a value of logit_bias is '1'; it must be a number"),
        (dict(logit_bias=[1]), "give a number for each"),
        (dict(max_tokens=1.5), "max_tokens is 1.5; it must be a whole number"),
        (dict(top_k="3"), "top_k is '3'"),
        (dict(temperature=None), "temperature is None; it must be a number"),
        (dict(n=0), "n is 0"),
        (dict(seed=-1), "seed is -1"),
    ],
)
def test_parameters_that_cannot_be_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**wrong)


def test_numbers_of_any_kind_become_plain_ones():
    """What is a number to Python but none to a tensor would be a fault of the step that draws."""
    third, logits = Fraction(1, 3), torch.randn(1, 20, generator=torch.Generator().manual_seed(0))
    odd: dict[str, Any] = dict(
        temperature=third,
        top_p=Fraction(9, 10),
        min_p=np.float32(0.01),
        top_k=np.int64(9),
        presence_penalty=third,
        frequency_penalty=True,
        repetition_penalty=Fraction(3, 2),
        logit_bias={np.int64(3): third, True: 1},
        top_logprobs=True,
        seed=np.int64(4),
        stop_ids=np.array([5]),
    )
    plain: dict[str, Any] = {
        **{name: float(value) for name, value in odd.items() if name.endswith(("penalty", "_p", "temperature"))},
        **dict(top_k=9, logit_bias={3: 1 / 3, 1: 1.0}, top_logprobs=1, seed=4, stop_ids=(5,)),
    }
    params = SamplingParams(**odd)
    assert params == SamplingParams(**plain)
    assert draw(logits, [Row(params, 4, written=(1, 2), prompt=(3,))]) == draw(
        logits, [Row(SamplingParams(**plain), 4, written=(1, 2), prompt=(3,))]
    )
    draw(logits, [Row(SamplingParams(top_k=2**53), 4)])
