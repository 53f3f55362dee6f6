"""Batches from a built training set, by its mixture: the same sequence for any number of ranks, found again at once.

    pass p     slots 0 ... M - 1, M = sum of draws (mixture.py), dealt to streams by a permutation from (seed, p)
    slot       of stream s is draw number g of s, counted slot by slot over all passes
    draw g     of s is piece P(g mod n_s), P a permutation drawn from (seed, s, g // n_s)
    batches    pieces end to end, cut at `batch_tokens`; what is cut off opens the next batch (as in loader.py)
    rank r     of R takes batches r, r + R, r + 2 R ... of that one sequence

Nothing is stored but the place and the draws of each stream in this pass, and no list of pieces is ever made: memory
does not grow with the set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from math import ceil
from pathlib import Path

import numpy as np
import torch

from rille.data.dataset import Dataset
from rille.data.loader import Batch
from rille.data.mixture import Mixture, draws_a_pass, draws_before, draws_of_pass, next_pass
from rille.data.shuffle import Permutation

_BLOCK = 1024  # slots whose pieces are found at once
_ORDER = 2  # of the draws; a place in another order means other batches


class MixedLoader:
    """Endless training batches of exactly `batch_tokens` tokens from a `Dataset`."""

    def __init__(
        self,
        dataset: Dataset | str | Path,
        batch_tokens: int,
        sequence_length: int,
        seed: int = 0,
        *,
        mixture: Mixture | None = None,
        rank: int = 0,
        ranks: int = 1,
    ):
        """mixture: none takes the set's own. rank of ranks: which batches are given out here.

        Raises ValueError for sizes below 1, a rank that is not one of ranks, and what `Dataset` and the mixture refuse.
        """
        if batch_tokens < 1 or sequence_length < 1:
            raise ValueError(f"batch_tokens {batch_tokens} and sequence_length {sequence_length} must be at least 1")
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} is not one of {ranks} ranks, which count from 0")
        dataset = dataset if isinstance(dataset, Dataset) else Dataset(dataset)
        self._streams = dataset.streams(sequence_length)
        self._sizes = [stream.size for stream in self._streams]
        self._domains = [dataset.domains.index(stream.domain) for stream in self._streams]
        self._mixture = dataset.mixture if mixture is None else mixture
        self._rank, self._ranks = rank, ranks
        self._settings = {
            "seed": seed,
            "batch_tokens": batch_tokens,
            "sequence_length": sequence_length,
            "dataset": dataset.digest,
            "draws": draws_a_pass(self._sizes, self._mixture),
            "max_epochs": self._mixture.max_epochs,
            "order": _ORDER,
        }
        self._go_to(0, 0, 0)

    def begin(self, read: Mapping[str, float]) -> None:
        """Go to the first batch of a stage; `read` are the epochs of the stages before, which count for max_epochs."""
        self._mixture = replace(self._mixture, read=dict(read))
        self._go_to(0, 0, 0)

    @property
    def epoch(self) -> int:
        """Passes that are complete."""
        return self._pass

    @property
    def most_targets(self) -> int | None:
        """More than so many tokens cannot be read before max_epochs ends it; None without it."""
        if (cap := self._mixture.max_epochs) is None:
            return None
        live = [s for s, draws in zip(self._sizes, self._settings["draws"], strict=True) if draws]
        return sum(min(s.targets * ceil(cap), round(s.pieces * cap) * self._settings["sequence_length"]) for s in live)

    def epochs(self) -> dict[str, float]:
        """How often the documents of each domain were read so far, on average over its tokens."""
        read: dict[str, float] = {}
        targets: dict[str, int] = {}
        for size, before, drawn in zip(self._sizes, self._before, self._drawn, strict=True):
            done = (before + drawn) / max(1, size.pieces)
            read[size.domain] = read.get(size.domain, 0) + done * size.targets
            targets[size.domain] = targets.get(size.domain, 0) + size.targets
        return {name: read[name] / max(1, targets[name]) for name in read}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """This rank's next batch. Raises ValueError when max_epochs leaves nothing to read."""
        of_all_ranks = [self._spans() for _ in range(self._ranks)]
        return self._read(of_all_ranks[self._rank])

    def state(self) -> dict:
        """Where all ranks stand, as JSON can hold it; it is the same on each, and says nothing of their number."""
        place = {"epoch": self._pass, "piece": self._slot, "offset": self._offset, "drawn": [*self._drawn]}
        return {**self._settings, **place}

    def restore(self, state: dict) -> None:
        """Continue from a `state()` of any number of ranks. Raises ValueError if it is of other settings or data."""
        wrong = [f"{key} {state.get(key)}, now {now}" for key, now in self._settings.items() if state.get(key) != now]
        if wrong:
            raise ValueError(f"the saved place in the data is of another run: {'; '.join(wrong)}; resume with the same")
        self._go_to(state["epoch"], state["piece"], state["offset"], state["drawn"])

    def _go_to(self, number: int, slot: int, offset: int, drawn: Sequence[int] | None = None) -> None:
        """drawn: slots of each stream before this one, none at the beginning of a pass."""
        self._pass, self._slot, self._offset = number, slot, offset
        self._before = draws_before(number, self._sizes, self._mixture)
        self._pass_draws = draws_of_pass(number, self._sizes, self._mixture)
        self._drawn = [0] * len(self._sizes) if drawn is None else [*drawn]
        self._block: list[tuple[int, int]] = []
        self._block_start = 0
        self._order = Permutation(max(1, sum(self._pass_draws)), (self._settings["seed"], 0, number))

    def _spans(self) -> list[tuple[int, int, int, int]]:
        """(stream, shard, start, length) of the pieces of the next batch; moves on."""
        spans = []
        room = self._settings["batch_tokens"]
        while room:
            stream, piece = self._piece_at(self._slot)
            shard, start, length = self._streams[stream].piece(piece)
            taken = min(room, length - self._offset)
            spans.append((stream, shard, start + self._offset, taken))
            room -= taken
            self._offset += taken
            if self._offset == length:
                self._next_slot()
        return spans

    def _next_slot(self) -> None:
        self._drawn[self._piece_at(self._slot)[0]] += 1
        self._slot, self._offset = self._slot + 1, 0
        if self._slot == sum(self._pass_draws):
            self._go_to(next_pass(self._pass + 1, self._sizes, self._mixture), 0, 0)

    def _piece_at(self, slot: int) -> tuple[int, int]:
        if not any(self._pass_draws):
            raise ValueError(
                f"the data is used up after {self._pass} passes of this stage: every stream was read max_epochs "
                f"{self._mixture.max_epochs} times; train shorter, raise max_epochs or build a larger set"
            )
        if not self._block_start <= slot < self._block_start + len(self._block):
            self._block_start = slot
            self._block = self._pieces(np.arange(slot, min(slot + _BLOCK, sum(self._pass_draws))))
        return self._block[slot - self._block_start]

    def _pieces(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """(stream, piece) of slots from the present one on."""
        first = np.array([0, *accumulate(self._pass_draws)])
        places = self._order(slots)
        streams = np.searchsorted(first, places, side="right") - 1
        pieces = np.empty_like(places)
        for number in np.unique(streams).tolist():
            mine = streams == number
            begun = self._before[number] + self._drawn[number]
            pieces[mine] = self._pieces_of(number, np.arange(begun, begun + int(mine.sum())))
        return list(zip(streams.tolist(), pieces.tolist(), strict=True))

    def _pieces_of(self, stream: int, draws: np.ndarray) -> np.ndarray:
        count = self._sizes[stream].pieces
        pieces = np.empty_like(draws)
        for epoch in np.unique(draws // count).tolist():
            mine = draws // count == epoch
            order = Permutation(count, (self._settings["seed"], 1, stream, epoch))
            pieces[mine] = order(draws[mine] % count)
        return pieces

    def _read(self, spans: list[tuple[int, int, int, int]]) -> Batch:
        parts = [self._streams[stream].read(shard, start, length) for stream, shard, start, length in spans]
        inputs = np.concatenate([part[:-1] for part in parts]).astype(np.int64)
        targets = np.concatenate([part[1:] for part in parts]).astype(np.int64)
        domains = tuple(self._domains[stream] for stream, *_ in spans)
        return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), tuple(span[3] for span in spans), domains)
