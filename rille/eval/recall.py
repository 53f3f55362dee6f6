"""Synthetic recall in context: how much of what is asked for (`recall_tasks.py`) is a model's first choice.

A checkpoint sees the tasks as ids of its own vocabulary, drawn at random for each example, after whatever its documents
begin with. It was not trained on them: what it can do it learned from text (copying, looking up), and the stack's
commands mean nothing to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rille.eval.config import RecallConfig
from rille.eval.opened import Opened, open_checkpoint
from rille.eval.recall_tasks import Example, RecallTask, recall_task
from rille.eval.result import Result, bar, show
from rille.model.model import K3
from rille.packing import Packing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STACKS = 64


def recall(config: RecallConfig) -> list[dict]:
    """Measure, show, and give the rows: one for each task and length.

    Raises ValueError where the vocabulary has fewer ordinary ids than symbols, or a length does not fit a task.
    """
    opened = open_checkpoint(config)
    rows = []
    with bar("recall", len(config.tasks) * len(config.lengths) * config.samples) as tell:
        for name in config.tasks:
            task = recall_task(name, config.symbols, STACKS)
            for length in config.lengths:
                draw = np.random.default_rng((config.seed, length))
                scores = []
                for _ in range(config.samples):
                    scores.append(score(opened.model, [as_ids(opened, task.make(length, draw), config.symbols, draw)]))
                    tell(1)
                rows.append(row(task, length, scores))
    remark = "right: the first choice of the whole vocabulary; chance: guessing among what an answer may be"
    draw = [lambda axes: lines(axes, rows)]
    show(Result("recall", f"Recall in context, {opened.place}", config, rows, draw, (remark,)), config.out)
    return rows


def as_ids(opened: Opened, example: Example, symbols: int, draw: np.random.Generator) -> Example:
    """The example in ids of the vocabulary, none of them special, after what documents begin with."""
    ordinary = np.setdiff1d(np.arange(opened.tokenizer.vocab_size), list(opened.tokenizer.specials.values()))
    if symbols > len(ordinary):
        raise ValueError(f"symbols is {symbols:,}, but the vocabulary has {len(ordinary):,} ordinary tokens")
    ids = draw.permutation(ordinary)[:symbols][example.symbols]
    begin = opened.line([])
    return Example(np.concatenate([begin, ids]), np.concatenate([np.zeros(len(begin), dtype=bool), example.asked]))


@dataclass(frozen=True)
class Score:
    """right of asked answers; nats: the sum of their -log p."""

    right: int
    asked: int
    nats: float


@torch.inference_mode()
def score(model: K3, examples: Sequence[Example]) -> Score:
    """What a model makes of examples, all in one batch."""
    tokens, rows, wanted = packed(examples)
    packing = Packing.of([len(example.symbols) for example in examples], device=model.device)
    logits_RW = model.logits(tokens, packing=packing, rows=rows.to(model.device)).cpu()
    nats = -torch.log_softmax(logits_RW, -1).gather(1, wanted[:, None])
    return Score(int((logits_RW.argmax(-1) == wanted).sum()), len(wanted), float(nats.sum()))


def packed(examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """(ids of all examples end to end, rows whose next id is asked for, those ids), int64 each."""
    tokens = np.concatenate([example.symbols for example in examples]).astype(np.int64)
    asked = np.flatnonzero(np.concatenate([example.asked for example in examples]))
    return torch.from_numpy(tokens), torch.from_numpy(asked - 1), torch.from_numpy(tokens[asked])


def row(task: RecallTask, length: int, scores: Sequence[Score]) -> dict:
    asked = sum(score.asked for score in scores)
    return {
        "task": task.name,
        "length": length,
        "answers": asked,
        "right": sum(score.right for score in scores) / asked,
        "chance": 1 / task.choices,
        "nats an answer": sum(score.nats for score in scores) / asked,
    }


def lines(axes: Axes, rows: Sequence[dict]) -> None:
    """Share of right answers by length, a line a task."""
    for name in dict.fromkeys(row["task"] for row in rows):
        some = [row for row in rows if row["task"] == name]
        axes.plot([row["length"] for row in some], [row["right"] for row in some], marker="o", ms=4, label=name)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xscale("log", base=2)
    axes.set_xlabel("length", fontsize=8)
    axes.set_ylabel("right", fontsize=8)
    axes.legend(fontsize=8, frameon=False)
