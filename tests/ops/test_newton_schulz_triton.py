"""Symmetric products by half of their tiles: the kernel against its twin, and both forms of the iteration with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.newton_schulz import newton_schulz

symmetric = pytest.importorskip("rille.ops.newton_schulz.symmetric", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
U = 2**-24
SIZES = [(1, 1), (15, 17), (32, 16), (33, 63), (65, 31), (129, 48)]  # P, K: tiles of 32 here


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def padded(x: Tensor) -> Tensor:
    """In the middle of NaN."""
    whole = torch.full((x.numel() + 64,), torch.nan, device=x.device, dtype=x.dtype)
    whole[32:-32] = x.flatten()
    return whole[32:-32].view(x.shape)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max())


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(("P", "K"), SIZES)
def test_gram_matrices(P: int, K: int, tall: bool) -> None:
    """Sums of K products of fp32 numbers up to 5 or so: K (K + 1) roundings at the very most, far fewer in fact."""
    x = padded(draw(3, K, P) if tall else draw(3, P, K))
    got = symmetric.product(x, x, tall=tall)
    exact = symmetric.twin(x.double(), x.double(), tall=tall)
    assert distance(got, exact) <= 25 * K * U * (1 + K**0.5)
    assert torch.allclose(got, got.mT, rtol=0, atol=25 * K * U)
    assert distance(symmetric.twin(x, x, tall=tall), exact) <= 25 * K * U * (1 + K**0.5)


@pytest.mark.parametrize("P", [1, 15, 33, 64, 97])
def test_polynomials(P: int) -> None:
    """With a matrix and the diagonal added, and of two matrices that commute."""
    x = draw(2, P, P, seed=1) / (2 * P**0.5)
    a = padded(symmetric.twin(x, x))
    exact = a.double()
    b = symmetric.product(a, a, a, 2.0315, -4.775, 3.4445)
    want = 2.0315 * exact @ exact - 4.775 * exact + 3.4445 * torch.eye(P, device=DEVICE)
    assert distance(b, want) <= 64 * U * 10
    assert distance(symmetric.twin(a, a, a, 2.0315, -4.775, 3.4445), want) <= 64 * U * 10
    assert distance(symmetric.product(b, a), want @ exact) <= 64 * U * 20
    assert distance(symmetric.twin(b, a), want @ exact) <= 64 * U * 20


@pytest.mark.parametrize("form", ["plain", "gram"])
@pytest.mark.parametrize(("P", "Q"), [(1, 1), (17, 17), (40, 70), (70, 40)])
def test_both_forms(P: int, Q: int, form: str) -> None:
    m = draw(2, P, Q, seed=2)
    got = newton_schulz(m, backend=f"{form} symmetric")
    want = newton_schulz(m.double(), backend="reference")
    assert float((got.double() - want).norm() / want.norm()) < 1e-4  # as in test_newton_schulz
    assert distance(got, newton_schulz(m, backend=form)) < 1e-4


def test_nothing_there() -> None:
    assert newton_schulz(draw(0, 15, 63), backend="gram symmetric").shape == (0, 15, 63)
