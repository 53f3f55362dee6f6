"""What KDA, its decode step and the convolution ask of their arguments: what does not fit is refused in words, and what
fits however it lies in memory gives the same. On a card the same tests run on the card."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops import kda as op
from rille.ops.conv import PooledTail, TailPlaces, short_conv
from rille.ops.kda import Gate, Places, PooledState, choose_backend, cutting, kda, segment_transition
from rille.ops.kda.decode import kda_commit, kda_decode, kda_verify
from rille.ops.kda.decode_operands import DecodeLayer, Pools, Projected, Remembered
from rille.ops.kda.forward import INTERPRET
from rille.packing import Packing
from tests.ops.test_kda_decode import make_inputs, make_layer, make_pools

pytestmark = [] if INTERPRET else pytest.mark.gpu
DEVICE = "cpu" if INTERPRET else "cuda"
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
ERROR = 2e-5 if INTERPRET else 2e-2
LENGTHS, H = (5, 0, 70), 2
K = V = 64 if INTERPRET else 128
N, S = sum(LENGTHS), len(LENGTHS)
FORMS = ["reference", "chunk", "triton"] if INTERPRET else ["triton"]
NAMES = ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state")


def draw(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(N, H, K), (N, H, K), (N, H, V), (N, H, K), (N, H), (H,), (H, K), (S, H, V, K)]
    drawn = {name: torch.randn(x, generator=generator).to(DEVICE) for name, x in zip(NAMES, shapes, strict=True)}
    return {name: x.to(DTYPE) if name in NAMES[:5] else x for name, x in drawn.items()}


def run(x: dict[str, Tensor], backend: str | None = None, bound: float | None = -5.0, **others: Any) -> list[Tensor]:
    given = dict(packing=Packing.of(LENGTHS, device=DEVICE), state=x.get("state")) | others
    gate = Gate(x["A_log"], x["dt_bias"], bound)
    return list(kda(x["q"], x["k"], x["v"], x["z"], x["b"], gate, **given, backend=backend))


def assert_close(got: list[Tensor], want: list[Tensor], error: float = ERROR) -> None:
    for x, y in zip(got, want, strict=True):
        assert (x.double() - y.double()).norm() <= error * y.double().norm()


@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("name", NAMES)
def test_what_holds_no_floats_is_refused(name: str, backend: str) -> None:
    """Integers were taken for floats, and o came back cut off to them."""
    x = draw()
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(ValueError, match=rf"{name} is {dtype}; expected float64, float32"):
            run(x | {name: x[name].to(dtype)}, backend)


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_several_devices_are_refused(name: str) -> None:
    x = draw()
    with pytest.raises(ValueError, match=r"must share one device, not q on .*meta"):
        run(x | {name: x[name].to("meta")})
    with pytest.raises(ValueError, match=r"must share one device.*packing on meta"):
        run(x, packing=Packing.of(LENGTHS, device="meta"))


def test_double_precision_anywhere_takes_a_form_that_has_it() -> None:
    """Kernels read it as floats and answer in floats."""
    for name in NAMES[:5]:
        x = draw()
        x[name] = x[name].double()
        with pytest.raises(ValueError, match="cannot run: float64 tensors"):
            run(x, "triton")
        with pytest.raises(ValueError, match="cannot run: float64 tensors"):
            transition(x, "triton") if name != "q" else run(x, "triton")
    with pytest.warns(UserWarning, match="float64") if DEVICE == "cuda" else nullcontext():
        assert run(draw() | {"z": draw()["z"].double()})[1].dtype == torch.float64


class OnCard:
    """A tensor as far as the choice of a form looks at it."""

    is_cuda, dtype, shape = True, torch.bfloat16, (N, H, K)


def test_a_bound_beyond_blocks_takes_the_recurrence_on_a_card_too() -> None:
    x: Any = OnCard()
    for bound, want in ((-5.0, "triton"), (None, "triton"), (-5.5, "reference")):
        gate = Gate(torch.zeros(H), torch.zeros(H, K), bound)
        name, reason = choose_backend(x, x, x, x, x, gate, Packing.of(LENGTHS))
        assert name == want and ("a lower bound of -5.5 is beyond" in reason) == (bound == -5.5)
    x = draw()
    with pytest.warns(UserWarning, match="beyond what blocks hold") if DEVICE == "cuda" else nullcontext():
        got = run(x, bound=-8.0)
    assert_close(got, run({n: t.double() for n, t in x.items()}, "reference", -8.0))
    with pytest.raises(ValueError, match="must be negative and finite"):
        Gate(x["A_log"], x["dt_bias"], float("-inf"))


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("backend", FORMS)
def test_states_as_they_lie_in_memory(backend: str, size: int | None) -> None:
    """Transposed, expanded, and every second one of a wider tensor; gradients too."""
    x = draw()
    wide = torch.randn(2 * S, H, V, K, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    for state in (x["state"].mT.contiguous().mT, x["state"][:1].expand(S, -1, -1, -1), wide[1::2]):
        results = []
        for given in (state, state.contiguous()):
            leaf = given.detach().requires_grad_()
            with cutting(size):
                o, final = run(x | {"state": leaf}, backend)
            results.append([o, final, *torch.autograd.grad(o.float().sum() + final.square().sum(), leaf)])
        assert_close(*results)


@pytest.mark.parametrize("backend", FORMS)
def test_tokens_as_they_lie_in_memory(backend: str) -> None:
    """Rows that are one row, rows that begin inside the one before (neither is for the TMA unit), rows and channels of
    wider tensors at odd places."""
    x = draw()
    generator = torch.Generator().manual_seed(4)
    wide = torch.randn(N + 3, H, K + 8, generator=generator).to(DEVICE, DTYPE)
    line = torch.randn(N * 8 + H * K, generator=generator).to(DEVICE, DTYPE)
    x["q"], x["k"] = wide[3:, :, 5 : 5 + K], line.as_strided((N, H, K), (8, K, 1))
    x["v"], x["z"], x["b"] = (
        x["v"][1:2].expand(N, H, V),
        wide[:1, :1, :K].expand(N, H, K),
        wide[:N, :1, 0].expand(N, H),
    )
    leaves = [t.detach().requires_grad_() for t in x.values()]
    got = run(dict(zip(NAMES, leaves, strict=True)), backend)
    exact = [t.detach().double().contiguous().requires_grad_() for t in x.values()]
    want = run(dict(zip(NAMES, exact, strict=True)), "reference")
    assert_close(got, want)
    grads = [
        torch.autograd.grad(o.double().sum() + final.double().square().sum(), inputs)
        for (o, final), inputs in ((got, leaves), (want, exact))
    ]
    assert_close([*grads[0][:5], grads[0][7]], [*grads[1][:5], grads[1][7]], 1.5 * ERROR)


def pooled(slots: Tensor, checkpoints: Tensor | None = None) -> PooledState:
    return PooledState(torch.zeros(5, H, V, K), slots, checkpoints)


def test_slots_that_no_pool_has_are_refused() -> None:
    """A negative one was counted from the end, or was memory in front of the pool."""
    for slots in ([0, 1, -1], [0, 1, 5]):
        with pytest.raises(ValueError, match=r"not all among the pool's 5, 0 to 4"):
            pooled(torch.tensor(slots))
        with pytest.raises(ValueError, match=r"not all among the pool's 5, 0 to 4"):
            PooledTail(torch.zeros(5, 3, 8), torch.tensor(slots))
    slots = torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match=r"not all among"):
        pooled(slots, torch.tensor([-1, 5, -1]))
    for kept in ([-1, 1, -1], [3, 3, -1]):
        with pytest.raises(ValueError, match="name one slot twice"):
            pooled(slots, torch.tensor(kept))
    for wrong in (slots.int(), slots.float(), [0, 1, 2]):
        given: Any = wrong
        with pytest.raises(ValueError, match=r"slots are .*; expected a tensor of torch\.int64"):
            pooled(given)
        with pytest.raises(ValueError, match=r"slots are .*; expected a tensor of torch\.int64"):
            PooledTail(torch.zeros(5, 3, 8), given)


def transition(x: dict[str, Tensor], backend: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    packing, gate = Packing.of(lengths, device=DEVICE), Gate(x["A_log"], x["dt_bias"], -5.0)
    return segment_transition(x["k"], x["v"], x["z"], x["b"], gate, packing, backend=backend)


@pytest.mark.parametrize("backend", ["chunk", "triton"])
def test_a_transition_asks_for_what_kda_asks(backend: str) -> None:
    x = draw()
    shapes = {"v": (N, H + 1, V), "z": (N, H, K // 2), "b": (N, 1), "A_log": (1,), "dt_bias": (1, K)}
    for name, shape in shapes.items():
        with pytest.raises(ValueError, match=rf"{name} has shape .*, expected"):
            transition(x | {name: torch.zeros(shape, device=DEVICE)}, backend)
    with pytest.raises(ValueError, match=rf"q has shape .*, expected \(90, 2, {K}\)"):
        transition(x, backend, (90,))


def test_a_state_of_another_kind_is_refused() -> None:
    wrong: Any = [1]
    with pytest.raises(ValueError, match="state is a list; give a tensor, a PooledState or None"):
        run(draw(), state=wrong)
    x, packing = torch.zeros(N, 4, device=DEVICE), Packing.of(LENGTHS, device=DEVICE)
    with pytest.raises(ValueError, match="tail is a list; give a tensor, a PooledTail or None"):
        short_conv(x, torch.zeros(4, 4, device=DEVICE), packing, wrong)


def conv(x: Tensor, weight: Tensor, tail: Tensor | PooledTail | None = None) -> Tensor:
    return short_conv(x, weight, Packing.of(LENGTHS, device=DEVICE), tail)[0]


def test_the_convolution_refuses_what_it_would_misread() -> None:
    x, weight, pool = (torch.zeros(shape, device=DEVICE) for shape in ((N, 8), (8, 4), (9, 3, 8)))
    slots = torch.tensor([0, 1, 2], device=DEVICE)
    for dtype in (torch.int64, torch.complex64):
        for given in ((x.to(dtype), weight), (x, weight.to(dtype)), (x, weight, pool[:S].to(dtype))):
            with pytest.raises(ValueError, match=rf"is {dtype}; expected float64"):
                conv(*given)
    for given in ((x.to("meta"), weight), (x, weight, pool[:S].to("meta")), (x, weight.to("meta"))):
        with pytest.raises(ValueError, match="must share one device"):
            conv(*given)
    with pytest.raises(ValueError, match=r"strides \(24, 1, 3\) needs a slot's 3 inputs of 8 without gaps"):
        conv(x, weight, PooledTail(pool.new_zeros(9, 8, 3).mT, slots))
    packing = Packing.of(LENGTHS, device=DEVICE)
    places, kept = TailPlaces.of(packing, [[1], [], []], 2), torch.tensor([5], device=DEVICE)
    with pytest.raises(ValueError, match=r"places.rows has shape \(1, 1\), expected \(1, 3\)"):
        conv(x, weight, PooledTail(pool, slots, places, kept))
    for one in ((places, None), (None, kept)):
        with pytest.raises(ValueError, match="come together or not at all"):
            PooledTail(pool, slots, *one)
    for make in (lambda: Places.of(packing, [[1]]), lambda: TailPlaces.of(packing, [[1]], 4)):
        with pytest.raises(ValueError, match="1 lists of places for 3 sequences"):
            make()


def test_a_call_that_is_refused_writes_nothing() -> None:
    x, weight, pool = (
        torch.ones(N, 8, device=DEVICE),
        torch.ones(8, 4, device=DEVICE),
        torch.zeros(9, 3, 8, device=DEVICE),
    )
    packing, slots = Packing.of(LENGTHS, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    places, kept = TailPlaces.of(packing, [[1], [], []], 4), torch.tensor([5], device=DEVICE)
    with pytest.raises(ValueError, match="unknown backend"):
        short_conv(x, weight, packing, PooledTail(pool, slots, places, kept), backend="cuda")
    assert not pool.any()


@pytest.fixture
def layer() -> DecodeLayer:
    return make_layer()


@pytest.mark.skipif(not INTERPRET, reason="slots are read on a CPU alone")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_of_a_decode_step_need_slots_of_their_own(layer: DecodeLayer, backend: str) -> None:
    inputs, pools = make_inputs(layer, 3), make_pools(layer)
    none, accepted = make_inputs(layer, 3, 2), torch.tensor([0, 0, 0])
    assert kda_decode(inputs, layer, pools, torch.tensor([-1, -1, 2]), backend=backend).isfinite().all()
    for numbers, said in (([1, 1, 2], "name one slot twice"), ([1, 5, 2], "not all among the pool's 5")):
        slots = torch.tensor(numbers)
        with pytest.raises(ValueError, match=said):
            kda_decode(inputs, layer, pools, slots, backend=backend)
        with pytest.raises(ValueError, match=said):
            kda_verify(none, layer, pools, slots, accepted, backend=backend)
        with pytest.raises(ValueError, match=said):
            kda_commit(layer, pools, slots, accepted, backend=backend)
    for slots in (torch.tensor([1.0, 2.0, 0.0]), torch.tensor([[1, 2, 0]]), torch.tensor(1)):
        with pytest.raises(ValueError, match="slots"):
            kda_decode(inputs, layer, pools, slots, backend=backend)
    nothing = Pools(pools.states[:0], pools.tails[:0])
    empty = torch.tensor([], dtype=torch.int64)
    assert kda_decode(make_inputs(layer, 0), layer, nothing, empty, backend=backend).shape == (0, 64)


@pytest.mark.skipif(not INTERPRET, reason="the same on every device")
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_a_commit_asks_for_what_verify_asks(layer: DecodeLayer, backend: str) -> None:
    """It believed its pools, and wrote beside them."""
    pools, slots, accepted = make_pools(layer), torch.tensor([1, 4, 0]), torch.tensor([1, 0, 2])
    assert pools.past is not None
    states, tails, past = pools.states, pools.tails, pools.past
    short = Remembered(past.qkv, past.z, past.u[:, :, 1:])
    for given, said in (
        (Pools(states[..., 1:], tails, past), r"states has shape \(5, 2, 32, 15\), expected"),
        (Pools(states, tails[..., 1:], past), "tails has shape"),
        (Pools(states, tails, short), "past.u has shape"),
        (Pools(states, tails, Remembered(past.qkv, past.z, past.u.half())), "u have that of the states"),
        (Pools(states.half(), tails, past), "states of torch.float16 for inputs of torch.float32"),
        (Pools(states, tails.to("meta"), past), "must share one device"),
    ):
        with pytest.raises(ValueError, match=said):
            kda_commit(layer, given, slots, accepted, backend=backend)
    for wrong in (accepted.float(), accepted[:1], accepted.bool()):
        with pytest.raises(ValueError, match="accepted"):
            kda_commit(layer, pools, slots, wrong, backend=backend)


@pytest.mark.skipif(not INTERPRET, reason="the same on every device")
def test_parameters_of_a_decode_step(layer: DecodeLayer) -> None:
    """The kernels would fail to compile for others than fp32; the plain form takes them."""
    inputs, slots, gate = make_inputs(layer, 3), torch.tensor([1, 4, 0]), layer.gate
    short = DecodeLayer(layer.conv_weight, Gate(gate.A_log.bfloat16(), gate.dt_bias, -5.0), layer.norm_weight, 1e-5)
    with pytest.raises(ValueError, match="cannot run: the kernels take fp32 parameters"):
        kda_decode(inputs, short, make_pools(layer), slots, backend="triton")
    assert kda_decode(inputs, short, make_pools(layer), slots).isfinite().all()
    flat = DecodeLayer(layer.conv_weight, Gate(gate.A_log, gate.dt_bias.flatten(), -5.0), layer.norm_weight, 1e-5)
    with pytest.raises(ValueError, match=r"dt_bias \(32,\).*must be \[H, K\]"):
        kda_decode(inputs, flat, make_pools(layer), slots)
    for wrong in (Projected(*(x[0] for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate))), make_inputs(layer, 3, 2)):
        with pytest.raises(ValueError, match="qkv has shape"):
            kda_decode(wrong, layer, make_pools(layer), slots)
    with pytest.raises(ValueError, match="z is torch.int64"):
        kda_decode(Projected(inputs.qkv, inputs.z.long(), inputs.b, inputs.gate), layer, make_pools(layer), slots)


def test_choice_says_why_in_one_line() -> None:
    x = draw()
    gate = Gate(x["A_log"], x["dt_bias"], -5.0)
    name, reason = choose_backend(x["q"], x["k"], x["v"], x["z"], x["b"], gate, Packing.of(LENGTHS, device=DEVICE))
    assert "\n" not in reason and reason and name in op.BACKENDS
