"""The engine under grammars: several in one batch, and the vocabulary that they are compiled against."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from rille.serve import engine as engine_module
from rille.serve.audit import audit_scheduler
from rille.serve.engine import Engine
from rille.serve.grammar import Vocabulary
from rille.serve.schema import Request, SamplingParams
from rille.serve.speculation import Draft
from rille.text.grammar import continuations
from rille.text.parser import parse
from tests.serve.lively import FORM, lively_model, lively_tokenizer

model = pytest.fixture(lively_model, scope="module")
tokenizer = pytest.fixture(lively_tokenizer, scope="module")


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_two_grammars_in_one_batch(model, tokenizer, drafter):
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"n": {"enum": [1, 2]}}}}}
    grammars = [
        continuations("response", response_format=FORM),
        continuations("response", [tool], tool_choice="required"),
    ]
    served = Engine(model, tokenizer=tokenizer, num_pages=120, hash_unit=64, drafter=drafter, adaptive_drafts=False)
    close = {tokenizer.specials["<|close|>"]: 30.0, **dict.fromkeys(tokenizer.encode(" \n\t0123456789"), -30.0)}
    params = [SamplingParams(max_tokens=400, seed=n, grammar=g, logit_bias=close) for n, g in enumerate(grammars)]
    [[form], [called], [free]] = served.generate([[1, 2]] * 3, [*params, SamplingParams(max_tokens=30, seed=3)])
    assert form.reason == called.reason == "stop" and free.reason in ("length", "stop")
    assert set(json.loads(parse(form.tokens, tokenizer, start="response").content)) == {"ok"}
    calls = parse(called.tokens, tokenizer, start="response").calls
    assert calls and {call.name for call in calls} == {"look"}
    with pytest.raises(ValueError, match="not 'no'"):
        served.generate([[1]], SamplingParams(grammar=grammars[0], grammar_prefix="no"))


def test_the_vocabulary_is_read_once_however_many_ask_first(model, tokenizer, monkeypatch):
    """It takes seconds where the vocabulary is large, in which nobody else gets a token."""
    made = []

    def slowly(*given):
        time.sleep(0.05)
        made.append(Vocabulary(*given))
        return made[-1]

    monkeypatch.setattr(engine_module, "Vocabulary", slowly)
    served = Engine(model, tokenizer=tokenizer, num_pages=20, hash_unit=64)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: served.vocabulary, range(8))) == {made[0]}
    assert len(made) == 1


def forks(count, behind='"x" asked'):
    """Behind an x a form whose every brace opens as many ways to go on as it has alternatives, each with its
    properties."""
    ways = [{"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(n)}} for n in range(1, count)]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"anyOf": ways}}}
    grammar = continuations("response", response_format=form)
    return replace(grammar, lark=grammar.lark.replace("answer: asked", f"answer: {behind}"))


class Guesses:
    """The tokens of a text, whatever was written."""

    reads_hidden = False

    def __init__(self, ids):
        self.ids = ids

    def propose(self, sequence, limit):
        return Draft(tuple(self.ids[sequence.num_written :][:limit]))

    def observe(self, sequence, start, hidden_ND, following):
        pass

    def forget(self, sequence):
        pass


@pytest.mark.parametrize("is_guessed", [False, True])
def test_a_grammar_that_its_compiler_gives_up_ends_its_request_alone(model, tokenizer, is_guessed, capfd):
    """At the first brace, though it was let through: those beside it, and those who come later, go on."""
    drafter = Guesses(tokenizer.encode('x{"k0":"and so on"')) if is_guessed else None
    served = Engine(model, tokenizer=tokenizer, num_pages=60, hash_unit=64, drafter=drafter, adaptive_drafts=False)
    free = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    [[want]] = served.generate([[1, 2]], free)
    few, many = (SamplingParams(max_tokens=30, seed=1, grammar=forks(count)) for count in (5, 60))
    [[written], [given_up], [beside]] = served.generate([[1, 2]] * 3, [few, many, free])
    assert written.reason in ("stop", "length") and written.tokens
    assert given_up.reason == "error" and given_up.usage.completion_tokens == len(given_up.tokens) == 1
    assert "cannot be followed any further" in given_up.error and len(given_up.error) < 300
    *_, end = served.submit(Request(prompt=[1, 2], params=many))
    assert end.error == given_up.error and end.is_refused
    assert beside.tokens == served.generate([[1, 2]], free)[0][0].tokens == want.tokens
    audit_scheduler(served.scheduler)
    assert served.scheduler.cache.available == 60 and not served._handles


def test_a_guess_at_which_the_compiler_gives_up_changes_nothing(model, tokenizer, capfd):
    """A reply that goes another way than its guesses is written to its end."""
    [brace], results = tokenizer.encode("{"), []
    either = forks(60, behind='"x" (asked | "ab")')
    params = SamplingParams(max_tokens=40, seed=2, grammar=either, logit_bias={brace: -1e6})
    for drafter in (None, Guesses([brace] * 40)):
        served = Engine(model, tokenizer=tokenizer, num_pages=60, hash_unit=64, drafter=drafter, adaptive_drafts=False)
        [[one]] = served.generate([[1, 2]], params)
        results.append((one.tokens, one.reason, one.error))
    assert results[0] == results[1] and results[0][1] == "stop"
