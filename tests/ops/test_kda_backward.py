"""Gradients of KDA: the written-out form against autograd of the float64 recurrence, the kernels against the same.

Without a GPU the kernels run in Triton's interpreter, where fp32 inputs keep fp32 operands. A gradient may then be off
by three roundings of the largest exponent, 80 * 2^-24 of its norm each, and by what autograd of the recurrence itself
loses in fp32. On a GPU operands are bf16, and so is the bound.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from math import log

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import Gate, PooledState, chunk_backward, kda
from rille.ops.kda.backward import Inputs, backward, local, prepare, reverse, states
from rille.ops.kda.forward import INTERPRET, forward, intra
from rille.ops.kda.function import kda_backward_op
from rille.ops.kda.reference import normalised
from rille.packing import Packing
from tests.ops.kda_gates import decays_cut_off

PACKED = (1, 15, 16, 17, 63, 64, 65, 0, 130)
DEVICE = "cpu" if INTERPRET else "cuda"
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
NAMES = [f"d{name}" for name in ("q", "k", "v", "z", "b", "A_log", "dt_bias", "state")]


@dataclass
class Case:
    """Inputs q, k, v, z, b, A_log, dt_bias, state, and the gradients of the outputs that they are asked for."""

    leaves: list[Tensor]
    do: Tensor
    dfinal: Tensor
    lengths: tuple[int, ...]
    bound: float | None = -5.0

    @property
    def packing(self) -> Packing:
        return Packing.of(self.lengths, device=DEVICE)

    def gradients(self, backend: str, dtype: torch.dtype | None = None) -> list[Tensor]:
        leaves = [x.detach().to(dtype or x.dtype).requires_grad_() for x in self.leaves]
        q, k, v, z, b, A_log, dt_bias, state = leaves
        o, final = kda(q, k, v, z, b, Gate(A_log, dt_bias, self.bound), self.packing, state, backend=backend)
        assert isinstance(final, Tensor)
        loss = (o * self.do.to(o.dtype)).sum() + (final * self.dfinal.to(final.dtype)).sum()
        return list(torch.autograd.grad(loss, leaves))


def draw(lengths: tuple[int, ...], H: int = 2, K: int = 64, V: int = 64, bound: float | None = -5.0) -> Case:
    generator = torch.Generator().manual_seed(0)
    N, S = sum(lengths), len(lengths)
    shapes = [
        (N, H, K),
        (N, H, K),
        (N, H, V),
        (N, H, K),
        (N, H),
        (H + 1,),
        (H, K),
        (S, H, V, K),
        (N, H, V),
        (S, H, V, K),
    ]
    q, k, v, z, b, A_log, dt_bias, state, do, dfinal = (torch.randn(x, generator=generator).to(DEVICE) for x in shapes)
    tokens = [x.to(DTYPE) for x in (q, k, v, 3 * z, b)]
    return Case([*tokens, 0.3 * A_log, dt_bias, state], do.to(DTYPE), dfinal, lengths, bound)


def distance(got: Tensor, want: Tensor) -> float:
    return (got.double() - want.double()).norm().item()


def assert_gradients(case: Case, got: list[Tensor] | None = None, slack: float = 1.0) -> None:
    with decays_cut_off() if case.bound is None else nullcontext():
        exact = case.gradients("reference", torch.float64)
        literal = case.gradients("reference", torch.float32)
    got = got or case.gradients("triton")
    relative = 240 * 2.0**-24 if INTERPRET else 2e-2
    for name, x, y, by_token, leaf in zip(NAMES, got, exact, literal, case.leaves, strict=True):
        assert x.dtype == leaf.dtype and x.shape == leaf.shape
        limit = slack * relative * y.norm().item() + 4 * distance(by_token, y) + 1e-30
        assert distance(x, y) <= limit, f"{name}: off by {distance(x, y):.2e}, limit {limit:.2e}"


@pytest.mark.parametrize("bound", [-5.0, -2.0, None])
@pytest.mark.parametrize("lengths", [(1,), (17,), (64,), (1, 15, 16, 0, 63, 64, 65, 150)], ids=str)
def test_written_out_gradient_is_autograd_of_the_recurrence(lengths: tuple[int, ...], bound: float | None) -> None:
    case = draw(lengths, K=8, V=5, bound=bound)
    exact = case.gradients("reference", torch.float64)
    *tokens, A_log, dt_bias, state = (x.double() for x in case.leaves)
    gate = Gate(A_log, dt_bias, bound)
    got = chunk_backward.kda_backward(*tokens, gate, case.packing, state, case.do.double(), case.dfinal.double())
    for name, x, y in zip(NAMES, got, exact, strict=True):
        assert distance(x, y) <= 1e-12 * y.norm().item(), name


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("bound", [-5.0, -2.0, None])
def test_packed_sequences(bound: float | None) -> None:
    assert_gradients(draw(PACKED, bound=bound))


@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 256), (128, 64)])
def test_widths(K: int, V: int) -> None:
    assert_gradients(draw((70, 3), H=1, K=K, V=V))


def bimodal(*shape: int) -> Tensor:
    return torch.where(torch.rand(shape, generator=torch.Generator().manual_seed(2)) < 0.5, 12.0, -12.0)


GATES = {
    "open": torch.tensor(-12.0),
    "shut": torch.tensor(12.0),
    "by token": bimodal(130, 1, 1),
    "by channel": bimodal(1, 1, 64),
    "shut, then open": torch.where(torch.arange(130) < 64, 12.0, -12.0)[:, None, None],
    "open, then shut": torch.where(torch.arange(130) < 20, -12.0, 12.0)[:, None, None],
}


def gated(name: str) -> Case:
    case = draw((130,))
    q, k, v, z, b, A_log, dt_bias, state = case.leaves
    z = GATES[name].to(z).expand_as(z).contiguous()
    return replace(case, leaves=[q, k, v, z, b, torch.zeros_like(A_log), torch.zeros_like(dt_bias), state])


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    assert_gradients(gated(name))


@pytest.mark.parametrize("size", [1e6, 1e-12])
@pytest.mark.parametrize("name", ["shut", "open, then shut"])
def test_large_and_small_gradients_under_a_shut_gate(name: str, size: float) -> None:
    case = gated(name)
    assert_gradients(replace(case, do=size * case.do, dfinal=size * case.dfinal))


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_repeated_keys(spread: float) -> None:
    case = draw((150,))
    q, k, v, z, b, *others = case.leaves
    k = k[:1] + spread * k
    assert_gradients(replace(case, leaves=[q, k, v, z * 0 - 12, b * 0 + 9, *others]), slack=8.0)


def test_zero_keys_and_weak_writes() -> None:
    case = draw((100,))
    q, k, v, z, b, *others = case.leaves
    k, b = k.clone(), b.clone()
    k[10:40], b[30:60], b[60:80] = 0, -100, -30
    got = replace(case, leaves=[q, k, v, z, b, *others]).gradients("triton")
    assert all(bool(x.isfinite().all()) for x in got)
    assert_gradients(replace(case, leaves=[q, k, v, z, b, *others]), got)


@pytest.mark.parametrize("which", ["o", "final"])
def test_gradient_of_one_output_alone(which: str) -> None:
    case = draw((70, 30))
    only_o = which == "o"
    case = replace(case, do=case.do * only_o, dfinal=case.dfinal * (not only_o))
    leaves = [x.detach().requires_grad_() for x in case.leaves]
    q, k, v, z, b, A_log, dt_bias, state = leaves
    o, final = kda(q, k, v, z, b, Gate(A_log, dt_bias, -5.0), case.packing, state, backend="triton")
    assert isinstance(final, Tensor)
    loss = (o * case.do).sum() if only_o else (final * case.dfinal).sum()
    assert_gradients(case, list(torch.autograd.grad(loss, leaves)))


def test_without_state_and_with_strides() -> None:
    """Heads cut out of one projection, a gradient of o that is expanded from one number."""
    case = draw((66, 20), H=2)
    q, k, v, z, b, A_log, dt_bias, _ = (x.detach() for x in case.leaves)
    qkv = torch.cat([q, k, v], -1).flatten(1).requires_grad_()
    heads = qkv.unflatten(1, (2, -1))
    q, k, v = heads.split([64, 64, 64], -1)
    o, _ = kda(q, k, v, z, b, Gate(A_log, dt_bias, -5.0), case.packing, backend="triton")
    (got,) = torch.autograd.grad(o.sum(), qkv)
    exact = qkv.detach().double().requires_grad_()
    q, k, v = exact.unflatten(1, (2, -1)).split([64, 64, 64], -1)
    o, _ = kda(q, k, v, z.double(), b.double(), Gate(A_log, dt_bias, -5.0), case.packing, backend="reference")
    (want,) = torch.autograd.grad(o.sum(), exact)
    assert distance(got, want) <= (1e-5 if INTERPRET else 2e-2) * want.norm().item()


def test_nan_in_one_sequence_stays_there() -> None:
    case = draw((40, 70, 5))
    clean = case.gradients("triton")
    for x in case.leaves[:5]:
        x[40:110] = torch.nan
    spoilt = case.gradients("triton")
    for name, x, y in zip(NAMES[:5], spoilt, clean, strict=False):
        for rows in (slice(0, 40), slice(110, 115)):
            assert torch.equal(x[rows], y[rows]), name
    assert torch.equal(spoilt[7][[0, 2]], clean[7][[0, 2]])


def test_packed_equals_separate_bit_for_bit_and_twice_the_same() -> None:
    case = draw((70, 20))
    packed, again = case.gradients("triton"), case.gradients("triton")
    assert all(torch.equal(x, y) for x, y in zip(packed, again, strict=True))
    for s, rows in enumerate((slice(0, 70), slice(70, 90))):
        tokens, others = [x[rows] for x in case.leaves[:5]], case.leaves[5:7]
        alone = replace(
            case, leaves=[*tokens, *others, case.leaves[7][s : s + 1]], do=case.do[rows], dfinal=case.dfinal[s : s + 1],
            lengths=(case.lengths[s],),
        )  # fmt: skip
        got = alone.gradients("triton")
        assert all(torch.equal(x[rows], y) for x, y in zip(packed[:5], got[:5], strict=True))
        assert torch.equal(packed[7][s], got[7][0])


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    case = draw(lengths)
    got = case.gradients("triton")
    assert torch.equal(got[7], case.dfinal)
    assert all(not x.any() for x in got[:7])


def test_pool_is_read_before_it_is_overwritten() -> None:
    case = draw((70, 20))
    q, k, v, z, b, A_log, dt_bias, state = (x.detach() for x in case.leaves)
    q.requires_grad_()
    pool = torch.cat([torch.zeros_like(state[:1]), state])
    gate, slots = Gate(A_log, dt_bias, -5.0), torch.tensor([2, 1], device=DEVICE)
    o, none = kda(q, k, v, z, b, gate, case.packing, PooledState(pool, slots), backend="triton")
    assert none is None and not o.isnan().any()
    (got,) = torch.autograd.grad((o * case.do).sum(), q)
    o, final = kda(q, k, v, z, b, gate, case.packing, state[[1, 0]], backend="triton")
    assert isinstance(final, Tensor)
    (want,) = torch.autograd.grad((o * case.do).sum(), q)
    assert torch.equal(got, want)
    assert torch.equal(pool[slots], final)


@pytest.mark.parametrize(
    ("name", "logits"), [("shut", 36), ("by channel", 12), ("by token", 4), ("open, then shut", 4)]
)
def test_softplus_gate_without_a_bound(name: str, logits: int) -> None:
    """Logits of up to 36: those of e^-19.4 and less are cut off, and pass no gradient."""
    case = replace(gated(name), bound=None)
    q, k, v, z, *others = case.leaves
    assert_gradients(replace(case, leaves=[q, k, v, z * (logits / 12), *others]), slack=4.0)


def test_softplus_gate_of_shut_tokens_between_open_ones() -> None:
    """Here dz is e^-12 of the terms that it is a sum of, and off by their rounding."""
    case = replace(gated("by token"), bound=None)
    exact, got = case.gradients("reference", torch.float64), case.gradients("triton")
    terms = (case.leaves[1] * exact[1]).norm().item()
    assert distance(got[3], exact[3]) <= (2e-6 if INTERPRET else 2e-2) * terms


@pytest.mark.parametrize("size", [1e6, 1e-12])
@pytest.mark.parametrize("rate", [1.0, 16.0])
def test_large_and_small_gradients_under_the_softplus_gate(size: float, rate: float) -> None:
    """Some channels shut, some open, some between: in blocks of 8 the largest factors meet the largest gradients."""
    case = replace(gated("by channel"), bound=None)
    q, k, v, z, b, A_log, *others = case.leaves
    spread = torch.randn(z.shape, generator=torch.Generator().manual_seed(3)).to(z)
    leaves = [q, k, v, (z / 6 + spread).to(z), b, A_log + log(rate), *others]
    assert_gradients(replace(case, leaves=leaves, do=size * case.do, dfinal=size * case.dfinal), slack=4.0)


@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 256)])
def test_widths_with_the_softplus_gate(K: int, V: int) -> None:
    assert_gradients(draw((70, 3), H=1, K=K, V=V, bound=None))


def test_ops_hold_the_rules_of_torch_library() -> None:
    case = draw((20, 3), H=1)
    *tokens, A_log, dt_bias, state = case.leaves
    chunks, gate = case.packing.chunks(64), Gate(A_log, dt_bias, -5.0)
    made = forward(*tokens, gate, case.packing, state)
    indices = (chunks.spans, case.packing.starts, case.packing.longest_first, chunks.first)
    inputs = Inputs._make([*tokens, A_log, dt_bias, -5.0, *indices, state])
    arguments = (*inputs, made.t_DMHCC, made.a_MHCC, case.do, case.dfinal, [])
    torch.library.opcheck(kda_backward_op.registered, arguments, test_utils=("test_schema", "test_faketensor"))


def repeated_keys(spread: float, lengths: tuple[int, ...] = (192,), H: int = 2, width: int = 64) -> tuple[Case, Inputs]:
    """bf16, an open gate, strong writes."""
    case = draw(lengths, H, width, width)
    q, k, v, z, b, *others = case.leaves
    tokens = [x.bfloat16() for x in (q, k[:1] + spread * k, v, torch.full_like(z, -12.0), torch.full_like(b, 9.0))]
    chunks, packing = case.packing.chunks(64), case.packing
    indices = (chunks.spans, packing.starts, packing.longest_first, chunks.first)
    inputs = Inputs._make([*tokens, *others[:2], -5.0, *indices, others[2]])
    return replace(case, leaves=[*tokens, *others], do=case.do.bfloat16()), inputs


def test_written_keys_have_two_digits_and_states_adds_them() -> None:
    _, inputs = repeated_keys(0.05, lengths=(128, 128))
    q, k, _, z, b, A_log, dt_bias = inputs[:7]
    prepared = prepare(inputs, digits=2)
    high, low = prepared.k_end_DMHCK
    assert torch.equal(prepare(inputs, digits=1).k_end_DMHCK[0], high)
    log2_NHK = -5.0 / log(2) * (A_log[:2, None].double().exp() * (z.double() + dt_bias)).sigmoid()
    to_end_CHK = log2_NHK[64:128].flip(0).cumsum(0).flip(0) - log2_NHK[64:128]
    written_CHK = b[64:128, :, None].double().sigmoid() * to_end_CHK.exp2() * normalised(k[64:128], torch.float64)
    one_digit_CHK = high[1].double().transpose(0, 1)
    two_digits_CHK = one_digit_CHK + low[1].double().transpose(0, 1)
    assert distance(two_digits_CHK, written_CHK) <= 2.0**-14 * written_CHK.norm().item()
    assert distance(one_digit_CHK, written_CHK) >= 2.0**-11 * written_CHK.norm().item()

    t_DMHCC = intra(q, k, z, b, A_log, dt_bias, -5.0, inputs.spans_M2, digits=2).t_DMHCC
    inputs = inputs._replace(initial_SHVK=None)

    def after_first_chunks(second: Tensor) -> Tensor:
        given = prepared._replace(k_end_DMHCK=torch.stack([high, second]))
        return states(inputs, given, t_DMHCC)[1][1::2]

    once, twice = after_first_chunks(torch.zeros_like(low)), after_first_chunks(high)
    assert distance(twice, 2 * once) <= 2.0**-8 * once.double().norm().item()


@pytest.mark.gpu
@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_low_bits_of_written_keys_where_keys_repeat(spread: float) -> None:
    """Later writes take back what earlier ones left along the key that is read, not what rounding turned aside. So it
    adds up in the state, and in the sums over tokens that dt_bias receives. Emulated, 20 draws: errors of dz fall to
    0.5, at most 0.62, of ddt_bias to 0.2, at most 0.28. Triton's interpreter, which cuts and does not round, hides
    it."""
    case, inputs = repeated_keys(spread, lengths=(1000,), H=16, width=128)
    q, k, _, z, b, A_log, dt_bias = inputs[:7]
    made, prepared = intra(q, k, z, b, A_log, dt_bias, -5.0, inputs.spans_M2, digits=2), prepare(inputs, digits=2)
    high, low = prepared.k_end_DMHCK

    def gate_gradients(second: Tensor) -> tuple[Tensor, Tensor]:
        given = prepared._replace(k_end_DMHCK=torch.stack([high, second]))
        u, before = states(inputs, given, made.t_DMHCC)
        dv, dafter, dinitial = reverse(inputs, given, made.t_DMHCC, made.a_MHCC, case.do, case.dfinal)
        numbers = (given.totals_MH4K, given.norms_MH4C)
        got = local(inputs, case.do, dv, dinitial, u, before, dafter, *numbers)
        return got.z_NHK, got.dt_bias_HK

    exact = case.gradients("chunk", torch.float64)
    fine, coarse = gate_gradients(low), gate_gradients(torch.zeros_like(low))
    for x, y, want, share in zip(fine, coarse, (exact[3], exact[6]), (0.75, 0.5), strict=True):
        assert distance(x, want) <= share * distance(y, want)


def test_low_bits_of_t_where_keys_repeat() -> None:
    """L is full of ones, and what rounding takes from T is felt in every row. With the low bits dk is closer, by a
    third where products round their operands, and by a fifth where they cut them, as Triton's interpreter does."""
    case, inputs = repeated_keys(0.05)
    q, k, v, z, b, A_log, dt_bias, _ = case.leaves
    made = [intra(q, k, z, b, A_log, dt_bias, -5.0, inputs.spans_M2, digits=digits) for digits in (1, 2)]
    high, low = made[1].t_DMHCC
    assert torch.equal(made[0].t_DMHCC[0], high) and torch.equal(low, low.tril(-1))
    assert low.any() and bool((low.abs() <= 2.0**-7 * high.abs()).all())
    exact = case.gradients("reference", torch.float64)
    coarse, fine = (backward(inputs, x.t_DMHCC, x.a_MHCC, case.do, case.dfinal) for x in made)
    assert distance(fine.k_NHK, exact[1]) <= 0.85 * distance(coarse.k_NHK, exact[1])
    assert distance(fine.q_NHK, exact[0]) <= distance(coarse.q_NHK, exact[0])
    assert distance(fine.v_NHV, exact[2]) <= 0.95 * distance(coarse.v_NHV, exact[2])
    inputs = inputs._replace(initial_SHVK=None)
    u_HCV = states(inputs, prepare(inputs, digits=2), made[1].t_DMHCC)[0][0].double()
    expected_HCV = (high[0].double() + low[0].double()) @ v[:64].double().transpose(0, 1)
    torch.testing.assert_close(u_HCV, expected_HCV, atol=1e-4, rtol=2.0**-7)
    for x, y in zip(fine, case.gradients("triton"), strict=True):
        assert x is not None and torch.equal(x.to(y.dtype), y), "a call that wants gradients keeps both digits"


def test_shut_gate_with_operands_of_bf16() -> None:
    """What a token reads of its own write decays by nothing. Under a shut gate it is e^5 times all that dz is made of,
    and rounded operands must not turn it into dz."""
    case = draw((192,), H=2, K=64, V=64)
    leaves = [x.bfloat16() if i < 5 else x for i, x in enumerate(case.leaves)]
    leaves[3] = torch.full_like(leaves[3], 12.0)
    case = replace(case, leaves=leaves, do=case.do.bfloat16())
    exact, got = case.gradients("reference", torch.float64), case.gradients("triton")
    for name, x, y in zip(NAMES, got, exact, strict=True):
        assert distance(x, y) <= 5e-2 * y.norm().item(), f"{name}: {distance(x, y) / y.norm().item():.1e}"
