"""What the scheduler may do: sequences, tokens and classes of requests. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf


@dataclass(frozen=True)
class Kind:
    """A class of requests. up_to: prompts of at most so many tokens that have not been computed are of this kind (the
    first that fits). share: of the prefill budget, as long as others want theirs. max_queued_tokens: prompt tokens that
    may wait."""

    name: str
    up_to: float = inf
    share: float = 1.0
    max_queued_tokens: float = inf


class Shares:
    """Divides the tokens of prompts among kinds. What a kind gets too much or too little of in one step, since tokens
    are whole, is made up for in the next ones: where there are few tokens to a step no kind waits for ever either."""

    def __init__(self, kinds: Sequence[Kind]) -> None:
        self._kinds, self._owed = kinds, dict.fromkeys((kind.name for kind in kinds), 0.0)

    def divide(self, budget: int, wanted: Mapping[str, int]) -> list[tuple[Kind, int]]:
        """How many of `budget` tokens each kind may read, of those that it wants: by share, and what one does not want
        goes to the others."""
        left, given, owed = dict(wanted), dict.fromkeys(wanted, 0), self._owed
        while budget > 0 and (open_kinds := [kind for kind in self._kinds if left[kind.name]]):
            total, round_budget = sum(kind.share for kind in open_kinds), budget
            for kind in open_kinds:
                owed[kind.name] += round_budget * kind.share / total
            for kind in open_kinds:
                tokens = max(0, min(left[kind.name], budget, ceil(owed[kind.name])))
                given[kind.name] += tokens
                left[kind.name] -= tokens
                owed[kind.name] -= tokens
                budget -= tokens
        self._owed = {name: owed[name] if left[name] else 0.0 for name in owed}
        return [(kind, given[kind.name]) for kind in self._kinds]


KINDS = (Kind("short", 2_048, 0.4), Kind("medium", 32_768, 0.35), Kind("long", inf, 0.25))


@dataclass(frozen=True)
class SchedulerConfig:
    """max_length: tokens that one sequence may come to. deterministic: chunks end at the boundaries of the hash unit
    and nowhere else, so that a sequence is computed in the same pieces whatever else runs or is cached."""

    max_running: int = 64
    token_budget: int = 2_048
    max_queued: int = 1_024
    max_length: int = 1 << 20
    kinds: tuple[Kind, ...] = KINDS
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_queued < 0 or self.max_length < 2 or not self.kinds:
            raise ValueError(
                f"scheduler: max_running {self.max_running}, max_queued {self.max_queued}, max_length "
                f"{self.max_length} and {len(self.kinds)} kinds; want at least 1, 0, 2 and 1"
            )
        if self.token_budget < self.max_running:
            raise ValueError(
                f"scheduler: a token budget of {self.token_budget} cannot hold one token of each of "
                f"{self.max_running} running sequences"
            )
        if any(kind.share <= 0 for kind in self.kinds) or self.kinds[-1].up_to != inf:
            raise ValueError("scheduler: every kind needs a share above 0, and the last one must take any length")
