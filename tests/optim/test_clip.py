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


def one_by_one(parameters: list[nn.Parameter], limit: float) -> torch.Tensor:
    """The twin: a norm and a product for each gradient, in its own order."""
    found = [p.grad for p in parameters if p.grad is not None]
    wide = [torch.promote_types(torch.float32, gradient.dtype) for gradient in found]
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient, dtype in zip(found, wide, strict=True)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    for gradient in found:
        gradient.mul_((limit / norm).clamp(max=1.0))
    return norm


@pytest.mark.parametrize("bad", [None, 0.0, float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("limit", [1e-3, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_all_at_once_is_one_by_one_bit_for_bit(dtype: torch.dtype, limit: float, bad: float | None):
    """Empty, transposed and strided gradients too; NaN where the twin has NaN."""
    together, apart = (odd_gradients(dtype, bad) for _ in range(2))
    norms = clip_gradients(together, limit), one_by_one(apart, limit)
    assert torch.equal(norms[0].nan_to_num(-1.0), norms[1].nan_to_num(-1.0)) and norms[0].dtype == norms[1].dtype
    for ours, theirs in zip(together, apart, strict=True):
        assert ours.grad is not None and theirs.grad is not None and ours.grad.dtype == dtype
        assert torch.equal(ours.grad.isnan(), theirs.grad.isnan())
        assert torch.equal(ours.grad.nan_to_num(), theirs.grad.nan_to_num())


def odd_gradients(dtype: torch.dtype, bad: float | None) -> list[nn.Parameter]:
    parameters = with_gradients(3.0, dtype)[:-1]
    assert parameters[1].grad is not None
    if bad is not None:
        parameters[1].grad[2, 3] = bad
    for gradient in (torch.zeros(0), torch.arange(15.0).view(5, 3).mT, torch.arange(40.0).view(5, 8)[:, ::2]):
        p = nn.Parameter(torch.zeros_like(gradient, dtype=dtype))
        p.grad = gradient.to(dtype)
        parameters.append(p)
    return parameters


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [1.8, 1e9])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype: torch.dtype, limit: float):
    """The CPU's norm, and each gradient times the wide factor, rounded once."""
    on_cpu, on_gpu, before = odd_gradients(dtype, None), [], []
    for p in on_cpu:
        assert p.grad is not None
        on_gpu.append(nn.Parameter(p.detach().cuda()))
        before.append(p.grad.cuda())
        on_gpu[-1].grad = before[-1].clone()
    norm = clip_gradients(on_gpu, limit)
    assert norm.is_cuda and float(norm) == pytest.approx(float(clip_gradients(on_cpu, limit)), rel=1e-6)
    factor = (limit / norm).clamp(max=1.0)
    for p, gradient in zip(on_gpu, before, strict=True):
        assert p.grad is not None and p.grad.dtype == dtype
        assert torch.equal(p.grad, (gradient.to(norm.dtype) * factor).to(dtype))


def test_gradients_of_several_dtypes():
    parameters = [*with_gradients(1.0, torch.bfloat16), *with_gradients(1.0), *with_gradients(1.0, torch.bfloat16)]
    twins = [*with_gradients(1.0, torch.bfloat16), *with_gradients(1.0), *with_gradients(1.0, torch.bfloat16)]
    assert float(clip_gradients(parameters, 0.5)) == pytest.approx(float(one_by_one(twins, 0.5)), rel=1e-6)
    for ours, theirs in zip(parameters, twins, strict=True):
        assert getattr(ours.grad, "dtype", None) == getattr(theirs.grad, "dtype", None)
    assert np.abs(gradients(parameters) - gradients(twins)).max() <= 2**-9


def test_no_gradient():
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        clip_gradients([nn.Parameter(torch.zeros(2))], 1.0)


def test_an_iterator_is_fine():
    parameters = with_gradients(10.0)
    clip_gradients(iter(parameters), 1.0)
    assert np.linalg.norm(gradients(parameters)) == pytest.approx(1.0, rel=1e-6)
