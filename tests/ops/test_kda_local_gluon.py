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
from rille.ops.kda import backward_local_gluon, backward_prepare_gluon, numbers_gluon
from rille.ops.kda.backward import Gradients, Inputs, local, prepare
from rille.ops.kda.backward_kernels import prepare_kernel
from rille.ops.kda.backward_local import local_kernel
from rille.ops.kda.backward_local_gluon import local_tile_kernel
from rille.ops.kda.backward_prepare_gluon import prepare_tile_kernel
from rille.ops.kda.forward import INTERPRET
from tests.ops.gluon_on_cpu import Kernel
from tests.ops.gluon_views_on_cpu import kernels_of
from tests.ops.kda_last_kernel import assert_repeats_and_keeps_nan, in_bf16, launching
from tests.ops.kda_last_kernel import draw as inputs_of

GATES = ("random", "shut", "open", "shut or open")
draw = partial(inputs_of, -5.0)


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of the Gluon kernels are run by Python where there is no card."""
    if INTERPRET:
        _, last, first = kernels_of(monkeypatch, numbers_gluon, backward_local_gluon, backward_prepare_gluon)
        copies = {
            local_tile_kernel: last.local_tile_kernel,
            prepare_tile_kernel: first.prepare_tile_kernel,
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
    with launching(local_kernel, tiled=False):
        wanted = local(inputs, *last)
    request.getfixturevalue("by_python")
    inputs, last = in_bf16(inputs, last)
    with launching(local_tile_kernel):
        got = local(inputs, *last)
    assert_close(got, wanted, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("gate", "size"), [*((gate, 1.0) for gate in GATES), ("shut or open", 1e6)])
def test_twins_agree_on_a_card(gate: str, size: float) -> None:
    """And a second run gives the same bits, and NaN in one sequence stays there."""
    inputs, last = draw(gate, torch.bfloat16, size)
    with launching(local_kernel, tiled=False):
        wanted = local(inputs, *last)
    with launching(local_tile_kernel):
        got = local(inputs, *last)
    assert_close(got, wanted, inputs)
    assert_repeats_and_keeps_nan(got, inputs, last)


def assert_first_kernels_agree(digits: int, request: pytest.FixtureRequest) -> None:
    """Rows are rounded once in each; with two digits the written keys agree to the second one's rounding."""
    inputs, last = draw("random", torch.float32 if INTERPRET else torch.bfloat16)
    with launching(prepare_kernel, tiled=False):
        wanted = prepare(inputs, digits)
    request.getfixturevalue("by_python")
    with launching(prepare_tile_kernel):
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
