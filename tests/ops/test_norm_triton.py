"""The norms' kernels against their definition: values, gradients, strides, rounding, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.norm import add_rms_norm, choose_backend, gated_rms_norm, rms_norm

launch = pytest.importorskip("rille.ops.norm.launch", exc_type=ImportError)

EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1), (3, 15), (37, 64), (2, 5, 63), (700, 8), (3, 2100)]


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def outcomes(function, backend: str, inputs: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients of a wave over them; float64 for the reference."""
    leaves = [x.detach().to(torch.float64 if backend == "reference" else x.dtype).requires_grad_() for x in inputs]
    outputs = function(*leaves, EPS, backend=backend)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    waves = [torch.arange(x.numel(), device=DEVICE).add(k).double().sin().view_as(x) for k, x in enumerate(outputs)]
    loss = sum((x * wave.to(x.dtype)).sum() for x, wave in zip(outputs, waves, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def compare(function, inputs: list[Tensor], limit: float = 2e-5) -> None:
    got, want = (outcomes(function, name, inputs) for name in ("triton", "reference"))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        assert (a.double() - b).abs().max() <= limit * b.abs().max().clamp_min(1e-30)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, ...]) -> None:
    compare(rms_norm, [draw(*shape), draw(shape[-1], seed=1)])


def test_without_a_gain() -> None:
    compare(lambda x, eps, backend: rms_norm(x, None, eps, backend=backend), [draw(5, 33)])


@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_add_rms_norm(shape: tuple[int, ...]) -> None:
    compare(add_rms_norm, [draw(*shape), draw(*shape, seed=2), draw(shape[-1], seed=1)])


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 17), (40, 2, 128)])
def test_gated_rms_norm(shape: tuple[int, ...]) -> None:
    function = lambda o, gate, weight, eps, backend: gated_rms_norm(o, gate, weight, eps, backend=backend)  # noqa: E731
    compare(function, [draw(*shape), draw(*shape, seed=1), draw(shape[-1], seed=2)])


def test_gated_rms_norm_of_two_dtypes() -> None:
    o, gate, weight = draw(9, 2, 32), draw(9, 2, 32, seed=1, dtype=torch.bfloat16), draw(32, seed=2)
    got = gated_rms_norm(o, gate, weight, EPS, backend="triton")
    whole = gated_rms_norm(o, gate, weight, EPS, dtype=torch.float32, backend="triton")
    assert got.dtype == torch.bfloat16 and whole.dtype == torch.float32
    want = gated_rms_norm(o, gate, weight, EPS, dtype=torch.float32, backend="reference")
    assert (whole - want).abs().max() <= 2e-6 * want.abs().max()
    assert (got.float() - want).abs().max() <= 2**-7 * want.abs().max()


def test_rounds_before_the_gain() -> None:
    """The interpreter truncates casts, so only the card can be compared bit for bit; here within two roundings."""
    x, weight = draw(16, 256, dtype=torch.bfloat16), draw(256, seed=1, dtype=torch.bfloat16)
    got, want = (rms_norm(x, weight, EPS, backend=name).float() for name in ("triton", "reference"))
    assert ((got - want).abs() <= 2**-6 * want.abs() + 1e-6).all()
    if DEVICE == "cuda":
        assert (got != want).float().mean() < 1e-3


def test_rows_that_lie_apart() -> None:
    both, weight = draw(6, 24), draw(16, seed=1)
    left = both[:, :16]
    assert launch.dense_rows(left) is left
    assert torch.equal(
        rms_norm(left, weight, EPS, backend="triton"), rms_norm(left.contiguous(), weight, EPS, backend="triton")
    )
    o = draw(4, 3, 2, 16)[:, :, 1]
    gate = draw(4, 3, 16, seed=1)
    want = gated_rms_norm(o.contiguous(), gate, weight, EPS, backend="triton")
    assert torch.equal(gated_rms_norm(o, gate, weight, EPS, backend="triton"), want)


@pytest.mark.parametrize("tokens", [1, 5])
def test_gates_among_the_columns_of_a_product(tokens: int) -> None:
    """Heads of a token lie together, tokens apart. They are read where they are, and their gradient goes back there."""
    results = []
    for apart in (True, False):
        product = draw(tokens, 88).requires_grad_()
        o, weight = draw(tokens, 3, 16, seed=1).requires_grad_(), draw(16, seed=2).requires_grad_()
        gate = product[:, 24:72].unflatten(-1, (3, 16))
        y = gated_rms_norm(o, gate if apart else gate.contiguous(), weight, EPS, backend="triton")
        y.backward(draw(tokens, 3, 16, seed=3))
        results.append((y, o.grad, product.grad, weight.grad))
    for got, want in zip(*results, strict=True):
        assert got is not None and want is not None and torch.equal(got, want)


def test_no_rows() -> None:
    x = draw(0, 8).requires_grad_()
    weight = draw(8).requires_grad_()
    rms_norm(x, weight, EPS, backend="triton").sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_nan_stays_in_its_row() -> None:
    x = draw(5, 8)
    sick = x.clone()
    sick[2] = torch.nan
    keep = [0, 1, 3, 4]
    a, b = (rms_norm(t, None, EPS, backend="triton")[keep] for t in (x, sick))
    assert torch.equal(a, b)


def test_ops_are_registered_whole() -> None:
    checks = ("test_schema", "test_faketensor")
    arguments = (draw(3, 8), draw(3, 8, seed=1), draw(8), EPS)
    torch.library.opcheck(launch.rms_norm.registered, arguments, test_utils=checks)
    arguments = (draw(6, 8), draw(3, 2, 8, seed=1), draw(8), EPS, torch.bfloat16)
    torch.library.opcheck(launch.gated_rms_norm.registered, arguments, test_utils=checks)


def test_choice_and_refusal() -> None:
    name, reason = choose_backend(draw(2, 4))
    assert reason and name == ("triton" if DEVICE == "cuda" else "reference")
    with pytest.raises(ValueError, match="unknown backend"):
        rms_norm(draw(2, 4), None, EPS, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        rms_norm(draw(2, 4).double(), None, EPS, backend="triton")
    with pytest.raises(ValueError, match=r"rows of 1 to \d+ elements, these have 20000"):
        rms_norm(draw(1, 20000), None, EPS, backend="triton")
    with pytest.raises(ValueError, match="differ"):
        add_rms_norm(draw(2, 4), draw(3, 4), None, EPS)
