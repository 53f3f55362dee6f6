"""KDA and its convolution inside what torch puts around an op: autocast, inference mode, graphs of second derivatives,
calls that want some gradients alone. On a card the same tests run on the card."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.conv import short_conv
from rille.ops.kda import Gate, cutting, segment_transition
from rille.ops.kda.decode import kda_decode, kda_verify
from rille.ops.kda.forward import INTERPRET
from rille.packing import Packing
from tests.ops.test_kda_arguments import DEVICE, FORMS, LENGTHS, NAMES, H, N, S, V, draw, run
from tests.ops.test_kda_decode import make_inputs, make_layer, make_pools

pytestmark = [] if INTERPRET else pytest.mark.gpu
CONV_FORMS = ["reference", "triton"] if INTERPRET else ["triton"]


def learning(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone().requires_grad_() for name, t in x.items()}


def gradients(x: dict[str, Tensor], backend: str, wanted: tuple[str, ...] = NAMES, **others: object) -> list[Tensor]:
    leaves = learning({name: x[name] for name in wanted})
    o, final = run(x | leaves, backend, **others)
    return list(torch.autograd.grad(o.float().square().sum() + final.square().sum(), list(leaves.values())))


def of_conv(backend: str, packing: Packing) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, weight, tail = (
        torch.randn(shape, generator=generator).to(DEVICE).requires_grad_() for shape in ((N, 8), (8, 4), (S, 3, 8))
    )
    y, final = short_conv(x, weight, packing, tail, backend=backend)
    assert final is not None
    return [y, final, *torch.autograd.grad(y.square().sum() + final.sum(), (x, weight, tail))]


def assert_same(got: list[Tensor], want: list[Tensor]) -> None:
    assert [x.dtype for x in got] == [x.dtype for x in want]
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", FORMS)
def test_a_gradient_does_not_depend_on_who_else_wants_one(backend: str) -> None:
    x = draw()
    with cutting(1):
        for name, want in zip(NAMES, gradients(x, backend), strict=True):
            assert_same(gradients(x, backend, (name,)), [want])


@pytest.mark.parametrize("backend", FORMS)
def test_a_batch_that_inference_has_seen_is_trained_on(backend: str) -> None:
    """What a packing keeps was made in inference mode, and no graph could save it."""
    seen, x = Packing.of(LENGTHS, device=DEVICE), draw()
    with torch.inference_mode(), cutting(1):
        made_there = Packing.of(LENGTHS, device=DEVICE)
        run(x, backend, packing=seen)
    for packing in (seen, made_there):
        with cutting(1):
            assert_same(gradients(x, backend, packing=packing), gradients(x, backend))
    for name in CONV_FORMS:
        packing = Packing.of(LENGTHS, device=DEVICE)
        with torch.inference_mode():
            short_conv(torch.zeros(N, 8, device=DEVICE), torch.zeros(8, 4, device=DEVICE), packing, backend=name)
        assert_same(of_conv(name, packing), of_conv(name, Packing.of(LENGTHS, device=DEVICE)))


@pytest.mark.parametrize("backend", FORMS)
def test_autocast_changes_nothing(backend: str) -> None:
    """The plain forms were computed in bf16, or failed half-way: their products are what autocast looks for."""
    x, packing = draw(), Packing.of(LENGTHS, device=DEVICE)
    gate = Gate(x["A_log"], x["dt_bias"], -5.0)
    calls: list[Callable[[], list[Tensor]]] = [lambda: run(x, backend)]
    if backend != "reference":
        tokens = (x["k"], x["v"], x["z"], x["b"])
        calls.append(lambda: list(segment_transition(*tokens, gate, packing, backend=backend)))
    if backend != "chunk":
        calls.append(
            lambda: [
                y for y in short_conv(x["b"], x["z"][:H, 0, :4].float(), packing, backend=backend) if y is not None
            ]
        )
    for call in calls:
        want = call()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            got = call()
        assert_same(got, want)
    leaves = learning(x)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        o, final = run(leaves, backend)
    loss = o.float().square().sum() + final.square().sum()
    assert_same(list(torch.autograd.grad(loss, list(leaves.values()))), gradients(x, backend))


@pytest.mark.skipif(not INTERPRET, reason="the plain form is the same on every device")
def test_autocast_changes_no_decode_step() -> None:
    layer, slots, counts = make_layer(), torch.tensor([1, 4, 0]), torch.tensor([0, 0, 0])
    results = []
    for enabled in (False, True):
        pools = make_pools(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y = kda_decode(make_inputs(layer, 3), layer, pools, slots, backend="reference")
            tried = kda_verify(make_inputs(layer, 3, 2), layer, pools, slots, counts, backend="reference")
        results.append([y, tried, pools.states, pools.tails])
    assert_same(*results)


@pytest.mark.skipif(not INTERPRET, reason="the plain form is the same on every device")
def test_the_blocked_form_has_the_second_derivatives_of_the_recurrence() -> None:
    """They came out as NaN: the magnitude by which a gradient is divided is no part of it."""
    results = []
    for backend in ("reference", "chunk"):
        leaves = learning({name: t.double() for name, t in draw().items()})
        o, _ = run(leaves, backend)
        first = torch.autograd.grad(o.square().sum(), list(leaves.values()), create_graph=True)
        results.append(torch.autograd.grad(sum(x.square().sum() for x in first), list(leaves.values())))
    for name, got, want in zip(NAMES, results[1], results[0], strict=True):
        assert (got - want).norm() <= 1e-11 * want.norm(), name


def test_the_kernels_have_no_second_derivative_and_say_so() -> None:
    x = learning(draw())
    (dq,) = torch.autograd.grad(run(x, "triton")[0].float().square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula"):
        torch.autograd.grad(dq.float().square().sum(), x["k"])


@pytest.mark.parametrize("backend", FORMS)
def test_a_batch_without_tokens_has_gradients_and_states_of_its_own(backend: str) -> None:
    x = draw()
    x = learning({name: t[:0] if name in NAMES[:5] else t for name, t in x.items()})
    o, final = run(x, backend, packing=Packing.of([0] * S, device=DEVICE))
    assert torch.equal(final, x["state"]) and final.data_ptr() != x["state"].data_ptr()
    (o.float().sum() + final.sum()).backward()
    assert x["v"].grad is not None and x["v"].grad.shape == (0, H, V)
    assert x["state"].grad is not None and torch.equal(x["state"].grad, torch.ones_like(final))
