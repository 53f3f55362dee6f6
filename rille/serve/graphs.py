"""Decoding as a recorded CUDA graph: one token of every sequence, with shapes that never change.

A step of many small kernels costs the host more than the device. Recorded once for a number of rows and a width of the
page table, it is replayed as one launch; what differs from step to step lies in one buffer, which one copy fills:

    tokens [S] | sources [S] | positions [S] | slots [G, S] | table [S, T] | lots [5, S]

The token of each row is drawn inside, and stays on the device: a row with a source reads the token that the step before
drew in that row, so that a step can be launched while the one before it runs and nobody has seen its tokens. They come
to the host in a copy of their own (`Launched`).

Rows without a sequence have negative slots and a page of their own to write on. Weights that change in place, and pages
that change hands, are what a recorded step reads next.

Suffixes: S rows, G groups of KDA layers, T pages of a sequence's latents, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import linear

from rille.model.context import Context
from rille.model.model import K3
from rille.packing import Packing
from rille.serve.paged import Batch, Pages
from rille.serve.prefix import Holding
from rille.serve.sampler import Drawn, Lot, Way, choose, drawn_of, figures, way_of
from rille.serve.sequences import Part

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NO_LOT: Lot = (0.0, 0.0, 1.0, 1.0, 0.0)


class Sheet:
    """A host's copy of the buffer. tabled: whose pages stand in each row of the table, and how many."""

    def __init__(self, length: int, pinned: bool) -> None:
        self.tensor = torch.zeros(length, dtype=torch.int64, pin_memory=pinned)
        self.tabled: list[tuple[Holding | None, int]] = []

    def fill(
        self, parts: Sequence[Part], lots: Sequence[Lot], size: int, width: int, groups: int, spare_page: int
    ) -> None:
        """Write a step's numbers."""
        flat, count, idle = self.tensor.numpy(), len(parts), [0] * (size - len(parts))
        holdings = [part.sequence.holding for part in parts]
        flat[:size] = [0 if p.source >= 0 else p.sequence.chain.ids[p.start] for p in parts] + idle
        flat[size : 2 * size] = [p.source for p in parts] + [-1] * len(idle)
        flat[2 * size : 3 * size] = [p.start for p in parts] + idle
        slots_GS = flat[3 * size : (3 + groups) * size].reshape(groups, size)
        slots_GS[:, count:] = -1
        if groups:
            slots_GS[:, :count] = list(zip(*(h.state for h in holdings if h is not None), strict=True))
        table_ST = flat[(3 + groups) * size : (3 + groups + width) * size].reshape(size, width)
        self._fill_table(table_ST, holdings, spare_page)
        flat[(3 + groups + width) * size :].view("float64").reshape(5, size)[:] = list(
            zip(*lots, *[NO_LOT] * len(idle), strict=True)
        )

    def _fill_table(self, table_ST: np.ndarray, holdings: Sequence[Holding | None], spare_page: int) -> None:
        """A row is written again where another sequence took it or its sequence took another page."""
        tabled = [(holding, len(holding.latents)) for holding in holdings if holding is not None]
        for row, (new, old) in enumerate(zip(tabled, [*self.tabled, *[(None, 0)] * len(tabled)], strict=False)):
            if new[0] is not old[0] or new[1] != old[1]:
                table_ST[row, : new[1]] = [entry.pages[0] for entry in new[0].latents]
        table_ST[len(tabled) : len(self.tabled) or None] = spare_page
        self.tabled = [*tabled]


@dataclass(frozen=True, eq=False)
class Slate:
    """The buffer of a recorded step: two sheets on the host, taken in turn since a copy from one may be under way while
    the next step is written, and on the device the buffer and its parts."""

    sheets: tuple[Sheet, Sheet]
    device: Tensor
    tokens: Tensor
    sources: Tensor
    positions: Tensor
    slots: Tensor
    table: Tensor
    lots: Tensor

    @classmethod
    def new(cls, size: int, width: int, groups: int, device: torch.device) -> Slate:
        counts = (size, size, size, groups * size, size * width, 5 * size)
        buffer = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        sheets = tuple(Sheet(sum(counts), pinned=device.type == "cuda") for _ in range(2))
        tokens, sources, positions, slots, table, lots = buffer.split(counts)
        lots_5S = lots.view(torch.float64).view(5, size)
        parts = (tokens, sources, positions, slots.view(groups, size), table.view(size, width), lots_5S)
        return cls((sheets[0], sheets[1]), buffer, *parts)

    def fill(self, turn: int, parts: Sequence[Part], lots: Sequence[Lot], spare_page: int) -> None:
        """Write a step's numbers and send them."""
        (groups, size), width = self.slots.shape, self.table.shape[1]
        self.sheets[turn].fill(parts, lots, size, width, groups, spare_page)
        self.device.copy_(self.sheets[turn].tensor, non_blocking=True)


class StaticBatch(Batch):
    """`Batch` over tensors that stay where they are."""

    def __init__(self, pages: Pages, slate: Slate) -> None:
        self._pages, self._rows, self.inputs = pages, None, {}
        self._table, self._slots = slate.table, list(slate.slots)


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded step and what it leaves. packing: the recording does not keep what it reads alive, so this does."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    figures: Tensor
    packing: Packing


@dataclass(frozen=True, eq=False)
class Launched:
    """Tokens on their way to the host: float64 [4, S] of `sampler.figures`, there once `event` has passed."""

    figures: Tensor
    count: int
    event: torch.cuda.Event | None = None

    def wait(self) -> list[Drawn]:
        if self.event is not None:
            self.event.synchronize()
        return drawn_of(self.figures[:, : self.count].tolist())


class DecodeGraphs:
    """Recorded steps by size, width and way of drawing. spare_page: a page that belongs to nobody else. captures: False
    runs the same step without a recording, for rows that are all taken (that is what a CPU can do)."""

    def __init__(
        self,
        model: K3,
        pages: Pages,
        spare_page: int,
        longest: int,
        sizes: Sequence[int] = SIZES,
        captures: bool = True,
    ) -> None:
        self._model, self._pages, self._spare_page, self._captures = model, pages, spare_page, captures
        self._sizes = sorted(sizes)
        self._widest = -(-longest // pages.layout.page_tokens) + 1
        self._slates: dict[tuple[int, int], Slate] = {}
        self._recorded: dict[tuple[int, int, Way], Recording] = {}
        self._drawn = torch.zeros(self._sizes[-1], dtype=torch.int64, device=pages.device)
        pinned = pages.device.type == "cuda"
        self._arrived = [torch.zeros(4 * self._sizes[-1], dtype=torch.float64, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._memory = None

    def can_run(self, parts: Sequence[Part]) -> bool:
        """Whether this step is one token of each sequence, each of them drawn from, and not too many."""
        plain = all(part.count == 1 and part.ends and not part.drafts for part in parts)
        return (
            plain
            and not any(part.sequence.request.params.expert_ids for part in parts)
            and (len(parts) <= self._sizes[-1])
        )

    def is_recorded(self, parts: Sequence[Part]) -> bool:
        """Whether `launch` needs no new recording, which would draw over what the step before it drew."""
        return not self._captures or (*self._shape(parts), _way(parts)) in self._recorded

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> Tensor:
        """Logits fp32 [S, W] of the parts, in a buffer that the next step overwrites."""
        return self._replay(parts, [NO_LOT] * len(parts), Way.GREEDY)[0]

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part], lots: Sequence[Lot]) -> Launched:
        """Run the parts and draw a token for each. At most one other step may be under way."""
        _, figures_4S = self._replay(parts, lots, _way(parts))
        if not figures_4S.is_cuda:
            return Launched(figures_4S, len(parts))
        arrived_4S = self._arrived[self._turn][: figures_4S.numel()].view(figures_4S.shape)
        arrived_4S.copy_(figures_4S, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Launched(arrived_4S, len(parts), event)

    def _replay(self, parts: Sequence[Part], lots: Sequence[Lot], way: Way) -> tuple[Tensor, Tensor]:
        shape, self._turn = self._shape(parts), 1 - self._turn
        if shape not in self._slates:
            self._slates[shape] = Slate.new(*shape, self._pages.layout.groups, self._pages.device)
        slate = self._slates[shape]
        if not self._captures:
            slate.fill(self._turn, parts, lots, self._spare_page)
            packing = Packing.of([1] * len(parts), [p.start for p in parts], self._pages.device)
            return self._forward(slate, packing, way)
        if (*shape, way) not in self._recorded:
            self._recorded[*shape, way] = self._record(slate, way)
        recording = self._recorded[*shape, way]
        slate.fill(self._turn, parts, lots, self._spare_page)
        recording.graph.replay()
        return recording.logits[: len(parts)], recording.figures

    def _shape(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Rows and width of the table, rounded up so that there are few of them."""
        longest = max(len(part.sequence.holding.latents) for part in parts if part.sequence.holding is not None)
        width = min(max(4, 1 << (longest - 1).bit_length()), max(self._widest, longest))
        return next(size for size in self._sizes if size >= len(parts)), width

    def _record(self, slate: Slate, way: Way) -> Recording:
        slate.fill(self._turn, [], [], self._spare_page)
        packing = self._static_packing(slate)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets every op make what it keeps
                self._forward(slate, packing, way)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.current_stream().synchronize()  # the sheet is written again
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            packing.history.copy_(slate.positions)
            logits_SW, figures_4S = self._forward(slate, packing, way)
        return Recording(graph, logits_SW, figures_4S, packing)

    def _static_packing(self, slate: Slate) -> Packing:
        """One token of each row. The host knows only a bound on what was consumed: ops read the lengths on the
        device."""
        size, bound = slate.table.shape[0], slate.table.shape[1] * self._pages.layout.page_tokens - 1
        packing = Packing.of([1] * size, [bound] * size, self._pages.device)
        packing.__dict__["positions"] = slate.positions  # instead of what follows from the bound
        packing.history.copy_(slate.positions)
        return packing

    def _forward(self, slate: Slate, packing: Packing, way: Way) -> tuple[Tensor, Tensor]:
        """Logits [S, W] and figures [4, S]; what is drawn stays for the next step."""
        tokens_S = torch.where(slate.sources < 0, slate.tokens, self._drawn[slate.sources.clamp(min=0)])
        hidden_SD = self._model(tokens_S, Context(packing, StaticBatch(self._pages, slate)))
        logits_SW = linear(hidden_SD, self._model.head_weight)
        logits_SW = logits_SW.to(torch.promote_types(logits_SW.dtype, torch.float32))
        tokens_S = choose(logits_SW, slate.lots, way)
        self._drawn[: len(tokens_S)] = tokens_S
        return logits_SW, figures(logits_SW, logits_SW, tokens_S)


def _way(parts: Sequence[Part]) -> Way:
    return way_of(part.sequence.request.params for part in parts)
