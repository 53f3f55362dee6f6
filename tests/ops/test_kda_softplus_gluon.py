"""The Gluon form of the softplus gate's last backward kernel against its Triton twin, which takes pairs of rows one by
one: run by Python on a CPU, where the twin keeps fp32 operands in the interpreter and the difference is the rounding of
operands to bf16, and on a card."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import backward as kernels
from rille.ops.kda import backward_local_gluon, backward_softplus_gluon, numbers_gluon
from rille.ops.kda.backward import Gradients, Inputs, local
from rille.ops.kda.backward_local import local_kernel
from rille.ops.kda.backward_softplus_gluon import softplus_tile_kernel
from rille.ops.kda.forward import INTERPRET
from tests.ops import test_kda_backward as backward
from tests.ops.gluon_on_cpu import Kernel
from tests.ops.gluon_views_on_cpu import kernels_of
from tests.ops.kda_last_kernel import LENGTHS, WIDTH, assert_repeats_and_keeps_nan, in_bf16, launching
from tests.ops.kda_last_kernel import draw as inputs_of

GATES = ("random", "shut", "open", "shut or open", "resets")
draw = partial(inputs_of, None)


@pytest.fixture
def by_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of the Gluon kernel are run by Python where there is no card."""
    if INTERPRET:
        *_, copy = kernels_of(monkeypatch, numbers_gluon, backward_local_gluon, backward_softplus_gluon)

        def launch(kernel: Any, programs: int, arguments: tuple, **options: Any) -> None:
            assert kernel is softplus_tile_kernel
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
    with launching(local_kernel, tiled=False):
        wanted = local(inputs, *last)
    request.getfixturevalue("by_python")
    inputs, last = in_bf16(inputs, last)
    with launching(softplus_tile_kernel):
        got = local(inputs, *last)
    assert_close(got, wanted, inputs)


@pytest.mark.gpu
@pytest.mark.parametrize(("gate", "size"), [*((gate, 1.0) for gate in GATES), ("shut or open", 1e6)])
def test_twins_agree_on_a_card(gate: str, size: float) -> None:
    """And a second run gives the same bits, and NaN in one sequence stays there."""
    inputs, last = draw(gate, torch.bfloat16, size)
    with launching(local_kernel, tiled=False):
        wanted = local(inputs, *last)
    with launching(softplus_tile_kernel):
        got = local(inputs, *last)
    assert_close(got, wanted, inputs)
    assert_repeats_and_keeps_nan(got, inputs, last)


@pytest.mark.gpu
def test_gradients_equal_the_recurrence() -> None:
    backward.assert_gradients(backward.draw(LENGTHS, K=WIDTH, V=WIDTH, bound=None))
