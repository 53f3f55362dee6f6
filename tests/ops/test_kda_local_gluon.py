"""The Gluon forms of the last and the first kernel of the KDA backward against their Triton twins: run by Python on a
CPU, where the twins keep fp32 operands in the interpreter and the difference is the rounding of operands to bf16, and
on a card."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import backward as kernels
from rille.ops.kda import backward_local_gluon, backward_prepare_gluon, intra_gluon
from rille.ops.kda.backward import Gradients, Inputs, local, prepare, reverse, states
from rille.ops.kda.forward import INTERPRET, intra
from rille.packing import Packing
from tests.ops.gluon_on_cpu import Kernel
from tests.ops.gluon_views_on_cpu import kernels_of

H, WIDTH = 2, 128
DEVICE = "cpu" if INTERPRET else "cuda"
GATES = {"random": None, "shut": 12.0, "open": -8.0, "shut or open": 0.0}
LENGTHS: tuple[int, ...] = (17, 70) if INTERPRET else (1, 15, 16, 17, 0, 63, 64, 65, 300)
Last = tuple[Any, ...]


def draw(gate: str, dtype: torch.dtype, size: float = 1.0) -> tuple[Inputs, Last]:
    """Inputs that bf16 holds exactly, and what the kernels before the last one make of them, rounded alike."""
    generator, N = torch.Generator().manual_seed(0), sum(LENGTHS)
    z, q, k, v, do = (torch.randn(N, H, WIDTH, generator=generator) for _ in range(5))
    logit = GATES[gate]
    if logit == 0:
        z = torch.where(z[:, :, :1] < 0, -12.0, 12.0).expand_as(z)
    elif logit is not None:
        z = torch.full_like(z, logit)
    b = torch.randn(N, H, generator=generator)
    tokens = [x.bfloat16().to(DEVICE, dtype) for x in (q, k, v, 3 * z if logit is None else z, b)]
    gates = [
        x.to(DEVICE) for x in (0.3 * torch.randn(H, generator=generator), torch.randn(H, WIDTH, generator=generator))
    ]
    packing = Packing.of(LENGTHS, device=DEVICE)
    indices = (packing.chunks(64).spans, packing.starts, packing.longest_first, packing.chunks(64).first)
    inputs = Inputs._make([*tokens, *gates, -5.0, *indices, None])
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
    """The first and the last kernel are the Gluon ones; without a card their launches are run by Python."""
    monkeypatch.setattr(kernels, "TILED", True)
    monkeypatch.setattr(kernels, "TILED_PREPARE", True)
    if INTERPRET:
        _, last, first = kernels_of(monkeypatch, intra_gluon, backward_local_gluon, backward_prepare_gluon)
        copies = {
            backward_local_gluon.local_tile_kernel: last.local_tile_kernel,
            backward_prepare_gluon.prepare_tile_kernel: first.prepare_tile_kernel,
        }

        def launch(kernel: Any, programs: int, arguments: tuple, **options: Any) -> None:
            run = partial(copies[kernel], num_warps=options["num_warps"])
            Kernel(run)[(programs,)](*arguments, **options)

        monkeypatch.setattr(kernels, "launch", launch)


def assert_close(got: Gradients, wanted: Gradients, inputs: Inputs) -> None:
    """dA_log, where terms of either sign nearly cancel, beside the sum of their sizes."""
    terms = wanted.z_NHK.double() * (inputs.z_NHK.double() + inputs.dt_bias_HK.double())
    for name, x, y in zip(Gradients._fields[:7], got[:7], wanted[:7], strict=True):
        assert isinstance(x, Tensor) and isinstance(y, Tensor) and bool(x.isfinite().all()), name
        size = terms.abs().sum((0, 2)) if name == "A_log" else y.double()
        distance = (x.double() - y.double()).norm() / size.norm()
        assert distance <= (5e-3 if INTERPRET else 1e-2), f"{name} is off by {distance:.1e}"


@pytest.mark.skipif(not INTERPRET, reason="on a card the next test")
@pytest.mark.parametrize(("gate", "size"), [("random", 1.0), ("open", 1.0), ("shut or open", 1e6)])
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


def assert_first_kernels_agree(digits: int, request: pytest.FixtureRequest) -> None:
    """Rows are rounded once in each; with two digits the written keys agree to the second one's rounding."""
    inputs, last = draw("random", torch.float32 if INTERPRET else torch.bfloat16)
    wanted = prepare(inputs, digits)
    request.getfixturevalue("tiled")
    got = prepare(in_bf16(inputs, last)[0], digits)
    for name, x, y in zip(got._fields, got, wanted, strict=True):
        x, y = x.double(), y.double()
        if name == "k_end_DMHCK":
            x, y = x.sum(0), y.sum(0)
        if name == "norms_MH4C":
            x, y = x[:, :, :3], y[:, :, :3]  # the fourth is room
        limit = {"q_start_MHCK": 4e-3, "k_start_MHCK": 4e-3, "k_end_DMHCK": 4e-3 if digits == 1 else 5e-5}
        assert bool(x.isfinite().all()), name
        assert (x - y).norm() <= limit.get(name, 1e-6 if INTERPRET else 1e-5) * y.norm(), name


@pytest.mark.skipif(not INTERPRET, reason="on a card the next test")
@pytest.mark.parametrize("digits", [1, 2])
def test_twins_of_the_first_kernel_agree(digits: int, request: pytest.FixtureRequest) -> None:
    assert_first_kernels_agree(digits, request)


@pytest.mark.gpu
@pytest.mark.parametrize("digits", [1, 2])
def test_twins_of_the_first_kernel_agree_on_a_card(digits: int, request: pytest.FixtureRequest) -> None:
    assert_first_kernels_agree(digits, request)
