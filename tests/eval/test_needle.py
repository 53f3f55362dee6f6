"""Needles: the sentence is where it should be, and a model that looks for it is told from one that does not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from rille.eval.config import NeedleConfig
from rille.eval.needle import answered, example, haystack, needle
from rille.serve.generate import generate


@pytest.fixture(scope="module")
def hay(run, opened) -> np.ndarray:
    return haystack(opened, NeedleConfig(checkpoint=str(run), haystack=str(run.parent / "text"), lengths=(300,)))


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_one_needle_at_its_depth(opened, hay, depth):
    hidden, without, answer = example(opened, hay, 300, depth, seed=3)
    assert len(hidden) == len(without) == 300
    text, number = opened.tokenizer.decode(hidden[1:]), opened.tokenizer.decode(answer).strip()
    assert text.count(number) == 1
    assert number not in opened.tokenizer.decode(without[1:])
    assert text.index("The secret number") / text.rindex("\nThe secret number") == pytest.approx(depth, abs=0.2)
    assert text.rstrip().endswith(" is")
    assert (hidden[0], without[0]) == (opened.tokenizer.eos_id, opened.tokenizer.eos_id)


def test_found_means_what_greedy_writing_gives(opened, hay):
    hidden, _, answer = example(opened, hay, 200, 0.5, seed=0)
    written = generate(opened.model, torch.from_numpy(hidden), len(answer)).numpy()
    assert answered(opened, hidden, answer)[0] == (written == answer).all()
    assert answered(opened, hidden, written)[0]
    written[-1] = (written[-1] + 1) % 256
    assert not answered(opened, hidden, written)[0]


class Looking:
    """Gives the next id if it occurred before the question, by reading it off the end of what it is asked."""

    def __init__(self, hidden: np.ndarray, answer: np.ndarray):
        self.answer, self.size = torch.from_numpy(answer), len(hidden)

    def logits(self, ids, rows):
        seen = (ids[: self.size].unfold(0, len(self.answer), 1) == self.answer).all(1).any()
        return 9.0 * seen * torch.nn.functional.one_hot(self.answer, 320)


def test_a_model_that_looks_gains(opened, hay):
    hidden, without, answer = example(opened, hay, 200, 0.5, seed=0)
    looking = replace(opened, model=Looking(hidden, answer))
    assert answered(looking, hidden, answer)[0]
    right, nats = answered(looking, without, answer)
    assert not right
    assert nats > answered(looking, hidden, answer)[1] + 4


def test_a_run(run, tmp_path):
    text = str(run.parent / "text")
    config = NeedleConfig(checkpoint=str(run), lengths=(100, 150), depths=(0.0, 1.0), samples=1, haystack=text)
    rows = needle(replace(config, out=str(tmp_path)))
    assert [(row["tokens"], row["depth"]) for row in rows] == [(100, 0.0), (100, 1.0), (150, 0.0), (150, 1.0)]
    assert (tmp_path / "needle.png").exists()
    with pytest.raises(ValueError, match="5 tokens are too few for needle and question; give at least"):
        needle(replace(config, lengths=(5,)))
    with pytest.raises(ValueError, match=r"depths are \(1\.5,\)"):
        replace(config, depths=(1.5,))
