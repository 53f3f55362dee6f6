"""The short convolution against torch's conv1d, sequence by sequence, and what its tails must carry over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rille.ops.conv import PooledTail, TailPlaces, short_conv
from rille.packing import Packing

C = 5
LENGTHS = (0, 1, 2, 3, 4, 0, 5, 17, 64)
WIDTHS = [1, 2, 3, 4, 7]


def draw(lengths: tuple[int, ...], W: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x [N, C], weight [C, W], tail [S, W-1, C], float64."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(sum(lengths), C), (C, W), (len(lengths), W - 1, C)]
    x, weight, tail = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return x, weight, tail


def by_conv1d(x: Tensor, weight: Tensor, lengths: tuple[int, ...], tail: Tensor) -> tuple[Tensor, Tensor]:
    W, outputs, tails = weight.shape[1], [], []
    for before, rows in zip(tail, x.split(list(lengths)), strict=True):
        stream = torch.cat([before, rows])
        tails.append(stream[len(rows) :])
        if len(rows):
            outputs.append(F.silu(F.conv1d(stream.T[None], weight[:, None], groups=C))[0].T)
            assert len(outputs[-1]) == len(stream) - W + 1
    return torch.cat(outputs), torch.stack(tails)


@pytest.mark.parametrize("W", WIDTHS)
def test_equals_conv1d_with_gradients(W: int) -> None:
    packing, results = Packing.of(LENGTHS), []
    for function in (short_conv, by_conv1d):
        x, weight, tail = (tensor.requires_grad_() for tensor in draw(LENGTHS, W))
        y, final = function(x, weight, packing if function is short_conv else LENGTHS, tail)
        loss = (y * torch.arange(y.numel()).view_as(y).sin()).sum() + (final * torch.arange(W - 1)[:, None].cos()).sum()
        results.append([y, final, *torch.autograd.grad(loss, [x, weight, tail])])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-13)


def test_values_by_hand() -> None:
    """weight[:, W-1] meets the current input; the tail is oldest first."""
    x, weight = torch.tensor([[1.0], [10.0]]), torch.tensor([[1000.0, 100.0, 2.0]])
    tail = torch.tensor([[[0.5], [3.0]]])
    y, final = short_conv(x, weight, Packing.of([2]), tail)
    assert torch.equal(y, torch.tensor([[500.0 + 300.0 + 2.0], [3000.0 + 100.0 + 20.0]]))
    assert torch.equal(final, torch.tensor([[[1.0], [10.0]]]))


@pytest.mark.parametrize("W", WIDTHS)
def test_no_tail_is_a_zero_tail(W: int) -> None:
    x, weight, tail = draw(LENGTHS, W)
    packing = Packing.of(LENGTHS)
    for got, want in zip(short_conv(x, weight, packing), short_conv(x, weight, packing, 0 * tail), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("W", WIDTHS)
@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3, 4), (0, 5, 5, 6), (2, 11)])
def test_a_sequence_cut_into_calls(cuts: tuple[int, ...], W: int) -> None:
    x, weight, tail = draw((20,), W)
    whole, final = short_conv(x, weight, Packing.of([20]), tail)
    outputs, carried = [], tail
    for start, end in zip((0, *cuts), (*cuts, 20), strict=True):
        y, carried = short_conv(x[start:end], weight, Packing.of([end - start], [start]), carried)
        outputs.append(y)
    # torch's SiLU takes another path at the end of an array, an ulp away, so only the tails are equal bit for bit.
    torch.testing.assert_close(torch.cat(outputs), whole, rtol=0, atol=1e-14)
    assert torch.equal(carried, final)


def test_pooled_tails_are_read_and_written_in_place() -> None:
    """Slots in no order, in a pool that is a strided view of a buffer; everything else there is NaN and stays NaN."""
    lengths, slots = (5, 0, 1, 2), torch.tensor([6, 1, 4, 0])
    x, weight, tail = draw(lengths, 4)
    buffer = torch.full((8, 2, 3, C), torch.nan, dtype=torch.float64)
    pool = buffer[:, 1]
    pool[slots] = tail
    y, nothing = short_conv(x, weight, Packing.of(lengths), PooledTail(pool, slots))
    want, final = short_conv(x, weight, Packing.of(lengths), tail)
    assert nothing is None and torch.equal(y, want) and torch.equal(pool[slots], final)
    pool[slots] = torch.nan
    assert buffer.isnan().all()


@pytest.mark.parametrize("W", WIDTHS)
def test_tails_on_the_way(W: int) -> None:
    """Those of calls that end there, bit for bit, also where they are in part the old one; nothing else changes."""
    lengths, places = (0, 1, 2, 17, 64), [[], [1], [1, 2], [1, 2, 3, 4, 9, 16, 17], [5, 63]]
    slots, kept = torch.tensor([8, 1, 20, 0, 5]), torch.tensor([19, 2, 7, 9, 3, 4, 10, 11, 12, 13, 15, 18])
    (x, weight, tail), packing = draw(lengths, W), Packing.of(lengths)
    buffer = torch.full((21, 2, W - 1, C), torch.nan, dtype=torch.float64)
    pool = buffer[:, 1]
    pool[slots] = tail
    where = TailPlaces.of(packing, places, W)
    y, nothing = short_conv(x, weight, packing, PooledTail(pool, slots, where, kept))
    want, final = short_conv(x, weight, packing, tail)
    assert nothing is None and torch.equal(y, want) and torch.equal(pool[slots], final)
    rows = x.split(lengths)
    ends = [
        short_conv(rows[s][:tokens], weight, Packing.of([tokens]), tail[s : s + 1])[1]
        for s, some in enumerate(places)
        for tokens in some
    ]
    assert torch.equal(pool[kept], torch.cat(ends))
    pool[torch.cat([slots, kept])] = torch.nan
    assert buffer.isnan().all()


def test_nan_stays_in_its_sequence() -> None:
    lengths = (2, 3, 0, 1, 5, 4)
    packing, sick = Packing.of(lengths), torch.tensor([0, 2, 4])
    well_N, well = ~torch.isin(packing.sequence_of, sick), torch.tensor([1, 3, 5])
    results = []
    for poison in (0.0, torch.nan):
        x, weight, tail = draw(lengths, 4)
        x[~well_N] += poison
        tail[sick] += poison
        x, tail = x.requires_grad_(), tail.requires_grad_()
        y, final = short_conv(x, weight, packing, tail)
        assert final is not None
        x_grad, tail_grad = torch.autograd.grad(y[well_N].sum() + final[well].sum(), [x, tail])
        results.append([y[well_N], final[well], x_grad[well_N], tail_grad[well]])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)


def test_bfloat16_is_computed_in_fp32() -> None:
    x, weight, tail = (tensor.bfloat16() for tensor in draw(LENGTHS, 4))
    y, final = short_conv(x, weight.float(), Packing.of(LENGTHS), tail)
    want, want_final = short_conv(x.float(), weight.float(), Packing.of(LENGTHS), tail.float())
    assert y.dtype == torch.bfloat16 and torch.equal(y, want.bfloat16())
    assert final is not None and final.dtype == torch.bfloat16 and torch.equal(final.float(), want_final)


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    x, weight, tail = draw(lengths, 4)
    y, final = short_conv(x, weight, Packing.of(lengths), tail)
    assert y.shape == (0, C) and final is not None and torch.equal(final, tail)


def test_mistakes_are_named() -> None:
    x, weight, tail = draw((3, 2), 4)
    packing = Packing.of((3, 2))
    with pytest.raises(ValueError, match=r"x has shape \(4, 5\), expected \(5, 5\)"):
        short_conv(x[1:], weight, packing)
    with pytest.raises(ValueError, match=r"tail has shape \(2, 2, 5\), expected \(2, 3, 5\)"):
        short_conv(x, weight, packing, tail[:, 1:])
    with pytest.raises(ValueError, match=r"weight \(5, 0\) must be .* W >= 1"):
        short_conv(x, weight[:, :0], packing)
    with pytest.raises(ValueError, match=r"slots \[2, 2\] name one slot twice"):
        PooledTail(tail, torch.tensor([2, 2]))
    with pytest.raises(ValueError, match=r"conv tails: \[4\] of sequence 0 must lie in 1\.\.3"):
        TailPlaces.of(packing, [[4], []], 4)
    pool, places = torch.zeros(4, 3, C).double(), TailPlaces.of(packing, [[1], [2]], 4)
    with pytest.raises(ValueError, match=r"slots \[0, 1, 2, 1\] name one slot twice"):
        PooledTail(pool, torch.tensor([0, 1]), places, torch.tensor([2, 1]))
    with pytest.raises(ValueError, match=r"tail.kept has shape \(1,\), expected \(2,\)"):
        short_conv(x, weight, packing, PooledTail(pool, torch.tensor([0, 1]), places, torch.tensor([2])))
