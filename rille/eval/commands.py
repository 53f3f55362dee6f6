"""`rille eval VERB ...`: one verb an evaluation. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from rille.eval.config import HarnessConfig, HeldOutConfig, LearnConfig, LengthConfig, NeedleConfig, RecallConfig
from rille.interrupts import loading


def overview() -> str:
    verbs = "\n".join(f"  {name:<10}{line}" for name, (_, _, line) in VERBS.items())
    return f"""Measure what a checkpoint can do: a table, and with --out the numbers as JSON and a picture.

usage: rille eval VERB ...        `rille eval VERB --help` explains one

{verbs}

examples
  rille eval held-out runs/first
  rille eval held-out runs/first --sources notes=notes/ code=src/ --out evals/first
  rille eval length runs/first --length 1024
  rille eval needle runs/first --lengths 512 1024
  rille eval recall runs/first --tasks mqar
  rille eval learn mqar --length 32
  rille eval harness runs/first --tasks arc_easy --limit 100"""


def held_out(config: HeldOutConfig) -> None:
    with loading():
        from rille.eval.held_out import held_out
    held_out(config)


def length(config: LengthConfig) -> None:
    with loading():
        from rille.eval.length import length
    length(config)


def needle(config: NeedleConfig) -> None:
    with loading():
        from rille.eval.needle import needle
    needle(config)


def recall(config: RecallConfig) -> None:
    with loading():
        from rille.eval.recall import recall
    recall(config)


def learn(config: LearnConfig) -> None:
    with loading():
        from rille.eval.learn import learn
    learn(config)


def harness(config: HarnessConfig) -> None:
    if find_spec("lm_eval") is None:
        raise ValueError(
            "rille eval harness needs lm-evaluation-harness, not installed here: pip install 'rille[eval]'"
        )
    with loading():
        from rille.eval.harness import harness
    harness(config)


VERBS: dict[str, tuple[type, Callable, str]] = {
    "held-out": (HeldOutConfig, held_out, "bits per byte of unseen text, by source"),
    "length": (LengthConfig, length, "loss by position, beyond the trained length too"),
    "needle": (NeedleConfig, needle, "one sentence found in a long text, by depth and length"),
    "recall": (RecallConfig, recall, "palindromes, key-value pairs, stacks, on a checkpoint's token ids"),
    "learn": (LearnConfig, learn, "train a small model on one of these tasks"),
    "harness": (HarnessConfig, harness, "multiple choice and exact match of lm-evaluation-harness"),
}
