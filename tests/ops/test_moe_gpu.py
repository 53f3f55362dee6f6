"""The experts' kernels for many tokens on a GPU, in bf16: against float64, among memory that holds NaN, and what a
rounded sum is."""

from __future__ import annotations

import pytest
import torch

from rille.ops.moe import expert_glu, expert_glu_normed, reference
from rille.ops.norm import rms_norm
from tests.ops.moe_operands import SITU, operands

permute = pytest.importorskip("rille.ops.moe.permute", exc_type=ImportError)
pytestmark = pytest.mark.gpu
# N tokens, E experts, A active, L latent, F expert width
SIZES = [(700, 8, 2, 256, 448), (1500, 64, 6, 256, 448), (2100, 256, 6, 256, 448)]


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_sums_are_those_of_the_definition_and_repeat(size: tuple[int, ...]) -> None:
    x, ids, weights, experts = operands(size)
    some = torch.arange(0, size[0], 50, device="cuda")
    wide = [t.double() for t in (x[some], weights[some], experts.w13, experts.w2)]
    want = reference.expert_glu(wide[0], ids[some], *wide[1:], SITU)
    first = expert_glu(x, ids, weights, experts, backend="triton")
    assert (first[some] - want).norm() <= 2**-7 * want.norm()
    poison = [torch.full((size[0] * size[2] * 4, 512), torch.nan, device="cuda") for _ in range(4)]
    del poison
    assert torch.equal(expert_glu(x, ids, weights, experts, backend="triton"), first)


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_rows_without_a_pair_are_marked(size: tuple[int, ...]) -> None:
    _, ids, _, _ = operands(size)
    pairs, poison = ids.numel(), torch.full((1 << 22,), 2**30, dtype=torch.int32, device="cuda")
    del poison
    places = permute.permute(ids, size[1])
    want = torch.full_like(places.pair_of_row, -1)
    want[places.row_of_pair.long()] = torch.arange(pairs, dtype=torch.int32, device="cuda")
    assert torch.equal(places.pair_of_row, want)
    experts = places.expert_of_tile.repeat_interleave(permute.TILE)[places.row_of_pair.long()]
    assert torch.equal(experts.long(), ids.flatten()), "every pair stands in a tile of its expert"


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_a_rounded_sum_is_the_sum_rounded(size: tuple[int, ...]) -> None:
    x, ids, weights, experts = operands(size)
    gain = torch.randn(size[3], device="cuda").bfloat16()
    got = expert_glu_normed(x, ids, weights, experts, gain, 1e-5, backend="triton")
    total = expert_glu(x, ids, weights, experts, backend="triton")
    assert total.dtype == torch.float32
    assert torch.equal(got, rms_norm(total.bfloat16(), gain, 1e-5))
