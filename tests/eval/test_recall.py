"""Recall of a model: one that knows the answers has all of them right; a small one learns a task from scratch."""

import json

import numpy as np
import pytest
import torch

from rille.eval.config import LearnConfig, RecallConfig
from rille.eval.learn import learn
from rille.eval.recall import as_ids, recall, score
from rille.eval.recall_tasks import recall_task


class Knowing:
    """Its first choice in each row is the id after it, plus `wrong`."""

    device = torch.device("cpu")

    def __init__(self, wrong: int = 0):
        self.wrong = wrong

    def logits(self, tokens, *, packing, rows):
        assert packing.num_tokens == len(tokens)
        next_R = (tokens[rows + 1] + self.wrong) % 40
        return 10.0 * torch.nn.functional.one_hot(next_R, 40)


@pytest.mark.parametrize("name", ["palindrome", "mqar", "stack"])
def test_score_looks_where_answers_are(name):
    draw = np.random.default_rng(0)
    examples = [recall_task(name, 32, 4).make(24, draw) for _ in range(5)]
    asked = sum(int(example.asked.sum()) for example in examples)
    known, wrong = score(Knowing(), examples), score(Knowing(1), examples)  # pyright: ignore[reportArgumentType]
    assert (known.right, known.asked) == (asked, asked)
    assert (wrong.right, wrong.asked) == (0, asked)
    assert known.nats < 0.01 * asked < wrong.nats


def test_ids_are_ordinary_and_one_to_one(opened):
    draw = np.random.default_rng(0)
    example = recall_task("mqar", 200).make(64, draw)
    told = as_ids(opened, example, 200, draw)
    specials = set(opened.tokenizer.specials.values())
    assert told.symbols[0] == opened.tokenizer.eos_id
    assert not specials & set(told.symbols[1:].tolist())
    assert len(set(zip(example.symbols, told.symbols[1:], strict=True))) == len(set(told.symbols[1:]))
    assert told.asked.tolist() == [False, *example.asked]


def test_a_checkpoint(run, tmp_path):
    config = RecallConfig(checkpoint=str(run), lengths=(32, 64), samples=2, symbols=128, out=str(tmp_path))
    rows = recall(config)
    assert [(row["task"], row["length"]) for row in rows] == [
        (task, length) for task in ("palindrome", "mqar", "stack") for length in (32, 64)
    ]
    assert all(0 <= row["right"] <= 1 and row["answers"] > 0 for row in rows)
    assert json.loads((tmp_path / "recall.json").read_text())["rows"] == rows
    with pytest.raises(ValueError, match="symbols is 5,000, but the vocabulary has"):
        recall(RecallConfig(checkpoint=str(run), symbols=5000, tasks=("palindrome",)))


def test_a_small_model_learns(tmp_path, capsys):
    sizes = {"symbols": 12, "length": 12, "lengths": (12,), "head_dim": 16, "lr": 1e-2, "eval_every": 10}
    [row] = learn(LearnConfig(task="mqar", **sizes, steps=200, enough=0.9, out=str(tmp_path)))
    assert row["right"] >= 0.85
    assert "90% of unseen examples of length 12: after" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "learn-mqar-kda.json").read_text())["course"][-1][1] >= 0.9


@pytest.mark.parametrize("mixer", ["kda", "mla", "hybrid"])
@pytest.mark.parametrize("task", ["palindrome", "stack"])
def test_one_step_teaches_nothing(task, mixer, capsys):
    sizes = {"symbols": 40, "length": 30, "lengths": (30, 60), "head_dim": 8, "steps": 1}
    rows = learn(LearnConfig(task=task, mixer=mixer, **sizes))
    assert all(row["right"] < 0.2 for row in rows)
    assert "not within 1 updates" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("task", ["palindrome", "mqar", "stack"])
def test_the_defaults_fit_every_task(task):
    config = LearnConfig(task=task)
    for length in (config.length, *config.lengths):
        assert recall_task(task, config.symbols, config.stacks).make(length, np.random.default_rng(0)).asked.any()


def test_mistakes():
    with pytest.raises(ValueError, match="has 16 pairs, of 4 keys"):
        learn(LearnConfig(task="mqar", symbols=8))
    with pytest.raises(ValueError, match="enough is 2"):
        LearnConfig(task="mqar", enough=2.0)
