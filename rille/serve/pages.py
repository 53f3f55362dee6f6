"""One pool of equal-sized pages for both kinds of memory, and the sizes that make them equal. No torch here.

    page  =  the latents of `page_tokens` tokens, all MLA layers          or
             the states and tails of one group of KDA layers, one sequence at one position

A state of the whole model takes `groups` pages: with three KDA layers to one MLA layer, three groups that are each
about as heavy as the MLA layers together. Nothing divides the pool beforehand: a page serves whoever needs one.
Source: Kimi K3 report section 5.4 (there 6144 tokens to a page).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GRAIN = 64  # a page holds a multiple of so many tokens
_ALIGNMENT = 256  # bytes: where a layer begins inside a page


@dataclass(frozen=True)
class Copy:
    """Content that must move from one page to another. rows: only so many tokens of latents; None: all of it."""

    source: int
    target: int
    rows: int | None = None


@dataclass(frozen=True)
class PageLayout:
    """Where things lie in a page. Offsets and sizes in bytes.

    latent_at: MLA layer -> offset of its [page_tokens, R] rows. state_at: KDA layer -> (group, offset of its state,
    offset of its tail).
    """

    page_tokens: int
    page_bytes: int
    groups: int
    latent_at: dict[int, int]
    state_at: dict[int, tuple[int, int, int]]

    @classmethod
    def of(
        cls, mla_layers: Iterable[int], kda_layers: Iterable[int], row_bytes: int, state_bytes: int, tail_bytes: int
    ) -> PageLayout:
        """Sizes for a model. row_bytes: of one token's latent in one MLA layer; state_bytes, tail_bytes: of one KDA
        layer. Raises ValueError for a model without layers."""
        mla, kda = list(mla_layers), list(kda_layers)
        if not mla and not kda:
            raise ValueError("pages: the model has no layers")
        groups = -(-len(kda) // max(len(mla), 1)) if kda else 0
        per_group = -(-len(kda) // groups) if kda else 0
        state, tail = _aligned(state_bytes), _aligned(tail_bytes)
        group_bytes = per_group * (state + tail)
        tokens = GRAIN
        if mla and row_bytes:
            tokens = max(GRAIN, -(-group_bytes // (len(mla) * row_bytes * GRAIN)) * GRAIN)
        latents = _aligned(tokens * row_bytes)
        state_at = {}
        for place, layer in enumerate(kda):
            group, within = divmod(place, per_group)
            state_at[layer] = (group, within * (state + tail), within * (state + tail) + state)
        latent_at = {layer: place * latents for place, layer in enumerate(mla)}
        return cls(tokens, max(group_bytes, len(mla) * latents), groups, latent_at, state_at)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class PagePool:
    """Which pages are free. The pages themselves are whoever's memory it is."""

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"pages: a pool of {num_pages} pages; at least one is needed")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._taken = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def free_pages(self) -> list[int]:
        return list(self._free)

    def take(self, count: int) -> list[int]:
        """So many free pages; there must be as many."""
        assert 0 <= count <= len(self._free), f"{count} pages asked, {len(self._free)} free"
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._taken[page] = 1
        return pages

    def give(self, pages: Iterable[int]) -> None:
        """Pages that nobody needs any more."""
        for page in pages:
            assert self._taken[page], f"page {page} is free already"
            self._taken[page] = 0
            self._free.append(page)
