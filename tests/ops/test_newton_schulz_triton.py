"""Symmetric products by half of their tiles: the kernel against its twin, and both forms of the iteration with it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import rille.ops.newton_schulz as package
from rille.ops.newton_schulz import COEFFICIENTS, blocks, choose_backend, newton_schulz
from tests.ops import gluon_on_cpu

symmetric = pytest.importorskip("rille.ops.newton_schulz.symmetric", exc_type=ImportError)
chain_gluon = pytest.importorskip("rille.ops.newton_schulz.chain_gluon", exc_type=ImportError)

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


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("tiles", [1, 2])
def test_chain(tiles: int, steps: int) -> None:
    """The Gluon kernel run by Python, in fp32, and what it is the same as."""
    x = draw(2, 128 * tiles, 300, seed=4).cpu()
    x /= torch.linalg.matrix_norm(x, keepdim=True)
    a = symmetric.twin(x, x)
    t = torch.full_like(a, torch.nan)
    (chain,) = gluon_on_cpu.kernels_of(chain_gluon)
    gluon_on_cpu.Kernel(chain.transform)[(2,)](a, t, *COEFFICIENTS, STEPS=steps, TILES=tiles, num_warps=8)
    want = blocks.transform(a.double(), steps)
    assert float((t.double() - want).norm() / want.norm()) < 1e-6
    assert float((blocks.transform(a, steps).double() - want).norm() / want.norm()) < 1e-6


@pytest.mark.parametrize("rank", [None, 20])
@pytest.mark.parametrize(("P", "Q"), [(128, 512), (448, 256)])
def test_chain_in_fp16(P: int, Q: int, rank: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The roundings of a card in five steps, also where most of A is noise: no further off than the library's form."""
    (chain,) = gluon_on_cpu.kernels_of(chain_gluon)

    def by_python(a_BPP: Tensor, steps: int) -> Tensor:
        t_BPP, tiles = torch.full_like(a_BPP, torch.nan), a_BPP.shape[1] // 128
        kernel = gluon_on_cpu.Kernel(chain.transform)[(len(a_BPP),)]
        kernel(a_BPP, t_BPP, *COEFFICIENTS, STEPS=steps, TILES=tiles, num_warps=8)
        return t_BPP

    monkeypatch.setattr(symmetric, "chain", by_python)
    m = (draw(1, P, Q, seed=6) if rank is None else draw(1, P, rank, seed=6) @ draw(1, rank, Q, seed=7)).cpu()
    want = newton_schulz(m.double(), backend="reference")
    got = symmetric.chained((m / torch.linalg.matrix_norm(m, keepdim=True)).half(), 5)
    library = newton_schulz(m, dtype=torch.float16, backend="gram")
    errors = [float((x.double() - want).norm() / want.norm()) for x in (got, library)]
    assert errors[0] <= 1.25 * errors[1] and errors[0] < (1e-2 if rank is None else 5e-2), errors
    assert torch.linalg.matrix_norm(got.float(), 2).max() < 1.21, "the polynomial's largest is 1.2024"


def test_choice_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch where it was measured: fp16, shorter sides of 128 and 256, oblong, Hopper."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from rille.ops import launching

    major = 9
    monkeypatch.setattr(launching, "INTERPRET", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    with FakeTensorMode():

        def chosen(P: int, Q: int, dtype: torch.dtype = torch.float16) -> str:
            return choose_backend(torch.empty(2, P, Q, dtype=dtype, device="cuda"))[0]

        assert chosen(256, 448) == chosen(448, 256) == chosen(128, 7168) == "gram chain"
        assert chosen(512, 896) == chosen(192, 896) == chosen(256, 448, torch.bfloat16) == "gram"
        assert chosen(256, 256) == "plain"
        monkeypatch.setattr(package, "KERNELS", "symmetric")
        assert (chosen(512, 896), chosen(512, 512), chosen(128, 512)) == ("gram symmetric", "plain symmetric", "gram")
        monkeypatch.setattr(package, "KERNELS", "")
        assert chosen(256, 448) == "gram"
        monkeypatch.setattr(package, "KERNELS", "chain")
        major = 8
        assert chosen(256, 448) == "gram"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", ["plain symmetric", "gram symmetric", "gram chain"])
@pytest.mark.parametrize(("P", "Q"), [(256, 448), (448, 256), (128, 512), (128, 7168), (512, 128)])
def test_on_the_card(P: int, Q: int, backend: str, dtype: torch.dtype) -> None:
    m = draw(3, P, Q, seed=5)
    want = newton_schulz(m.double(), backend="reference")
    got = newton_schulz(m, dtype=dtype, backend=backend)
    limit = {torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]  # as in test_newton_schulz
    assert float((got.double() - want).norm() / want.norm()) < limit
    assert torch.equal(got, newton_schulz(m, dtype=dtype, backend=backend))


def test_refused() -> None:
    with pytest.raises(ValueError, match="'gram chain' cannot run"):
        newton_schulz(draw(2, 100, 300), backend="gram chain")


def test_nothing_there() -> None:
    assert newton_schulz(draw(0, 15, 63), backend="gram symmetric").shape == (0, 15, 63)
