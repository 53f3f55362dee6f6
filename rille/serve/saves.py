"""Checkpoints inside the part of a prompt that one step reads: where they lie, and on which pages. No torch here.

A step stores the state of its end by a copy when it is over. States on the way there are gone by then, so their pages
are taken before it runs, and the layers write them (`rille.serve.paged.Saving`): a prompt is read in as few steps as
the budget allows, however many checkpoints it leaves.
"""

from __future__ import annotations

from rille.serve.prefix import PrefixCache
from rille.serve.sequences import Save, Sequence


def saves_of(cache: PrefixCache, sequence: Sequence, start: int, until: int) -> tuple[Save, ...]:
    """Pages for the checkpoints between two places of a prompt; where there is no room, or the same is stored already,
    there is none."""
    holding, saves = sequence.holding, []
    assert holding is not None
    for stop in sequence.stops:
        if start < stop < until:
            copies = cache.checkpoint(holding, stop, fork=stop == sequence.fork)
            if copies:
                saves.append((stop, tuple(copy.target for copy in copies)))
    return tuple(saves)
