"""SiTU-GLU and SwiGLU against Python's math, their limits, and their gradients."""

import math

import pytest
import torch

from rille.ops.situ import situ_glu, swiglu

CAPS = (4.0, 25.0)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def grid() -> tuple[torch.Tensor, torch.Tensor]:
    """Every pair of a gate and an up value from -100 to 100, the report's range and beyond its caps."""
    values = torch.tensor([-100.0, -25, -7.5, -4, -1, -1e-3, 0, 1e-3, 0.5, 3, 4, 10, 25, 99], dtype=torch.float64)
    gate, up = torch.meshgrid(values, values, indexing="ij")
    return gate.contiguous(), up.contiguous()


def test_values_by_hand() -> None:
    gate, up = grid()
    want = [
        4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25)
        for g, u in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)
    ]
    got = situ_glu(gate, up, *CAPS).flatten()
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=1e-300)
    want = [g * sigmoid(g) * u for g, u in zip(gate.flatten().tolist(), up.flatten().tolist(), strict=True)]
    torch.testing.assert_close(
        swiglu(gate, up).flatten(), torch.tensor(want, dtype=torch.float64), rtol=1e-13, atol=1e-300
    )


@pytest.mark.parametrize("function", [lambda g, u: situ_glu(g, u, *CAPS), swiglu])
def test_gradients(function) -> None:
    gate, up = (torch.linspace(-9, 11, 15, dtype=torch.float64).roll(n).requires_grad_() for n in (0, 6))
    assert torch.autograd.gradcheck(function, (gate, up))


def test_bounded_and_never_without_gradient() -> None:
    gate, up = (torch.tensor([[1e4, 1e4, -1e4], [20.0, 12.0, -3.0]][n]).requires_grad_() for n in (0, 1))
    out = situ_glu(gate, up, *CAPS)
    assert torch.isfinite(out).all() and (out.abs() <= 100).all()
    assert torch.isfinite(torch.stack(torch.autograd.grad(out.sum(), (gate, up)))).all()
    moderate = torch.tensor([8.0], requires_grad=True)  # twice the gate's cap: a clamp would have gradient 0
    (slope,) = torch.autograd.grad(situ_glu(moderate, torch.ones(1), *CAPS).sum(), moderate)
    assert slope.item() > 0.05


def test_wide_caps_give_swiglu() -> None:
    gate, up = grid()
    # b tanh(z / b) = z - z^3 / (3 b^2) + ...: at |z| = 100 and b = 1e8 each factor is off by z^2 / (3 b^2) = 3e-13
    torch.testing.assert_close(situ_glu(gate, up, 1e8, 1e8), swiglu(gate, up), rtol=1e-12, atol=1e-300)


def test_bfloat16_is_rounded_once() -> None:
    gate, up = (values.bfloat16() for values in grid())
    assert torch.equal(situ_glu(gate, up, *CAPS), situ_glu(gate.float(), up.float(), *CAPS).bfloat16())
    assert torch.equal(swiglu(gate, up), swiglu(gate.float(), up.float()).bfloat16())


def test_bad_operands() -> None:
    one = torch.ones(2)
    with pytest.raises(ValueError, match="caps must be positive, got 0"):
        situ_glu(one, one, 0, 25)
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        situ_glu(one, torch.ones(3), *CAPS)
    with pytest.raises(ValueError, match="float64"):
        swiglu(one, one.double())
