"""Sequences set aside with all their pages, for the time that others need the pool. No torch here.

Unlike the prefix cache, which comes back to the last boundary, a parked sequence goes on exactly where it was.
"""

from __future__ import annotations

from rille.serve.chain import Chain
from rille.serve.prefix import Holding, PrefixCache
from rille.serve.store import Entry
from rille.serve.tier import Tier


def park(cache: PrefixCache, holding: Holding, tier: Tier, name: bytes) -> bool:
    """Copy the pages out and give them back. Whether the tier took them; the pages are given back in any case."""
    assert not holding.pinned and not holding.pending, "a step of this sequence is not over"
    used = holding.latents[: -(-holding.length // cache.page_tokens)]  # there may be one more, made for drafts
    pages = [*(page for entry in used for page in entry.pages), *holding.state]
    tier.drop(name)  # what may be left of an earlier time
    tier.put([name], pages)
    cache.release(holding)
    return tier.has(name)


def unpark(
    cache: PrefixCache, chain: Chain, length: int, tier: Tier, name: bytes, is_private: bool = False
) -> Holding | None:
    """The sequence again, at `length` tokens, on pages of its own. None where the pool has too few now."""
    num_latents = -(-length // cache.page_tokens)
    pages = cache.store.allocate(num_latents + cache.groups)
    if pages is None:
        return None
    is_back = False
    try:
        tier.get(name, pages)
        is_back = True
    finally:
        if not is_back:
            cache.store.pool.give(pages)
    tier.drop(name)
    latents = [Entry((page,), (place + 1) * cache.page_tokens) for place, page in enumerate(pages[:num_latents])]
    return Holding(chain, length, latents, tuple(pages[num_latents:]), registered=length, is_private=is_private)
