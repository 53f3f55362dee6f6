"""The kernels of the gated activations against their definition, over the whole range of the caps."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rille.ops.situ import choose_backend, situ_glu, swiglu

launch = pytest.importorskip("rille.ops.situ.launch", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1), (7, 33), (2, 3, 65), (1, 1024), (3, 1400)]
FUNCTIONS = {"situ": partial(situ_glu, cap_gate=4.0, cap_up=25.0), "swiglu": swiglu}


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Values of size 1e-4 to 1e3, of both signs."""
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=g) * 10.0 ** (7 * torch.rand(shape, generator=g) - 4)).to(DEVICE)


def outcomes(function, backend: str, gate: Tensor, up: Tensor) -> list[Tensor]:
    wide = torch.float64 if backend == "reference" else gate.dtype
    leaves = [x.detach().to(wide).requires_grad_() for x in (gate, up)]
    out = function(*leaves, backend=backend)
    wave = torch.arange(out.numel(), device=DEVICE).double().sin().view_as(out).to(gate.dtype).to(out.dtype)
    return [out, *torch.autograd.grad((out * wave).sum(), leaves)]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(name: str, shape: tuple[int, ...]) -> None:
    """Relative to each value, so that small ones count; below 1e-30 fp32 has nothing left."""
    inputs = draw(*shape), draw(*shape, seed=1)
    got, want = (outcomes(FUNCTIONS[name], backend, *inputs) for backend in ("triton", "reference"))
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert a.shape == b.shape and a.isfinite().all()
        # Where a factor saturates, 1 - tanh^2 is what fp32 leaves of 1 - 1, times the other factors.
        room = 1e-30 if i == 0 else 2e-6 * b.abs().max()
        assert ((a.double() - b).abs() <= 5e-6 * b.abs() + room).all()


def test_values_far_out_are_finite() -> None:
    gate = torch.tensor([-1e30, -200.0, -1e-30, 0.0, 200.0, 1e30], device=DEVICE)
    got, want = (outcomes(FUNCTIONS["situ"], backend, gate, gate.flip(0)) for backend in ("triton", "reference"))
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all() and ((a.double() - b).abs() <= 1e-5 * b.abs() + 1e-6).all()


def test_bfloat16_is_computed_in_fp32() -> None:
    gate, up = draw(7, 33).bfloat16(), draw(7, 33, seed=1).bfloat16()
    got, want = (outcomes(FUNCTIONS["situ"], backend, gate, up) for backend in ("triton", "reference"))
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.bfloat16
        assert ((a.double() - b).abs() <= 2**-7 * b.abs() + 1e-6 * b.abs().max()).all()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gate_and_up_side_by_side(name: str) -> None:
    both = draw(6, 2 * 40).requires_grad_()
    gate, up = both.chunk(2, -1)
    assert launch.dense_rows(up) is up
    out = FUNCTIONS[name](gate, up, backend="triton")
    (grad,) = torch.autograd.grad(out.sum(), both)
    leaves = [x.detach().contiguous().requires_grad_() for x in (gate, up)]
    want = FUNCTIONS[name](*leaves, backend="triton")
    assert torch.equal(out, want)
    assert torch.equal(grad, torch.cat(torch.autograd.grad(want.sum(), leaves), -1))


def test_nothing_and_single_numbers() -> None:
    for shape in ((0, 5), (5, 0), ()):
        x = torch.ones(shape, device=DEVICE).requires_grad_()
        out = situ_glu(x, x, 4.0, 25.0, backend="triton")
        out.sum().backward()
        assert out.shape == shape and x.grad is not None


def test_the_op_is_registered_whole() -> None:
    arguments = (draw(3, 8), draw(3, 8, seed=1), 4.0, 25.0, True)
    torch.library.opcheck(launch.glu.registered, arguments, test_utils=("test_schema", "test_faketensor"))


def test_choice_and_refusal() -> None:
    x = draw(2, 4)
    name, reason = choose_backend(x, x)
    assert reason and name == ("triton" if DEVICE == "cuda" else "reference")
    with pytest.raises(ValueError, match="unknown backend"):
        swiglu(x, x, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        swiglu(x.double(), x.double(), backend="triton")
