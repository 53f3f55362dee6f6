"""One step on the device: the parts of many sequences as one packed batch, from token ids to logits.

    tokens of part 1 | of part 2 | ...     chunks of prompts, single tokens, tokens with drafts: one forward
    rows whose next token is asked for  ->  head  ->  logits [R, W]

A part with drafts runs on a copy of its state. Its projected inputs are remembered, so that `replay` can move the state
itself on by the tokens that came true: no state is stored for any draft. Latents need nothing: what was rejected lies
behind the end and is written over.

Suffixes: N packed tokens, R rows, W vocabulary, D width, M rows of pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rille.model.beside import in_line
from rille.model.context import Context, Routes
from rille.model.kda import KDA
from rille.model.media import Media
from rille.model.model import K3
from rille.ops.kda import Projected
from rille.ops.linear import linear
from rille.packing import Packing, moved
from rille.serve.graphs import DecodeGraphs
from rille.serve.paged import Batch, Pages, Saving
from rille.serve.prefix import Holding
from rille.serve.prompts import PromptGraphs
from rille.serve.sequences import Part
from rille.serve.sequences import Sequence as Choice


@dataclass
class Ran:
    """What a step left. logits [R, W]: rows of the parts in order, `rows[i]` of them of part i; hidden [N, D], where
    asked for, with each part's first row in `starts`; experts: MoE layer -> ids [R, A] of those rows; inputs: what
    `replay` needs."""

    logits: Tensor
    rows: list[int]
    starts: list[int]
    hidden: Tensor | None
    experts: dict[int, Tensor]
    inputs: dict[int, Projected]


class Runner:
    """A model and its pages. keeps_hidden: hand out the final hidden states, for a drafter that reads them. graphs: for
    steps that only decode; prompts: for others."""

    def __init__(self, model: K3, pages: Pages, *, deterministic: bool = False) -> None:
        self.model, self.pages, self.deterministic = model, pages, deterministic
        self.keeps_hidden = False
        self.graphs: DecodeGraphs | None = None
        self.prompts: PromptGraphs | None = None
        self._features: dict[int, Tensor] = {}

    @torch.inference_mode()
    def run(self, parts: Sequence[Part], with_experts: bool = False) -> Ran:
        """Run the parts; deterministic: each as a batch of its own."""
        if self.graphs is not None and not self.keeps_hidden and self.graphs.can_run(parts):
            return Ran(self.graphs.run(parts), [1] * len(parts), list(range(len(parts))), None, {}, {})
        if self.prompts is not None and not self.keeps_hidden and (logits_RW := self.prompts.run(parts)) is not None:
            return Ran(logits_RW, [int(part.ends) for part in parts], [], None, {}, {})
        groups = [[part] for part in parts] if self.deterministic else [list(parts)]
        results = [self._forward(group, with_experts) for group in groups]
        if len(results) == 1:
            return results[0]
        offsets = np.cumsum([0, *(len(r.hidden) if r.hidden is not None else 0 for r in results)])
        return Ran(
            torch.cat([r.logits for r in results]),
            [count for r in results for count in r.rows],
            [int(offset) for offset in offsets[:-1]],
            torch.cat([r.hidden for r in results if r.hidden is not None]) if self.keeps_hidden else None,
            {layer: torch.cat([r.experts[layer] for r in results]) for layer in results[0].experts},
            {},
        )

    def _forward(self, parts: list[Part], with_experts: bool) -> Ran:
        device = self.model.device
        ids = np.concatenate([tokens_of(part) for part in parts])
        packing = Packing.of([part.num_tokens for part in parts], [part.start for part in parts], device)
        starts = np.cumsum([0, *packing.lengths])
        drafted = [np.arange(a, a + p.num_tokens) for a, p in zip(starts, parts, strict=False) if p.drafts]
        remembered = moved(torch.from_numpy(np.concatenate(drafted)), device) if drafted else None
        states = [part.scratch or holding_of(part).state for part in parts]
        tables = [latents_of(part) for part in parts]
        if any(part.saves for part in parts):
            saves = [[(place - part.start, pages) for place, pages in part.saves] for part in parts]
            batch = Saving(self.pages, tables, states, remembered, packing, saves)
        else:
            batch = Batch(self.pages, tables, states, remembered)
        context = Context(packing, batch, Routes() if with_experts else None, media=self._media(parts, starts))
        with in_line():
            hidden_ND = self.model(moved(torch.from_numpy(ids), device), context)
        wanted = [range(s + p.count - 1, s + p.num_tokens) for s, p in zip(starts, parts, strict=False) if p.ends]
        rows_R = moved(torch.tensor([row for rows in wanted for row in rows], dtype=torch.int64), device)
        logits_RW = linear(hidden_ND[rows_R], self.model.head_weight)
        chosen = context.routes.chosen if context.routes is not None else {}
        return Ran(
            logits_RW.to(torch.promote_types(logits_RW.dtype, torch.float32)),
            [len(part.drafts) + 1 if part.ends else 0 for part in parts],
            starts[:-1].tolist(),
            hidden_ND if self.keeps_hidden else None,
            {layer: ids_NA[rows_R] for layer, ids_NA in chosen.items()},
            batch.inputs,
        )

    @torch.inference_mode()
    def replay(self, ran: Ran, parts: Sequence[Part], accepted: Sequence[int]) -> None:
        """Move the states of parts on whose drafts came true in part: by the known tokens and `accepted` drafts."""
        some = [a < len(part.drafts) for part, a in zip(parts, accepted, strict=True)]
        if not any(some):
            return
        rows, chosen, lengths, first = [], [], [], 0
        for part, count, is_partial in zip(parts, accepted, some, strict=True):
            if is_partial:
                rows.append(np.arange(first, first + part.count + count))
                chosen.append(part)
                lengths.append(part.count + count)
            first += part.num_tokens if part.drafts else 0
        rows_N = moved(torch.from_numpy(np.concatenate(rows)), self.model.device)
        packing = Packing.of(lengths, [part.start for part in chosen], self.model.device)
        batch = Batch(self.pages, [[]] * len(chosen), [holding_of(part).state for part in chosen])
        for block in self.model.blocks():
            if isinstance(block.attn, KDA):
                i = ran.inputs[block.layer]
                again = Projected(i.qkv[rows_N], i.z[rows_N], i.b[rows_N], i.gate[rows_N])
                block.attn.replay(again, Context(packing, batch))

    # --- pictures ---

    def _media(self, parts: list[Part], starts: np.ndarray) -> Media | None:
        rows, features = [], []
        for part, start in zip(parts, starts, strict=False):
            if not part.sequence.request.images:
                continue
            places = picture_places(part.sequence, self.model)
            inside = np.flatnonzero((places >= part.start) & (places < part.start + part.count))
            if len(inside):
                rows.append(places[inside] - part.start + start)
                features.append(self._encoded(part.sequence)[torch.from_numpy(inside).to(self.model.device)])
        if not rows:
            return None
        return Media(torch.from_numpy(np.concatenate(rows)).to(self.model.device), torch.cat(features))

    def _encoded(self, sequence: Choice) -> Tensor:
        key = id(sequence.request)
        if key not in self._features:
            encoded = [self.model.encode_images(images) for images in sequence.request.images]
            self._features[key] = torch.cat(encoded)
        return self._features[key]

    def forget(self, sequence: Choice) -> None:
        """Let go of what was kept for a sequence (a sibling that still reads its prompt encodes its pictures again)."""
        self._features.pop(id(sequence.request), None)


def picture_places(sequence: Choice, model: K3) -> np.ndarray:
    """Positions of the rows of pictures in a prompt."""
    return np.flatnonzero(np.asarray(sequence.request.prompt) == model.config.media_pad_id)


def tokens_of(part: Part) -> np.ndarray:
    ids = part.sequence.chain.ids[part.start : part.start + part.count]
    return np.array([*ids, *part.drafts], dtype=np.int64)


def holding_of(part: Part) -> Holding:
    assert part.sequence.holding is not None
    return part.sequence.holding


def latents_of(part: Part) -> list[int]:
    return [entry.pages[0] for entry in holding_of(part).latents]
