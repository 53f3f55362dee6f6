"""The MX kernels give the bits of the plain PyTorch form."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops import mx
from rille.ops.mx import blocks

stream = pytest.importorskip("rille.ops.mx.stream", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WIDE = torch.float32


def hard_values(largest: float) -> Tensor:
    """[G, 32]: random of every size, all midpoints and neighbours of them at every scale, zeros of both signs, the ends
    of fp32."""
    g = torch.Generator().manual_seed(0)
    rows = [torch.randn(8, 32, generator=g) * 2.0**e for e in range(-150, 120, 9)]
    steps = torch.arange(32) * largest / 64
    for shift in (-(2.0**-20), 0.0, 2.0**-20):
        near = steps * (1 + shift)
        near[-1] = largest
        rows += [(near * sign * 2.0**e)[None] for e in (-130, -126, -3, 0, 7, 100) for sign in (1.0, -1.0)]
    rows += [torch.zeros(1, 32), -torch.zeros(1, 32), torch.full((1, 32), 2.0**-149), torch.full((1, 32), largest)]
    rows += [torch.nextafter(torch.full((1, 32), largest), torch.tensor(float("inf")))]
    return torch.cat(rows).to(DEVICE)


def rounded(values: Tensor, dtype: torch.dtype) -> Tensor:
    """In dtype; under the interpreter, which reads bfloat16's subnormal numbers wrongly, without those."""
    w = values.to(dtype)
    return w if DEVICE == "cuda" or dtype == WIDE else w.masked_fill(w.abs() < 2.0**-126, 0.0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_bits(dtype: torch.dtype) -> None:
    w = rounded(hard_values(6.0), dtype)
    packed, scale = mx.quantise_mxfp4(w, backend="torch")
    codes, bytes_ = stream.quantise(w, False)
    assert same_bits(codes, packed) and same_bits(bytes_, scale)
    values = mx.dequantise_mxfp4(packed, scale, WIDE, backend="torch")
    assert same_bits(stream.dequantise(packed, scale, WIDE, False), values)
    assert same_bits(stream.fake_quantise(w, False).to(WIDE), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8_bits(dtype: torch.dtype) -> None:
    w = rounded(hard_values(448.0), dtype)
    elements, scale = mx.quantise_mxfp8(w, backend="torch")
    codes, bytes_ = stream.quantise(w, True)
    assert same_bits(bytes_, scale) and same_bits(codes, elements.view(torch.uint8))
    values = mx.dequantise_mxfp8(elements, scale, WIDE, backend="torch")
    assert same_bits(stream.dequantise(codes, bytes_, WIDE, True), values)


def test_every_code_under_every_scale() -> None:
    code = torch.arange(256, dtype=torch.uint8, device=DEVICE)
    scale = torch.arange(253, dtype=torch.uint8, device=DEVICE)
    packed = code.view(1, 16, 16).expand(253, 16, 16).contiguous()
    scales = scale[:, None, None].expand(253, 16, 1).contiguous()
    want = mx.dequantise_mxfp4(packed, scales, WIDE, backend="torch")
    assert same_bits(stream.dequantise(packed, scales, WIDE, False), want)
    scales = scale[:235, None, None].expand(235, 8, 1).contiguous()
    elements = code.view(1, 8, 32).expand(235, 8, 32).contiguous()
    got = stream.dequantise(elements, scales, WIDE, True)
    want = elements.view(torch.float8_e4m3fn).to(WIDE) * blocks.scales(scales, WIDE)[..., 0, :]
    assert torch.equal(got.isnan(), want.isnan()) and same_bits(got.nan_to_num(1.0), want.nan_to_num(1.0))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_group_that_is_not_finite_is_nan_and_alone(bad: float) -> None:
    w = torch.ones(3, 64, device=DEVICE)
    w[1, 40] = bad
    out = stream.fake_quantise(w, False)
    want = torch.ones(3, 64, device=DEVICE)
    want[1, 32:] = torch.nan
    assert torch.equal(out.isnan(), want.isnan()) and torch.equal(out.nan_to_num(2.0), want.nan_to_num(2.0))


def test_gradient_goes_straight_through() -> None:
    w = torch.randn(2, 64, device=DEVICE, requires_grad=True)
    out = mx.fake_quantise_mxfp4(w, backend="triton")
    assert same_bits(out.detach(), mx.fake_quantise_mxfp4(w, backend="torch").detach())
    seed = torch.randn(2, 64, device=DEVICE)
    assert torch.equal(torch.autograd.grad(out, w, seed)[0], seed)


def test_no_groups_and_odd_numbers_of_them() -> None:
    for rows in (0, 1, 127, 129):
        w = torch.randn(rows, 32, device=DEVICE)
        want = mx.fake_quantise_mxfp4(w, backend="torch")
        assert same_bits(mx.fake_quantise_mxfp4(w, backend="triton"), want)


def test_refusals() -> None:
    w = torch.randn(1, 32, device=DEVICE)
    with pytest.raises(ValueError, match="unknown backend"):
        mx.fake_quantise_mxfp4(w, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        mx.fake_quantise_mxfp4(w.double(), backend="triton")
    with pytest.raises(ValueError, match="finite"):
        mx.quantise_mxfp4(w * torch.inf, backend="triton")
