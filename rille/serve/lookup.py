"""How far the beginning of a sequence is stored. No torch here.

To go on after b tokens needs the latents of all b and the state of every KDA group after exactly b. For a sequence of L
tokens, with hash unit u and P tokens to a page, that is found in two stages:

    latents   whole pages while the hash at (k+1)P is known, then the last boundary inside the first missing page
    state     the last boundary b <= that length, b <= L-1, with a checkpoint of all groups; behind each boundary first
              the places at which, as is remembered, a prompt or a reply ended

Nothing is changed by looking. Source: Kimi K3 report section 5.4.
"""

from __future__ import annotations

from dataclasses import dataclass

from rille.serve.chain import Chain
from rille.serve.store import Entry, Store


@dataclass(frozen=True)
class Match:
    """latents, checkpoint: what was found, in the pool or (a name) in the tier behind it. latent_length: how far the
    latents go; resumed: where the sequence can go on."""

    latents: tuple[Entry | bytes, ...]
    latent_length: int
    checkpoint: Entry | bytes | None
    resumed: int


def find(store: Store, chain: Chain, page_tokens: int, groups: int, external: bool = False) -> Match:
    """What is there of a sequence. groups: pages of one state. external: what lies in the tier counts too."""
    return _Search(store, chain, page_tokens, groups, external).match()


@dataclass(frozen=True)
class _Search:
    store: Store
    chain: Chain
    page_tokens: int
    groups: int
    external: bool

    def match(self) -> Match:
        unit = self.chain.unit
        latents, length = self._latents((len(self.chain) - 1) // unit * unit)
        for position in range(length // unit * unit, -1, -unit):
            if (match := self._end_behind(position, latents, length)) is not None:
                return match
            found = self._state(position) if position else None
            if position and (found is not None or not self.groups):
                return Match(tuple(latents[: -(-position // self.page_tokens)]), length, found, position)
        return Match((), length, None, 0)

    def _latents(self, last: int) -> tuple[list[Entry | bytes], int]:
        found: list[Entry | bytes] = []
        P, u = self.page_tokens, self.chain.unit
        while len(found) * P + P <= last and (page := self._page(len(found) * P + P)) is not None:
            found.append(page)
        start = len(found) * P
        for position in range(min(start + P, last) // u * u, start, -u):
            if (page := self._page(position)) is not None:
                return [*found, page], position
        return found, start

    def _end_behind(self, boundary: int, latents: list[Entry | bytes], length: int) -> Match | None:
        """The last place behind a boundary and before the next at which something ended. latents: what was found, up to
        `length`."""
        for rest in self.store.ends(self.chain.at(boundary)):
            position = boundary + rest
            if position >= len(self.chain) or (state := self._state(position)) is None:
                continue
            pages = latents[: min(length, position) // self.page_tokens]
            while (start := len(pages) * self.page_tokens) < position:
                page = self._page(min(start + self.page_tokens, position))
                if page is None:
                    break
                pages.append(page)
            else:
                return Match(tuple(pages), max(length, position), state, position)
        return None

    def _page(self, position: int) -> Entry | bytes | None:
        """The page of the last token before a position."""
        key = self.chain.at(position)
        return self.store.latents(key) or (self.store.outside(key, False) if self.external else None)

    def _state(self, position: int) -> Entry | bytes | None:
        key = self.chain.at(position)
        return self.store.state(key) or (self.store.outside(key, True) if self.external else None)
