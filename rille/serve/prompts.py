"""Steps with prompts as recorded CUDA graphs: chunks of prompts, and single tokens of those that write meanwhile.

Op by op such a step costs the host some 450 launches, many times what a GPU takes for a few hundred tokens. So it is
recorded for a few numbers of tokens, rows, pages and kept states, rounded up (`rille.serve.padded`), once a shape has
come a second time, and replayed as one launch. The first time, and where a shape is too large or its memory too much,
the step runs op by op.

What differs from the same step op by op: more rows to each product, whose sums are then split otherwise; sequences
without a history read their latents from the pages, like all others; no sequence is cut for several processors; of the
sequences with a few new tokens those of one token are split along their pages, not those of up to 16.

Suffixes: N tokens, S sequences, R rows whose logits are wanted, W vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rille.model.context import Context
from rille.model.mla import MLA
from rille.model.model import K3
from rille.ops.conv import TailPlaces
from rille.ops.conv import choose_backend as choose_conv
from rille.ops.kda import Gate, Places, cutting
from rille.ops.kda import choose_backend as choose_kda
from rille.ops.kda.arguments import CHUNK
from rille.ops.linear import linear
from rille.ops.mla import LatentCache, choose_latent_backend
from rille.ops.mla.classes import settle_classes
from rille.packing import ChunkMap, Packing
from rille.serve.graphs import StaticBatch
from rille.serve.padded import Form, Numbers, Shape, Sheet
from rille.serve.paged import Pages, Saving
from rille.serve.sequences import Part

TOKENS = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
ROWS = (4, 16, 64, 256)
SAVES = (0, 4, 16, 64)
LEAST_WIDTH, WIDER = 4, 4  # pages of a row of the table, and by how much the next size has more
MOST_RECORDED = 64  # shapes; the first that come twice


@dataclass(frozen=True, eq=False)
class Slate:
    """The numbers of a step on the device, in one buffer that stays where it is."""

    form: Form
    buffer: Tensor
    of: dict[str, Tensor]

    @classmethod
    def new(cls, form: Form, device: torch.device) -> Slate:
        buffer = torch.zeros(form.size, dtype=torch.uint8, device=device)
        return cls(form, buffer, form.tensors(buffer))

    def packing(self, numbers: Numbers) -> Packing:
        """Of all sequences. numbers: those of the step, or bounds where ops read the others on the device."""
        of, M = self.of, self.form.shape.chunks
        known = numbers.starts_M, numbers.lengths_M
        chunks = ChunkMap(CHUNK, of["first"], numbers.per_sequence, of["spans"][:M], *known)
        packing = Packing(numbers.lengths, numbers.consumed, of["starts"], of["history"], _chunks={CHUNK: chunks})
        named = dict(sequence_of=of["sequence_of"], positions=of["positions"], longest_first=of["order"])
        packing.__dict__.update(named)  # not those of the bounds
        settle_classes(packing, [(1, of["singles"]), (self.form.shape.tokens, of["others"])])
        return packing

    def places(self, numbers: Numbers) -> Places:
        """Where states are kept. Ops on a CPU take as many rows as the host says."""
        of, (_, _, _, P), M = self.of, self.form.shape, self.form.shape.chunks
        rest = Packing(numbers.rest, (0,) * P, of["rest_starts"], of["rest_history"])
        rest.__dict__.update(longest_first=of["rest_order"])
        rows_R = of["rest_rows"][: rest.num_tokens]
        return Places(P, of["index"], (M, *[P] * 5), rows_R, rest, of["spans"], of["rest_first"])


class StaticSaving(Saving):
    """`Saving` over a slate."""

    def __init__(self, pages: Pages, slate: Slate, numbers: Numbers) -> None:
        of, places = slate.of, slate.places(numbers)
        self._pages, self._rows, self.inputs = pages, None, {}
        self._table, self._slots, self._kept = of["table"], list(of["slots"]), list(of["kept"])
        self._at = [places.at(*slots) for slots in zip(self._slots, self._kept, strict=True)]
        self._tail_places = TailPlaces(of["tail_rows"], of["tail_sequences"])


@dataclass(frozen=True, eq=False)
class Recording:
    """A recorded step, and the numbers that it reads."""

    graph: torch.cuda.CUDAGraph
    slate: Slate


class PromptGraphs:
    """Recorded steps with prompts, by shape. spares: pages that belong to nobody else; one is enough on a GPU. longest:
    tokens of a sequence; rows: parts of a step; room: bytes that recorded steps may take, all of them in the same
    memory. captures: False runs every step in its padded form without a recording (that is what a CPU can do)."""

    def __init__(
        self, model: K3, pages: Pages, spares: Sequence[int], longest: int, rows: int, room: int, captures: bool = True
    ) -> None:
        self._model, self._pages, self._spares, self._captures = model, pages, spares, captures
        self._rows = [size for size, less in zip(ROWS, (0, *ROWS), strict=False) if less < rows]
        self._widest, self._room = -(-longest // pages.layout.page_tokens) + 1, room
        wide, words = torch.promote_types(model.dtype, torch.float32), model.config.vocab_size
        self._logits = torch.empty(self._rows[-1], words, dtype=wide, device=pages.device)
        self._seen: set[Shape] = set()
        self._refused: set[Shape] = set()
        self._recorded: dict[Shape, Recording] = {}
        self._memory = None

    @torch.inference_mode()
    def run(self, parts: Sequence[Part]) -> Tensor | None:
        """Logits fp32 [R, W] behind the parts that end, in a buffer that the next step overwrites. None where the step
        is to run op by op."""
        shape = self._shape(parts)
        if shape is None:
            return None
        if not self._captures:
            slate = self._new_slate(shape)
            self._forward(slate, self._fill(slate, parts))
        elif (recording := self._recording(shape)) is not None:
            self._fill(recording.slate, parts)
            recording.graph.replay()
        else:
            return None
        return self._logits[: sum(part.ends for part in parts)]

    def _shape(self, parts: Sequence[Part]) -> Shape | None:
        """Rounded up so that there are few of them; None for a step that is none of them."""
        for part in parts:
            request = part.sequence.request
            if part.drafts or part.scratch or part.source >= 0 or request.params.expert_ids:
                return None
            if request.images and part.start < part.sequence.num_prompt:
                return None
        tokens = _least(TOKENS, sum(part.count for part in parts))
        rows = _least(self._rows, len(parts))
        saves = _least(SAVES, sum(len(part.saves) for part in parts))
        if tokens is None or rows is None or saves is None:
            return None
        held = max(len(part.sequence.holding.latents) for part in parts if part.sequence.holding is not None)
        needed, width = max(held, -(-tokens // self._pages.layout.page_tokens)), LEAST_WIDTH
        while width < needed:
            width *= WIDER
        return Shape(tokens, rows, max(needed, min(width, self._widest)), saves)

    def _new_slate(self, shape: Shape) -> Slate:
        return Slate.new(Form(shape, self._pages.layout.groups, self._pages.conv_width), self._pages.device)

    def _fill(self, slate: Slate, parts: Sequence[Part]) -> Numbers:
        """Write a step's numbers and send them: from memory that is new each time, since steps that draw nothing are
        not waited for."""
        sheet = Sheet(slate.form, parts, self._spares, pinned=slate.buffer.is_cuda)
        slate.buffer.copy_(sheet.buffer, non_blocking=True)
        return sheet.numbers

    def _recording(self, shape: Shape) -> Recording | None:
        """That of a shape, made when it comes a second time."""
        if shape not in self._recorded and shape not in self._refused:
            if shape not in self._seen:
                self._seen.add(shape)
            elif not self._is_full() and (made := self._record(shape)) is not None:
                self._recorded[shape] = made
            else:
                self._refused.add(shape)
        return self._recorded.get(shape)

    def _is_full(self) -> bool:
        if full := len(self._recorded) >= MOST_RECORDED:
            told = f"{MOST_RECORDED} shapes of steps with prompts are recorded; steps of others run op by op"
            warnings.warn(told, stacklevel=2)  # Python says it once
        return full

    def _record(self, shape: Shape) -> Recording | None:
        """None where there is no room for it. A step that is all padding runs first: it compiles, and shows what memory
        it takes."""
        slate, bounds, device = self._new_slate(shape), Numbers.bounds(shape), self._pages.device
        self._fill(slate, [])
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        self._forward(slate, bounds)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # given back by then
        room = min(self._room, torch.cuda.mem_get_info(device)[0] + cached)
        if (need := torch.cuda.max_memory_allocated(device) - before) > room:
            told = f"one takes {need / 2**30:.2f} GiB, and there are {room / 2**30:.2f} for them"
            warnings.warn(f"steps of {shape.tokens:,} tokens run op by op, not recorded: {told}", stacklevel=2)
            return None
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            self._forward(slate, bounds)
        return Recording(graph, slate)

    def _forward(self, slate: Slate, numbers: Numbers) -> None:
        """Leaves the logits. numbers: as in `Slate.packing`."""
        of = slate.of
        if slate.form.shape.saves:
            batch = StaticSaving(self._pages, slate, numbers)
        else:
            batch = StaticBatch(self._pages, of["table"], of["slots"])
        with cutting(None):
            hidden_ND = self._model(of["tokens"], Context(slate.packing(numbers), batch))
        self._logits[: slate.form.shape.rows] = linear(hidden_ND[of["wanted"]], self._model.head_weight)


def obstacle(model: K3, pages: Pages, with_prompts: bool = True) -> str:
    """Why ops of this model would ask the host for the lengths of sequences, which recorded steps do not know, or an
    empty string. with_prompts: whether sequences have more than one token."""
    for block in model.blocks():
        attn, chosen = block.attn, []
        x = torch.empty(1, attn.out_proj.shape[1], dtype=model.dtype, device=model.device)
        if isinstance(attn, MLA):
            cache = LatentCache(pages.latents[block.layer], torch.zeros(1, 1, dtype=torch.int64, device=x.device))
            q_NHR = x.new_empty(1, attn.query.shape[0] // attn.query_dim, cache.pool.shape[-1])
            chosen = [choose_latent_backend(q_NHR, cache, attn.kv_norm.shape[0], attn.query_dim**-0.5)]
        elif with_prompts:
            q_NHK = x.unflatten(1, (attn.heads, -1))
            gate = Gate(attn.A_log, attn.dt_bias.view(attn.heads, -1), attn.lower_bound)
            rest = (q_NHK[..., 0], gate, Packing.of([1], device=x.device))
            chosen = [choose_kda(q_NHK, q_NHK, q_NHK, q_NHK, *rest), choose_conv(x.repeat(1, 3), attn.qkv_conv)]
        for name, reason in chosen:
            if name != "triton":
                return reason
    return ""


def _least(sizes: Sequence[int], count: int) -> int | None:
    return next((size for size in sizes if size >= count), None)
