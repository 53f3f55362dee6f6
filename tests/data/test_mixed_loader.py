"""Every epoch of a stream holds each of its pieces once; shares, caps and ranks come out as promised; a restored loader
goes on exactly."""

import json
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.data.dataset import Dataset
from rille.data.mixed_loader import MixedLoader
from rille.data.mixture import Mixture, StreamSize, draws_a_pass, draws_of_pass
from rille.data.shuffle import Permutation
from rille.model.model import new_model
from rille.packing import Packing
from tests.data.sets import build, essay
from tests.train.small import MODEL


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    texts = {"a": [essay(seed) for seed in range(40)], "b": [essay(seed, 400) for seed in range(100, 110)]}
    texts["b"] += [essay(seed, 1600) for seed in range(200, 203)]
    return build(tmp_path_factory.mktemp("mixed"), texts, shard_bytes=8_000, long_tokens=2_000)


@given(st.integers(1, 3000), st.integers(0, 2**40))
def test_permutation_holds_each_value_once(n: int, key: int):
    values = Permutation(n, (key, 1))(np.arange(n))
    assert sorted(values.tolist()) == list(range(n))
    assert Permutation(n, (key, 1))[n - 1] == values[-1]


def test_permutation_spreads():
    n = 10_000
    values = Permutation(n, (5,))(np.arange(n))
    assert abs(np.corrcoef(values, np.arange(n))[0, 1]) < 5 / n**0.5
    steps = np.abs(np.diff(values))
    assert abs(steps.mean() - n / 3) < 5 * n / 18**0.5 / n**0.5
    other = Permutation(n, (6,))(np.arange(n))
    assert (values == other).sum() < 10  # about 1 by chance


def all_pieces(dataset: Dataset, length: int) -> Counter:
    return Counter(
        tuple(stream.read(*stream.piece(number)).tolist())
        for stream in dataset.streams(length)
        for number in range(stream.size.pieces)
    )


@pytest.mark.parametrize("length", [1, 17, 64, 1 << 20])
def test_pieces_cover_every_target_once(dataset: Dataset, length: int):
    for stream, whole in zip(dataset.streams(length), dataset.streams(1 << 30), strict=True):
        pieces = [stream.piece(number) for number in range(stream.size.pieces)]
        assert all(1 <= size <= length for _, _, size in pieces)
        covered = sorted((shard, place) for shard, start, size in pieces for place in range(start, start + size))
        documents = [whole.piece(number) for number in range(whole.size.pieces)]
        assert covered == sorted((shard, i) for shard, start, size in documents for i in range(start, start + size))


def test_an_epoch_holds_every_piece_once(dataset: Dataset):
    expected = all_pieces(dataset, 64)
    loader = MixedLoader(dataset, 1, 64)
    for _ in range(2):
        seen = Counter()
        begun = loader.epoch
        inputs, targets = [], []
        while loader.epoch == begun:
            batch = next(loader)
            inputs.append(int(batch.tokens))
            targets.append(int(batch.targets))
        place = 0
        order = MixedLoader(dataset, 1, 64)
        order._go_to(begun, 0, 0)
        while place < len(inputs):
            stream, piece = order._piece_at(order._slot)
            size = order._streams[stream].piece(piece)[2]
            seen[(*inputs[place : place + size], targets[place + size - 1])] += 1
            place += size
            if place < len(inputs):
                order._next_slot()
        assert seen == expected


@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_any_number_of_ranks_is_one_sequence(dataset: Dataset, ranks: int):
    one = MixedLoader(dataset, 300, 64, seed=3)
    many = [MixedLoader(dataset, 300, 64, seed=3, rank=rank, ranks=ranks) for rank in range(ranks)]
    for _ in range(6):
        for loader in many:
            expected, batch = next(one), next(loader)
            assert torch.equal(batch.tokens, expected.tokens)
            assert torch.equal(batch.targets, expected.targets)
            assert batch.lengths == expected.lengths
        assert all(loader.state() == one.state() for loader in many)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 60), st.integers(1, 400), st.integers(1, 90), st.integers(1, 4))
def test_restore_continues_exactly(dataset: Dataset, before: int, batch_tokens: int, length: int, ranks: int):
    loader = MixedLoader(dataset, batch_tokens, length)
    for _ in range(before):
        next(loader)
    state = json.loads(json.dumps(loader.state()))
    restored = [MixedLoader(dataset, batch_tokens, length, rank=rank, ranks=ranks) for rank in range(ranks)]
    for one in restored:
        one.restore(state)
    for _ in range(3):
        for one in restored:
            expected, batch = next(loader), next(one)
            assert torch.equal(batch.tokens, expected.tokens)
            assert batch.lengths == expected.lengths


def test_state_of_another_run_is_refused(dataset: Dataset):
    state = MixedLoader(dataset, 100, 64).state()
    with pytest.raises(ValueError, match="seed 0, now 1"):
        MixedLoader(dataset, 100, 64, seed=1).restore(state)
    with pytest.raises(ValueError, match="dataset x, now"):
        MixedLoader(dataset, 100, 64).restore({**state, "dataset": "x"})
    with pytest.raises(ValueError, match="order None, now 2"):  # of a version that dealt pieces in another order
        MixedLoader(dataset, 100, 64).restore({key: value for key, value in state.items() if key != "order"})
    with pytest.raises(ValueError, match="rank 2 is not one of 2"):
        MixedLoader(dataset, 100, 64, rank=2, ranks=2)
    with pytest.raises(ValueError, match="must be at least 1"):
        MixedLoader(dataset, 0, 64)


def shares_of_first_pass(dataset: Dataset, mixture: Mixture) -> tuple[dict[str, float], dict[bool, float]]:
    loader = MixedLoader(dataset, 50, 50, mixture=mixture)
    by_domain, by_length = Counter(), Counter()
    while loader.epoch == 0:
        for stream, _, _, size in loader._spans():
            by_domain[loader._sizes[stream].domain] += size
            by_length[loader._sizes[stream].long] += size
    total = by_domain.total()
    return {k: v / total for k, v in by_domain.items()}, {k: v / total for k, v in by_length.items()}


def test_shares_of_tokens_are_those_asked_for(dataset: Dataset):
    by_domain, _ = shares_of_first_pass(dataset, Mixture({"a": 0.8, "b": 0.2}))
    assert by_domain["a"] == pytest.approx(0.8, abs=0.02)
    by_domain, _ = shares_of_first_pass(dataset, Mixture({"a": 0.0, "b": 1.0}))
    assert by_domain == {"b": 1.0}


@pytest.mark.parametrize("length", [16, 500, 1 << 20])
def test_shares_are_kept_however_few_pieces_a_stream_has(dataset: Dataset, length: int):
    """A stage of long context cuts a small set into few pieces: a share is no whole number of them a pass."""
    asked = {"a": 0.95, "b": 0.05}
    loader = MixedLoader(dataset, 1000, length, mixture=Mixture(asked))
    read = Counter()
    for _ in range(1500):
        for stream, _, _, size in loader._spans():
            read[loader._sizes[stream].domain] += size
    assert all(abs(read[name] / read.total() - share) < 0.005 for name, share in asked.items())


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 0.95), st.sampled_from([30, 100, 1 << 20]), st.integers(0, 9), st.integers(1, 300))
def test_a_piece_comes_again_only_after_every_other_one_of_its_stream(
    dataset: Dataset, share: float, length: int, seed: int, cut: int
):
    mixture = Mixture({"a": share, "b": 1 - share})
    loader, seen = MixedLoader(dataset, 1, length, seed, mixture=mixture), Counter()
    for slot in range(500):
        if slot == cut:  # and a resume changes nothing of it
            state, loader = loader.state(), MixedLoader(dataset, 1, length, seed, mixture=mixture)
            loader.restore(json.loads(json.dumps(state)))
        seen[loader._piece_at(loader._slot)] += 1
        loader._next_slot()
    for number, size in enumerate(loader._sizes):
        times = [seen[number, piece] for piece in range(size.pieces)]
        assert max(times) - min(times) <= 1


def test_a_domain_without_text_has_no_share(dataset: Dataset):
    with pytest.raises(ValueError, match="gives c a share, but there is no text of it"):
        MixedLoader(dataset, 1, 64, mixture=Mixture({"a": 0.5, "b": 0.3, "c": 0.2}))
    MixedLoader(dataset, 1, 64, mixture=Mixture({"a": 0.5, "b": 0.5, "c": 0.0}))
    with pytest.raises(ValueError, match="b would be read once in"):
        MixedLoader(dataset, 1, 64, mixture=Mixture({"a": 1.0, "b": 1e-12}))


def test_epochs_are_those_read(dataset: Dataset):
    loader, read = MixedLoader(dataset, 700, 64, mixture=Mixture({"a": 0.7, "b": 0.3}, max_epochs=3)), Counter()
    targets = {name: sum(s.targets for s in loader._sizes if s.domain == name) for name in dataset.domains}
    for _ in range(60):
        for stream, _, _, size in loader._spans():
            read[loader._sizes[stream].domain] += size
        assert loader.epochs() == pytest.approx({name: read[name] / targets[name] for name in targets}, abs=0.05)


def test_long_documents_are_seen_more_often(dataset: Dataset):
    natural = shares_of_first_pass(dataset, Mixture({}))[1]
    often = shares_of_first_pass(dataset, Mixture({}, long_times=3.0))[1]
    assert often[True] / often[False] == pytest.approx(3 * natural[True] / natural[False], rel=0.05)


def test_cap_of_epochs_holds_and_then_the_data_is_used_up(dataset: Dataset):
    loader = MixedLoader(dataset, 1, 64, mixture=Mixture({"a": 0.9, "b": 0.1}, max_epochs=2))
    seen = Counter()
    with pytest.raises(ValueError, match="the data is used up after"):
        while True:
            seen.update(span[:3] for span in loader._spans())
    assert set(seen.values()) == {2}
    assert len(seen) == dataset.num_targets
    assert all(1.9 < epochs <= 2 for epochs in loader.epochs().values())


sizes = st.lists(
    st.tuples(st.sampled_from("ab"), st.booleans(), st.integers(1, 10**6)), min_size=1, unique_by=lambda s: s[:2]
)


@given(sizes, st.floats(0.1, 5), st.one_of(st.none(), st.floats(0.1, 4)))
def test_draws_follow_the_shares(found, times: float, cap: float | None):
    streams = [StreamSize(name, long, targets * 8, targets) for name, long, targets in found]
    names = {stream.domain for stream in streams}
    mixture = Mixture({name: 1 / len(names) for name in names}, times, cap)
    draws = draws_a_pass(streams, mixture)
    total = sum(stream.targets for stream in streams)
    for name in names:
        drawn = sum(8 * draw for draw, stream in zip(draws, streams, strict=True) if stream.domain == name)
        assert drawn == pytest.approx(total / len(names))
    drawn = np.sum([draws_of_pass(number, streams, mixture) for number in range(50)], axis=0)
    if cap is not None:
        assert all(n <= round(s.pieces * cap) for n, s in zip(drawn, streams, strict=True))


def test_no_document_sees_another_through_the_model(dataset: Dataset):
    """A packed batch gives each of its sequences what the sequence alone gives: no state, no attention in between."""
    batch = next(MixedLoader(dataset, 400, 100, seed=1))
    assert len(batch.lengths) > 3
    torch.manual_seed(0)
    model = new_model(MODEL.replace(vocab_size=400), seed=0).eval()
    with torch.no_grad():
        packed = model.logits(batch.tokens, packing=Packing.of(batch.lengths))
        alone = [model.logits(part) for part in batch.tokens.split(list(batch.lengths))]
        torch.testing.assert_close(packed, torch.cat(alone), atol=2e-5, rtol=1e-4)
        together = model.logits(batch.tokens)
    assert (together - packed).abs().max() > 1e-2


def test_targets_are_the_next_tokens_of_the_same_document(dataset: Dataset):
    pieces = all_pieces(dataset, 1 << 30)
    wholes = ["," + ",".join(map(str, piece)) + "," for piece in pieces]
    batch = next(MixedLoader(dataset, 400, 100, seed=1))
    start = 0
    for size in batch.lengths:
        ids = [*batch.tokens[start : start + size].tolist(), int(batch.targets[start + size - 1])]
        assert batch.targets[start : start + size - 1].tolist() == ids[1:-1]
        assert any(f",{','.join(map(str, ids))}," in whole for whole in wholes)
        start += size
