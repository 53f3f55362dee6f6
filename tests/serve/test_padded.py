"""The numbers of a step in a fixed shape, and that kernels which read them need no others."""

import numpy as np
import pytest
import torch

from rille.model.model import new_model
from rille.ops import conv as conv_op
from rille.ops import kda as kda_op
from rille.ops.mla import absorb, choice
from rille.packing import Packing
from rille.serve.padded import Form, Numbers, Shape, Sheet
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


def by_kernels(monkeypatch):
    """From now on ops that know a batch by its sequences run in Triton's interpreter; returns which have."""
    ran = set()

    def chosen(name, found):
        return lambda *args, **options: (ran.add(name), found)[1]

    monkeypatch.setattr(kda_op, "choose_backend", chosen("recurrence", ("triton", "")))
    monkeypatch.setattr(conv_op, "settle", chosen("convolution", "triton"))
    monkeypatch.setattr(choice, "choose_latent_backend", chosen("attention", ("triton", "")))
    monkeypatch.setattr(absorb, "_settle", chosen("around attention", True))
    return ran


def test_kernels_read_lengths_on_the_device(monkeypatch):
    """What the host takes for the lengths, in a recording bounds, changes no bit; and what the kernels compute is what
    a step computes as it comes."""
    model = new_model(MODEL.replace(init_std=0.2, kda_heads=1, kda_head_dim=64, shared_key_dim=16), seed=3)
    bed = Bed(model, (Piece(70, 1), Piece(3, 66, (2, 64)), Piece(64, 20, (20,), ends=False), Piece(0, 5)), spares=16)
    want, want_pages = bed.run(None)
    graphs, results, ran = bed.graphs(captures=False), [], by_kernels(monkeypatch)
    slate = graphs._new_slate(Shape(128, 4, 8, 4))
    for bounds in (None, Numbers.bounds(slate.form.shape)):
        bed.pages.bytes.copy_(bed.begun)
        with torch.inference_mode():
            numbers = graphs._fill(slate, bed.parts)
            graphs._forward(slate, bounds or numbers)
        results.append((graphs._logits[: len(want)].clone(), bed.pages.bytes[16:].clone()))
    (got, got_pages), (others, other_pages) = results
    assert len(ran) == 4 and torch.equal(got, others) and torch.equal(got_pages, other_pages)
    assert_near(got, want, rtol=1e-3, atol=1e-3)
    assert_near(got_pages, want_pages, rtol=1e-3, atol=1e-4)
