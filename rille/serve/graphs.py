"""Decoding as a recorded CUDA graph: one token of every sequence, with shapes that never change.

A step of many small kernels costs the host more than the device. Recorded once for a number of rows and a width of the
page table, it is replayed as one launch; what differs from step to step lies in one buffer, which one copy fills:

    tokens [S] | positions [S] | slots [G, S] | table [S, T]

Rows without a sequence have negative slots and a page of their own to write on. Weights that change in place, and pages
that change hands, are what a recorded step reads next.

Suffixes: S rows, G groups of KDA layers, T pages of a sequence's latents, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from rille.model.context import Context
from rille.model.model import K3
from rille.packing import Packing
from rille.serve.paged import Batch, Pages
from rille.serve.sequences import Part

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


@dataclass(frozen=True, eq=False)
class Slate:
    """The buffer of a recorded step on the host and on the device, and its parts there."""

    host: Tensor
    device: Tensor
    tokens: Tensor
    positions: Tensor
    slots: Tensor
    table: Tensor

    @classmethod
    def new(cls, size: int, width: int, groups: int, device: torch.device) -> Slate:
        counts = (size, size, groups * size, size * width)
        buffer = torch.zeros(sum(counts), dtype=torch.int64, device=device)
        host = torch.zeros(sum(counts), dtype=torch.int64, pin_memory=device.type == "cuda")
        tokens, positions, slots, table = buffer.split(counts)
        return cls(host, buffer, tokens, positions, slots.view(groups, size), table.view(size, width))

    def fill(self, parts: Sequence[Part], spare_page: int) -> None:
        """Write a step's numbers and send them."""
        (groups, size), width = self.slots.shape, self.table.shape[1]
        flat = self.host.numpy()
        tokens, positions = flat[:size], flat[size : 2 * size]
        slots_GS = flat[2 * size : (2 + groups) * size].reshape(groups, size)
        table_ST = flat[(2 + groups) * size :].reshape(size, width)
        tokens[len(parts) :], positions[len(parts) :], slots_GS[:, len(parts) :] = 0, 0, -1
        table_ST[len(parts) :] = spare_page
        for row, part in enumerate(parts):
            holding = part.sequence.holding
            assert holding is not None
            tokens[row], positions[row] = part.sequence.chain.ids[part.start], part.start
            slots_GS[:, row] = holding.state
            table_ST[row, : len(holding.latents)] = [entry.pages[0] for entry in holding.latents]
        self.device.copy_(self.host, non_blocking=True)


class StaticBatch(Batch):
    """`Batch` over tensors that stay where they are."""

    def __init__(self, pages: Pages, slate: Slate) -> None:
        self._pages, self._rows, self.inputs = pages, None, {}
        self._table, self._slots = slate.table, list(slate.slots)


class DecodeGraphs:
    """Recorded steps by size. spare_page: a page that belongs to nobody else. captures: False runs the same step
    without a recording, for rows that are all taken (that is what a CPU can do)."""

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
        # A recording holds no tensor that it reads: its packing must live as long.
        self._recorded: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, Tensor, Packing]] = {}
        self._memory = None

    def can_run(self, parts: Sequence[Part]) -> bool:
        """Whether this step is one token of each sequence, each of them drawn from, and not too many."""
        plain = all(part.count == 1 and part.ends and not part.drafts for part in parts)
        return (
            plain
            and not any(part.sequence.request.params.expert_ids for part in parts)
            and (len(parts) <= self._sizes[-1])
        )

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> Tensor:
        """Logits fp32 [S, W] of the parts, in a buffer that the next step overwrites."""
        key = self._key(parts)
        if key not in self._slates:
            self._slates[key] = Slate.new(*key, self._pages.layout.groups, self._pages.device)
        slate = self._slates[key]
        if not self._captures:
            slate.fill(parts, self._spare_page)
            return self._forward(slate, Packing.of([1] * len(parts), [p.start for p in parts], self._pages.device))
        if key not in self._recorded:
            self._recorded[key] = self._record(slate)
        graph, logits_SW, _ = self._recorded[key]
        slate.fill(parts, self._spare_page)
        graph.replay()
        return logits_SW[: len(parts)]

    def _key(self, parts: Sequence[Part]) -> tuple[int, int]:
        """Rows and width of the table, rounded up so that there are few of them."""
        longest = max(len(part.sequence.holding.latents) for part in parts if part.sequence.holding is not None)
        width = min(max(4, 1 << (longest - 1).bit_length()), max(self._widest, longest))
        return next(size for size in self._sizes if size >= len(parts)), width

    def _record(self, slate: Slate) -> tuple[torch.cuda.CUDAGraph, Tensor, Packing]:
        slate.fill([], self._spare_page)
        packing = self._static_packing(slate)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):  # compiles, and lets every op make what it keeps
                self._forward(slate, packing)
        torch.cuda.current_stream().wait_stream(side)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            packing.history.copy_(slate.positions)
            logits_SW = self._forward(slate, packing)
        return graph, logits_SW, packing

    def _static_packing(self, slate: Slate) -> Packing:
        """One token of each row. The host knows only a bound on what was consumed: ops read the lengths on the
        device."""
        size, bound = slate.table.shape[0], slate.table.shape[1] * self._pages.layout.page_tokens - 1
        packing = Packing.of([1] * size, [bound] * size, self._pages.device)
        packing.__dict__["positions"] = slate.positions  # instead of what follows from the bound
        packing.history.copy_(slate.positions)
        return packing

    def _forward(self, slate: Slate, packing: Packing) -> Tensor:
        hidden_SD = self._model(slate.tokens, Context(packing, StaticBatch(self._pages, slate)))
        logits_SW = linear(hidden_SD, self._model.head_weight)
        return logits_SW.to(torch.promote_types(logits_SW.dtype, torch.float32))
