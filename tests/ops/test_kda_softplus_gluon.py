"""The Gluon form of the softplus gate's last backward kernel against its Triton twin, which takes pairs of rows one by
one: run by Python on a CPU, where the twin keeps fp32 operands in the interpreter and the difference is the rounding of
operands to bf16, and on a card."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import backward as kernels
from rille.ops.kda import backward_local_gluon, backward_softplus_gluon, intra_gluon
from rille.ops.kda.backward import Gradients, Inputs, local, prepare, reverse, states
from rille.ops.kda.forward import INTERPRET, intra
from rille.packing import Packing
from tests.ops import test_kda_backward as backward
from tests.ops.gluon_on_cpu import Kernel
from tests.ops.gluon_views_on_cpu import kernels_of

H, WIDTH = 2, 128
DEVICE = "cpu" if INTERPRET else "cuda"
GATES = ("random", "shut", "open", "shut or open", "resets")
LENGTHS: tuple[int, ...] = (17, 70) if INTERPRET else (1, 15, 16, 17, 0, 63, 64, 65, 300)
Last = tuple[Any, ...]


def logits(gate: str, z: Tensor) -> Tensor:
    token = torch.arange(z.shape[0])[:, None, None]
    if gate == "resets":
        return torch.where(token % 11 == 5, 40.0, -3.0).expand_as(z)
    if gate == "shut or open":
        return torch.where(z[:, :, :1] < 0, -12.0, 12.0).expand_as(z)
    return {"shut": torch.full_like(z, 40.0), "open": torch.full_like(z, -8.0)}.get(gate, 3 * z)


def draw(gate: str, dtype: torch.dtype, size: float = 1.0) -> tuple[Inputs, Last]:
    """Inputs that bf16 holds exactly, and what the kernels before the last one make of them, rounded alike."""
    generator, N = torch.Generator().manual_seed(0), sum(LENGTHS)
    z, q, k, v, do = (torch.randn(N, H, WIDTH, generator=generator) for _ in range(5))
    b = torch.randn(N, H, generator=generator)
    tokens = [x.bfloat16().to(DEVICE, dtype) for x in (q, k, v, logits(gate, z), b)]
    gates = [
        x.to(DEVICE) for x in (0.3 * torch.randn(H, generator=generator), torch.randn(H, WIDTH, generator=generator))
    ]
    packing = Packing.of(LENGTHS, device=DEVICE)
    indices = (packing.chunks(64).spans, packing.starts, packing.longest_first, packing.chunks(64).first)
    inputs = Inputs._make([*tokens, *gates, None, *indices, None])
    made = intra(*inputs[:2], *inputs[3:8], inputs.spans_M2, digits=2)
    prepared, do = prepare(inputs, digits=2), (size * do).bfloat16().to(DEVICE, dtype)
    u, before = states(inputs, prepared, made.t_DMHCC)
    dv, after, _ = reverse(inputs, prepared, made.t_DMHCC, made.a_MHCC, do, None)
    dv, u, before, after = (x.bfloat16().to(dtype) for x in (dv, u, before, after))
    return inputs, (do, dv, None, u, before, after, prepared.totals_MH4K, prepared.norms_MH4C)


def in_bf16(inputs: Inputs, last: Last) -> tuple[Inputs, Last]:
    tiles = [x if x is None else x.bfloat16() for x in last[:6]]
    return Inputs._make([*(x.bfloat16() for x in inputs[:5]), *inputs[5:]]), (*tiles, *last[6:])


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last kernel is the Gluon one; without a card its launches are run by Python."""
    monkeypatch.setattr(kernels, "SOFTPLUS_TILED", True)
    if INTERPRET:
        *_, copy = kernels_of(monkeypatch, intra_gluon, backward_local_gluon, backward_softplus_gluon)

        def launch(kernel: Any, programs: int, arguments: tuple, **options: Any) -> None:
            assert kernel is backward_softplus_gluon.softplus_tile_kernel
            Kernel(lambda *values, H: copy.softplus_tile_kernel(*values, H, 8))[(programs,)](*arguments, **options)

        monkeypatch.setattr(kernels, "launch", launch)


def assert_close(got: Gradients, wanted: Gradients, inputs: Inputs) -> None:
    """dA_log and ddt_bias, where terms of either sign nearly cancel, beside the sums of their sizes."""
    x_NHK = inputs.z_NHK.double() + inputs.dt_bias_HK.double()
    terms = wanted.z_NHK.double() * torch.nn.functional.softplus(x_NHK) / x_NHK.sigmoid()
    sizes = {"A_log": terms.abs().sum((0, 2)), "dt_bias_HK": wanted.z_NHK.double().abs().sum(0)}
    for name, x, y in zip(Gradients._fields[:7], got[:7], wanted[:7], strict=True):
        assert isinstance(x, Tensor) and isinstance(y, Tensor) and bool(x.isfinite().all()), name
        distance = (x.double() - y.double()).norm() / sizes.get(name, y.double()).norm().clamp_min(1e-30)
        assert distance <= (5e-3 if INTERPRET else 1e-2), f"{name} is off by {distance:.1e}"


@pytest.mark.skipif(not INTERPRET, reason="on a card the next test")
@pytest.mark.parametrize(("gate", "size"), [("random", 1.0), ("resets", 1.0), ("shut or open", 1e6)])
def test_twins_agree(gate: str, size: float, request: pytest.FixtureRequest) -> None:
    inputs, last = draw(gate, torch.float32, size)
    wanted = local(inputs, *last)
    request.getfixturevalue("tiled")
    inputs, last = in_bf16(inputs, last)
    assert_close(local(inputs, *last), wanted, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("gate", "size"), [*((gate, 1.0) for gate in GATES), ("shut or open", 1e6)])
def test_twins_agree_on_a_card(gate: str, size: float, request: pytest.FixtureRequest) -> None:
    """And a second run gives the same bits, and NaN in one sequence stays there."""
    inputs, last = draw(gate, torch.bfloat16, size)
    wanted = local(inputs, *last)
    request.getfixturevalue("tiled")
    got, again = local(inputs, *last), local(inputs, *last)
    assert all(torch.equal(x, y) for x, y in zip(got[:7], again[:7], strict=True))
    assert_close(got, wanted, inputs)
    start = sum(LENGTHS[:6])
    rows: list[Tensor] = [x.clone() for x in (*inputs[:5], *last[:2])]
    for x in rows:
        x[start : start + LENGTHS[6]] = torch.nan
    spoilt = local(Inputs._make([*rows[:5], *inputs[5:]]), *rows[5:], *last[2:])
    for x, y in zip((*spoilt[:2], *spoilt[3:5]), (*got[:2], *got[3:5]), strict=True):
        assert torch.equal(x[:start], y[:start])
        assert torch.equal(x[start + LENGTHS[6] :], y[start + LENGTHS[6] :])


@pytest.mark.gpu
@pytest.mark.usefixtures("tiled")
def test_gradients_equal_the_recurrence() -> None:
    backward.assert_gradients(backward.draw(LENGTHS, K=WIDTH, V=WIDTH, bound=None))
