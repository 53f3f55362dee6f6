"""Whether a rewritten passage still says what the original says, as far as numbers can tell. No torch here.

    numbers     share of the original's different numbers that the passage has
    names       share of its names (capitalised words inside sentences, words with digits or capitals inside)
    invented    share of the passage's numbers that the original does not have
    length      words of the passage / words of the original
    copied      share of the passage's 8-word runs that stand in the original

A passage that loses numbers or names, invents numbers, shrinks or swells, or merely copies, is not kept. Meaning is
for a model to judge (rephrase.py); these bounds are for what a model overlooks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from rille.data.words import grams, words_of

_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_NAME = re.compile(r"(?<=[a-z,;:] )[A-Z][a-z]{2,}|\b[A-Za-z]+(?:[A-Z_]|\d)[A-Za-z0-9_]*")
_RUN = 8


@dataclass(frozen=True)
class Bounds:
    """What a rewritten passage must keep to."""

    numbers: float = 0.9
    names: float = 0.75
    invented: float = 0.1
    length: tuple[float, float] = (0.5, 2.5)
    copied: float = 0.7


@dataclass(frozen=True)
class Fidelity:
    """The measures of the head of this file; 1 (or 0) where there is nothing to measure."""

    numbers: float
    names: float
    invented: float
    length: float
    copied: float

    def fault(self, bounds: Bounds = Bounds()) -> str | None:
        """The first bound that is broken, in words to count by, or None."""
        low, high = bounds.length
        checks = (
            ("numbers lost", self.numbers < bounds.numbers),
            ("names lost", self.names < bounds.names),
            ("numbers invented", self.invented > bounds.invented),
            ("too short", self.length < low),
            ("too long", self.length > high),
            ("copied", self.copied > bounds.copied),
        )
        return next((name for name, broken in checks if broken), None)


def measure(original: str, rewritten: str) -> Fidelity:
    """Compare a rewritten passage with its original."""
    numbers, new_numbers = set(_NUMBER.findall(original)), set(_NUMBER.findall(rewritten))
    names = set(_NAME.findall(original))
    kept_names = sum(name in rewritten for name in names)
    one, other = words_of(original.encode(), bare=True), words_of(rewritten.encode(), bare=True)
    runs = grams(other.hashes, _RUN)
    return Fidelity(
        numbers=len(numbers & new_numbers) / len(numbers) if numbers else 1.0,
        names=kept_names / len(names) if names else 1.0,
        invented=len(new_numbers - numbers) / len(new_numbers) if new_numbers else 0.0,
        length=len(other) / max(1, len(one)),
        copied=float(np.isin(runs, grams(one.hashes, _RUN)).mean()) if len(runs) else 0.0,
    )
