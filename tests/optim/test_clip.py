"""Gradient clipping against float64."""

import numpy as np
import pytest
import torch
from torch import nn

from rille.optim.clip import clip_gradients


def with_gradients(scale: float, dtype=torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    parameters = []
    for shape in ((7,), (3, 5), (2, 3, 4), ()):
        p = nn.Parameter(torch.zeros(shape, dtype=dtype))
        p.grad = (torch.randn(shape, generator=generator) * scale).to(dtype)
        parameters.append(p)
    return [*parameters, nn.Parameter(torch.zeros(3))]  # the last has no gradient


def gradients(parameters: list[nn.Parameter]) -> np.ndarray:
    return np.concatenate([p.grad.double().numpy().ravel() for p in parameters if p.grad is not None])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2**-8)]
)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_norm_and_scale(dtype: torch.dtype, tolerance: float, scale: float):
    """The norm is exact to fp32 even for bf16 gradients; each scaled gradient is rounded once to its own dtype."""
    parameters = with_gradients(scale, dtype)
    before = gradients(parameters)
    norm = clip_gradients(parameters, 0.5)
    expected = np.linalg.norm(before)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    assert norm.shape == ()
    assert float(norm) == pytest.approx(expected, rel=1e-6)
    after = gradients(parameters)
    if expected <= 0.5:
        assert np.array_equal(after, before)
    else:
        assert np.abs(after - before * 0.5 / expected).max() <= tolerance * np.abs(after).max()


def test_zero_gradients_stay_zero():
    parameters = with_gradients(0.0)
    assert float(clip_gradients(parameters, 1.0)) == 0.0
    assert not gradients(parameters).any()


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_shows(bad: float):
    parameters = with_gradients(1.0)
    parameters[0].grad[0] = bad  # type: ignore[index]
    assert not torch.isfinite(clip_gradients(parameters, 1.0))
    assert np.isnan(gradients(parameters)).any()


def test_no_gradient():
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        clip_gradients([nn.Parameter(torch.zeros(2))], 1.0)


def test_an_iterator_is_fine():
    parameters = with_gradients(10.0)
    clip_gradients(iter(parameters), 1.0)
    assert np.linalg.norm(gradients(parameters)) == pytest.approx(1.0, rel=1e-6)
