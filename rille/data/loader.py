"""Batches of exactly so many tokens, without padding, without loss, resumable to the batch.

    documents --cut at sequence_length--> pieces --shuffle--> endless line of tokens --cut at batch_tokens--> batches

An epoch is a permutation of all pieces, drawn from (seed, epoch). Where a batch is full inside a piece, the rest of the
piece opens the next batch as a sequence of its own. Piece (s, n) has inputs tokens[s : s + n] and targets
tokens[s + 1 : s + n + 1] (the head of corpus.py draws this), so that every position of the stream is a target exactly
once an epoch, wherever the cuts fall.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences end to end: `lengths` sum to N.

    tokens, targets: int64 [N] on the host. targets[i] is the token that follows tokens[i] in its document; -100 means
    none (the loss ignores it). domains: of each sequence, its number in the text's list of domains; () without one.
    """

    tokens: Tensor
    targets: Tensor
    lengths: tuple[int, ...]
    domains: tuple[int, ...] = ()


class Loader:
    """Endless training batches of exactly `batch_tokens` tokens, one shuffled epoch after the other."""

    def __init__(
        self,
        tokens: np.ndarray,
        boundaries: np.ndarray,
        batch_tokens: int,
        sequence_length: int,
        seed: int = 0,
        note: Callable[[str], None] = print,
    ):
        """tokens: [N + 1] ids. boundaries: [documents + 1], from 0 to N. note is told if N is less than one batch.

        Raises ValueError for sizes below 1 or boundaries that do not fit the tokens.
        """
        self._tokens = tokens
        self._starts, self._lengths = _pieces(tokens, boundaries, batch_tokens, sequence_length)
        self._settings = {
            "seed": seed,
            "batch_tokens": batch_tokens,
            "sequence_length": sequence_length,
            "num_targets": len(tokens) - 1,
            "num_documents": len(boundaries) - 1,
        }
        self._epoch, self._piece, self._offset = 0, 0, 0
        self._order = self._shuffled(0)
        if len(tokens) - 1 < batch_tokens:
            note(
                f"data: {len(tokens) - 1:,} tokens are fewer than a batch of {batch_tokens:,}: each batch repeats some"
            )

    def begin(self, read: Mapping[str, float]) -> None:
        """Go to the first batch of a stage; what the stages before have read matters to a `MixedLoader`."""
        self._epoch, self._piece, self._offset = 0, 0, 0
        self._order = self._shuffled(0)

    @property
    def epoch(self) -> int:
        """Epochs that are complete."""
        return self._epoch

    def epochs(self) -> dict[str, float]:
        """How often the pieces were read so far; of a text with domains each would have its own number."""
        return {"all": self._epoch + self._piece / len(self._order)}

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; there always is one."""
        spans = []
        room = self._settings["batch_tokens"]
        while room:
            piece = self._order[self._piece]
            taken = min(room, int(self._lengths[piece]) - self._offset)
            spans.append((int(self._starts[piece]) + self._offset, taken))
            room -= taken
            self._advance(taken, int(self._lengths[piece]))
        return _gather(self._tokens, spans)

    def state(self) -> dict[str, int]:
        """Where the loader stands, as JSON can hold it: after `restore` the same batches follow."""
        return {**self._settings, "epoch": self._epoch, "piece": self._piece, "offset": self._offset}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from a `state()`. Raises ValueError if it was taken with other settings or other text."""
        wrong = [f"{key} {state.get(key)}, now {now}" for key, now in self._settings.items() if state.get(key) != now]
        if wrong:
            raise ValueError(f"the saved place in the data is of another run: {'; '.join(wrong)}; resume with the same")
        self._epoch, self._piece, self._offset = state["epoch"], state["piece"], state["offset"]
        self._order = self._shuffled(self._epoch)

    def _advance(self, taken: int, length: int) -> None:
        self._offset += taken
        if self._offset < length:
            return
        self._piece, self._offset = self._piece + 1, 0
        if self._piece == len(self._order):
            self._epoch, self._piece = self._epoch + 1, 0
            self._order = self._shuffled(self._epoch)

    def _shuffled(self, epoch: int) -> np.ndarray:
        return np.random.default_rng((self._settings["seed"], epoch)).permutation(len(self._starts))


def held_out_batches(
    tokens: np.ndarray,
    boundaries: np.ndarray,
    batch_tokens: int,
    sequence_length: int,
    domains: np.ndarray | None = None,
) -> Iterator[Batch]:
    """Every position once, in order: batches of `batch_tokens`, the last one shorter. Arguments as in `Loader`.

    domains: [documents] the number of each one's domain, where the batches are to name them.
    """
    spans, room = [], batch_tokens
    for start, length in zip(*_pieces(tokens, boundaries, batch_tokens, sequence_length), strict=True):
        start, length = int(start), int(length)
        while length:
            taken = min(room, length)
            spans.append((start, taken))
            start, length, room = start + taken, length - taken, room - taken
            if not room:
                yield _labelled(_gather(tokens, spans), spans, boundaries, domains)
                spans, room = [], batch_tokens
    if spans:
        yield _labelled(_gather(tokens, spans), spans, boundaries, domains)


def _labelled(batch: Batch, spans: list[tuple[int, int]], boundaries: np.ndarray, domains: np.ndarray | None) -> Batch:
    """The batch with the domains of its spans."""
    if domains is None:
        return batch
    documents = np.searchsorted(boundaries, [start for start, _ in spans], side="right") - 1
    return replace(batch, domains=tuple(domains[documents].tolist()))


def _pieces(
    tokens: np.ndarray, boundaries: np.ndarray, batch_tokens: int, sequence_length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Starts and lengths, int64, of the pieces that documents are cut into; all but a document's last are full."""
    if batch_tokens < 1 or sequence_length < 1:
        raise ValueError(f"batch_tokens {batch_tokens} and sequence_length {sequence_length} must be at least 1")
    if len(boundaries) < 2 or boundaries[0] != 0 or (np.diff(boundaries) < 0).any():
        raise ValueError("boundaries must rise from 0 and describe at least one document")
    if boundaries[-1] < 1 or boundaries[-1] != len(tokens) - 1:
        raise ValueError(f"boundaries end at {boundaries[-1]}, but {len(tokens)} tokens have {len(tokens) - 1} targets")
    sizes = np.diff(boundaries)
    counts = -(-sizes // sequence_length)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = (np.arange(counts.sum()) - first) * sequence_length
    starts = np.repeat(boundaries[:-1], counts) + offsets
    lengths = np.minimum(np.repeat(sizes, counts) - offsets, sequence_length)
    return starts, lengths


def _gather(tokens: np.ndarray, spans: list[tuple[int, int]]) -> Batch:
    inputs = np.concatenate([tokens[start : start + length] for start, length in spans]).astype(np.int64)
    targets = np.concatenate([tokens[start + 1 : start + length + 1] for start, length in spans]).astype(np.int64)
    return Batch(torch.from_numpy(inputs), torch.from_numpy(targets), tuple(length for _, length in spans))
