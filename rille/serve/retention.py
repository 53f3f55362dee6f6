"""Where checkpoints of the KDA state are kept: a policy as plain data, and the class that obeys it. No torch here.

A state costs as much memory as thousands of latents, so there can be few: where a later prompt is likely to go on.
Positions are rounded down to the hash unit u.

    prompt end        floor((L-1)/u) u for the same prompt again, floor(L/u) u for a longer one
    marks             what the caller knows: turn ends, the place before the generation prompt
    turn end          one that moves along with the reply; the last boundary before its end stays
    forks             where this prompt leaves what was seen before: at the second sighting (Marconi, arXiv 2411.19379)
    intervals         every so many tokens of a long prompt
    exact ends        not rounded: L-1 of a prompt, for the same one again, where a reply ended, for the next turn,
                      marks, and where prompts part

Source: Kimi K3 report section 5.4, whose hash unit is 512.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_UNIT, LARGEST_UNIT = 64, 512


def unit_for(page_tokens: int, groups: int) -> int:
    """The hash unit where none is asked for: a power of two. What is shorter than a unit leaves no checkpoint, and one
    behind a single unit takes as much memory as 16 to 32 units of latents, unless the state is lighter or heavier than
    the limits allow. page_tokens: latents to a page; groups: pages of one state."""
    worth = page_tokens * groups // 16
    return min(LARGEST_UNIT, max(SMALLEST_UNIT, 1 << max(worth, 1).bit_length() - 1))


@dataclass(frozen=True)
class Retention:
    """interval: tokens between checkpoints in a long prompt, a multiple of the hash unit; 0: none. exact_above: shorter
    prompts end at boundaries, where a layer's pass has the state at hand; elsewhere it takes one more call a layer."""

    prompt_end: bool = True
    marks: bool = True
    turn_end: bool = True
    forks: bool = True
    interval: int = 32_768
    exact: bool = False
    exact_above: int = 0

    def check(self, unit: int) -> None:
        """Raise ValueError for an interval that the hash unit does not divide; any multiple is fine."""
        if self.interval < 0 or self.interval % unit:
            raise ValueError(
                f"retention: interval {self.interval} must be a multiple of the hash unit of {unit} tokens"
            )

    def positions(self, length: int, resumed: int, unit: int, marks: Sequence[int], fork: int) -> list[int]:
        """Places above `resumed` at which a prompt of `length` tokens leaves a checkpoint, rising. fork: how far
        it was seen before."""
        wanted, is_exact = set[int](), self.exact and length > max(unit, self.exact_above)
        if self.prompt_end:
            wanted |= {(length - 1) // unit * unit, length // unit * unit}
        if self.marks:
            wanted |= {mark if is_exact and mark > unit else mark // unit * unit for mark in marks}
        if self.forks:
            wanted.add(fork if self.exact else fork // unit * unit)
        if is_exact and self.prompt_end:
            wanted.add(length - 1)
        if self.interval:
            wanted |= set(range(self.interval, length + 1, self.interval))
        return sorted(position for position in wanted if resumed < position <= length)

    def describe(self) -> str:
        kinds = ("prompt_end", "marks", "turn_end", "forks")
        named = [kind.replace("_", " ") for kind in kinds if getattr(self, kind)] + ["exact ends"] * self.exact
        return ", ".join([*named, *([f"every {self.interval:,} tokens"] if self.interval else [])]) or "none"
