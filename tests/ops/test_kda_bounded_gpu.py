"""The kernels of the bounded gate and of the convolution on a card: all widths on packed sequences, hard inputs, NaN of
one sequence, pools, the same bits in every run. The softplus gate: `test_kda_softplus_gpu.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.conv import PooledTail, short_conv
from rille.packing import Packing
from tests.ops import test_kda_backward as backward
from tests.ops import test_kda_triton as forward

pytestmark = pytest.mark.gpu
LENGTHS = (1, 15, 16, 17, 63, 64, 65, 0, 1000)


@pytest.mark.parametrize("V", [64, 128, 256])
@pytest.mark.parametrize("K", [64, 128])
def test_packed_sequences_of_all_widths(K: int, V: int) -> None:
    forward.assert_equals_reference(*forward.draw(LENGTHS, H=3, K=K, V=V), LENGTHS)
    case = backward.draw(LENGTHS, H=3, K=K, V=V)
    got = case.gradients("triton")
    backward.assert_gradients(case, got)
    assert all(torch.equal(x, y) for x, y in zip(got, case.gradients("triton"), strict=True))


@pytest.mark.parametrize("name", forward.GATES)
def test_extreme_gates(name: str) -> None:
    forward.test_extreme_gates(name, -5.0)


def test_hard_inputs() -> None:
    for spread in (0.0, 0.05):
        forward.test_repeated_keys_with_weak_decay_and_full_writes(spread)
    forward.test_zero_keys_and_queries()
    forward.test_rows_of_a_wider_tensor()
    forward.test_pool_and_checkpoints()
    forward.test_no_tokens((0, 0))


def test_nan_stays_in_its_sequence() -> None:
    for place in range(5):
        forward.test_nan_stays_in_its_sequence(place, -5.0)
    backward.test_nan_in_one_sequence_stays_there()


def run_conv(x: Tensor, weight: Tensor, tail: Tensor | None, backend: str) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (x, weight, tail) if t is not None]
    packing = Packing.of(LENGTHS, device="cuda")
    y, final = short_conv(leaves[0], leaves[1], packing, leaves[2] if tail is not None else None, backend=backend)
    assert final is not None
    loss = y.float().square().sum() + final.float().square().sum()
    return [y, final, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("W", [2, 4])
def test_the_convolution(W: int, dtype: torch.dtype) -> None:
    N, S, C, limit = sum(LENGTHS), len(LENGTHS), 520, 1e-5 if dtype == torch.float32 else 1e-2
    generator = torch.Generator().manual_seed(0)
    shapes = ((N, C), (C, W), (S, W - 1, C))
    x, weight, tail = (torch.randn(shape, generator=generator).cuda() for shape in shapes)
    x, tail = x.to(dtype), tail.to(dtype)
    for given in (None, tail):
        got, want = (run_conv(x, weight, given, name) for name in ("triton", "reference"))
        for mine, exact in zip(got, want, strict=True):
            assert (mine.double() - exact.double()).norm() <= limit * exact.double().norm()
        assert all(torch.equal(*pair) for pair in zip(got, run_conv(x, weight, given, "triton"), strict=True))
    slots = torch.arange(S, device="cuda").flip(0)
    pools = [torch.zeros(S, 2, W - 1, C, device="cuda", dtype=dtype)[:, 1] for _ in range(2)]
    results = []
    for pool, backend in zip(pools, ("triton", "reference"), strict=True):
        pool[slots] = tail
        spoilt = x.clone()
        spoilt[200] = torch.nan  # a token of the seventh sequence
        packing = Packing.of(LENGTHS, device="cuda")
        results.append(short_conv(spoilt, weight, packing, PooledTail(pool, slots), backend=backend)[0])
    assert torch.equal(pools[0].nan_to_num(7), pools[1].nan_to_num(7))
    assert torch.equal(results[0].isnan(), results[1].isnan()) and not results[0][241:].isnan().any()
