"""The norms against arithmetic done by hand in float64, their order of rounding, and their gradients."""

import pytest
import torch
from torch import Tensor

from rille.ops.norm import gated_rms_norm, rms_norm

EPS = 1e-5
SHAPES = [(0, 4), (1, 1), (3, 15), (17, 64), (2, 5, 63)]


def draw(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def by_hand(row: list[float], gain: list[float]) -> list[float]:
    root = (sum(value * value for value in row) / len(row) + EPS) ** 0.5
    return [value / root * factor for value, factor in zip(row, gain, strict=True)]


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm_by_hand(shape: tuple[int, ...]) -> None:
    x, weight = draw(*shape), draw(shape[-1], seed=1)
    rows = [by_hand(row, weight.tolist()) for row in x.flatten(0, -2).tolist()]
    want = torch.tensor(rows, dtype=torch.float64).view(shape)
    torch.testing.assert_close(rms_norm(x, weight, EPS), want, rtol=1e-14, atol=1e-14)
    assert torch.equal(rms_norm(x, None, EPS), rms_norm(x, torch.ones(shape[-1]), EPS))


def test_rms_norm_gradients() -> None:
    x, weight = draw(7, 15).requires_grad_(), draw(15, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: rms_norm(*inputs, EPS), (x, weight))


def test_rms_norm_rounds_before_the_gain() -> None:
    x, weight = draw(64, 256, dtype=torch.bfloat16), draw(256, dtype=torch.bfloat16, seed=1)
    normed = x.float() / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    got = rms_norm(x, weight, EPS)
    # sqrt and divide against rsqrt: an fp32 ulp apart, so a few values fall on the other side of a rounding boundary.
    assert (got != normed.bfloat16() * weight).float().mean() < 1e-3
    assert (got != (normed * weight.float()).bfloat16()).float().mean() > 0.1, "gain applied before the rounding"


def test_rms_norm_keeps_the_dtype_and_ignores_the_gains_dtype() -> None:
    x, weight = draw(3, 8, dtype=torch.bfloat16), draw(8, seed=1).float()
    assert rms_norm(x, weight, EPS).dtype == torch.bfloat16
    assert torch.equal(rms_norm(x, weight, EPS), rms_norm(x, weight.bfloat16(), EPS))


def test_eps_is_inside_the_root() -> None:
    x = torch.full((1, 4), 1e-3, dtype=torch.float64)
    want = 1e-3 / (1e-6 + EPS) ** 0.5
    torch.testing.assert_close(rms_norm(x, None, EPS), torch.full_like(x, want), rtol=1e-14, atol=0)
    assert torch.equal(rms_norm(torch.zeros(2, 4), torch.ones(4), EPS), torch.zeros(2, 4))


def test_rows_do_not_mix() -> None:
    x = draw(5, 8)
    poisoned = x.clone()
    poisoned[2] = torch.nan
    keep = [0, 1, 3, 4]
    assert torch.equal(rms_norm(poisoned, None, EPS)[keep], rms_norm(x, None, EPS)[keep])


@pytest.mark.parametrize("shape", [(0, 2, 4), (1, 1, 1), (5, 3, 17)])
def test_gated_rms_norm_by_hand(shape: tuple[int, ...]) -> None:
    o, gate, weight = draw(*shape), draw(*shape, seed=1), draw(shape[-1], seed=2)
    rows = [by_hand(row, weight.tolist()) for row in o.flatten(0, -2).tolist()]
    want = torch.tensor(rows, dtype=torch.float64).view(shape) / (1 + torch.exp(-gate))
    torch.testing.assert_close(gated_rms_norm(o, gate, weight, EPS), want, rtol=1e-14, atol=1e-14)


def test_gated_rms_norm_gradients() -> None:
    inputs = [draw(3, 2, 5).requires_grad_(), draw(3, 2, 5, seed=1).requires_grad_(), draw(5, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(lambda *xs: gated_rms_norm(*xs, EPS), inputs)


def test_gated_rms_norm_rounds_once() -> None:
    o, gate, weight = draw(9, 2, 32).float(), draw(9, 2, 32, seed=1).bfloat16(), draw(32, seed=2).float()
    whole = gated_rms_norm(o, gate.float(), weight, EPS)
    assert torch.equal(gated_rms_norm(o, gate, weight, EPS), whole.bfloat16())
    assert torch.equal(gated_rms_norm(o, gate, weight, EPS, dtype=torch.float32), whole)


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"\(3,\).*4"):
        rms_norm(torch.ones(2, 4), torch.ones(3), EPS)
    with pytest.raises(ValueError, match="differ in shape"):
        gated_rms_norm(torch.ones(2, 1, 4), torch.ones(2, 2, 4), torch.ones(4), EPS)
    with pytest.raises(ValueError, match=r"\(3,\).*4"):
        gated_rms_norm(torch.ones(2, 1, 4), torch.ones(2, 1, 4), torch.ones(3), EPS)
