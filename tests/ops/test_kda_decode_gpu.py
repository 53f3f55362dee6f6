"""Decode and verify on a card: the Gluon kernels against the slow twin, verify against single steps at every count of
accepted tokens bit for bit, and NaN of one row beside the others. Triton's interpreter runs their twins alone."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.kda import Gate
from rille.ops.kda.decode import choose_backend, kda_commit, kda_decode, kda_verify
from rille.ops.kda.decode_operands import DecodeLayer, Pools, Projected, Remembered
from tests.ops.test_kda_decode import make_inputs, make_layer, make_pools

pytestmark = pytest.mark.gpu
SIZES = [
    dict(H=3, K=128, V=128),
    dict(H=2, K=64, V=64, lower_bound=None),
    dict(H=2, K=128, V=256, W=2),
    dict(H=1, K=64, V=128, lower_bound=None),
]
TOKENS = 4


def on_card(x: Any) -> Any:
    """A tensor, or a dataclass of tensors, of which states and tails lie in pools that torch has made whole."""
    if isinstance(x, Tensor):
        return x.contiguous().cuda()
    if isinstance(x, Projected | DecodeLayer | Gate | Pools | Remembered):
        return replace(x, **{field.name: on_card(getattr(x, field.name)) for field in fields(x)})
    return x


def start(sizes: dict[str, Any], dtype: torch.dtype) -> tuple[DecodeLayer, Pools]:
    layer = make_layer(**sizes)
    return on_card(layer), on_card(make_pools(layer, dtype, TOKENS))


def tokens(sizes: dict[str, Any], dtype: torch.dtype, *lead: int, seed: int) -> Projected:
    return on_card(make_inputs(make_layer(**sizes), *lead, dtype=dtype, seed=seed))


def copy(pools: Pools) -> Pools:
    past = pools.past
    assert past is not None
    return Pools(
        pools.states.clone(), pools.tails.clone(), Remembered(past.qkv.clone(), past.z.clone(), past.u.clone())
    )


def at(inputs: Projected, t: int) -> Projected:
    return Projected(inputs.qkv[:, t], inputs.z[:, t], inputs.b[:, t], inputs.gate[:, t])


def assert_near(got: Tensor, want: Tensor, dtype: torch.dtype) -> None:
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    assert (got.double() - want.double()).norm() <= limit * want.double().norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_count_of_accepted_tokens(sizes: dict[str, Any], dtype: torch.dtype) -> None:
    """Row r takes r of 4 tokens, in a second round 4 - r: each count from none to all, then the commit."""
    layer, tried = start(sizes, dtype)
    twin, stepped = copy(tried), copy(tried)
    slots = torch.tensor([3, 0, 4, 1, 2], device="cuda")
    accepted = torch.zeros(5, dtype=torch.int64, device="cuda")
    for counts in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0]):
        drafts = tokens(sizes, dtype, 5, TOKENS, seed=counts[0])
        assert choose_backend(drafts.qkv, layer)[0] == "gluon"
        y = kda_verify(drafts, layer, tried, slots, accepted)
        assert_near(y, kda_verify(drafts, layer, twin, slots, accepted, backend="reference"), dtype)
        accepted = torch.tensor(counts, device="cuda")
        for t in range(TOKENS):
            taken = accepted > t
            step = kda_decode(at(drafts, t), layer, stepped, torch.where(taken, slots, -1))
            assert torch.equal(y[:, t][taken], step[taken]) and not step[~taken].any()
    for pools, backend in ((tried, None), (twin, "reference")):
        kda_commit(layer, pools, slots, accepted, backend=backend)
    assert torch.equal(tried.states, stepped.states) and torch.equal(tried.tails, stepped.tails)
    assert_near(tried.states, twin.states, dtype)
    assert torch.equal(tried.tails, twin.tails)


@pytest.mark.parametrize("sizes", SIZES[:2], ids=str)
def test_nan_of_one_row_reaches_no_other_and_no_state(sizes: dict[str, Any]) -> None:
    layer, clean = start(sizes, torch.bfloat16)
    spoilt, slots = copy(clean), torch.tensor([3, 0, 4], device="cuda")
    none = torch.zeros(3, dtype=torch.int32, device="cuda")
    drafts = tokens(sizes, torch.bfloat16, 3, TOKENS, seed=1)
    bad = Projected(*(x.clone() for x in (drafts.qkv, drafts.z, drafts.b, drafts.gate)))
    for x in (bad.qkv, bad.z, bad.b, bad.gate):
        x[1] = torch.nan
    want, got = kda_verify(drafts, layer, clean, slots, none), kda_verify(bad, layer, spoilt, slots, none)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and bool(got[1].isnan().all())
    assert torch.equal(spoilt.states, clean.states) and torch.equal(spoilt.tails, clean.tails)
    want, got = kda_verify(drafts, layer, clean, slots, none), kda_verify(drafts, layer, spoilt, slots, none)
    assert torch.equal(got, want), "drafts that were not taken leave nothing"
    want, got = kda_decode(at(drafts, 0), layer, clean, slots), kda_decode(at(bad, 0), layer, spoilt, slots)
    assert torch.equal(got[[0, 2]], want[[0, 2]]) and bool(got[1].isnan().all())
    others = [1, 2, 3, 4]
    assert torch.equal(spoilt.states[others], clean.states[others])
