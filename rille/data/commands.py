"""`rille data VERB ...`: the verbs of the data pipeline, one function each. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from tyro.conf import Positional, arg

from rille.data.build_config import BuildConfig


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
    from rille.data.report import print_report, read_report

    out = build_dataset(config, steps=Bars())
    print_report(read_report(out), Console())
    print(f"\n{out} is ready: rille train RECIPE --data {out}; the page is {out / 'report.html'}")


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


@dataclass(frozen=True, kw_only=True)
class TrainFilterConfig:
    """Train a small classifier of texts on examples, for `build` to filter by."""

    examples: Annotated[Positional[tuple[str, ...]], arg(metavar="LABEL=PATH ...")]
    """Sources of texts by label; a label may have several."""

    out: str
    """The .npz file to write."""

    features: Literal["words", "bytes"] = "words"
    """words: one and two (quality, topic); bytes: runs of up to four (languages)."""

    field: str = "text"
    """The field of a JSON record, or the column of a table, that holds the text."""

    most: int = 20_000
    """Read at most so many texts a label."""

    buckets: int = 1 << 18
    """Rows of the table that n-grams are hashed into."""

    span: int = 4_096
    """Bytes of a text that are looked at."""

    epochs: int = 5
    """Passes over the examples."""

    seed: int = 0
    """Of the order of the examples."""

    def __post_init__(self):
        for name in ("most", "buckets", "span", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        wrong = [example for example in self.examples if not all(example.partition("="))]
        if wrong or not self.examples:
            raise ValueError(f"write examples as LABEL=PATH, not {', '.join(wrong) or 'none at all'}")


def train_filter(config: TrainFilterConfig) -> None:
    """`rille data train-filter LABEL=PATH ... --out FILE`"""
    from rille.data.filter_training import train_filter

    result = train_filter(config, Bars())
    console = Console()
    console.print(result.table())
    print(f"{config.out}: {result.accuracy:.1%} of {result.tested:,} texts that it was not trained on are told right")


@dataclass(frozen=True, kw_only=True)
class RephraseConfig:
    """Have a model write texts anew, chunk by chunk, in several styles; keep what stays true to the original.

    The endpoint speaks the OpenAI protocol (chat completions). A run that was stopped goes on when it is given again.
    """

    source: Annotated[Positional[str], arg(metavar="PATH")]
    """Texts: a file, a folder, .jsonl[.gz|.xz|.zst], .parquet or hf:DATASET[:SPLIT]."""

    out: str
    """The .jsonl file to write: text, source, style, fidelity of each."""

    endpoint: str
    """Base address, such as http://localhost:8000/v1."""

    model: str
    """The name that the endpoint knows the model by."""

    styles: tuple[str, ...] = ("textbook", "dialogue")
    """Styles, each giving one rephrasing of a document; `rille.data.styles` lists them."""

    field: str = "text"
    """The field of a JSON record, or the column of a table, that holds the text."""

    most: int | None = None
    """Take at most so many documents."""

    chunk_bytes: int = 2_000
    """Size of the pieces that are rewritten one after the other, cut between paragraphs or sentences."""

    context_bytes: int = 2_000
    """So much of what was written last is shown with the next piece."""

    judge: bool = True
    """Ask the model too whether a rewritten piece says what the original says."""

    attempts: int = 3
    """Tries for a piece before the document is given up."""

    temperature: float = 0.8
    """Of the rewriting; judging is at 0."""

    parallel: int = 8
    """Documents under way at once."""

    timeout: float = 120.0
    """Seconds for one answer."""

    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key, where the endpoint wants one."""

    def __post_init__(self):
        for name in ("chunk_bytes", "attempts", "parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.context_bytes < 0 or self.timeout <= 0 or self.temperature < 0:
            raise ValueError(
                f"context_bytes {self.context_bytes}, timeout {self.timeout} and temperature {self.temperature} must "
                "not be negative, and timeout not 0"
            )
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.endpoint!r} is no address; write http://HOST:PORT/v1")


def rephrase(config: RephraseConfig) -> None:
    """`rille data rephrase PATH --endpoint URL --model NAME --out FILE`"""
    from rille.data.rephrase import rephrase

    Console().print(rephrase(config, Bars()).table())


@dataclass(frozen=True, kw_only=True)
class SynthesiseConfig:
    """Make long documents: others in a new order, with questions whose answers need several of them."""

    source: Annotated[Positional[str], arg(metavar="PATH")]
    """Texts: a file, a folder, .jsonl[.gz|.xz|.zst], .parquet or hf:DATASET[:SPLIT]."""

    out: str
    """The .jsonl file to write."""

    count: int = 100
    """Long documents to make."""

    document_bytes: int = 400_000
    """Size of each, about."""

    questions: int = 8
    """Questions at the end of each."""

    needs: int = 3
    """Documents that each answer needs, at least 2."""

    field: str = "text"
    """The field of a JSON record, or the column of a table, that holds the text."""

    seed: int = 0
    """Of the choice of documents, their order and the questions."""

    def __post_init__(self):
        if self.count < 1 or self.document_bytes < 1 or self.questions < 1:
            raise ValueError(
                f"count {self.count}, document_bytes {self.document_bytes} and questions {self.questions} must be at "
                "least 1"
            )
        if self.needs < 2 or self.seed < 0:
            raise ValueError(f"needs is {self.needs} and seed {self.seed}; at least 2 and at least 0")


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
