"""Training a filter from files of examples, and proving it on texts that it has not seen. No torch here."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
from rich.table import Table

from rille.data.classifier import Training, confusion, train_classifier
from rille.data.command_config import TrainFilterConfig
from rille.data.records import Fault, read_records, text_of
from rille.data.steps import Steps

_TESTED = 0.1  # of the examples, by a hash of their text
_LONGEST = 16_000_000


@dataclass(frozen=True, eq=False)
class Result:
    """confusion int64 [labels, labels]: what texts of a label were taken for. left_out: records without a text."""

    labels: tuple[str, ...]
    confusion: np.ndarray
    left_out: Counter[str] = field(default_factory=Counter)

    @property
    def tested(self) -> int:
        return int(self.confusion.sum())

    @property
    def accuracy(self) -> float:
        return float(self.confusion.trace() / max(1, self.tested))

    def table(self) -> Table:
        table = Table("label", *(f"taken for {label}" for label in self.labels), box=None, pad_edge=False)
        for label, row in zip(self.labels, self.confusion.tolist(), strict=True):
            table.add_row(label, *(f"{count:,}" for count in row))
        return table


def train_filter(config: TrainFilterConfig, steps: Steps) -> Result:
    """Train on nine tenths of the examples, save to `config.out`, test on the rest.

    Raises ValueError for sources that cannot be read, fewer than two labels, or no text left to test on.
    """
    learned: list[tuple[str, str]] = []
    tested: list[tuple[str, str]] = []
    left_out: Counter[str] = Counter()
    for example in config.examples:
        label, _, path = example.partition("=")
        for text in islice(_texts(path, config.field, left_out), config.most):
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            side = tested if int.from_bytes(digest, "big") < _TESTED * 2**64 else learned
            side.append((label, text[: config.span]))
    if not tested:
        raise ValueError(f"{len(learned):,} examples are too few to test a filter on; give more")
    training = Training(config.features, config.buckets, config.span, config.epochs, config.seed)
    with steps.step("training", len(learned) * config.epochs) as advance:
        texts, labels = [text for _, text in learned], [label for label, _ in learned]
        classifier = train_classifier(texts, labels, training, lambda: advance(1))
    unknown = {label for label, _ in tested} - set(classifier.labels)
    if unknown:
        raise ValueError(f"all examples of {', '.join(sorted(unknown))} fell among the tested ones; give more")
    classifier.save(config.out)
    table = confusion(classifier, [text for _, text in tested], [label for label, _ in tested])
    return Result(classifier.labels, table, left_out)


def _texts(path: str, field: str, left_out: Counter[str]) -> Iterator[str]:
    """The texts of a source; what has none is counted by its reason."""
    for record in read_records(path, field=field, max_bytes=_LONGEST):
        text = record if isinstance(record, Fault) else text_of(record, field)
        if isinstance(text, Fault):
            left_out[text.reason] += 1
        else:
            yield text
