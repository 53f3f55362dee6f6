"""The kernels of the softplus gate on a card: the Gluon first kernel and the last kernel of the backward pass, which
Triton's interpreter does not run, at all widths, on packed sequences, cut into segments, with decays cut off."""

from __future__ import annotations

from math import log

import pytest
import torch

pytest.importorskip("triton")

from rille.ops.kda import Gate
from rille.ops.kda import backward as kernels
from rille.ops.kda.segments import cutting
from tests.ops import test_kda_backward as backward
from tests.ops import test_kda_triton as forward

pytestmark = pytest.mark.gpu
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 0, 300)


@pytest.fixture(params=[True, False], ids=["tiles", "pairs"], autouse=True)
def last_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Gluon for K = V = 128, and its twin, which other widths always take."""
    monkeypatch.setattr(kernels, "SOFTPLUS_TILED", request.param)


@pytest.mark.parametrize(("K", "V"), [(128, 128), (128, 64), (128, 256), (64, 64)])
def test_packed_sequences(K: int, V: int) -> None:
    forward.assert_equals_reference(*forward.draw(LENGTHS, K=K, V=V, bound=None), LENGTHS)
    backward.assert_gradients(backward.draw(LENGTHS, K=K, V=V, bound=None))


@pytest.mark.parametrize("rate", [1.0, 16.0])
def test_resets_among_weak_decays(rate: float) -> None:
    """With an old state 100 times as large as what is written."""
    inputs, gate = forward.draw((200,), K=128, V=128, bound=None)
    token = torch.arange(200)[:, None, None]
    z = torch.where(token % 11 == 5, 40.0, -3.0).to(forward.DEVICE, forward.DTYPE)
    inputs[3] = z.expand_as(inputs[3]).contiguous()
    gate = Gate(torch.full_like(gate.A_log, log(rate)), torch.zeros_like(gate.dt_bias), None)
    forward.assert_equals_reference(inputs, gate, (200,), scale=100.0)


def test_cut_into_segments() -> None:
    case = backward.draw((300, 130), K=128, V=128, bound=None)
    with cutting(1):
        backward.assert_gradients(case)


@pytest.mark.parametrize("size", [1e6, 1e-12])
def test_large_and_small_gradients(size: float) -> None:
    backward.test_large_and_small_gradients_under_the_softplus_gate(size, 1.0)
