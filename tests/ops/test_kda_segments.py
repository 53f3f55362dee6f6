"""Sequences cut into segments: the planner, the pieces in float64 against the recurrence, the kernels against the same.

Cut or not, the result has to be the same, so the bounds are those of `test_kda_triton.py`.
"""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import Gate, PooledState, kda, segment_transition
from rille.ops.kda.function import kda_backward_op
from rille.ops.kda.segments import (
    Costs,
    Plan,
    cut,
    cutting,
    microseconds,
    plan_segments,
    segments_of,
    tables,
    train_microseconds,
)
from rille.packing import Packing
from tests.ops.test_kda_triton import DEVICE, ERROR, INTERPRET, assert_equals_reference, draw, states

PACKED = (1, 15, 1000, 0, 64, 129)


def draw_remembering(lengths: tuple[int, ...], **shape: Any) -> tuple[list[Tensor], Gate]:
    """Weak gates, and channels that no key overwrites: elsewhere a state is forgotten before the next segment."""
    inputs, gate = draw(lengths, **shape)
    inputs[1][..., ::2] = 0
    inputs[3] = inputs[3] / 3 - 8
    return inputs, gate


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()


@pytest.mark.parametrize(("chunks", "size"), [(16, 3), (16, 16), (17, 16), (0, 4), (1, 4), (1000, 7), (9, 1)])
def test_cut_is_even(chunks: int, size: int) -> None:
    sizes = cut(chunks, size)
    assert sum(sizes) == chunks and max(sizes) <= size and max(sizes) - min(sizes) <= 1
    assert len(sizes) == max(1, -(-chunks // size)) and sorted(sizes, reverse=True) == list(sizes)


@pytest.mark.parametrize(
    ("lengths", "heads", "is_cut"),
    [
        ((32768,), 16, True),
        ((65536,), 12, True),
        ((65536,), 4, True),
        ((65536, 100, 0, 2000), 4, True),
        ((8192,), 96, False),
        ((1024,) * 8, 96, False),
        ((8192,), 64, False),
        ((300,), 4, False),
        ((64,), 1, False),
        ((0,), 1, False),
        ((), 1, False),
    ],
)
def test_planner_cuts_where_the_card_idles(lengths: tuple[int, ...], heads: int, is_cut: bool) -> None:
    plan = plan_segments(lengths, heads, 132)
    assert (plan is not None) is is_cut
    if plan is not None:
        assert [sum(sizes) for sizes in plan] == [-(-n // 64) for n in lengths]
        whole = tuple((sum(sizes),) for sizes in plan)
        gain = microseconds(plan, heads, 132, 128, 128, Costs()) / microseconds(whole, heads, 132, 128, 128, Costs())
        assert gain <= Costs().margin


@pytest.mark.parametrize(
    ("tokens", "heads", "measured"), [(32768, 16, (3,)), (65536, 12, (4,)), (65536, 4, (8, 16)), (8192, 16, (1,))]
)
def test_planner_finds_the_counts_that_were_measured_best(tokens: int, heads: int, measured: tuple[int, ...]) -> None:
    plan = plan_segments((tokens,), heads, 132)
    count = len(plan[0]) if plan is not None else 1
    assert measured[0] <= count <= measured[-1]


@pytest.mark.parametrize(
    ("tokens", "heads", "measured"),
    [(32768, 16, (4, 7)), (65536, 12, (5, 7)), (65536, 4, (16, 32)), (8192, 16, (1, 1))],
)
def test_planner_weighs_the_backward_pass_too(tokens: int, heads: int, measured: tuple[int, ...]) -> None:
    plan = plan_segments((tokens,), heads, 132, gradients=True)
    assert measured[0] <= (len(plan[0]) if plan is not None else 1) <= measured[-1]


@pytest.mark.parametrize(
    ("tokens", "heads", "measured"),
    [
        (32768, 16, {1: 5928, 2: 5160, 3: 4620, 4: 4445, 5: 4520, 7: 4444}),
        (65536, 12, {1: 10183, 3: 7365, 4: 6839, 5: 6687, 7: 6788}),
        (65536, 4, {1: 6754, 8: 2669, 12: 2468, 16: 2373, 32: 2428}),
    ],
)
def test_costs_of_forward_and_backward_are_those_measured(tokens: int, heads: int, measured: dict[int, int]) -> None:
    for count, train_us in measured.items():
        plan = (cut(tokens // 64, -(-tokens // 64 // count)),)
        assert abs(train_microseconds(plan, heads, 132, 128, 128, Costs()) / train_us - 1) < 0.06, count


@pytest.mark.parametrize("gradients", [False, True])
def test_planner_looks_no_further_only_where_no_size_can_win(gradients: bool) -> None:
    weigh, draws, found = train_microseconds if gradients else microseconds, Random(3), []
    for _ in range(60):
        longest, heads = draws.choice((500, 8000, 60000)), draws.choice((4, 16, 96))
        lengths = [draws.randint(1, longest) for _ in range(draws.choice((1, 2, 20)))]
        chunks, costs = [-(-n // 64) for n in lengths], Costs()
        limit = costs.margin * weigh(tuple((n,) for n in chunks), heads, 132, 128, 128, costs)
        sizes = {-(-max(chunks) // n) for n in range(2, 65)}
        best = min(
            (weigh(tuple(cut(n, size) for n in chunks), heads, 132, 128, 128, costs) for size in sizes if size >= 8),
            default=limit,
        )
        plan = plan_segments(lengths, heads, 132, gradients=gradients)
        assert (plan is not None) is (best < limit)
        assert plan is None or weigh(plan, heads, 132, 128, 128, costs) == best
        found.append(plan is not None)
    assert 5 < sum(found) < 55


def test_planner_leaves_short_sequences_whole() -> None:
    plan = plan_segments((65536, 100, 0, 2000), 4, 132)
    assert plan is not None and len(plan[0]) > 4 and plan[1:3] == ((2,), (0,))


def test_cutting_is_switched() -> None:
    packing = Packing.of((32768,))
    assert segments_of(packing, 16, 132, 128, 128) is segments_of(packing, 16, 132, 128, 128) is not None
    with cutting(None):
        assert segments_of(packing, 16, 132, 128, 128) is None
        assert segments_of(packing, 16, 132, 128, 128, gradients=True) is None
        with cutting(256):
            forced = segments_of(packing, 16, 1, 128, 128)
    assert forced is not None and forced.first_G.tolist() == [0, 256]
    for size in (0, -1, "never"):
        with pytest.raises(ValueError, match="positive number"), cutting(size):  # pyright: ignore[reportArgumentType]
            pass


def test_tables_by_hand() -> None:
    packing = Packing.of((10, 250, 0, 64))
    plan: Plan = ((1,), (2, 1, 1), (0,), (1,))
    made = tables(plan, packing)
    assert made.starts_G1.tolist() == [0, 10, 138, 202, 260, 260, 324]
    assert made.order_G.tolist() == [1, 2, 5, 3, 0, 4]
    assert made.first_G.tolist() == [0, 1, 3, 4, 5, 5]
    assert made.head_S.tolist() == [0, 1, 4, 5] and made.last_S.tolist() == [0, 3, 4, 5]
    jobs = [[10, 128, 1, 1, 1, 2], [138, 64, 3, -1, -1, 3]]  # of the long sequence: its first two segments
    jobs += [[0, 0, 0, 0, 0, -1], [260, 0, 5, 2, 4, -1], [260, 0, 5, 3, 5, -1]]  # of the others: the initial state
    assert made.jobs_J6.tolist() == jobs
    assert made.products_P2.tolist() == [[3, 1]] and made.chains_Q3.tolist() == [[2, 1, 0]]
    back = [[10 + 64 * 2, 64, 3, -1, -1, 1], [202, 58, 4, 1, 3, 2]]
    back += [[0, 0, 0, 0, 0, -1], [260, 0, 5, 2, 4, -1], [260, 0, 5, 3, 5, -1]]
    assert made.back_J6.tolist() == back and made.back_Q3.tolist() == [[2, 1, 0]]
    assert {x.data_ptr() % 16 for x in made} == {0}


@pytest.mark.parametrize("bound", [-5.0, None])
def test_transition_is_what_the_recurrence_does(bound: float | None) -> None:
    inputs, gate = draw_remembering(PACKED, K=8, V=5, bound=bound)
    packing = Packing.of(PACKED, device=DEVICE)
    q, k, v, z, b = (x.double() for x in inputs)
    start = states(packing, inputs).double()
    _, final = kda(q, k, v, z, b, gate, packing, start, backend="reference")
    p_SHKK, local_SHVK = segment_transition(k, v, z, b, gate, packing, backend="chunk")
    assert isinstance(final, Tensor)
    torch.testing.assert_close(start @ p_SHKK + local_SHVK, final, atol=1e-12, rtol=1e-12)


def test_transitions_of_neighbours_multiply() -> None:
    inputs, gate = draw_remembering((300,), K=8, V=5)
    inputs = [x.double() for x in inputs]
    parts = [
        segment_transition(*(x[rows] for x in inputs[1:]), gate, Packing.of((n,), device=DEVICE), backend="chunk")
        for rows, n in ((slice(0, 100), 100), (slice(100, 300), 200))
    ]
    whole = segment_transition(*inputs[1:], gate, Packing.of((300,), device=DEVICE), backend="chunk")
    torch.testing.assert_close(parts[0][0] @ parts[1][0], whole[0], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(parts[0][1] @ parts[1][0] + parts[1][1], whole[1], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("K", "V"), [(64, 64), (128, 128), (64, 256)])
def test_transition_by_the_kernels(K: int, V: int) -> None:
    lengths = (70, 0, 130) if K == V == 64 else (70,)
    inputs, gate = draw_remembering(lengths, K=K, V=V)
    packing = Packing.of(lengths, device=DEVICE)
    exact = segment_transition(*(x.double() for x in inputs[1:]), gate, packing, backend="chunk")
    got = segment_transition(*inputs[1:], gate, packing, backend="triton")
    for x, y in zip(got, exact, strict=True):
        assert x.dtype == torch.float32 and distance(x, y) <= 2 * ERROR
    if 0 in lengths:
        assert torch.equal(got[0][1], torch.eye(K, device=DEVICE).expand(2, K, K)) and not got[1][1].any()


def test_transition_refuses_and_does_nothing_without_tokens() -> None:
    inputs, gate = draw_remembering((0,))
    packing = Packing.of((0,), device=DEVICE)
    for backend in ("chunk", "triton"):
        p_SHKK, local_SHVK = segment_transition(*inputs[1:], gate, packing, backend=backend)
        assert torch.equal(p_SHKK, torch.eye(64, device=DEVICE).expand(1, 2, 64, 64)) and not local_SHVK.any()
    with pytest.raises(ValueError, match="unknown backend 'reference'"):
        segment_transition(*inputs[1:], gate, packing, backend="reference")


def test_memory_crosses_segments() -> None:
    inputs, gate = draw_remembering((330,), H=1)
    p_SHKK, _ = segment_transition(*inputs[1:], gate, Packing.of((330,), device=DEVICE), backend="triton")
    assert p_SHKK.norm() > 1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_packed_sequences_cut(size: int) -> None:
    with cutting(size):
        assert_equals_reference(*draw_remembering(PACKED, H=1), PACKED, stateful=size != 2)


@pytest.mark.parametrize(("K", "V", "bound"), [(128, 128, -5.0), (64, 256, -5.0), (128, 64, None)])
def test_widths_cut(K: int, V: int, bound: float | None) -> None:
    with cutting(1):
        assert_equals_reference(*draw_remembering((200, 3), H=1, K=K, V=V, bound=bound), (200, 3))


@pytest.mark.parametrize("logit", [-12.0, -8.0, 12.0])
def test_extreme_gates_cut(logit: float) -> None:
    lengths = (600,)
    inputs, gate = draw_remembering(lengths, H=1)
    inputs[3] = torch.full_like(inputs[3], logit)
    plain = Gate(torch.zeros_like(gate.A_log), torch.zeros_like(gate.dt_bias), -5.0)
    with cutting(2):
        assert_equals_reference(inputs, plain, lengths, error=2 * ERROR)


def test_repeated_keys_cut() -> None:
    inputs, gate = draw_remembering((400,), H=1)
    inputs[1] = inputs[1][:1] + 0.05 * inputs[1]
    inputs[3] = torch.full_like(inputs[3], -12.0)
    inputs[4] = torch.full_like(inputs[4], 9.0)
    with cutting(1):
        assert_equals_reference(inputs, gate, (400,), error=3 * ERROR)


def test_nan_stays_in_its_sequence_and_after_its_place() -> None:
    lengths = (200, 300, 70)
    inputs, gate = draw_remembering(lengths, H=1)
    packing = Packing.of(lengths, device=DEVICE)
    with cutting(1):
        clean, clean_final = kda(*inputs, gate, packing, backend="triton")
        inputs[2][200 + 150 : 200 + 160] = torch.nan
        o, final = kda(*inputs, gate, packing, backend="triton")
    assert final is not None and clean_final is not None
    assert torch.equal(o[:328], clean[:328]) and torch.equal(o[500:], clean[500:])
    assert torch.equal(final[[0, 2]], clean_final[[0, 2]]) and o[360:500].isnan().any()


def test_pool_and_checkpoints_cut() -> None:
    lengths = (70, 0, 330)
    inputs, gate = draw_remembering(lengths, H=1)
    packing = Packing.of(lengths, device=DEVICE)
    start = states(packing, inputs)
    slots = torch.tensor([5, 1, 3], device=DEVICE)
    checkpoints = torch.tensor([-1, -1, 7, -1, -1, 0, -1, -1], device=DEVICE)
    pools, outputs = [], []
    for size in (2, None):
        pool = torch.zeros(9, 2, 1, 64, 64, device=DEVICE)[:, 0]  # every second state of a wider pool
        pool[slots] = start
        with cutting(size):
            o, final = kda(*inputs, gate, packing, PooledState(pool, slots, checkpoints), backend="triton")
        assert final is None
        pools.append(pool)
        outputs.append(o)
    assert torch.equal(pools[0][[2, 4, 6, 8]], torch.zeros(4, 1, 64, 64, device=DEVICE))
    assert torch.equal(pools[0][1], start[1])
    tolerance = dict(atol=1e-5, rtol=1e-5) if INTERPRET else dict(atol=3e-2, rtol=3e-2)
    torch.testing.assert_close(pools[0], pools[1], **tolerance)
    torch.testing.assert_close(outputs[0], outputs[1], **tolerance)


def test_cut_results_repeat_bit_for_bit() -> None:
    inputs, gate = draw_remembering((333,), H=1)
    packing = Packing.of((333,), device=DEVICE)
    with cutting(1):
        first, second = (kda(*inputs, gate, packing, backend="triton") for _ in range(2))
    assert torch.equal(first[0], second[0]) and first[1] is not None and second[1] is not None
    assert torch.equal(first[1], second[1])


def gradients(inputs: list[Tensor], gate: Gate, lengths: tuple[int, ...], backend: str, dtype: Any) -> list[Tensor]:
    """Of q, k, v, z, b, the parameters of the gate and the initial states, with gradients of o and the final states."""
    packing = Packing.of(lengths, device=DEVICE)
    leaves = [*inputs, gate.A_log, gate.dt_bias, states(packing, inputs)]
    leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in leaves]
    o, final = kda(*leaves[:5], Gate(leaves[5], leaves[6], gate.lower_bound), packing, leaves[7], backend=backend)
    generator = torch.Generator().manual_seed(3)
    do, dfinal = (torch.randn(x.shape, generator=generator).to(DEVICE) for x in (o, leaves[7]))
    assert final is not None
    return list(torch.autograd.grad((o * do.to(o.dtype)).sum() + (final * dfinal.to(final.dtype)).sum(), leaves))


NAMES = ("dq", "dk", "dv", "dz", "db", "dA_log", "ddt_bias", "dstate")
GRADIENT_ERROR = 480 * 2.0**-24 if INTERPRET else 3e-2


@pytest.mark.parametrize(("lengths", "size"), [((1, 15, 400, 0, 64, 129), 1), ((70, 450), 2)])
def test_gradients_cut(lengths: tuple[int, ...], size: int) -> None:
    inputs, gate = draw_remembering(lengths, H=1)
    exact = gradients(inputs, gate, lengths, "reference", torch.float64)
    with cutting(size):
        got = gradients(inputs, gate, lengths, "triton", None)
    for name, x, y in zip(NAMES, got, exact, strict=True):
        assert distance(x, y) <= GRADIENT_ERROR, f"{name} is off by {distance(x, y):.1e}"
    start = 0
    for length in lengths:
        for border in range(start + 64 * size, start + length, 64 * size):  # one row before and one after
            for name, x, y in zip(NAMES[:5], got, exact, strict=False):
                rows, of = slice(border - 1, border + 1), y[start : start + length]
                limit = 4 * GRADIENT_ERROR * of.norm() / of.shape[0] ** 0.5
                assert (x[rows].double() - y[rows]).norm() <= limit, f"{name} at token {border}"
        start += length


@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 256), (128, 64)])
def test_gradients_cut_of_widths(K: int, V: int) -> None:
    inputs, gate = draw_remembering((200, 3), H=1, K=K, V=V)
    exact = gradients(inputs, gate, (200, 3), "reference", torch.float64)
    with cutting(1):
        got = gradients(inputs, gate, (200, 3), "triton", None)
    for name, x, y in zip(NAMES, got, exact, strict=True):
        assert distance(x, y) <= GRADIENT_ERROR, f"{name} is off by {distance(x, y):.1e}"


def test_ops_hold_the_rules_of_torch_library() -> None:
    inputs, gate = draw((150, 3), H=1)
    packing = Packing.of((150, 3), device=DEVICE)
    with cutting(1):
        tables_of_cut = list(segments_of(packing, 1, 1, 64, 64) or ())
    indices = (packing.chunks(64).spans, packing.starts, packing.longest_first, packing.chunks(64).first)
    tokens = (*inputs, gate.A_log, gate.dt_bias, gate.lower_bound, *indices, states(packing, inputs))
    op = torch.ops.rille.kda_forward.default
    made = op(*tokens, tables_of_cut, 2)
    rules = ("test_schema", "test_faketensor")
    torch.library.opcheck(op, (*tokens, tables_of_cut, 2), test_utils=rules)
    grads = (torch.ones_like(made[0]), torch.ones_like(made[1]))
    arguments = (*tokens, made[2], made[3], *grads, [*made[4:], *tables_of_cut])
    torch.library.opcheck(kda_backward_op.registered, arguments, test_utils=rules)


def test_gradients_cut_with_the_softplus_gate() -> None:
    inputs, gate = draw_remembering((200,), H=1, bound=None)
    exact = gradients(inputs, gate, (200,), "reference", torch.float64)
    with cutting(1):
        got = gradients(inputs, gate, (200,), "triton", None)
    for name, x, y in zip(NAMES, got, exact, strict=True):
        assert distance(x, y) <= GRADIENT_ERROR, f"{name} is off by {distance(x, y):.1e}"


def test_gradients_cut_without_a_state() -> None:
    inputs, gate = draw_remembering((200,), H=1)
    packing, found = Packing.of((200,), device=DEVICE), []
    for size in (1, None):
        leaves = [x.detach().requires_grad_() for x in inputs]
        with cutting(size):
            found.append(torch.autograd.grad(kda(*leaves, gate, packing, backend="triton")[0].sum(), leaves))
    for name, x, y in zip(NAMES, *found, strict=False):
        assert distance(x, y.double()) <= GRADIENT_ERROR, f"{name} is off by {distance(x, y.double()):.1e}"
