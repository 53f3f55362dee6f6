"""The Gluon form of the first KDA kernel, run by Python on a CPU, against its Triton twin in the interpreter, which
keeps fp32 operands for fp32 inputs: the difference is the rounding of operands to bf16."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import Gate, intra_gluon
from rille.ops.kda import forward as kernels
from rille.ops.kda.forward import INTERPRET, intra
from rille.packing import Packing
from tests.ops.gluon_on_cpu import Kernel
from tests.ops.gluon_views_on_cpu import kernels_of

pytestmark = pytest.mark.skipif(not INTERPRET, reason="on a GPU test_kda_triton.py ties both")
LENGTHS = (1, 64, 100)


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of the first kernel run its Gluon form."""
    (copy,) = kernels_of(monkeypatch, intra_gluon)

    def launch(kernel: Any, programs: int, arguments: tuple, **options: Any) -> None:
        assert kernel is intra_gluon.intra_tile_kernel
        tile_kernel = partial(copy.intra_tile_kernel, num_warps=options["num_warps"])
        Kernel(tile_kernel)[(programs,)](*arguments, **options)

    monkeypatch.setattr(kernels, "TILED", True)
    monkeypatch.setattr(kernels, "launch", launch)


def draw(K: int, bound: float | None, spread: float = 3.0) -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    N, H = sum(LENGTHS), 2
    q, k, z = (torch.randn(N, H, K, generator=generator) for _ in range(3))
    b = torch.randn(N, H, generator=generator)
    gate = Gate(0.3 * torch.randn(H, generator=generator), torch.randn(H, K, generator=generator), bound)
    tokens = [x.bfloat16() for x in (q, k, spread * z, b)]
    return *tokens, gate.A_log, gate.dt_bias, bound, Packing.of(LENGTHS).chunks(64).spans


def in_fp32(arguments: Any) -> Any:
    return tuple(x.float() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments)


def assert_twins_agree(arguments: Any, request: pytest.FixtureRequest) -> None:
    """T in two digits counts as their sum. Given T, the first digit is what W is made of."""
    exact = in_fp32(arguments)
    wanted = intra(*exact)
    solved = intra(*exact, wanted.t_DMHCC.bfloat16().float())
    request.getfixturevalue("tiled")
    made = [intra(*arguments, digits=digits) for digits in (1, 2)]
    for got, want in ((made[0], wanted), (made[1], wanted), (intra(*arguments, wanted.t_DMHCC.bfloat16()), solved)):
        for name, x, y in zip(want._fields, got, want, strict=True):
            x, y = (each.double().sum(0) if name == "t_DMHCC" else each.double() for each in (x, y))
            assert bool(x.isfinite().all()), name
            distance = (x - y).norm() / y.norm().clamp_min(1e-30)
            assert distance <= 5e-3, f"{name} is off by {distance:.1e}"
    assert torch.equal(made[0].t_DMHCC[0], made[1].t_DMHCC[0])


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("K", [64, 128])
def test_twins_agree(K: int, bound: float | None, request: pytest.FixtureRequest) -> None:
    assert_twins_agree(draw(K, bound), request)


@pytest.mark.parametrize("spread", [100.0, 12.0])
def test_twins_agree_where_the_softplus_gate_shuts(spread: float, request: pytest.FixtureRequest) -> None:
    """Most channels lose all or nothing at each token, and what is measured across a block's middle is largest."""
    assert_twins_agree(draw(64, None, spread), request)
