"""Question suites: likelihoods by hand, writing that stops, and the harness's requests through a stand-in for it."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from rille.eval.answers import encode_pair, likelihoods, whole_text, write
from rille.eval.config import HarnessConfig
from rille.serve.generate import generate

PAIRS = [("def square_3(x):", "\n    return x * 3"), ("def ", "square"), ("", "return"), ("x ", "* 4\n\n")]


def by_hand(opened, context: str, continuation: str) -> float:
    whole = opened.tokenizer.encode(context + continuation)
    size = len(whole) - len(opened.tokenizer.encode(context.rstrip()))
    ids = torch.tensor([opened.tokenizer.eos_id, *whole])
    log_probs = torch.log_softmax(opened.model.logits(ids[:-1]), -1).gather(1, ids[1:, None]).squeeze(1)
    return log_probs[-size:].sum().item()


@pytest.mark.parametrize("batch_tokens", [1, 1000])
def test_likelihoods(opened, batch_tokens):
    done = []
    found = likelihoods(opened, PAIRS, batch_tokens, done.append)
    for (value, _), pair in zip(found, PAIRS, strict=True):
        assert value == pytest.approx(by_hand(opened, *pair), abs=1e-3)
    assert sum(done) == len(PAIRS)


def test_greedy_is_what_the_model_would_write(opened):
    """Ids that come back from their text as they were."""
    context = "def square_3(x):"
    line, _ = encode_pair(opened, context, " ")
    prompt = torch.from_numpy(line[:-1])
    written = opened.tokenizer.decode(generate(opened.model, prompt, 3))
    again = encode_pair(opened, context, written)
    assert again[0].tolist()[: len(prompt)] == prompt.tolist(), "the prompt's ids moved"
    assert likelihoods(opened, [(context, written), (context, "zq")], 100, lambda done: None)[0][1]
    assert not likelihoods(opened, [(context, "zq")], 100, lambda done: None)[0][1]


def test_spaces_belong_to_the_continuation(opened):
    assert [part if isinstance(part, int) else part.tolist() for part in encode_pair(opened, "x ", "* 4")] == [
        part if isinstance(part, int) else part.tolist() for part in encode_pair(opened, "x", " * 4")
    ]
    with pytest.raises(ValueError, match="has no token of its own"):
        encode_pair(opened, "x", "")


def test_whole_text(opened):
    text = "def square_3(x):\n    return x"
    assert whole_text(opened, text, 8) == pytest.approx(by_hand(opened, "", text), abs=1e-3)


def test_writing_stops(opened):
    free = write(opened, "def", {}, 12)
    assert free
    stop = free[len(free) // 2]
    assert write(opened, "def", {"until": [stop, "never"]}, 12) == free[: free.index(stop)]
    assert write(opened, "def", {"until": stop, "max_gen_toks": 1}, 12) in free
    drawn = {"do_sample": True, "temperature": 2.0}
    assert write(opened, "def", drawn, 8) == write(opened, "def", drawn, 8)
    with pytest.raises(ValueError, match="asks for beams in writing"):
        write(opened, "def", {"beams": 3}, 8)


def stand_in(asked: dict) -> dict[str, ModuleType]:
    """The parts of the library that are used, under its names."""

    class LM:
        pass

    class TaskManager:
        all_tasks = ("toy",)

        def __init__(self, include_path=None):
            asked["include"] = include_path

    def simple_evaluate(model, tasks, num_fewshot, limit, task_manager, log_samples):
        assert isinstance(model, LM)
        assert isinstance(task_manager, TaskManager)
        asked.update(tasks=tasks, shots=num_fewshot, limit=limit)
        request = lambda *args: SimpleNamespace(args=args)  # noqa: E731
        asked["likelihoods"] = model.loglikelihood([request(*pair) for pair in PAIRS])
        asked["rolling"] = model.loglikelihood_rolling([request("return x")])
        asked["written"] = model.generate_until([request("def", {"until": ["\n\n"], "do_sample": False})])
        return {"results": {"toy": {"alias": "toy", "acc,none": 0.25, "acc_stderr,none": 0.1, "em,strict": 0.5}}}

    modules = {name: ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.tasks")}
    vars(modules["lm_eval"])["simple_evaluate"] = simple_evaluate
    vars(modules["lm_eval.api.model"])["LM"] = LM
    vars(modules["lm_eval.tasks"])["TaskManager"] = TaskManager
    return modules


def test_the_harness_is_answered(run, opened, tmp_path, monkeypatch, capsys):
    asked: dict = {}
    for name, module in stand_in(asked).items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "rille.eval.harness", raising=False)
    harness = importlib.import_module("rille.eval.harness")
    rows = harness.harness(HarnessConfig(checkpoint=str(run), tasks=("toy",), shots=2, limit=3, out=str(tmp_path)))
    monkeypatch.delitem(sys.modules, "rille.eval.harness")
    assert (asked["tasks"], asked["shots"], asked["limit"]) == (["toy"], 2, 3)
    values = [value for value, _ in asked["likelihoods"]]
    np.testing.assert_allclose(values, [by_hand(opened, *pair) for pair in PAIRS], atol=1e-3)
    assert asked["rolling"] == [pytest.approx(by_hand(opened, "", "return x"), abs=1e-3)]
    assert asked["written"] == [write(opened, "def", {"until": ["\n\n"]}, 256)]
    assert rows == [
        {"task": "toy", "measure": "acc", "value": 0.25, "standard error": 0.1},
        {"task": "toy", "measure": "em, strict", "value": 0.5, "standard error": None},
    ]
    assert "toy" in capsys.readouterr().out
    with pytest.raises(ValueError, match="include is nowhere, which is no folder"):
        harness.harness(HarnessConfig(checkpoint=str(run), tasks=("toy",), include="nowhere"))
    with pytest.raises(ValueError, match="the harness knows no task tow"):
        harness.harness(HarnessConfig(checkpoint=str(run), tasks=("tow",)))
