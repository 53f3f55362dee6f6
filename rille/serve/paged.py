"""The pages themselves: one tensor of bytes, seen by every layer as a pool of its own kind.

    bytes [pages, page_bytes]     latents of an MLA layer   [pages, page_tokens, R]     a window of each page
                                  states of a KDA layer     [pages, H, V, K] fp32       (axis 0 strides over the page)
                                  tails                     [pages, W-1, C]

Ops read and write these windows by index: `Batch` names the pages of the sequences that run together.

Suffixes: S sequences, G groups of KDA layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from mmap import PAGESIZE

import torch
from torch import Tensor

from rille.model.config import K3Config
from rille.ops.conv import PooledTail, TailPlaces
from rille.ops.kda import DecodeLayer, Places, PooledState, Projected
from rille.ops.mla import LatentCache
from rille.packing import Packing, moved
from rille.serve.pages import Copy, PageLayout

POISON = 255  # bytes of it are a NaN in every float format


def layout_of(c: K3Config, dtype: torch.dtype) -> PageLayout:
    """Sizes of the pages for a model whose activations are of this dtype."""
    mla = [layer for layer in range(c.num_layers) if c.is_mla(layer)]
    kda = [layer for layer in range(c.num_layers) if not c.is_mla(layer)]
    state_size = torch.promote_types(dtype, torch.float32).itemsize
    state_bytes = c.kda_heads * c.kda_head_dim**2 * state_size
    tail_bytes = (c.conv_width - 1) * 3 * c.kda_width * dtype.itemsize
    return PageLayout.of(mla, kda, c.cache_dim * dtype.itemsize, state_bytes, tail_bytes)


class Pages:
    """All pages. poison: fill what is free with NaN between steps, so that reading it shows."""

    def __init__(
        self, c: K3Config, num_pages: int, dtype: torch.dtype, device: torch.device | str, *, poison: bool = False
    ) -> None:
        self.layout, self.conv_width = layout_of(c, dtype), c.conv_width
        self.bytes = torch.empty(num_pages, self.layout.page_bytes, dtype=torch.uint8, device=device)
        if poison:
            self.bytes.fill_(POISON)
        wide, d = torch.promote_types(dtype, torch.float32), c.kda_head_dim
        self.latents = {
            layer: self._window(at, dtype, (self.layout.page_tokens, c.cache_dim))
            for layer, at in self.layout.latent_at.items()
        }
        places = self.layout.state_at.items()
        self.states = {layer: self._window(at, wide, (c.kda_heads, d, d)) for layer, (_, at, _) in places}
        self.tails = {
            layer: self._window(at, dtype, (c.conv_width - 1, 3 * c.kda_width)) for layer, (_, _, at) in places
        }
        self.group_of = {layer: group for layer, (group, _, _) in places}

    @property
    def device(self) -> torch.device:
        return self.bytes.device

    def _window(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = torch.Size(shape).numel()
        start = at // dtype.itemsize
        return self.bytes.view(dtype)[:, start : start + size].unflatten(1, shape)

    def touch(self) -> None:
        """Have the system give all memory of a pool on a CPU, which it does at the first write to each page of its own.
        Contents stay."""
        if self.device.type == "cpu":
            self.bytes.view(-1)[::PAGESIZE].add_(0)

    def copy(self, copies: Sequence[Copy]) -> None:
        """Carry out copies; no page is both read and written by them. Whole pages are copied even where a few rows
        would do: what lies behind them is never read."""
        if copies:
            sources, targets = ([getattr(copy, end) for copy in copies] for end in ("source", "target"))
            words = self.bytes.view(torch.int64)  # an index moves elements: the fewer the better
            words[self._index(targets)] = words[self._index(sources)]

    def clear(self, pages: Sequence[int]) -> None:
        """Pages of states that begin with zeros."""
        if pages:  # (an assignment would bring the number to a GPU, and wait)
            self.bytes.view(torch.int64).index_fill_(0, self._index(pages), 0)

    def poison(self, pages: Sequence[int]) -> None:
        if pages:
            self.bytes.index_fill_(0, self._index(pages), POISON)

    def read(self, page: int) -> Tensor:
        """A page's content in host memory."""
        return self.bytes[page].cpu().clone()

    def write(self, page: int, content: Tensor) -> None:
        self.bytes[page].copy_(content)

    def _index(self, pages: Sequence[int]) -> Tensor:
        return moved(torch.tensor(pages, dtype=torch.int64), self.device)


class Batch:
    """The memory of the sequences of one forward, as layers see it (`rille.model.context.LayerMemory`).

    tables: pages of latents of each sequence; states: pages of the state of each sequence, by group. rows: where given,
    the rows of the batch whose projected inputs are remembered, by layer, in `inputs`.
    """

    def __init__(
        self, pages: Pages, tables: Sequence[Sequence[int]], states: Sequence[Sequence[int]], rows: Tensor | None = None
    ) -> None:
        longest = max(map(len, tables), default=0)
        padded = [[*table, *[0] * (longest - len(table))] for table in tables]
        self._pages, self._rows = pages, rows
        self._table = moved(torch.tensor(padded, dtype=torch.int64).view(len(tables), longest), pages.device)
        slots_GS = torch.tensor(states, dtype=torch.int64).view(len(states), -1).T.contiguous()
        self._slots = list(moved(slots_GS, pages.device))
        self.inputs: dict[int, Projected] = {}

    def state(self, layer: int) -> PooledState:
        return PooledState(self._pages.states[layer], self._slots[self._pages.group_of[layer]])

    def tail(self, layer: int) -> PooledTail:
        return PooledTail(self._pages.tails[layer], self._slots[self._pages.group_of[layer]])

    def latents(self, layer: int) -> LatentCache:
        return LatentCache(self._pages.latents[layer], self._table)

    def remember(self, layer: int, inputs: Projected) -> None:
        if self._rows is not None:
            rows = self._rows
            self.inputs[layer] = Projected(inputs.qkv[rows], inputs.z[rows], inputs.b[rows], inputs.gate[rows])

    def verify(self, layer: int, inputs: Projected, weights: DecodeLayer) -> Tensor | None:
        """Drafts run on copies of the states here, as tokens do."""


class Saving(Batch):
    """A batch whose KDA layers leave states and tails on their way. saves: of each sequence tokens from the start of
    this batch, rising, and the pages that keep the state there, by group."""

    def __init__(
        self,
        pages: Pages,
        tables: Sequence[Sequence[int]],
        states: Sequence[Sequence[int]],
        rows: Tensor | None,
        packing: Packing,
        saves: Sequence[Sequence[tuple[int, Sequence[int]]]],
    ) -> None:
        super().__init__(pages, tables, states, rows)
        stops = [[at for at, _ in some] for some in saves]
        kept = torch.tensor([targets for some in saves for _, targets in some], dtype=torch.int64)
        self._kept = list(moved(kept.T.contiguous(), pages.device))
        places = Places.of(packing, stops)
        self._at = [places.at(*slots) for slots in zip(self._slots, self._kept, strict=True)]
        self._tail_places = TailPlaces.of(packing, stops, pages.conv_width)

    def state(self, layer: int) -> PooledState:
        group = self._pages.group_of[layer]
        return PooledState(self._pages.states[layer], self._slots[group], *self._at[group])

    def tail(self, layer: int) -> PooledTail:
        group = self._pages.group_of[layer]
        return PooledTail(self._pages.tails[layer], self._slots[group], self._tail_places, self._kept[group])
