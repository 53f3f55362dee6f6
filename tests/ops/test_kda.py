"""KDA: the recurrence against the equations written out by hand, the blocked form against the recurrence.

In float64 the two forms differ by rounding alone. In fp32 a form is measured against the float64 recurrence: it may be
off by one rounding of its largest exponent, 80 * 2^-24 of the result's norm, and by what the recurrence itself loses in
fp32, which covers what no form can hold (the slope of a sigmoid at logit 12 has lost a hundredth).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rille.ops.kda import Gate, PooledState, kda
from rille.ops.kda.chunk import inverse_of_unit_lower
from rille.packing import Packing

PACKED = (1, 15, 16, 17, 63, 64, 65, 0, 1000)
LENGTHS = [(1,), (15,), (16,), (17,), (63,), (64,), (65,), (1000,), PACKED]
BOUNDS = [-5.0, -2.0, None]
BACKENDS = ["reference", "chunk"]
ROUNDING = 80 * 2.0**-24


@dataclass
class Inputs:
    """All tensors of a call, float64, and the weights of the outputs in the loss."""

    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    state: Tensor
    loss_o: Tensor
    loss_final: Tensor

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        return [getattr(self, field.name).to(dtype, copy=True) for field in fields(self)]


def draw(lengths: tuple[int, ...], H: int = 2, K: int = 8, V: int = 5, seed: int = 0) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    N, S = sum(lengths), len(lengths)
    shapes = [(N, H, K), (N, H, K), (N, H, V), (N, H, K), (N, H), (H,), (H, K), (S, H, V, K), (N, H, V), (S, H, V, K)]
    inputs = Inputs(*(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes))
    return replace(inputs, z=3 * inputs.z, A_log=0.3 * inputs.A_log)


def draw_gated(z: Tensor, lengths: tuple[int, ...] = (200, 65), **sizes: int) -> Inputs:
    """Inputs whose decay logits are exactly z, broadcast to [N, H, K]."""
    inputs = draw(lengths, **{"H": 2, "K": 16, "V": 12, **sizes})
    zeros = {"A_log": torch.zeros_like(inputs.A_log), "dt_bias": torch.zeros_like(inputs.dt_bias)}
    return replace(inputs, z=z.double().expand_as(inputs.z).contiguous(), **zeros)


def run(inputs: Inputs, packing: Packing, bound: float | None, backend: str, dtype: torch.dtype) -> list[Tensor]:
    """Outputs, then the gradient of a random linear loss with respect to every input."""
    *leaves, loss_o, loss_final = inputs.tensors(dtype)
    leaves = [x.requires_grad_() for x in leaves]
    q, k, v, z, b, A_log, dt_bias, state = leaves
    o, final = kda(q, k, v, z, b, Gate(A_log, dt_bias, bound), packing, state, backend=backend)
    assert isinstance(final, Tensor)
    grads = torch.autograd.grad((o * loss_o).sum() + (final * loss_final).sum(), leaves)
    return [o.detach(), final.detach(), *grads]


NAMES = ["o", "final", *(f"d{name}" for name in ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state"))]


def distance(got: Tensor, expected: Tensor) -> float:
    return (got.double() - expected.double()).norm().item()


def assert_chunk_holds_fp32(inputs: Inputs, lengths: tuple[int, ...], bound: float | None) -> None:
    packing = Packing.of(lengths)
    exact = run(inputs, packing, bound, "reference", torch.float64)
    literal = run(inputs, packing, bound, "reference", torch.float32)
    blocked = run(inputs, packing, bound, "chunk", torch.float32)
    for name, want, by_token, got in zip(NAMES, exact, literal, blocked, strict=True):
        limit = ROUNDING * want.norm().item() + 4 * distance(by_token, want) + 1e-30
        assert distance(got, want) <= limit, f"{name}: off by {distance(got, want):.2e}, limit {limit:.2e}"


def by_hand(inputs: Inputs, lengths: tuple[int, ...], bound: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, head by head, with the state as [K, V]."""
    q, k, v, z, b, A_log, dt_bias, state, _, _ = (x.numpy() for x in inputs.tensors(torch.float64))
    o, final, n = np.zeros_like(v), np.zeros_like(state), 0
    for s, length in enumerate(lengths):
        states = [state[s, h].T.copy() for h in range(q.shape[1])]
        for _ in range(length):
            for h, S in enumerate(states):
                x = z[n, h] + dt_bias[h]
                soft = -np.exp(A_log[h]) * np.log1p(np.exp(x))
                g = soft if bound is None else bound / (1 + np.exp(-np.exp(A_log[h]) * x))
                unit_q, unit_k = (y[n, h] / np.sqrt(y[n, h] @ y[n, h] + 1e-6) for y in (q, k))
                S *= np.exp(g)[:, None]
                u = v[n, h] - unit_k @ S
                S += np.outer(unit_k, u) / (1 + np.exp(-b[n, h]))
                o[n, h] = unit_q @ S / np.sqrt(q.shape[2])
            n += 1
        final[s] = [S.T for S in states]
    return o, final


@pytest.mark.parametrize("bound", [*BOUNDS, -8.0])
def test_reference_is_the_equation(bound: float | None) -> None:
    lengths = (3, 0, 1, 40)
    inputs = draw(lengths)
    o, final, *_ = run(inputs, Packing.of(lengths), bound, "reference", torch.float64)
    expected_o, expected_final = by_hand(inputs, lengths, bound)
    np.testing.assert_allclose(o.numpy(), expected_o, rtol=0, atol=1e-13)
    np.testing.assert_allclose(final.numpy(), expected_final, rtol=0, atol=1e-13)


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_chunk_equals_reference_in_float64(lengths: tuple[int, ...], bound: float | None) -> None:
    inputs, packing = draw(lengths), Packing.of(lengths)
    literal = run(inputs, packing, bound, "reference", torch.float64)
    blocked = run(inputs, packing, bound, "chunk", torch.float64)
    for name, want, got in zip(NAMES, literal, blocked, strict=True):
        assert distance(got, want) <= 1e-12 * want.norm().item(), name


@pytest.mark.parametrize(("K", "V"), [(16, 32), (32, 16), (1, 3)])
def test_key_and_value_widths_differ(K: int, V: int) -> None:
    inputs, packing = draw((70, 5), K=K, V=V), Packing.of((70, 5))
    literal = run(inputs, packing, -5.0, "reference", torch.float64)
    for name, want, got in zip(NAMES, literal, run(inputs, packing, -5.0, "chunk", torch.float64), strict=True):
        assert distance(got, want) <= 1e-12 * want.norm().item(), name


@pytest.mark.parametrize("bound", [-5.0, None])
def test_chunk_holds_fp32(bound: float | None) -> None:
    lengths = (1, 15, 16, 17, 63, 64, 65, 0, 200)
    assert_chunk_holds_fp32(draw(lengths, K=16, V=12), lengths, bound)


def bimodal(*shape: int) -> Tensor:
    return torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5, 12.0, -12.0)


TOKEN = torch.arange(265)[:, None, None]
GATES = {
    "saturated": torch.tensor(100.0),
    "open": torch.tensor(-100.0),
    "logit 12": torch.tensor(12.0),
    "logit -12": torch.tensor(-12.0),
    "bimodal by token": bimodal(265, 1, 1),
    "bimodal by channel": bimodal(1, 1, 16),
    "bimodal": bimodal(265, 2, 16),
    "saturated, then open": torch.where(TOKEN % 64 < 30, 100.0, -12.0),
    "open, then saturated": torch.where(TOKEN % 64 < 30, -12.0, 100.0),
    "one strong token a tile": torch.where(TOKEN % 16 == 5, 30.0, -12.0),
}


@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("gate", GATES)
def test_extreme_gates_in_fp32(gate: str, bound: float | None) -> None:
    assert_chunk_holds_fp32(draw_gated(GATES[gate]), (200, 65), bound)


@pytest.mark.parametrize("logit", [30.0, 1e6])
def test_softplus_decay_without_bound(logit: float) -> None:
    """-30 a token throughout, and single tokens that wipe the state: what follows them must keep its precision."""
    assert_chunk_holds_fp32(draw_gated(torch.tensor(logit)), (200, 65), None)
    assert_chunk_holds_fp32(draw_gated(torch.where(TOKEN % 7 == 3, logit, -5.0)), (200, 65), None)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("spread", [0.0, 1e-3])
def test_repeated_keys_with_weak_decay_and_full_writes(spread: float, bound: float | None) -> None:
    """I + L is then as far from the identity as it gets; a series in L in low precision fails here."""
    inputs = draw_gated(torch.tensor(-12.0))
    keys = inputs.k[:1] + spread * inputs.k
    assert_chunk_holds_fp32(replace(inputs, k=keys, b=torch.full_like(inputs.b, 12.0)), (200, 65), bound)


def test_inverse_and_its_gradient() -> None:
    """Of I + L, L the part of the argument below the diagonal."""
    argument = torch.randn(3, 2, 64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) / 4
    weight, results = argument.flip(-1), []
    for invert in (inverse_of_unit_lower, lambda x: torch.linalg.inv(torch.eye(64) + x.tril(-1))):
        leaf = argument.clone().requires_grad_()
        inverse = invert(leaf)
        results.append([inverse, *torch.autograd.grad((inverse * weight).sum(), leaf)])
    for got, want in zip(*results, strict=True):
        assert distance(got, want) <= 1e-12 * want.norm().item()


def test_zero_keys() -> None:
    inputs = draw((200, 65), K=16, V=12)
    inputs.k[::3] = 0
    inputs.q[::5] = 0
    assert_chunk_holds_fp32(inputs, (200, 65), -5.0)


def test_large_gradients_under_a_saturated_gate() -> None:
    """2^115 meets the gradient of the pair products: 1e6 times it would leave fp32."""
    inputs = draw_gated(torch.tensor(100.0))
    assert_chunk_holds_fp32(replace(inputs, loss_o=1e6 * inputs.loss_o), (200, 65), -5.0)


def test_long_memory() -> None:
    """4,096 tokens at logit -9 keep 5 * sigmoid(-9) * 4096 = 2.5 of log-decay: early tokens still speak at the end."""
    inputs, packing = draw_gated(torch.tensor(-9.0), (4096,), H=1), Packing.of((4096,))
    results = []
    for backend, dtype in (("reference", torch.float64), ("reference", torch.float32), ("chunk", torch.float32)):
        q, k, v, z, b, A_log, dt_bias, state, _, _ = inputs.tensors(dtype)
        results.append(kda(q, k, v, z, b, Gate(A_log, dt_bias, -5.0), packing, state, backend=backend))
    for want, by_token, got in zip(*results, strict=True):
        assert distance(got, want) <= ROUNDING * want.norm().item() + 4 * distance(by_token, want)


def test_the_blocked_form_does_not_drift() -> None:
    """Over 65,536 tokens, of which the first keeps e^-2 to the end; in float64 the form stands for the recurrence."""
    inputs, packing = draw_gated(torch.tensor(-12.0), (65536,), H=1, K=8, V=5), Packing.of((65536,))
    (o, final), (exact_o, exact_final) = (
        call(inputs, packing, inputs.state.to(dtype), "chunk", dtype=dtype) for dtype in (torch.float32, torch.float64)
    )
    for got, want in ((o, exact_o), (final, exact_final)):
        assert distance(got, want) <= ROUNDING * want.norm().item()


def call(inputs: Inputs, packing: Packing, state: Tensor | PooledState | None, backend: str, **options: Any) -> Any:
    q, k, v, z, b, A_log, dt_bias, *_ = inputs.tensors(options.get("dtype", torch.float64))
    rows = options.get("rows", slice(None))
    tokens = [x[rows] for x in (q, k, v, z, b)]
    return kda(*tokens, Gate(A_log, dt_bias, -5.0), packing, state, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("cuts", [(70,), (1, 2, 66), (64, 128), (33, 33, 140)])
def test_a_sequence_cut_into_calls(cuts: tuple[int, ...], backend: str) -> None:
    inputs = draw((150,))
    state = inputs.state.clone().requires_grad_()
    whole, final = call(inputs, Packing.of([150]), state, backend)
    (whole_grad,) = torch.autograd.grad(final.square().sum() + whole.square().sum(), state)
    outputs, carried = [], state
    for start, end in zip((0, *cuts), (*cuts, 150), strict=True):
        o, carried = call(inputs, Packing.of([end - start], [start]), carried, backend, rows=slice(start, end))
        outputs.append(o)
    (grad,) = torch.autograd.grad(carried.square().sum() + torch.cat(outputs).square().sum(), state)
    for got, want in ((torch.cat(outputs), whole), (carried, final), (grad, whole_grad)):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_equals_separate(backend: str) -> None:
    lengths = (1, 17, 64, 0, 65, 130)
    inputs = draw(lengths)
    o, final = call(inputs, Packing.of(lengths), inputs.state, backend)
    start = 0
    for s, length in enumerate(lengths):
        rows = slice(start, start := start + length)
        alone, alone_final = call(inputs, Packing.of([length]), inputs.state[s : s + 1], backend, rows=rows)
        torch.testing.assert_close(o[rows], alone, rtol=0, atol=1e-13)
        torch.testing.assert_close(final[s], alone_final[0], rtol=0, atol=1e-13)


def test_no_state_is_a_zero_state() -> None:
    inputs = draw((65, 3))
    for backend in BACKENDS:
        o, final = call(inputs, Packing.of((65, 3)), None, backend)
        want_o, want_final = call(inputs, Packing.of((65, 3)), torch.zeros_like(inputs.state), backend)
        assert torch.equal(o, want_o) and torch.equal(final, want_final)


@pytest.mark.parametrize("backend", BACKENDS)
def test_pooled_states_are_read_and_written_in_place(backend: str) -> None:
    """Slots in no order, in a pool that is a strided view of a buffer; everything else there is NaN and stays NaN."""
    lengths, slots = (65, 0, 1, 130), torch.tensor([6, 1, 4, 0])
    inputs = draw(lengths)
    buffer = torch.full((8, 3, *inputs.state.shape[1:]), torch.nan, dtype=torch.float64)
    pool = buffer[:, 1]
    pool[slots] = inputs.state
    o, nothing = call(inputs, Packing.of(lengths), PooledState(pool, slots), backend)
    want, final = call(inputs, Packing.of(lengths), inputs.state, backend)
    assert nothing is None and torch.equal(o, want) and torch.equal(pool[slots], final)
    pool[slots] = torch.nan
    assert buffer.isnan().all()


@pytest.mark.parametrize("field", ["q", "k", "v", "z", "b", "state"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_stays_in_its_sequence(backend: str, field: str) -> None:
    """NaN in the first sequence, at whose first token masked rows point, and in a middle one: others do not notice."""
    lengths, sick = (3, 65, 70, 16), torch.tensor([0, 2])
    packing = Packing.of(lengths)
    well_N = ~torch.isin(packing.sequence_of, sick)
    clean = draw(lengths)
    poisoned = replace(clean, **{field: getattr(clean, field).clone()})
    getattr(poisoned, field)[sick if field == "state" else ~well_N] = torch.nan
    results = []
    for inputs in (clean, poisoned):
        leaves = [x.requires_grad_() for x in inputs.tensors(torch.float64)[:8]]
        q, k, v, z, b, A_log, dt_bias, state = leaves
        o, final = kda(q, k, v, z, b, Gate(A_log, dt_bias, -5.0), packing, state, backend=backend)
        assert isinstance(final, Tensor)
        grads = torch.autograd.grad(o[well_N].sum() + final[[1, 3]].sum(), leaves[:5])
        results.append([o[well_N], final[[1, 3]], *(grad[well_N] for grad in grads)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_token_sees_a_later_one(backend: str) -> None:
    """Up to rounding: the decays of a tile share an origin, which moves with each decay in it."""
    inputs, packing = draw((150,)), Packing.of([150])
    before, _ = call(inputs, packing, None, backend)
    for field in ("q", "k", "v", "z", "b"):
        changed = replace(inputs, **{field: getattr(inputs, field).clone()})
        getattr(changed, field)[77] += 1
        after, _ = call(changed, packing, None, backend)
        torch.testing.assert_close(after[:77], before[:77], rtol=0, atol=1e-15)
        assert (after[77] - before[77]).abs().max() > 1e-4


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_inputs_are_computed_in_fp32(backend: str) -> None:
    inputs = Inputs(*(x.bfloat16() for x in draw((70,)).tensors(torch.float64)))
    o, final = call(inputs, Packing.of([70]), None, backend, dtype=torch.bfloat16)
    want, want_final = call(inputs, Packing.of([70]), None, backend, dtype=torch.float32)
    assert o.dtype == torch.bfloat16 and torch.equal(o, want.bfloat16())
    assert final.dtype == torch.float32 and torch.equal(final, want_final)


def test_padding_of_A_log_is_not_read() -> None:
    inputs, packing = draw((70,)), Packing.of([70])
    padded = replace(inputs, A_log=torch.cat([inputs.A_log, torch.full((3,), torch.nan, dtype=torch.float64)]))
    for backend in BACKENDS:
        assert torch.equal(call(padded, packing, None, backend)[0], call(inputs, packing, None, backend)[0])


def test_short_batches_take_the_recurrence_and_longer_ones_chunks() -> None:
    for lengths, default in (((4, 1), "reference"), ((5, 1), "chunk")):
        inputs, packing = draw(lengths), Packing.of(lengths)
        results = {backend: call(inputs, packing, None, backend)[0] for backend in BACKENDS}
        q, k, v, z, b, A_log, dt_bias, *_ = inputs.tensors(torch.float64)
        chosen, _ = kda(q, k, v, z, b, Gate(A_log, dt_bias, -5.0), packing)
        assert not torch.equal(results["reference"], results["chunk"])
        assert torch.equal(chosen, results[default])


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    inputs = draw(lengths)
    for backend in BACKENDS:
        o, final = call(inputs, Packing.of(lengths), inputs.state, backend)
        assert o.shape == inputs.v.shape and torch.equal(final, inputs.state)


def test_bounds_that_overflow_a_tile_are_refused_by_chunks_only() -> None:
    inputs, packing = draw((20,)), Packing.of([20])
    run(inputs, packing, -5.0, "chunk", torch.float32)
    with pytest.raises(ValueError, match=r"lower_bound -5\.01 can decay by exp\(-80\.16\).*exp\(-80\)"):
        run(inputs, packing, -5.01, "chunk", torch.float32)
    run(inputs, packing, -5.01, "reference", torch.float32)


def test_mistakes_are_named() -> None:
    inputs, packing = draw((6, 4)), Packing.of((6, 4))
    state = inputs.state
    with pytest.raises(ValueError, match="unknown backend 'cuda'; there are reference, chunk"):
        call(inputs, packing, None, "cuda")
    with pytest.raises(ValueError, match=r"k has shape \(9, 2, 8\), expected \(10, 2, 8\)"):
        call(replace(inputs, k=inputs.k[1:]), packing, None, "chunk")
    with pytest.raises(ValueError, match=r"q has shape \(10, 2, 8\), expected \(11, 2, 8\)"):
        call(inputs, Packing.of([11]), None, "chunk")
    with pytest.raises(ValueError, match=r"state has shape \(2, 2, 8, 5\), expected \(2, 2, 5, 8\)"):
        call(inputs, packing, state.mT, "chunk")
    with pytest.raises(ValueError, match=r"A_log has shape \(1,\), expected at least \(2,\)"):
        call(replace(inputs, A_log=inputs.A_log[:1]), packing, None, "chunk")
    with pytest.raises(ValueError, match=r"slots \[1, 1\] name one slot twice"):
        PooledState(state, torch.tensor([1, 1]))
    with pytest.raises(ValueError, match=r"lower_bound 5\.0 must be negative"):
        Gate(inputs.A_log, inputs.dt_bias, 5.0)
