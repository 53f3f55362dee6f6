"""The loss of every token of a text, whatever the batches. A line of n + 1 ids has n targets.

    line -> pieces of at most `context` targets -> batches of whole pieces -> -log p(target), back in their lines

Pieces are never cut by a batch, so that batch sizes decide nothing but memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from rille.data.loader import Batch
from rille.model.model import K3
from rille.train.losses import next_token_loss

Piece = tuple[int, int, int]  # line, first target, number of targets


def line_nats(
    model: K3,
    lines: Sequence[np.ndarray],
    context: int,
    batch_tokens: int,
    tell: Callable[[int], None] = lambda done: None,
) -> list[np.ndarray]:
    """-log p of each target, float64 [n] a line, in nats. tell: how many targets were just done.

    lines: int [n + 1] ids each, n >= 0; target i is predicted from the ids before it in its piece.
    """
    nats = [np.zeros(max(0, len(line) - 1)) for line in lines]
    for pieces in batches(lines, context, batch_tokens):
        parts = [lines[line][start : start + size + 1].astype(np.int64) for line, start, size in pieces]
        inputs = torch.from_numpy(np.concatenate([part[:-1] for part in parts]))
        targets = torch.from_numpy(np.concatenate([part[1:] for part in parts]))
        batch = Batch(inputs, targets, tuple(size for *_, size in pieces))
        with torch.inference_mode():
            log_probs_N = next_token_loss(model, batch).log_probs.double().cpu().numpy()
        at = 0
        for line, start, size in pieces:
            nats[line][start : start + size] = -log_probs_N[at : at + size]
            at += size
        tell(at)
    return nats


def batches(lines: Sequence[np.ndarray], context: int, batch_tokens: int) -> Iterator[list[Piece]]:
    """Whole pieces in order, as many as fit; a piece longer than a batch has one to itself."""
    held: list[Piece] = []
    room = batch_tokens
    for number, line in enumerate(lines):
        for start in range(0, len(line) - 1, context):
            size = min(context, len(line) - 1 - start)
            if held and size > room:
                yield held
                held, room = [], batch_tokens
            held.append((number, start, size))
            room -= size
    if held:
        yield held
