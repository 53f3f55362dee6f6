"""Within an epoch no position is lost or doubled, whatever the sizes; a restored loader goes on exactly."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.data.loader import Loader, held_out_batches

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=12).filter(any)


def stream(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Every token is its own position, so that a batch tells where it was taken from."""
    return np.arange(sum(lengths) + 1, dtype=np.uint32), np.cumsum([0, *lengths])


def quiet(_: str) -> None:
    pass


def check(batch, boundaries: np.ndarray, sequence_length: int):
    """Targets follow inputs, and each sequence is consecutive inside one document."""
    assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets, batch.tokens + 1)
    assert sum(batch.lengths) == len(batch.tokens)
    assert all(1 <= length <= sequence_length for length in batch.lengths)
    for part in batch.tokens.split(list(batch.lengths)):
        assert torch.equal(part, torch.arange(int(part[0]), int(part[0]) + len(part)))
        document = np.searchsorted(boundaries, int(part[0]), side="right")
        assert int(part[-1]) < boundaries[document]


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 50), st.integers(1, 30), st.integers(0, 2**63))
def test_each_epoch_holds_every_position_once(lengths, batch_tokens, sequence_length, seed):
    tokens, boundaries = stream(lengths)
    total = len(tokens) - 1
    loader = Loader(tokens, boundaries, batch_tokens, sequence_length, seed, quiet)
    seen = []
    while loader.epoch < 3:
        batch = next(loader)
        assert len(batch.tokens) == batch_tokens
        check(batch, boundaries, sequence_length)
        seen += batch.tokens.tolist()
    for epoch in range(3):
        assert sorted(seen[epoch * total : (epoch + 1) * total]) == list(range(total))


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 50), st.integers(1, 30), st.integers(0, 20), st.integers(0, 5))
def test_restore_continues_exactly(lengths, batch_tokens, sequence_length, before, seed):
    arguments = (*stream(lengths), batch_tokens, sequence_length, seed, quiet)
    loader, restored = Loader(*arguments), Loader(*arguments)
    for _ in range(before):
        next(loader)
    restored.restore(json.loads(json.dumps(loader.state())))
    for _ in range(10):
        expected, batch = next(loader), next(restored)
        assert torch.equal(batch.tokens, expected.tokens)
        assert batch.lengths == expected.lengths
        assert restored.state() == loader.state()


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(1, 50), st.integers(1, 30))
def test_held_out_is_one_pass_in_order(lengths, batch_tokens, sequence_length):
    tokens, boundaries = stream(lengths)
    batches = list(held_out_batches(tokens, boundaries, batch_tokens, sequence_length))
    for batch in batches:
        check(batch, boundaries, sequence_length)
    assert {len(batch.tokens) for batch in batches[:-1]} <= {batch_tokens}
    assert 1 <= len(batches[-1].tokens) <= batch_tokens
    assert torch.cat([batch.tokens for batch in batches]).tolist() == list(range(len(tokens) - 1))


def order(seed: int, epochs: int) -> list[list[int]]:
    loader = Loader(*stream([4] * 50), 200, 4, seed)
    return [next(loader).tokens.tolist() for _ in range(epochs)]


def test_order_follows_seed_and_epoch():
    first, second = order(0, 2)
    assert first != second
    assert sorted(first) == sorted(second)
    assert order(0, 2) == [first, second]
    assert order(1, 1) != [first]


def test_long_documents_are_cut_into_full_pieces():
    loader = Loader(*stream([10]), 10, 4)
    assert sorted(next(loader).lengths) == [2, 4, 4]


def test_less_than_a_batch_repeats_and_says_so():
    notes: list[str] = []
    loader = Loader(*stream([2, 1]), 8, 4, 0, notes.append)
    assert notes == ["data: 3 tokens are fewer than a batch of 8: each batch repeats some"]
    assert sorted(next(loader).tokens.tolist()[:6]) == [0, 0, 1, 1, 2, 2]
    Loader(*stream([2, 1]), 3, 4, 0, notes.append)
    assert len(notes) == 1


def test_state_of_another_run_is_refused():
    state = Loader(*stream([9, 9]), 4, 3).state()
    with pytest.raises(ValueError, match="batch_tokens 4, now 5; sequence_length 3, now 2"):
        Loader(*stream([9, 9]), 5, 2).restore(state)
    with pytest.raises(ValueError, match="num_documents 2, now 1"):
        Loader(*stream([18]), 4, 3).restore(state)
    with pytest.raises(ValueError, match="seed None"):
        Loader(*stream([18]), 4, 3).restore({})


@pytest.mark.parametrize(
    ("boundaries", "batch_tokens", "sequence_length", "message"),
    [
        ([0, 9], 0, 4, "batch_tokens 0"),
        ([0, 9], 4, 0, "sequence_length 0"),
        ([0, 8], 4, 4, "end at 8, but 10 tokens have 9 targets"),
        ([0, 10], 4, 4, "end at 10"),
        ([1, 9], 4, 4, "rise from 0"),
        ([0, 5, 4, 9], 4, 4, "rise from 0"),
        ([0], 4, 4, "at least one document"),
    ],
)
def test_arguments_that_do_not_fit(boundaries, batch_tokens, sequence_length, message):
    tokens = np.arange(10, dtype=np.uint32)
    with pytest.raises(ValueError, match=message):
        Loader(tokens, np.array(boundaries), batch_tokens, sequence_length)
    with pytest.raises(ValueError, match=message):
        list(held_out_batches(tokens, np.array(boundaries), batch_tokens, sequence_length))


def test_loader_does_not_write_into_the_tokens():
    tokens, boundaries = stream([20])
    tokens.flags.writeable = False
    batch = next(Loader(tokens, boundaries, 8, 4))
    batch.tokens.zero_()
    assert tokens.tolist() == list(range(21))
