"""Muon's step: the kernels around the products against plain PyTorch, on pieces as the optimiser cuts them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.muon import Matrices, choose_backend, muon_step

launch = pytest.importorskip("rille.ops.muon.launch", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MU, KEEP, STEP = 0.9, 0.97, 0.05


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(DEVICE)


def stack(matrices: int, rows: int, columns: int, gap: int = 0, seed: int = 0) -> Matrices:
    """Matrices that are the first `rows` of blocks of rows + gap; what lies between is NaN."""
    pieces = []
    for number, scale in enumerate((1.0, 1e-4, 1e-3)):  # weights, gradients, momenta
        whole = torch.full((matrices, rows + gap, columns), torch.nan, device=DEVICE)
        whole[:, :rows] = draw(matrices, rows, columns, seed=3 * seed + number, scale=scale)
        pieces.append(whole[:, :rows])
    return Matrices(*pieces)


def copies(batch: list[Matrices], dtype: torch.dtype) -> list[Matrices]:
    return [Matrices(*(x.to(dtype, copy=True) for x in piece)) for piece in batch]


def off(got: Tensor, want: Tensor, scale: float) -> float:
    return float((got.double() - want.double()).abs().max()) / scale


BATCHES = {
    "one": [(1, 1, 1, 0)],
    "small": [(3, 5, 7, 0), (2, 5, 7, 2), (0, 5, 7, 0)],
    "tall": [(4, 65, 16, 3), (1, 65, 16, 0)],
    "two parts": [(2, 130, 129, 1)],
    "whole parts": [(2, 128, 128, 0)],
}


@pytest.mark.parametrize("backend", ["triton", "plain"])
@pytest.mark.parametrize("name", BATCHES)
def test_equals_the_reference_in_float64(name: str, backend: str) -> None:
    """fp32 throughout. The momentum is rounded twice; the direction has singular values of at most 1.21 and what
    Newton-Schulz magnifies of 2^-24, 485 times in the worst case; the weight is rounded three times."""
    batch = [stack(*shape, seed=i) for i, shape in enumerate(BATCHES[name])]
    exact, gradients = copies(batch, torch.float64), [piece.gradient.clone() for piece in batch]
    muon_step(batch, MU, KEEP, STEP, eps=1e-20, backend=backend)
    muon_step(exact, MU, KEEP, STEP, eps=1e-20, backend="reference")
    for piece, want, gradient in zip(batch, exact, gradients, strict=True):
        if not len(piece.weight):
            continue
        assert torch.equal(piece.gradient, gradient)
        assert off(piece.momentum, want.momentum, float(want.momentum.abs().max())) < 2**-22
        assert off(piece.weight, want.weight, 1.0) < STEP * 485 * 2**-24 + 4 * 2**-23


def test_what_lies_between_is_left_alone() -> None:
    piece = stack(3, 4, 8, gap=2)
    whole = piece.weight._base
    assert whole is not None
    muon_step([piece], MU, KEEP, STEP, backend="triton")
    assert whole[:, 4:].isnan().all() and whole[:, :4].isfinite().all()


def test_sixteen_bits_inside() -> None:
    """Only the direction is rounded: limits as of `newton_schulz` in fp16."""
    batch, exact = [stack(4, 24, 96)], copies([stack(4, 24, 96)], torch.float64)
    muon_step(batch, MU, 0.0, 1.0, eps=1e-20, dtype=torch.float16, backend="triton")
    muon_step(exact, MU, 0.0, 1.0, eps=1e-20, backend="reference")
    got, want = batch[0].weight.double(), exact[0].weight
    assert float((got - want).norm() / want.norm()) < 1e-2


def test_repeats_bit_for_bit() -> None:
    one, two = [stack(3, 130, 129)], [stack(3, 130, 129)]
    muon_step(one, MU, KEEP, STEP, backend="triton")
    muon_step(two, MU, KEEP, STEP, backend="triton")
    assert torch.equal(one[0].weight, two[0].weight) and torch.equal(one[0].momentum, two[0].momentum)


def test_zeros_stay_put() -> None:
    """An expert that never got a token: no direction, and no NaN from its norm."""
    piece = Matrices(torch.ones(2, 4, 6, device=DEVICE), *(torch.zeros(2, 4, 6, device=DEVICE) for _ in range(2)))
    muon_step([piece], MU, 1.0, STEP, backend="triton")
    assert torch.equal(piece.weight, torch.ones_like(piece.weight))


def test_refused() -> None:
    with pytest.raises(ValueError, match="one shape and dtype"):
        muon_step([stack(1, 2, 3), stack(1, 3, 2)], MU, KEEP, STEP)
    with pytest.raises(ValueError, match="unknown backend 'torch'"):
        muon_step([stack(1, 2, 3)], MU, KEEP, STEP, backend="torch")
    with pytest.raises(ValueError, match=r"cannot run: the kernels take fp32, not torch\.float64"):
        muon_step(copies([stack(1, 2, 3)], torch.float64), MU, KEEP, STEP, backend="triton")
    tall = Matrices(*(x.mT for x in stack(2, 3, 4)))
    with pytest.raises(ValueError, match="cannot run: a matrix has gaps"):
        muon_step([tall], MU, KEEP, STEP, backend="triton")


def test_choice() -> None:
    name, reason = choose_backend([stack(1, 2, 3)])
    assert (name, reason) == (
        ("triton", "CUDA tensors in fp32") if DEVICE == "cuda" else ("plain", "the tensors are on cpu")
    )
