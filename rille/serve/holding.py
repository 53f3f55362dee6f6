"""What a sequence has of the prefix cache's pool, what it was given when it came, and what is counted then. No torch
here."""

from __future__ import annotations

from dataclasses import dataclass, field

from rille.serve.chain import Chain
from rille.serve.pages import Copy
from rille.serve.schema import MissReason
from rille.serve.store import Entry


@dataclass(eq=False, slots=True)
class Holding:
    """What one sequence has in the pool.

    length: tokens whose latents and state are there. state: pages of the state that moves along, by group. shared: the
    first pages of latents, which others may have too. registered: tokens that others can find. pinned: what the copies
    of this step read; pending: checkpoints whose copies have not landed; made: checkpoints that it went on from or
    left; moving: the one that the next of the reply replaces. reach: tokens that its state has consumed when all that
    was launched is over, if more than `length`. is_private: of two versions of the weights, so nothing may match.
    """

    chain: Chain
    length: int = 0
    latents: list[Entry] = field(default_factory=list)
    state: tuple[int, ...] = ()
    shared: int = 0
    registered: int = 0
    pinned: list[Entry] = field(default_factory=list)
    pending: list[Entry] = field(default_factory=list)
    made: list[Entry] = field(default_factory=list)
    moving: Entry | None = None
    reach: int = 0
    is_private: bool = False


@dataclass(frozen=True)
class Admission:
    """copies: to be carried out before the sequence runs; clear: pages of a state that begins with zeros; fork: how far
    the prompt was there before, where that is worth a checkpoint."""

    holding: Holding
    resumed: int
    copies: tuple[Copy, ...]
    clear: tuple[int, ...]
    fork: int


@dataclass
class CacheCounts:
    """Totals in tokens, queries = hits + misses. latent_hits: with latents there, whether used or not; external: of the
    hits those that came from the tier."""

    queries: int = 0
    hits: int = 0
    latent_hits: int = 0
    external: int = 0
    misses: dict[MissReason, int] = field(
        default_factory=lambda: {"cold": 0, "evicted": 0, "no_checkpoint": 0, "below_unit": 0, "draft": 0}
    )
