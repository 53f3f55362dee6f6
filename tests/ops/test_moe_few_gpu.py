"""The experts' kernels for a few tokens on a GPU, in bf16: against float64, bit for bit alone and among others, and in
a recording."""

from __future__ import annotations

import pytest
import torch

from rille.ops.moe import expert_glu, expert_glu_normed, reference, route_logits
from rille.ops.norm import rms_norm
from tests.ops.moe_operands import SITU, operands

few = pytest.importorskip("rille.ops.moe.few", exc_type=ImportError)
pytestmark = pytest.mark.gpu
# N tokens, E experts, A active, L latent, F expert width
SIZES = [
    (1, 256, 6, 256, 448),
    (4, 256, 6, 256, 448),
    (16, 256, 6, 256, 448),
    (64, 256, 6, 256, 448),
    (170, 256, 6, 256, 448),
    (3, 8, 2, 48, 40),
    (8, 16, 4, 3584, 3072),
]


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_those_of_the_definition(size):
    x, ids, weights, experts = operands(size)
    assert few.is_few(ids.numel(), size[1])
    with torch.no_grad():
        got = expert_glu(x, ids, weights, experts)
    used = ids.unique()
    place = torch.zeros(size[1], dtype=torch.long, device="cuda")
    place[used] = torch.arange(len(used), device="cuda")
    doubles = (x.double(), place[ids], weights.double(), experts.w13[used].double(), experts.w2[used].double())
    exact = reference.expert_glu(*doubles, SITU)
    assert (got - exact).norm() <= 4e-3 * exact.norm()


@pytest.mark.parametrize("size", SIZES)
def test_the_norm_in_the_same_pass_has_the_bits_of_the_two_ops(size):
    x, ids, weights, experts = operands(size)
    gain = torch.linspace(0.5, 1.5, x.shape[1], device="cuda").bfloat16()
    with torch.no_grad():
        got = expert_glu_normed(x, ids, weights, experts, gain, 1e-5)
        want = rms_norm(expert_glu(x, ids, weights, experts).bfloat16(), gain, 1e-5)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, want, atol=0, rtol=2**-7)  # two sums over a row may round differently
    assert (got != want).float().mean() < 0.01


@pytest.mark.parametrize("N", [1, 64])
def test_routing_is_the_same_whether_loads_are_counted(N):
    logits, bias = torch.randn(N, 256, device="cuda"), torch.randn(256, device="cuda") / 10
    counted, plain = (route_logits(logits, bias, 6, loaded=loaded) for loaded in (True, False))
    assert torch.equal(counted.ids, plain.ids) and torch.equal(counted.weights, plain.weights)
    assert counted.load.sum() == 6 * N and plain.load.numel() == 0


def test_a_token_has_the_same_bits_alone_and_among_others_and_in_a_recording():
    x, ids, weights, experts = operands((64, 256, 6, 256, 448))
    with torch.no_grad():
        together = expert_glu(x, ids, weights, experts)
        for first, many in ((0, 5), (31, 20), (40, 24)):  # by pair, and listed
            rows = slice(first, first + many)
            assert torch.equal(expert_glu(x[rows], ids[rows], weights[rows], experts), together[rows])
        four = expert_glu(x[:4], ids[:4], weights[:4], experts)
        for n in range(4):
            row = slice(n, n + 1)
            assert torch.equal(expert_glu(x[row], ids[row], weights[row], experts)[0], four[n])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = expert_glu(x, ids, weights, experts)
        recorded.zero_()
        graph.replay()
        assert torch.equal(recorded, together)
