"""Losses by token: equal to the logits of each piece alone, whatever the batches."""

import numpy as np
import pytest
import torch

from rille.eval.scoring import batches, line_nats


def lines(*lengths: int) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.integers(0, 300, length) for length in lengths]


def by_hand(model, piece: np.ndarray) -> np.ndarray:
    logits = model.logits(torch.from_numpy(piece[:-1]))
    return -torch.log_softmax(logits, -1).gather(1, torch.from_numpy(piece[1:])[:, None]).squeeze(1).detach().numpy()


@pytest.mark.parametrize("context", [7, 64])
def test_pieces_are_independent(opened, context):
    some = lines(30, 1, 2, 65, 8)
    found = line_nats(opened.model, some, context, 40)
    for line, nats in zip(some, found, strict=True):
        alone = [by_hand(opened.model, line[at : at + context + 1]) for at in range(0, len(line) - 1, context)]
        assert len(nats) == len(line) - 1
        np.testing.assert_allclose(nats, np.concatenate([*alone, []]), atol=2e-5)


@pytest.mark.parametrize("batch_tokens", [1, 33, 1000])
def test_batches_decide_nothing(opened, batch_tokens):
    some, done = lines(20, 50, 3), []
    found = line_nats(opened.model, some, 16, batch_tokens, done.append)
    for a, b in zip(found, line_nats(opened.model, some, 16, 48), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    assert sum(done) == 19 + 49 + 2


def test_batches_hold_every_target_once():
    pieces = [piece for batch in batches(lines(20, 1, 50, 3), 16, 32) for piece in batch]
    places = [(line, place) for line, start, size in pieces for place in range(start, start + size)]
    assert places == [(0, n) for n in range(19)] + [(2, n) for n in range(49)] + [(3, n) for n in range(2)]
    assert all(sum(size for *_, size in batch) <= 32 for batch in batches(lines(20, 50), 16, 32))
