"""Stages of training: from some step on longer sequences, other batches, another mixture of domains. No torch.

    --stages "at=8000 sequence_length=16384 accumulate=2" "at=9500 sequence_length=65536 code=0.4 prose=0.6"

A stage is words NAME=VALUE: `at`, its first step (counted from 0), `sequence_length`, `batch_tokens`, `accumulate`, and
shares of domains, which need a set that `rille data build` made. What is not named stays as in the stage before. The K3
report grows the context so, from 8K over 64K and 256K to 1M (section 3).

Each stage goes through the text in an order of its own, from the beginning: documents are cut at other places, so that
"what was not read yet" has no meaning across stages. How often a domain was read has: a set's max_epochs holds for all
stages together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rille.data.loader import Batch, Loader
    from rille.data.mixed_loader import MixedLoader

COUNTS = ("sequence_length", "batch_tokens", "accumulate")


@dataclass(frozen=True)
class Stage:
    """Steps from `at` on. shares: of domains, () for those of the data set."""

    at: int
    sequence_length: int
    batch_tokens: int
    accumulate: int
    shares: tuple[tuple[str, float], ...] = ()


def parse_stages(first: Stage, texts: Sequence[str]) -> tuple[Stage, ...]:
    """The first stage and those that the texts describe. Raises ValueError that names the text and what is wrong."""
    stages = [first]
    for text in texts:
        words = dict(_word(word, text) for word in text.split())
        if "at" not in words:
            raise ValueError(f'stages: "{text}" names no first step; begin with at=STEP')
        counts = {name: _count(name, words.pop(name), text) for name in ("at", *COUNTS) if name in words}
        shares = tuple((name, _share(name, value, text)) for name, value in words.items())
        stage = replace(stages[-1], **counts, shares=shares or stages[-1].shares)
        if stage.at <= stages[-1].at:
            raise ValueError(f'stages: "{text}" does not begin after step {stages[-1].at}, where the one before begins')
        stages.append(stage)
    return tuple(stages)


def _word(word: str, text: str) -> tuple[str, str]:
    name, equals, value = word.partition("=")
    if not (name and equals and value):
        raise ValueError(f'stages: "{word}" in "{text}" is not NAME=VALUE')
    return name, value


def _count(name: str, value: str, text: str) -> int:
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f'stages: {name} is {value} in "{text}"; it must be a whole number of at least 1')
    return int(value)


def _share(name: str, value: str, text: str) -> float:
    try:
        share = float(value)
    except ValueError:
        share = -1.0
    if not (isfinite(share) and share >= 0):
        names = ", ".join(("at", *COUNTS))
        raise ValueError(f'stages: {name}={value} in "{text}" is no share of a domain from 0 on, and no {names}')
    return share


class Curriculum:
    """The batches of a run, stage by stage. make: a loader for a stage and its number; all are made at once, so that
    what is wrong with one is told before training."""

    def __init__(self, stages: Sequence[Stage], make: Callable[[Stage, int], Loader | MixedLoader]):
        self.stages = stages
        self.loaders = [make(stage, number) for number, stage in enumerate(stages)]
        self.number = 0
        self.read: dict[str, float] = {}  # epochs of the stages before

    @property
    def stage(self) -> Stage:
        return self.stages[self.number]

    def go_to(self, step: int) -> None:
        """Enter the stage that the step belongs to; in it nothing changes."""
        number = max(number for number, stage in enumerate(self.stages) if stage.at <= step)
        if number != self.number:
            self.read, self.number = self.epochs(), number
            self.loaders[number].begin(self.read)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self.loaders[self.number])

    def epochs(self) -> dict[str, float]:
        """How often the documents of each domain were read so far, in all stages."""
        return {name: count + self.read.get(name, 0.0) for name, count in self.loaders[self.number].epochs().items()}

    def state(self) -> dict[str, Any]:
        """Where it stands, as JSON can hold it."""
        return {**self.loaders[self.number].state(), "stage": self.number, "read": self.read}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`. Raises ValueError if it is of other settings or data."""
        self.number, self.read = state.get("stage", 0), dict(state.get("read", {}))
        self.loaders[self.number].begin(self.read)
        self.loaders[self.number].restore(state)
