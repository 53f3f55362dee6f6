"""Conversations of agents as a server sees them: a shared beginning, then turns that each read all before. No torch
here.

    prompt of turn 0  =  prefix of the session's group + a task
    prompt of turn k  =  prompt of turn k-1 + what was written + a tool's result

Of the lengths three are given and one follows: with T turns, a prefix of P tokens and O tokens written in a turn,
prompts have R times as many tokens as replies if each turn adds

    A = 2 (R O - P) / (T + 1) - O (T - 1) / (T + 1)

Each addition and each reply is drawn evenly from half to one and a half times its mean. Contents are random ids.
Source of R = 131 and of turns that add some 2,200 tokens: Mooncake's agentic trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True)
class Turn:
    """added: ids behind what is there already; output: tokens to write."""

    added: tuple[int, ...]
    output: int


@dataclass(frozen=True)
class Session:
    """One conversation. group: which prefix it shares with others."""

    group: int
    prefix: tuple[int, ...]
    turns: tuple[Turn, ...]


@dataclass(frozen=True, kw_only=True)
class TraceShape:
    """Lengths are tokens, means where they vary. ids: drawn from low (inclusive) to high (exclusive)."""

    sessions: int
    turns: int
    groups: int
    prefix: int
    output: int
    ratio: float
    low: int
    high: int
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sessions", "turns", "groups", "prefix", "output"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.low < self.high:
            raise ValueError(f"ids from {self.low} to {self.high}: there must be some")
        if self.added < 1:
            raise ValueError(
                f"a prefix of {self.prefix:,} tokens and {self.turns} turns of {self.output} written tokens come to "
                f"more than {self.ratio:g} read for each one written; ask for a shorter prefix, fewer turns or longer "
                "replies"
            )

    @property
    def added(self) -> float:
        """Mean tokens that a turn adds to the prompt."""
        mean = self.ratio * self.output - self.prefix
        return (2 * mean - self.output * (self.turns - 1)) / (self.turns + 1)

    @property
    def longest(self) -> int:
        """Tokens that no sequence of the trace exceeds."""
        return self.prefix + int(1.5 * self.turns * (self.added + self.output)) + 2 * self.turns

    def draw(self) -> Iterator[Session]:
        """The sessions, the same ones for the same seed."""
        random = Random(self.seed)
        prefixes = [self._ids(random, self.prefix) for _ in range(self.groups)]
        for _ in range(self.sessions):
            group = random.randrange(self.groups)
            turns = tuple(
                Turn(self._ids(random, _around(random, self.added)), _around(random, self.output))
                for _ in range(self.turns)
            )
            yield Session(group, prefixes[group], turns)

    def _ids(self, random: Random, count: int) -> tuple[int, ...]:
        return tuple(random.randrange(self.low, self.high) for _ in range(count))


def _around(random: Random, mean: float) -> int:
    return max(1, round(random.uniform(0.5 * mean, 1.5 * mean)))
