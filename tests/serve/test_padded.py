"""The numbers of a step in a fixed shape, and that kernels which read them need no others."""

import numpy as np
import pytest
import torch

from rille.model.model import new_model
from rille.ops.conv import PooledTail, TailPlaces, short_conv
from rille.ops.kda import Gate, PooledState, cutting, kda
from rille.ops.mla import LatentCache, latent_attention, store_rows
from rille.packing import Packing
from rille.serve.padded import Form, Numbers, Shape, Sheet
from rille.serve.prompts import Slate
from tests.serve.beds import ALONE, FRESH, LATER, MIXED, Bed, Piece, assert_near
from tests.train.small import MODEL


@pytest.fixture(scope="module")
def model():
    return new_model(MODEL.replace(init_std=0.2), seed=3)


def as_first(some, full):
    """Numbers that an array begins with, and the others."""
    return full[: len(some)].tolist() == np.asarray(some).tolist(), full[len(some) :]


@pytest.mark.parametrize("pieces", [MIXED, FRESH, ALONE, LATER])
def test_the_numbers_are_those_of_the_step(model, pieces):
    """What the buffer says of a step is what `Packing` says of it, with the padding as one more sequence."""
    bed, shape = Bed(model, pieces, spares=2), Shape(1024, 16, 20, 16)
    form = Form(shape, bed.pages.layout.groups, bed.pages.conv_width)
    sheet, n = Sheet(form, bed.parts, bed.spares), len(pieces)
    of, S, M = sheet.of, shape.sequences, shape.chunks
    idle, left = [0] * (S - n - 1), 1024 - sum(piece.count for piece in pieces)
    true = Packing.of([*(p.count for p in pieces), *idle, left], [*(p.before for p in pieces), *idle, 0])
    assert sheet.numbers.lengths == true.lengths and sheet.numbers.consumed[:n] == true.consumed[:n]
    chunks = true.chunks(64)
    same = dict(starts=true.starts, history=true.history, sequence_of=true.sequence_of, positions=true.positions)
    same |= dict(order=true.longest_first, first=chunks.first)
    for name, want in same.items():
        assert of[name].tolist() == want.tolist(), name
    begins, rest = as_first(chunks.spans, of["spans"][:M])
    assert begins and not rest.any() and sheet.numbers.per_sequence == chunks.per_sequence
    ids = [i for part in bed.parts for i in part.sequence.chain.ids[part.start : part.start + part.count]]
    begins, rest = as_first(ids, of["tokens"])
    assert begins and not rest.any()
    members = [of[name][of[name] != S - 2].tolist() for name in ("singles", "others")]
    assert sorted(sum(members, [])) == [*range(n), S - 1] and all(true.lengths[s] == 1 for s in members[0])
    assert set(of["slots"][:, n:].flatten()) == set(bed.spares) and set(of["table"][n:].flatten()) == {bed.spares[0]}
    for row, part in enumerate(bed.parts):
        pages = [entry.pages[0] for entry in part.sequence.holding.latents]
        assert of["table"][row, : len(pages)].tolist() == pages
        assert of["slots"][:, row].tolist() == list(part.sequence.holding.state)
    device = form.tensors(sheet.buffer)
    assert all(np.array_equal(device[name], of[name]) and device[name].data_ptr() % 16 == 0 for name in of)


@pytest.mark.parametrize("shape", [Shape(64, 4, 4, 0), Shape(2048, 64, 16, 4)])
def test_bounds_fit_the_shape(shape):
    bounds = Numbers.bounds(shape)
    assert sum(bounds.lengths) == shape.tokens and len(bounds.lengths) == shape.sequences == len(bounds.consumed)
    assert any(bounds.consumed) and sum(bounds.rest) == shape.between


@pytest.mark.parametrize("lengths", [[1] * 64, [65] * 15, [127, 1, 1, 63], [64] * 4, [2]])
def test_a_shape_has_room_for_all_chunks(lengths):
    """Whatever the padding is."""
    for tokens in (1024, -(-sum(lengths) // 64) * 64):
        every = [*lengths, tokens - sum(lengths)]
        assert sum(-(-n // 64) for n in every) <= Shape(tokens, len(lengths), 4, 0).chunks


class Kernels:
    """The ops that know a batch by its sequences, with random operands and pools, in Triton's interpreter."""

    def __init__(self, slate, pages):
        generator, N = torch.Generator().manual_seed(1), slate.form.shape.tokens
        self.slate, self.pages = slate, pages
        self.draw = lambda *sizes: torch.randn(sizes, generator=generator)
        self.q, self.k, self.v, self.z = (self.draw(N, 1, 64) for _ in range(4))
        self.b, self.x, self.both, self.queries = (
            self.draw(N, 1),
            self.draw(N, 5),
            self.draw(N, 48),
            self.draw(N, 2, 48),
        )
        self.weight, self.gain, self.gate = self.draw(5, 4), self.draw(32), Gate(self.draw(1), self.draw(1, 64), -5.0)
        self.pools = self.draw(pages, 1, 64, 64), self.draw(pages, 3, 5), self.draw(pages, 64, 48)

    def run(self, numbers):
        """Outputs and pools. numbers: of the step, or bounds."""
        of, packing, places = self.slate.of, self.slate.packing(numbers), self.slate.places(numbers)
        states, tails, latents = (pool.clone() for pool in self.pools)
        slots, kept, way = of["slots"][0], of["kept"][0], dict(backend="triton")
        tail = PooledTail(tails, slots, TailPlaces(of["tail_rows"], of["tail_sequences"]), kept)
        y, _ = short_conv(self.x, self.weight, packing, tail, **way)
        state, cache = PooledState(states, slots, *places.at(slots, kept)), LatentCache(latents, of["table"])
        with torch.no_grad(), cutting(None):
            o, _ = kda(self.q, self.k, self.v, self.z, self.b, self.gate, packing, state, **way)
        store_rows(self.both, self.gain, 1e-5, cache, packing, **way)
        mixed = latent_attention(self.queries, cache, packing, 0.1, 32, **way)
        return [y, o, mixed], [states, tails, latents]


def test_kernels_read_lengths_on_the_device(model):
    """What the host takes for the lengths changes no bit of what belongs to somebody."""
    pieces = Piece(70, 1), Piece(3, 66, (2, 64)), Piece(64, 20, (20,), ends=False)
    bed = Bed(model, pieces, spares=12)
    slate = Slate.new(Form(Shape(128, 4, 8, 4), bed.pages.layout.groups, 4), torch.device("cpu"))
    sheet = Sheet(slate.form, bed.parts, bed.spares)
    slate.buffer.copy_(sheet.buffer)
    kernels, count = Kernels(slate, 400), sum(piece.count for piece in pieces)
    (want, pools), (got, others) = kernels.run(sheet.numbers), kernels.run(Numbers.bounds(slate.form.shape))
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine[:count], theirs[:count]) and theirs[:count].isfinite().all()
    for mine, theirs, before in zip(others, pools, kernels.pools, strict=True):
        assert_near(mine[12:], theirs[12:], rtol=0, atol=0)
        assert not torch.equal(theirs[12:].nan_to_num(), before[12:].nan_to_num())
