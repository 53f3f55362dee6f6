"""The engine under grammars: several in one batch, and the vocabulary that they are compiled against."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rille.serve import engine as engine_module
from rille.serve.engine import Engine
from rille.serve.grammar import Vocabulary
from rille.serve.schema import SamplingParams
from rille.text.grammar import continuations
from rille.text.parser import parse
from tests.serve.lively import FORM, lively_model, lively_tokenizer


@pytest.fixture(scope="module")
def model():
    return lively_model()


@pytest.fixture(scope="module")
def tokenizer():
    return lively_tokenizer()


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
