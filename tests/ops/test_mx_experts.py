"""Packed experts: the kernels' twins and the dequantised form against the definition in float64, hard cases."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from rille.ops.moe import reference
from rille.ops.mx import blocks, dequantise_mxfp4
from rille.ops.mx.experts import PackedExperts, check_packed, choose_packed_backend, packed_expert_glu
from rille.ops.situ import situ_glu, swiglu

kernels = pytest.importorskip("rille.ops.mx.expert_kernels", exc_type=ImportError)
launches = pytest.importorskip("rille.ops.mx.experts_launch", exc_type=ImportError)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="fp32 experts run in the interpreter alone")

SITU = partial(situ_glu, cap_gate=4.0, cap_up=25.0)
# N tokens, E experts, A active, L latent, F expert width
SIZES = [(1, 1, 1, 32, 32), (0, 4, 2, 32, 32), (1, 9, 4, 64, 32), (8, 12, 3, 32, 96), (11, 3, 2, 96, 64)]
SIZES.append((40, 5, 2, 32, 32))


def random_bytes(*shape: int, low: int = 0, high: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + low)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)


def packed(E: int, L: int, F: int, glu=SITU) -> PackedExperts:
    """Any codes, scales from 2^-7 to 2^-3."""
    scales = random_bytes(E, 2 * F, L // 32, low=120, high=125), random_bytes(E, L, F // 32, low=120, high=125)
    return PackedExperts(random_bytes(E, 2 * F, L // 2), scales[0], random_bytes(E, L, F // 2), scales[1], glu)


def draw(N: int, E: int, A: int, L: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(N + E)
    ids = torch.rand(N, E, generator=generator).argsort(1)[:, :A].contiguous()
    return torch.randn(N, L, generator=generator), ids, torch.rand(N, A, generator=generator) + 0.1


def exact(x: Tensor, ids: Tensor, weights: Tensor, experts: PackedExperts) -> Tensor:
    w13 = dequantise_mxfp4(experts.w13, experts.w13_scale, torch.float64)
    w2 = dequantise_mxfp4(experts.w2, experts.w2_scale, torch.float64)
    return reference.expert_glu(x.double(), ids, weights.double(), w13, w2, experts.activation)


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.dtype == torch.float32 and got.shape == want.shape and got.isfinite().all()
    if got.numel():
        assert (got.double() - want).abs().max() <= 5e-6 * want.abs().max()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("backend", ["triton", "dequantised"])
def test_is_the_definition(size: tuple[int, ...], backend: str) -> None:
    N, E, A, L, F = size
    experts, call = packed(E, L, F), draw(N, E, A, L)
    check_packed(experts)
    assert_near(packed_expert_glu(*call, experts, backend=backend), exact(*call, experts))


@pytest.mark.parametrize("glu", [swiglu, partial(situ_glu, cap_gate=0.5, cap_up=2.0)])
def test_activations(glu) -> None:
    experts, call = packed(4, 32, 64, glu), draw(3, 4, 2, 32)
    assert_near(packed_expert_glu(*call, experts, backend="triton"), exact(*call, experts))


def test_all_tokens_choose_one_expert() -> None:
    """More rows than one tile holds, and an expert chosen twice by one token."""
    experts, (x, _, weights) = packed(6, 32, 32), draw(37, 6, 2, 32)
    ids = torch.full((37, 2), 4)
    assert_near(packed_expert_glu(x, ids, weights, experts, backend="triton"), exact(x, ids, weights, experts))


def test_a_sick_row_stays_alone_and_a_row_does_not_depend_on_others() -> None:
    experts, (x, ids, weights) = packed(5, 64, 32), draw(8, 5, 3, 64)
    whole = packed_expert_glu(x, ids, weights, experts, backend="triton")
    sick = x.clone()
    sick[3, 17] = torch.nan
    got = packed_expert_glu(sick, ids, weights, experts, backend="triton")
    keep = [n for n in range(8) if n != 3]
    assert got[3].isnan().all() and torch.equal(got[keep], whole[keep])
    for n in (0, 5):
        alone = packed_expert_glu(x[n : n + 1], ids[n : n + 1], weights[n : n + 1], experts, backend="triton")
        assert torch.equal(alone[0], whole[n])


def test_rows_of_x_that_lie_apart() -> None:
    experts, (x, ids, weights) = packed(5, 32, 32), draw(4, 5, 2, 32)
    wide = torch.full((4, 48), torch.nan)
    wide[:, :32] = x
    whole = packed_expert_glu(x, ids, weights, experts, backend="triton")
    assert torch.equal(packed_expert_glu(wide[:, :32], ids, weights, experts, backend="triton"), whole)


@pytest.mark.parametrize(("N", "E", "A", "tile"), [(1, 1, 1, 8), (1, 896, 16, 8), (8, 112, 16, 8), (33, 3, 2, 16)])
def test_places(N: int, E: int, A: int, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, ids, _ = draw(N, E, A, 96)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(2**30))
    tiles = launches.tiles_bound(N * A, E, tile)
    places, ordered = launches.prepare(x, ids, tile, tiles)
    rows, seen = places.row_of_pair.tolist(), []
    for pair, row in enumerate(rows):
        assert places.pair_of_row[row] == pair and places.expert_of_tile[row // tile] == ids.flatten()[pair]
        seen.append(row)
    assert (places.pair_of_row >= 0).sum() == N * A == len(set(seen))
    used = places.expert_of_tile[places.expert_of_tile >= 0]
    wanted = [e for e in sorted(set(ids.flatten().tolist())) for _ in range(-(-int((ids == e).sum()) // tile))]
    assert used.tolist() == wanted, "an expert has no tile more than it needs, so its weights are read once"
    for place in range(96):  # 8 places of each of four lanes, then the next 8; the lane without columns has none
        column = 8 * (place // 8) + (0, 4, 1, 5, 2, 6, 3, 7)[place % 8]
        lane, eight = place // 32, place % 32 // 8
        assert torch.equal(ordered[:, 32 * eight + 8 * lane + place % 8], x[:, column])


def decoded_by_bits(word: int, byte: int) -> list[float]:
    """What the assembly of `expert_gluon.py` makes of a word: bf16 halves of four registers, times 2^32."""
    factor = ((byte + 94) << 7) & 0xFFFF
    as_bf16 = lambda bits: torch.tensor([bits - (bits >> 15 << 16)], dtype=torch.int16).view(torch.bfloat16)  # noqa: E731
    found = []
    for start, mask, shift in ((word, 0x000F000F, 0x1040), (word, 0x00F000F0, 0x104)) + (
        (word >> 8, 0x000F000F, 0x1040), (word >> 8, 0x00F000F0, 0x104),
    ):  # fmt: skip
        pair = ((start & mask) * shift) & 0xFFFFFFFF & 0x81C081C0
        found += [as_bf16(half) * as_bf16(factor) for half in (pair & 0xFFFF, pair >> 16)]
    return [float(v.double() * 2.0**32) for v in found]


def test_the_decoding_is_exact() -> None:
    """All codes at all places under scales from end to end, in the order that x is brought into."""
    order = (0, 4, 1, 5, 2, 6, 3, 7)
    words = [0x76543210, 0xFEDCBA98, 0x01234567, 0x89ABCDEF, 0x80808080, 0x0F0F0F0F]
    for word in words:
        codes = [word >> 4 * n & 15 for n in range(8)]
        for byte in (27, 100, 120, 127, 133, 160):
            want = [blocks.CODES[codes[n]] * 2.0 ** (byte - 127) for n in order]
            assert decoded_by_bits(word, byte) == want
    assert all(abs(v) <= 2.0**-100 for v in decoded_by_bits(0x77777777, 0)), "tiny scales round to next to nothing"


def test_op_is_registered_whole() -> None:
    experts, (x, ids, weights) = packed(4, 32, 32), draw(3, 4, 2, 32)
    tensors = experts.w13, experts.w13_scale, experts.w2, experts.w2_scale
    arguments = (x, ids, weights, *tensors, 4.0, 25.0, True, False)
    torch.library.opcheck(launches.experts.registered, arguments, test_utils=("test_schema", "test_faketensor"))


def test_choice_and_refusal() -> None:
    experts, (x, ids, weights) = packed(4, 32, 32), draw(3, 4, 2, 32)
    assert choose_packed_backend(x, ids, experts) == ("dequantised", "the tensors are on cpu")
    with pytest.raises(ValueError, match="unknown backend 'fast'; there are triton, dequantised"):
        packed_expert_glu(x, ids, weights, experts, backend="fast")
    with pytest.raises(ValueError, match="cannot run: .*float64"):
        packed_expert_glu(x.double(), ids, weights, experts, backend="triton")
    with pytest.raises(ValueError, match="up to 256 tokens"):
        packed_expert_glu(*draw(300, 4, 2, 32), experts, backend="triton")
    with pytest.raises(ValueError, match="have no gradient"):
        packed_expert_glu(x.requires_grad_(), ids, weights, experts)
    with pytest.raises(ValueError, match=r"latent width 32; want \[N, L\]"):
        packed_expert_glu(draw(3, 4, 2, 64)[0], ids, weights, experts)
    with pytest.raises(ValueError, match="a byte of 161, more than 160"):
        check_packed(PackedExperts(experts.w13, torch.full_like(experts.w13_scale, 161), *_rest(experts)))
    with pytest.raises(ValueError, match="do not fit"):
        check_packed(PackedExperts(experts.w13[:, :-1], experts.w13_scale, *_rest(experts)))
    with pytest.raises(ValueError, match="want dense uint8"):
        check_packed(PackedExperts(experts.w13.int(), experts.w13_scale, *_rest(experts)))


def _rest(experts: PackedExperts) -> tuple:
    return experts.w2, experts.w2_scale, experts.activation
