"""The KDA kernels against the float64 recurrence. Without a GPU they run in Triton's interpreter, where fp32 inputs
keep fp32 operands: what remains is the algebra and the order of sums. On a GPU operands are bf16, and so are the
bounds.
"""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import Gate, PooledState, choose_backend, kda
from rille.ops.kda import forward as kernels
from rille.ops.kda.forward import INTERPRET, Split, forward, intra, value_block
from rille.ops.launching import described_all, rows_of
from rille.packing import Packing

PACKED = (1, 15, 16, 17, 63, 64, 65, 0, 200)
DEVICE = "cpu" if INTERPRET else "cuda"
DTYPE = torch.float32 if INTERPRET else torch.bfloat16
ERROR = 80 * 2.0**-24 if INTERPRET else 1e-2  # of the result's norm

Inputs = tuple[list[Tensor], Gate]


def draw(lengths: tuple[int, ...], H: int = 2, K: int = 64, V: int = 64, bound: float | None = -5.0) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    N = sum(lengths)
    shapes = [(N, H, K), (N, H, K), (N, H, V), (N, H, K), (N, H)]
    q, k, v, z, b = (torch.randn(shape, generator=generator).to(DEVICE, DTYPE) for shape in shapes)
    A_log, dt_bias = torch.randn(H + 1, generator=generator) * 0.3, torch.randn(H, K, generator=generator)
    return [q, k, v, 3 * z, b], Gate(A_log.to(DEVICE), dt_bias.to(DEVICE), bound)


def states(packing: Packing, inputs: list[Tensor]) -> Tensor:
    (_, H, K), V = inputs[0].shape, inputs[2].shape[2]
    generator = torch.Generator().manual_seed(1)
    return torch.randn(packing.num_sequences, H, V, K, generator=generator).to(DEVICE)


def assert_equals_reference(
    inputs: list[Tensor],
    gate: Gate,
    lengths: tuple[int, ...],
    error: float = ERROR,
    stateful: bool = True,
    scale: float = 1.0,
) -> None:
    packing = Packing.of(lengths, device=DEVICE)
    state = scale * states(packing, inputs) if stateful else None
    exact = kda(*(x.double() for x in inputs), gate, packing, state, backend="reference")
    got = kda(*inputs, gate, packing, state, backend="triton")
    assert got[0].dtype == inputs[2].dtype
    for name, x, y in zip(("o", "final"), got, exact, strict=True):
        assert x is not None and y is not None
        distance = (x.double() - y).norm() / y.norm().clamp_min(1e-30)
        assert distance <= error, f"{name} is off by {distance:.1e}"


@pytest.mark.parametrize("bound", [-5.0, -2.0, None])
def test_packed_sequences(bound: float | None) -> None:
    assert_equals_reference(*draw(PACKED, bound=bound), PACKED)


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("K", "V"), [(128, 128), (64, 256), (128, 64), (64, 128), (128, 256)])
def test_widths(K: int, V: int, bound: float | None) -> None:
    assert_equals_reference(*draw((70, 3), H=1, K=K, V=V, bound=bound), (70, 3), stateful=V != 128)


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


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("name", GATES)
def test_extreme_gates(name: str, bound: float | None) -> None:
    inputs, gate = draw((130,), H=1, bound=bound)
    inputs[3] = GATES[name].to(DEVICE, DTYPE).expand_as(inputs[3]).contiguous()
    plain = Gate(torch.zeros_like(gate.A_log), torch.zeros_like(gate.dt_bias), bound)
    assert_equals_reference(inputs, plain, (130,))


TOKEN = torch.arange(130)[:, None, None]
RESETS = {
    "logits of 12, shut": (torch.tensor(12.0), 16.0),
    "logits of 12 by token": (bimodal(130, 1, 1), 16.0),
    "logits of 12": (bimodal(130, 1, 64), 16.0),
    "one reset": (torch.where(TOKEN == 37, 1e6, -12.0), 1.0),
    "a reset in each block of 8": (torch.where(TOKEN % 8 == 2, 40.0, -1.0), 1.0),
    "all but one token in each block of 8": (torch.where(TOKEN % 8 == 5, -1.0, 40.0), 1.0),
    "almost as far as the cut": (torch.tensor(19.0), 1.0),
}


@pytest.mark.parametrize("name", RESETS)
def test_a_decay_cut_off_is_lost_in_rounding(name: str) -> None:
    """Against the softplus gate as it is, which goes on below 2^-28, with old states 100 times as large as what is
    written: what 2^-28 of them adds is less than fp32's rounding."""
    inputs, gate = draw((130,), H=1, bound=None)
    z, rate = RESETS[name]
    inputs[3] = z.to(DEVICE, DTYPE).expand_as(inputs[3]).contiguous()
    gate = Gate(torch.full_like(gate.A_log, log(rate)), torch.zeros_like(gate.dt_bias), None)
    assert_equals_reference(inputs, gate, (130,), scale=100.0)


@pytest.mark.parametrize("spread", [0.0, 0.05])
def test_repeated_keys_with_weak_decay_and_full_writes(spread: float) -> None:
    inputs, gate = draw((130,), H=1)
    inputs[1] = inputs[1][:1] + spread * inputs[1]
    inputs[3] = torch.full_like(inputs[3], -12.0)
    inputs[4] = torch.full_like(inputs[4], 9.0)
    assert_equals_reference(inputs, gate, (130,), error=2 * ERROR)


def test_zero_keys_and_queries() -> None:
    inputs, gate = draw((70,), H=1)
    inputs[0][5:9] = 0
    inputs[1][20:40] = 0
    assert_equals_reference(inputs, gate, (70,))


def test_long_memory() -> None:
    lengths = (1024,)
    inputs, gate = draw(lengths, H=1)
    inputs[3] = torch.full_like(inputs[3], -8.0)
    assert_equals_reference(inputs, gate, lengths, error=2 * ERROR)


@pytest.mark.parametrize("tokens", [4096, pytest.param(65536, marks=pytest.mark.gpu)])
def test_states_do_not_drift(tokens: int) -> None:
    """Keeps e^-2 of its first token after 65,536, and what 1,000 chunks round must not add up. In double precision the
    blocked form stands for the recurrence, which it equals to 1e-12 (`test_kda.py`)."""
    inputs, gate = draw((tokens,), H=1)
    packing, gate = Packing.of((tokens,), device=DEVICE), Gate(0 * gate.A_log, 0 * gate.dt_bias, -5.0)
    inputs[3], state = torch.full_like(inputs[3], -12.0), states(packing, inputs)
    exact = kda(*(x.double() for x in inputs), gate, packing, state, backend="chunk")
    got = kda(*inputs, gate, packing, state, backend="triton")
    for x, y in zip(got, exact, strict=True):
        assert x is not None and y is not None
        assert (x.double() - y.double()).norm() <= 2 * ERROR * y.double().norm()


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("place", range(5))
def test_nan_stays_in_its_sequence(place: int, bound: float | None) -> None:
    lengths = (30, 70, 40)
    inputs, gate = draw(lengths, bound=bound)
    packing = Packing.of(lengths, device=DEVICE)
    clean, clean_final = kda(*inputs, gate, packing, backend="triton")
    inputs[place][30:100] = torch.nan
    o, final = kda(*inputs, gate, packing, backend="triton")
    assert final is not None and clean_final is not None
    assert torch.equal(o[:30], clean[:30]) and torch.equal(o[100:], clean[100:])
    assert torch.equal(final[[0, 2]], clean_final[[0, 2]])
    assert o[30:100].isnan().any()


def test_rows_of_a_wider_tensor() -> None:
    inputs, gate = draw((70,))
    packing = Packing.of((70,), device=DEVICE)
    wide = torch.cat([x.flatten(1) for x in inputs[:3]], 1)
    views = [x.unflatten(1, (2, 64)) for x in wide.split(128, 1)]
    o, _ = kda(*views, *inputs[3:], gate, packing, backend="triton")
    assert torch.equal(o, kda(*inputs, gate, packing, backend="triton")[0])


def test_pool_and_checkpoints() -> None:
    lengths = (70, 0, 200)
    inputs, gate = draw(lengths)
    packing = Packing.of(lengths, device=DEVICE)
    start = states(packing, inputs)
    slots = torch.tensor([5, 1, 3], device=DEVICE)
    checkpoints = torch.tensor([-1, -1, 7, -1, 0, -1], device=DEVICE)
    pools = []
    for backend in ("triton", "chunk"):
        pool = torch.zeros(9, 2, 2, 64, 64, device=DEVICE)[:, 0]  # every second state of a wider pool
        pool[slots] = start
        o, final = kda(*inputs, gate, packing, PooledState(pool, slots, checkpoints), backend=backend)
        assert final is None
        pools.append(pool)
    assert torch.equal(o, kda(*inputs, gate, packing, start, backend="chunk")[0])
    assert torch.equal(pools[0][[2, 4, 6, 8]], torch.zeros(4, 2, 64, 64, device=DEVICE))
    assert torch.equal(pools[0][1], start[1])
    torch.testing.assert_close(pools[0], pools[1], atol=1e-5 if INTERPRET else 3e-2, rtol=0)


def test_saved_tensors_and_operands_from_a_given_t() -> None:
    lengths = (70,)
    inputs, gate = draw(lengths)
    packing = Packing.of(lengths, device=DEVICE)
    saved = forward(*inputs, gate, packing)
    assert saved.t_DMHCC.shape == (1, 2, 2, 64, 64) and saved.a_MHCC.shape == (2, 2, 64, 64)
    [t_MHCC] = saved.t_DMHCC
    for x in (t_MHCC, saved.a_MHCC):
        assert torch.equal(x, x.tril())
    assert not saved.a_MHCC[1, :, 6:].any() and not saved.a_MHCC[1, :, :, 6:].any()
    assert torch.equal(t_MHCC[1, :, 6:, 6:].float(), torch.eye(58, device=DEVICE).expand(2, 58, 58))
    assert not t_MHCC[1, :, 6:, :6].any()
    assert bool((t_MHCC.diagonal(dim1=2, dim2=3) == 1).all()), "a token's own write is exact, whatever its type"
    arguments = (*inputs[:2], *inputs[3:], gate.A_log, gate.dt_bias, gate.lower_bound, packing.chunks(64).spans)
    first, again = intra(*arguments), intra(*arguments, saved.t_DMHCC)
    for x, y in zip(first[2:], again[2:], strict=True):
        torch.testing.assert_close(x, y, atol=0, rtol=1e-2)


def test_a_value_that_meets_no_earlier_write_is_not_rounded() -> None:
    """The state after one token is an outer product of its value, bit for bit, and of its key times beta in bf16."""
    inputs, gate = draw((1,))
    inputs = [x.bfloat16() for x in inputs]
    _, final = kda(*inputs, gate, Packing.of((1,), device=DEVICE), backend="triton")
    assert isinstance(final, Tensor)
    v_HV1 = inputs[2][0].float()[..., None]
    key_H1K = final[:, :, :1][0] / v_HV1[:, :1]
    assert torch.equal(final[0], v_HV1 * key_H1K) and torch.equal(key_H1K, key_H1K.bfloat16().float())


@pytest.mark.parametrize("lengths", [(), (0,), (0, 0)])
def test_no_tokens(lengths: tuple[int, ...]) -> None:
    inputs, gate = draw(lengths)
    packing = Packing.of(lengths, device=DEVICE)
    start = states(packing, inputs)
    o, final = kda(*inputs, gate, packing, start, backend="triton")
    assert o.shape == (0, 2, 64) and final is not None and torch.equal(final, start)
    assert not forward(*inputs, gate, packing).final_SHVK.any()


def test_blocks_fill_the_card() -> None:
    assert value_block(128, 16, 132) == (64, 4, 3, True)
    assert value_block(128, 64, 132) == (64, 4, 3, False)  # twice 64 programs read in step
    assert value_block(128, 96, 132) == (128, 8, 2, True)
    assert value_block(64, 500, 132) == (64, 4, 3, True)


def test_refusals() -> None:
    inputs, gate = draw((3,), K=64, V=64)
    packing = Packing.of((3,), device=DEVICE)
    narrow = [x[..., :8].contiguous() for x in inputs[:4]]
    thin = Gate(gate.A_log, gate.dt_bias[:, :8], gate.lower_bound)
    with pytest.raises(ValueError, match="head widths K 8, V 8"):
        kda(*narrow, inputs[4], thin, packing, backend="triton")
    with pytest.raises(ValueError, match="lower_bound -6"):
        kda(inputs[0], *inputs[1:], Gate(gate.A_log, gate.dt_bias, -6.0), packing, backend="triton")
    if INTERPRET:
        assert choose_backend(*inputs, gate, packing) == ("reference", "no CUDA tensors")


def test_descriptors_have_what_their_class_wants() -> None:
    from triton.tools.tensor_descriptor import TensorDescriptor

    x = torch.zeros(2, 3, 64, 32)
    made, wanted = rows_of(x, 64), TensorDescriptor.from_tensor(x.view(-1, 32), [64, 32])
    assert made.base is x
    for name in ("shape", "strides", "block_shape"):
        assert list(getattr(made, name)) == list(getattr(wanted, name))
    for name in set(vars(wanted)) - {"base", "shape", "strides", "block_shape"}:
        assert getattr(made, name) == getattr(wanted, name)


def test_kinds_tell_apart_what_is_compiled_differently() -> None:
    x = torch.zeros(64, dtype=torch.bfloat16)
    arguments = [x, x[1:], x.float(), None, 1, 5, 32, 2**40, 0.5, rows_of(x.view(8, 8), 8), rows_of(x.view(8, 8), 4)]
    arguments += [(x, x), (x, x[1:]), (x,)]

    def kinds(*given: Any) -> tuple[Any, ...]:
        return tuple(described_all(given)[0])

    assert len({kinds(argument) for argument in arguments}) == len(arguments)
    assert kinds(16) == kinds(48) and kinds(x) == kinds(x[8:]) and kinds(0.5) == kinds(1.0)
    assert kinds((x, x)) == kinds((x[8:], x)) and kinds(x, 5) != kinds(5, x)


def test_a_launch_is_given_addresses_of_what_is_on_a_card_only() -> None:
    """What the launcher cannot reach it has to see itself, to say so."""
    x = torch.zeros(4)
    assert described_all((x, 3, (x, None)))[1] == [x, 3, (x, None)]


class OnSecondCard(Tensor):
    def get_device(self) -> int:
        return 1


def test_a_launch_refuses_tensors_of_another_card() -> None:
    """It would run on the current one with addresses of the other."""
    x = torch.zeros(4).as_subclass(OnSecondCard)
    assert described_all((x,), 1)[1] == [x.data_ptr()]
    for given in ((x,), (3, (None, x))):
        with pytest.raises(ValueError, match=r"runs on cuda:0, .* a tensor on cuda:1: .*set_device\(1\)"):
            described_all(given, 0)


def assert_twins_agree(results: list[tuple[Tensor | None, ...]]) -> None:
    for x, y in zip(*results, strict=True):
        assert x is not None and y is not None
        torch.testing.assert_close(x, y, atol=2e-2, rtol=1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(128, 8, 2), (64, 4, 3)])
def test_ring_equals_its_twin(block: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, gate = draw(PACKED, K=128, V=128)
    packing = Packing.of(PACKED, device=DEVICE)
    state = states(packing, inputs)
    monkeypatch.setattr(kernels, "value_block", lambda *_: Split(*block, ring=True))
    outputs = []
    for ring in (True, False):
        monkeypatch.setattr(kernels, "RING", ring)
        outputs.append(kda(*inputs, gate, packing, state, backend="triton"))
    assert_twins_agree(outputs)


@pytest.mark.gpu
@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize("digits", [1, 2])
def test_first_kernel_equals_its_twin(
    K: int, digits: int, bound: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, gate = draw(PACKED, K=K, V=128, bound=bound)
    arguments = (*inputs[:2], *inputs[3:], gate.A_log, gate.dt_bias, gate.lower_bound)
    spans = Packing.of(PACKED, device=DEVICE).chunks(64).spans
    outputs = []
    for tiled in (True, False):
        monkeypatch.setattr(kernels, "TILED", tiled)
        outputs.append(tuple(intra(*arguments, spans, digits=digits)))
    assert_twins_agree(outputs)


def test_the_body_and_the_op_agree() -> None:
    inputs, gate = draw(PACKED)
    packing = Packing.of(PACKED, device=DEVICE)
    body = kda(*inputs, gate, packing, backend="triton")
    op = kda(inputs[0].clone().requires_grad_(), *inputs[1:], gate, packing, backend="triton")
    assert op[0].requires_grad and not body[0].requires_grad
    for x, y in zip(body, op, strict=True):
        assert x is not None and y is not None and torch.equal(x, y)
