"""The one description of a batch: a flat token axis with sequence boundaries, never padding.

A batch of S sequences is one axis of N = sum(lengths) tokens. `starts` holds the S + 1 boundaries (what other projects
call cu_seqlens); `consumed` says how many tokens of each sequence went through the model before, so that the first row
of a sequence is not always its first token. Host numbers come first, device tensors follow from them once a batch: no
op asks the device for a size.

Suffixes: N packed tokens, S sequences, M chunks, C rows of a chunk.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

LARGEST = 2**31 - 1  # tokens of a batch or before it: boundaries are int32


def as_device(device: torch.device | str) -> torch.device:
    """A device that tensors can be on here. Raises ValueError for one that is misspelled or that this machine lacks."""
    try:
        found = torch.device(device) if isinstance(device, str | torch.device) else None
    except RuntimeError:
        found = None
    if found is None:
        raise ValueError(f'device is {device!r}; name one such as "cpu", "cuda", "cuda:0" or "meta"')
    here = torch.accelerator.current_accelerator(check_available=True)
    if found.type not in ("cpu", "meta", *([here.type] if here is not None else [])):
        raise ValueError(f"device {found}: this machine has no {found.type} device that torch can use; use cpu")
    if found.type not in ("cpu", "meta") and (found.index or 0) >= (count := torch.accelerator.device_count()):
        raise ValueError(f"device {found}: this machine has {count} of them, numbered from 0")
    return found


def moved(x: Tensor, device: torch.device) -> Tensor:
    """A host tensor on `device`. To a GPU it goes from pinned memory, in the stream's order: the host does not wait.
    Made in inference mode it still serves where gradients are wanted: what a batch keeps outlives the mode."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return moved(x.clone() if x.is_inference() else x, device)
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _whole(values: Sequence[int], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(index, values))
    except (TypeError, ValueError):
        shown = " ".join(repr(values).split())[:80]
        raise ValueError(
            f"packing: {name} must be a list of whole numbers, one for each sequence, not {shown}"
        ) from None


@dataclass(frozen=True, eq=False)
class ChunkMap:
    """Sequences cut into chunks of `size` rows; a chunk never crosses a sequence.

    per_sequence: chunks of each sequence, on the host. first_S int64: the sequence's first chunk. spans_M2 int32: the
    chunk's first token and its number of tokens, all that a kernel needs to find its rows. What only plain PyTorch
    reads is made when it is asked for: rows_MC int64: token of each row, 0 where there is none. mask_MC bool: which
    rows hold a token. sequence_M, order_M int64: the chunk's sequence and its place in it.
    """

    size: int
    first: Tensor
    per_sequence: tuple[int, ...]
    spans: Tensor
    starts_M: np.ndarray = field(repr=False)  # the host's numbers of the spans
    lengths_M: np.ndarray = field(repr=False)

    @cached_property
    def rows(self) -> Tensor:
        inside_MC = np.arange(self.size)
        rows_MC = np.where(inside_MC < self.lengths_M[:, None], self.starts_M[:, None] + inside_MC, 0)
        return moved(torch.from_numpy(rows_MC), self.first.device)

    @cached_property
    def mask(self) -> Tensor:
        return moved(torch.from_numpy(np.arange(self.size) < self.lengths_M[:, None]), self.first.device)

    @cached_property
    def sequence(self) -> Tensor:
        return moved(torch.from_numpy(self._sequence), self.first.device)

    @cached_property
    def order(self) -> Tensor:
        first_S = np.cumsum((0, *self.per_sequence))[:-1].astype(np.int64)
        order_M = np.arange(len(self.starts_M)) - first_S[self._sequence]
        return moved(torch.from_numpy(order_M), self.first.device)

    @property
    def _sequence(self) -> np.ndarray:
        return np.repeat(np.arange(len(self.per_sequence)), self.per_sequence).astype(np.int64)


@dataclass(frozen=True, eq=False)
class Packing:
    """Boundaries of the sequences of a batch, on the host and on the device. Make one with `Packing.of`."""

    lengths: tuple[int, ...]
    consumed: tuple[int, ...]
    starts: Tensor
    history: Tensor
    derived: dict[Hashable, Any] = field(default_factory=dict, repr=False)  # what ops make of the lengths and keep
    _chunks: dict[int, ChunkMap] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls, lengths: Sequence[int], consumed: Sequence[int] | None = None, device: torch.device | str = "cpu"
    ) -> Packing:
        """Describe a batch.

        lengths: tokens of each sequence in this batch; 0 is allowed. consumed: tokens of each sequence that earlier
        calls have already seen (default none). Raises ValueError for what are not whole numbers, negative ones, more
        than 2^31 - 1 tokens, lists of different length, a device that is not there.
        """
        lengths = _whole(lengths, "lengths")
        consumed = _whole(consumed, "consumed") if consumed is not None else (0,) * len(lengths)
        if len(consumed) != len(lengths):
            raise ValueError(f"packing: {len(lengths)} lengths but {len(consumed)} consumed counts; give one for each")
        if any(n < 0 for n in (*lengths, *consumed)):
            raise ValueError(f"packing: lengths {lengths} and consumed {consumed} must not be negative")
        if (most := max((sum(lengths), *consumed))) > LARGEST:
            raise ValueError(f"packing: {most:,} tokens are more than the {LARGEST:,} that boundaries can count")
        device = as_device(device) if not isinstance(device, torch.device) else device
        starts = torch.from_numpy(np.cumsum((0, *lengths), dtype=np.int32))
        history = torch.tensor(consumed, dtype=torch.int32)
        return cls(lengths, consumed, moved(starts, device), moved(history, device))

    @property
    def num_sequences(self) -> int:
        return len(self.lengths)

    @cached_property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def longest(self) -> int:
        return max(self.lengths, default=0)

    @property
    def device(self) -> torch.device:
        return self.starts.device

    @cached_property
    def sequence_of(self) -> Tensor:
        """int64 [N]: the sequence that each token belongs to."""
        sequences = np.repeat(np.arange(self.num_sequences), self.lengths)
        return moved(torch.from_numpy(sequences.astype(np.int64)), self.device)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [N]: the place of each token in its whole sequence, consumed tokens counted."""
        offsets = [np.arange(before, before + n) for n, before in zip(self.lengths, self.consumed, strict=True)]
        return moved(torch.from_numpy(np.concatenate([*offsets, np.empty(0)]).astype(np.int64)), self.device)

    @cached_property
    def longest_first(self) -> Tensor:
        """int32 [S]: the sequences by falling length, the order in which a kernel best starts on them."""
        order = np.argsort(-np.array(self.lengths, dtype=np.int64), kind="stable").astype(np.int32)
        return moved(torch.from_numpy(order), self.device)

    def chunks(self, size: int) -> ChunkMap:
        """The chunk map for chunks of `size` rows, at least 1; built once, then remembered."""
        if size not in self._chunks:
            if index(size) < 1:
                raise ValueError(f"packing: chunks of {size} rows; they must have at least 1")
            self._chunks[size] = self._cut(size)
        return self._chunks[size]

    def _cut(self, size: int) -> ChunkMap:
        per_sequence = tuple(-(-n // size) for n in self.lengths)
        first = np.cumsum((0, *per_sequence))[:-1].astype(np.int64)
        spans = [
            (start + at, min(size, n - at))
            for start, n in zip(np.cumsum((0, *self.lengths)).tolist(), self.lengths, strict=False)
            for at in range(0, n, size)
        ]
        spans_M2 = np.array(spans, dtype=np.int64).reshape(-1, 2)
        firsts, pairs = (moved(torch.from_numpy(x), self.device) for x in (first, spans_M2.astype(np.int32)))
        return ChunkMap(size, firsts, per_sequence, pairs, spans_M2[:, 0], spans_M2[:, 1])
