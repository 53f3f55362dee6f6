"""How long work shows where it stands: a protocol, so that nothing here knows of terminals. No torch here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Steps(Protocol):
    """Shows people how far a piece of work is."""

    def step(self, name: str, total: float | None) -> AbstractContextManager[Callable[[float], None]]:
        """A context that gives a function to call with what was done; total in the same unit, None if unknown."""
        ...


class NoSteps:
    """Says nothing."""

    def step(self, name: str, total: float | None) -> AbstractContextManager[Callable[[float], None]]:
        return nullcontext(lambda done: None)
