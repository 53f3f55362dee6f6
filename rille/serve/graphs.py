"""Decoding as a recorded CUDA graph: one token of every sequence, or one and drafts, with shapes that never change.

A step of many small kernels costs the host more than the device. Recorded once for a number of rows, a width of the
page table and a number of tokens, it is replayed as one launch; what differs from step to step lies in one buffer,
which one copy fills:

    tokens [S, T] | sources [S] | positions [S] | drafts [S] | slots [G, S] | table [S, pages] | lots [5, S T]

Tokens are drawn inside, and stay on the device: a row with a source reads the token that the step before drew in that
row, so that a step can be launched while the one before it runs and nobody has seen its tokens. They come to the host
in a copy of their own (`Launched`). Drafts that came true are found inside too, and the states move on by them
(`rille.serve.trial`).

Rows without a sequence have negative slots and a page of their own to write on; so have tokens behind the drafts of a
row. Weights that change in place, and pages that change hands, are what a recorded step reads next.

Suffixes: S rows, T tokens of a row, N = S T, G groups of KDA layers, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rille.model.context import Context
from rille.model.model import K3
from rille.ops.chains import chain
from rille.ops.embedding import step_tokens
from rille.ops.linear import linear
from rille.packing import Packing
from rille.serve.paged import Batch, Pages
from rille.serve.prefix import Holding
from rille.serve.sampler import Drawn, Lot, Way, choose_unchanged, drawn_of, way_of
from rille.serve.sequences import Part
from rille.serve.trial import Bench, Trial

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
NO_LOT: Lot = (0.0, 0.0, 1.0, 1.0, 0.0)
# Kernels of a recorded step of so many tokens begin before the ones ahead of them have ended: 34 % more tokens a second
# at one, a fifth at 16, 4 % at 24 and 32; 13 % fewer at 48.
CHAINED_TOKENS = 32


@dataclass(frozen=True)
class Shape:
    """rows; width: pages of a row of the table; tokens of a row."""

    rows: int
    width: int
    tokens: int

    def counts(self, groups: int) -> tuple[int, ...]:
        """Numbers of each part of the buffer."""
        S, N = self.rows, self.rows * self.tokens
        return N, S, S, S, groups * S, S * self.width, 5 * N


class Sheet:
    """A host's copy of the buffer. tabled: whose pages stand in each row of the table, and how many."""

    def __init__(self, shape: Shape, groups: int, pinned: bool) -> None:
        counts = shape.counts(groups)
        self.tensor = torch.zeros(sum(counts), dtype=torch.int64, pin_memory=pinned)
        tokens, *lists, slots, table, lots = np.split(self.tensor.numpy(), np.cumsum(counts)[:-1])
        self._tokens_ST, self._lists = tokens.reshape(shape.rows, shape.tokens), lists
        self._slots_GS, self._table = slots.reshape(groups, shape.rows), table.reshape(shape.rows, shape.width)
        self._lots_N5 = lots.view(np.float64).reshape(5, -1).T
        self._tabled: list[tuple[Holding, int]] = []

    def fill(self, parts: Sequence[Part], lots: Sequence[Sequence[Lot]], spare_page: int) -> None:
        """Write a step's numbers. lots: of each part, for the token after it and after each of its drafts."""
        count, tokens = len(parts), self._tokens_ST.shape[1]
        holdings = [part.sequence.holding for part in parts]
        first = [0 if p.source >= 0 else p.sequence.chain.ids[p.start] for p in parts]
        self._tokens_ST[:count, 0], self._tokens_ST[count:] = first, 0
        if tokens == 1:
            self._lots_N5[:count], self._lots_N5[count:] = [some[0] for some in lots] or NO_LOT, NO_LOT
        else:
            self._lots_N5[:] = NO_LOT
            for row, (part, some) in enumerate(zip(parts, lots, strict=True)):
                self._tokens_ST[row, 1 : 1 + len(part.drafts)] = part.drafts
                self._lots_N5[row * tokens : row * tokens + len(some)] = some
        numbers = ([p.source for p in parts], [p.start for p in parts], [len(p.drafts) for p in parts])
        for flat, some, idle in zip(self._lists, numbers, (-1, 0, 0), strict=True):
            flat[:count], flat[count:] = some, idle
        self._slots_GS[:, count:] = -1
        if count and len(self._slots_GS):
            self._slots_GS[:, :count] = list(zip(*(h.state for h in holdings if h is not None), strict=True))
        self._fill_table([(h, len(h.latents)) for h in holdings if h is not None], spare_page)

    def _fill_table(self, tabled: list[tuple[Holding, int]], spare_page: int) -> None:
        """A row is written again where another sequence took it or its sequence took another page."""
        for row, new in enumerate(tabled):
            old = self._tabled[row] if row < len(self._tabled) else None
            if old is None or new[0] is not old[0] or new[1] != old[1]:
                self._table[row, : new[1]] = [entry.pages[0] for entry in new[0].latents]
                self._table[row, new[1] :] = spare_page
        self._table[len(tabled) : len(self._tabled) or None] = spare_page
        self._tabled = tabled


@dataclass(frozen=True, eq=False)
class Slate:
    """The buffer of a recorded step: two sheets on the host, taken in turn since a copy from one may be under way while
    the next step is written, and on the device the buffer and its parts."""

    shape: Shape
    sheets: tuple[Sheet, Sheet]
    device: Tensor
    tokens: Tensor
    sources: Tensor
    positions: Tensor
    drafts: Tensor
    slots: Tensor
    table: Tensor
    lots: Tensor

    @classmethod
    def new(cls, shape: Shape, groups: int, device: torch.device) -> Slate:
        counts, pinned = shape.counts(groups), device.type == "cuda"
        buffer = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        tokens, sources, positions, drafts, slots, table, lots = buffer.split(counts)
        sheets = (Sheet(shape, groups, pinned), Sheet(shape, groups, pinned))
        lots_5N = lots.view(torch.float64).view(5, -1)
        wide = (tokens.view(shape.rows, -1), sources, positions, drafts)
        return cls(shape, sheets, buffer, *wide, slots.view(groups, -1), table.view(shape.rows, -1), lots_5N)

    def fill(self, turn: int, parts: Sequence[Part], lots: Sequence[Sequence[Lot]], spare_page: int) -> None:
        """Write a step's numbers and send them."""
        self.sheets[turn].fill(parts, lots, spare_page)
        self.device.copy_(self.sheets[turn].tensor, non_blocking=True)


class StaticBatch(Batch):
    """`Batch` over tensors that stay where they are."""

    def __init__(self, pages: Pages, table: Tensor, slots: Tensor) -> None:
        self._pages, self._rows, self.inputs = pages, None, {}
        self._table, self._slots = table, list(slots)


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded step and what it leaves. packing: the recording does not keep what it reads alive, so this does."""

    graph: torch.cuda.CUDAGraph
    logits: Tensor
    figures: Tensor
    packing: Packing


@dataclass(frozen=True, eq=False)
class Launched:
    """Tokens on their way to the host: float64 [3, N] of `sampler.figures`, there once `event` has passed."""

    figures: Tensor
    parts: Sequence[Part]
    tokens: int
    event: torch.cuda.Event | None = None

    def wait(self) -> list[list[Drawn]]:
        """For each part the tokens after it and after each of its drafts."""
        if self.event is not None:
            self.event.synchronize()
        drawn = drawn_of(self.figures[:, : len(self.parts) * self.tokens].tolist())
        if self.tokens == 1:
            return [[one] for one in drawn]
        starts = range(0, len(drawn), self.tokens)
        return [drawn[at : at + 1 + len(part.drafts)] for at, part in zip(starts, self.parts, strict=True)]


class DecodeGraphs:
    """Recorded steps by shape and way of drawing. spare_page: a page that belongs to nobody else. most_drafts: that a
    row may have; 0 where drafts cannot be verified here. captures: False runs the same step without a recording, for
    rows that are all taken (that is what a CPU can do)."""

    def __init__(
        self,
        model: K3,
        pages: Pages,
        spare_page: int,
        longest: int,
        sizes: Sequence[int] = SIZES,
        most_drafts: int = 0,
        captures: bool = True,
    ) -> None:
        self._model, self._pages, self.spare_page, self._captures = model, pages, spare_page, captures
        self._sizes, self.most_drafts = sorted(sizes), most_drafts
        self._widest = -(-longest // pages.layout.page_tokens) + 1
        self._slates: dict[Shape, Slate] = {}
        self._recorded: dict[tuple[Shape, Way], Recording] = {}
        most = self._sizes[-1]
        self._bench = Bench(pages, most, 1 + most_drafts)
        self._drawn = torch.zeros(most, dtype=torch.int64, device=pages.device)
        room = 3 * most * (1 + most_drafts)
        pinned = pages.device.type == "cuda"
        self._arrived = [torch.zeros(room, dtype=torch.float64, pin_memory=pinned) for _ in range(2)]
        self._turn = 0
        self._asked: tuple[Sequence[Part], tuple[Shape, Way]] | None = None
        self._memory = None

    def can_run(self, parts: Sequence[Part]) -> bool:
        """Whether this step is one token of each sequence and not too many drafts, each of them drawn from."""
        for p in parts:
            if p.count != 1 or p.scratch or len(p.drafts) > self.most_drafts or not p.ends:
                return False
            if p.sequence.request.params.expert_ids:
                return False
        return len(parts) <= self._sizes[-1]

    def is_recorded(self, parts: Sequence[Part]) -> bool:
        """Whether `launch` needs no new recording, which would draw over what the step before it drew."""
        return not self._captures or self._kind(parts) in self._recorded

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> Tensor:
        """Logits fp32 [S, W] of parts without drafts, maybe in a buffer that the next step overwrites."""
        assert not any(part.drafts for part in parts), "what is drawn elsewhere cannot be committed here"
        logits_SW = self._replay(parts, [[NO_LOT]] * len(parts), Way.GREEDY)[0]
        return logits_SW.to(torch.promote_types(logits_SW.dtype, torch.float32))

    @torch.inference_mode()
    def launch(self, parts: Sequence[Part], lots: Sequence[Sequence[Lot]]) -> Launched:
        """Run the parts and draw a token for each of them and of their drafts; states move on by what came true. At
        most one other step may be under way."""
        shape, way = self._kind(parts)
        _, figures_3N = self._replay(parts, lots, way)
        tokens = shape.tokens
        if not figures_3N.is_cuda:
            return Launched(figures_3N, parts, tokens)
        arrived_3N = self._arrived[self._turn][: figures_3N.numel()].view(figures_3N.shape)
        arrived_3N.copy_(figures_3N, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        return Launched(arrived_3N, parts, tokens, event)

    def _replay(self, parts: Sequence[Part], lots: Sequence[Sequence[Lot]], way: Way) -> tuple[Tensor, Tensor]:
        shape, self._turn = self._kind(parts)[0], 1 - self._turn
        self._asked = None  # whoever ran is forgotten
        if shape not in self._slates:
            self._slates[shape] = Slate.new(shape, self._pages.layout.groups, self._pages.device)
        slate = self._slates[shape]
        if not self._captures:
            slate.fill(self._turn, parts, lots, self.spare_page)
            packing = Packing.of([shape.tokens] * len(parts), [p.start for p in parts], self._pages.device)
            return self._forward(slate, packing, way)
        if (shape, way) not in self._recorded:
            self._recorded[shape, way] = self._record(slate, way)
        recording = self._recorded[shape, way]
        slate.fill(self._turn, parts, lots, self.spare_page)
        recording.graph.replay()
        return recording.logits[: len(parts)], recording.figures

    def _kind(self, parts: Sequence[Part]) -> tuple[Shape, Way]:
        """What a step is recorded by; it is asked for several times before the step runs."""
        if self._asked is None or self._asked[0] is not parts:
            way = way_of(part.sequence.request.params for part in parts)
            self._asked = parts, (self._shape(parts), way)
        return self._asked[1]

    def _shape(self, parts: Sequence[Part]) -> Shape:
        """Rounded up so that there are few of them. All tokens of a row have a place in the table."""
        tokens = 1 + self.most_drafts if any(part.drafts for part in parts) else 1
        ends = max(part.start for part in parts) + tokens
        held = max(len(part.sequence.holding.latents) for part in parts if part.sequence.holding is not None)
        longest = max(held, -(-ends // self._pages.layout.page_tokens))
        width = min(max(4, 1 << (longest - 1).bit_length()), max(self._widest, longest))
        return Shape(next(size for size in self._sizes if size >= len(parts)), width, tokens)

    def _record(self, slate: Slate, way: Way) -> Recording:
        slate.fill(self._turn, [], [], self.spare_page)
        packing, early = self._static_packing(slate), slate.tokens.numel() <= CHAINED_TOKENS
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with chain(early), torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets every op make what it keeps
                self._forward(slate, packing, way)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.current_stream().synchronize()  # the sheet is written again
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with chain(early), torch.cuda.graph(graph, pool=self._memory):
            logits_NW, figures_3N = self._forward(slate, packing, way)
        return Recording(graph, logits_NW, figures_3N, packing)

    def _static_packing(self, slate: Slate) -> Packing:
        """T tokens of each row. The host knows only a bound on what was consumed: ops read the lengths on the
        device."""
        rows, tokens = slate.tokens.shape
        bound = slate.shape.width * self._pages.layout.page_tokens - tokens
        packing = Packing.of([tokens] * rows, [bound] * rows, self._pages.device)
        packing.history.copy_(slate.positions)
        packing.__dict__["positions"] = slate.positions if tokens == 1 else _places(slate)  # not those of the bound
        return packing

    def _forward(self, slate: Slate, packing: Packing, way: Way) -> tuple[Tensor, Tensor]:
        """Logits [N, W] and figures [3, N]; what is drawn stays for the next step."""
        drafted = slate.shape.tokens > 1
        places_N = packing.positions if drafted and self._captures else None  # else they are where they should be
        given = (slate.tokens, slate.sources, self._drawn, slate.positions)
        tokens_N = step_tokens(*given, packing.history, places_N)
        tokens_ST = tokens_N.view(slate.tokens.shape)
        trial = Trial(self._pages, slate.table, slate.slots, self._bench, self.spare_page) if drafted else None
        batch = trial or StaticBatch(self._pages, slate.table, slate.slots)
        hidden_ND = self._model(tokens_N, Context(packing, batch))
        logits_NW = linear(hidden_ND, self._model.head_weight)
        drawn_N, figures_3N = choose_unchanged(logits_NW, slate.lots, way)
        drawn_ST = drawn_N.view(tokens_ST.shape)
        if trial is not None:
            places_T = torch.arange(slate.shape.tokens - 1, device=drawn_N.device)
            is_true_ST = (drawn_ST[:, :-1] == tokens_ST[:, 1:]) & (places_T < slate.drafts[:, None])
            trial.commit(1 + is_true_ST.long().cumprod(1).sum(1))
        self._drawn[: len(drawn_ST)] = drawn_ST[:, 0]
        return logits_NW, figures_3N


def _places(slate: Slate) -> Tensor:
    """Positions of all tokens, [N]."""
    tokens = slate.shape.tokens
    return (slate.positions[:, None] + torch.arange(tokens, device=slate.positions.device)).flatten()
