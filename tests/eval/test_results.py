"""docs/results.md says what its studies found: every mean and difference of docs/studies/*.json stands in its table."""

import json
import re
from pathlib import Path

import pytest

from rille.eval.intervals import Interval
from rille.recipes.study import STUDIES

TOP = Path(__file__).resolve().parent.parent.parent
PAGE = (TOP / "docs" / "results.md").read_text(encoding="utf-8")
FILES = sorted((TOP / "docs" / "studies").glob("*.json"))


def one_space(text: str) -> str:
    return re.sub(r" +", " ", text)


def as_row(row: dict, first: str) -> str:
    """A line of the page's table."""
    difference = None if row["difference"] is None else Interval(**row["difference"])
    mark = "" if difference is None or difference.side == "not told apart" else " *"
    by_seed = " | ".join(f"{value:.4g}" for value in row["by_seed"].values())
    name = row["reading"] if row["variant"] == first else ""
    minus = "" if difference is None else f"{difference}{mark}"
    return one_space(f"| {name} | {row['variant']} | {by_seed} | {Interval(**row['mean'])} | {minus} |")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_page_says_what_was_found(file):
    facts = json.loads(file.read_text(encoding="utf-8"))
    study = STUDIES[facts["study"]]()
    lines = one_space(PAGE).splitlines()
    first = facts["comparison"][0]["variant"]
    assert [row["reading"] for row in facts["comparison"]] == [r.name for r in study.readings for _ in study.variants]
    assert not [row for row in facts["comparison"] if as_row(row, first) not in lines]
    steps = "" if facts["steps"] == study.config.steps else f" --steps {facts['steps']}"
    every = facts["settings"]["eval_every"]
    every = "" if every == study.config.eval_every else f" --eval-every {every}"
    assert f"\nrille study {study.name}{steps}{every}\n" in PAGE, "the command that makes the same runs"
    assert f"{facts['seconds_of_steps']:.0f} s of" in PAGE
    assert file.with_suffix(".png").exists()


def test_there_are_studies():
    assert FILES
