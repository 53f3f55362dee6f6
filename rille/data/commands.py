"""`rille data VERB ...`: the verbs of the data pipeline, one function each. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from tyro.conf import Positional, arg

from rille.data.build_config import BuildConfig
from rille.data.command_config import RephraseConfig, SynthesiseConfig, TrainFilterConfig


def overview() -> str:
    verbs = "\n".join(f"  {name:<14}{line}" for name, (_, _, line) in VERBS.items())
    return f"""From raw text to a set that `rille train` reads.

usage: rille data VERB ...        `rille data VERB --help` explains one

{verbs}

a first set, and a run on it
  rille data build notes=notes/ code=src.jsonl.xz --code code --out sets/first
  rille data report sets/first
  rille train tiny --data sets/first --data.vocab-size 32768 --model.vocab-size 32768 --out runs/first

with filters that are trained on your own examples
  rille data train-filter en=english.jsonl zh=chinese.jsonl --features bytes --out filters/language.npz
  rille data train-filter good=picked.jsonl rest=crawl.jsonl --out filters/quality.npz
  rille data build web=crawl/ --language.path filters/language.npz --language.labels en \\
      --quality.path filters/quality.npz --quality.labels good --out sets/web

more text from text
  rille data rephrase facts.jsonl --endpoint http://localhost:8000/v1 --model NAME --out rephrased.jsonl
  rille data synthesise books/ --document-bytes 400000 --count 200 --out long.jsonl"""


class Bars:
    """Progress bars on standard error, one a step; what a step took stays on the screen."""

    @contextmanager
    def step(self, name: str, total: float | None) -> Iterator[Callable[[float], None]]:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task(name, total=total)
            yield lambda done: progress.advance(task, done)
            if total is not None:
                progress.update(task, completed=total)


def build(config: BuildConfig) -> None:
    """`rille data build NAME=PATH ... --out DIR`"""
    from rille.data.build import build_dataset
    from rille.data.dataset import Dataset
    from rille.data.report import print_report, read_report

    out = build_dataset(config, steps=Bars())
    print_report(read_report(out), Console())
    size = Dataset(out).manifest["vocab_size"]
    print(f"\n{out} is ready: rille train RECIPE --data {out} --data.vocab-size {size} --model.vocab-size {size}")
    print(f"the page is {out / 'report.html'}")


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show what became of the text of a set, and write its page anew."""

    directory: Annotated[Positional[str], arg(metavar="DIR")]
    """A folder that `rille data build` made."""

    check: bool = False
    """Read every shard and compare it with the digest that was taken when it was written."""


def report(config: ReportConfig) -> None:
    """`rille data report DIR`"""
    from rille.data.report import print_report, read_report, write_report

    facts = read_report(config.directory)
    if config.check:
        from rille.data.shards import check_shards

        with Bars().step("checking", None):
            count = check_shards(Path(config.directory))
        print(f"{count:,} shards are as they were written")
    write_report(Path(config.directory), facts)
    print_report(facts, Console())


def train_filter(config: TrainFilterConfig) -> None:
    """`rille data train-filter LABEL=PATH ... --out FILE`"""
    from rille.data.filter_training import train_filter

    result = train_filter(config, Bars())
    console = Console()
    console.print(result.table())
    for reason, count in sorted(result.left_out.items()):
        print(f"left out: {count:,} {reason}")
    print(f"{config.out}: {result.accuracy:.1%} of {result.tested:,} texts that it was not trained on are told right")


def rephrase(config: RephraseConfig) -> None:
    """`rille data rephrase PATH --endpoint URL --model NAME --out FILE`"""
    from rille.data.rephrase import rephrase

    Console().print(rephrase(config, Bars()).table())


def synthesise(config: SynthesiseConfig) -> None:
    """`rille data synthesise PATH --out FILE`"""
    from rille.data.synthesis import synthesise

    print(synthesise(config, Bars()))


VERBS: dict[str, tuple[type, Callable, str]] = {
    "build": (BuildConfig, build, "clean, filter, deduplicate, encode: sources to a training set"),
    "report": (ReportConfig, report, "what became of the text of a set: tables and a page"),
    "train-filter": (TrainFilterConfig, train_filter, "a classifier of languages or of quality, from examples"),
    "rephrase": (RephraseConfig, rephrase, "texts written anew by a model, in styles, checked against the original"),
    "synthesise": (SynthesiseConfig, synthesise, "long documents with questions that need several of their parts"),
}
