"""MXFP4 and MXFP8: the definition by brute force, byte-exact round trips, and what happens at the ends of the range."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from rille.ops.mx import (
    dequantise_mxfp4,
    dequantise_mxfp8,
    fake_quantise_mxfp4,
    quantise_mxfp4,
    quantise_mxfp8,
    reference,
)

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"
GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
EXACT = [torch.bfloat16, torch.float32, torch.float64]
GROUPS = 5

floats_of_a_group = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=32, max_size=32)
bytes_of_codes = st.lists(st.integers(0, 255), min_size=16 * GROUPS, max_size=16 * GROUPS)
near = settings(deadline=None, max_examples=200)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values, and equal signs of zero."""
    return torch.equal(a, b) and torch.equal(torch.signbit(a), torch.signbit(b))


def draw(*shape: int, spread: float = 1.0, seed: int = 0) -> Tensor:
    """Rows of very different size when spread is large."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    return values * torch.exp(spread * torch.randn(shape[0], generator=generator)).view(-1, *[1] * (len(shape) - 1))


def packed(codes: list[list[int]]) -> Tensor:
    """Bytes of codes, low nibble first."""
    return torch.tensor([[row[j] + 16 * row[j + 1] for j in range(0, len(row), 2)] for row in codes], dtype=torch.uint8)


def test_nibbles_and_values_by_hand() -> None:
    """Byte j holds column 2j low and 2j + 1 high; bit 3 is the sign; byte 0x81 is (0.5, -0)."""
    codes = list(range(16)) + [1, 8] * 8
    data = packed([codes])
    assert data[0, 0] == 0x10 and data[0, 8] == 0x81
    scale = torch.tensor([[127 + 3]], dtype=torch.uint8)
    values = [8 * magnitude for magnitude in GRID] + [-8 * magnitude for magnitude in GRID] + [4.0, -0.0] * 8
    for dtype in EXACT:
        got = dequantise_mxfp4(data, scale, dtype)
        assert got.dtype == dtype
        assert same(got, torch.tensor([values], dtype=dtype))


def test_scale_is_rounded_up() -> None:
    """amax = 6 * 2^e still takes 2^e; the next number takes twice that. The OCP rule would clip 3.5 * 2^e and more."""
    for exponent in (-126, -20, 0, 1, 90):
        amax = 6.0 * 2.0**exponent
        above = torch.nextafter(torch.tensor(amax), torch.tensor(torch.inf)).item()
        w = torch.zeros(3, 32)
        w[:, 7] = torch.tensor([amax, -above, 3.1 * 2.0**exponent])
        _, scale = quantise_mxfp4(w)
        assert scale.flatten().tolist() == [127 + exponent, 128 + exponent, 127 + exponent]


def test_midpoints_go_to_the_even_code() -> None:
    midpoints = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    w = torch.zeros(1, 32)
    w[0, 0] = 6.0  # pins the scale to 1
    w[0, 1:8], w[0, 8:15] = torch.tensor(midpoints), -torch.tensor(midpoints)
    below = torch.nextafter(torch.tensor(midpoints), torch.zeros(7))
    above = torch.nextafter(torch.tensor(midpoints), torch.full((7,), 9.0))
    w[0, 15:22], w[0, 22:29] = below, above
    got = dequantise_mxfp4(*quantise_mxfp4(w), torch.float32)[0]
    assert got[1:8].tolist() == want and got[8:15].tolist() == [-value for value in want]
    assert got[15:22].tolist() == GRID[:7] and got[22:29].tolist() == GRID[1:]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_equals_the_definition(dtype: torch.dtype) -> None:
    w = draw(64, 3, 96, spread=3.0).to(dtype)
    w[0, 0, :32], w[1, 1, :40] = 0.0, -0.0
    for got, want in zip(quantise_mxfp4(w), reference.quantise_mxfp4(w), strict=True):
        assert torch.equal(got, want)
    data, scale = quantise_mxfp4(w)
    assert data.dtype == scale.dtype == torch.uint8
    assert same(dequantise_mxfp4(data, scale, torch.float64), reference.dequantise_mxfp4(data, scale))


@near
@given(floats_of_a_group)
def test_any_finite_group(values: list[float]) -> None:
    """The bytes are the definition's, subnormal and huge values included; an element errs by at most half the gap of
    its neighbours on the grid: 1/4 of the scale up to 2, 1/2 up to 4, 1 up to 6."""
    w = torch.tensor([values], dtype=torch.float32)
    data, scale = quantise_mxfp4(w)
    want_data, want_scale = reference.quantise_mxfp4(w)
    assert torch.equal(data, want_data) and torch.equal(scale, want_scale)
    step = 2.0 ** (int(scale) - 127)
    size, error = w.double().abs(), (dequantise_mxfp4(data, scale, torch.float64) - w.double()).abs()
    assert (size <= 6 * step).all(), "clipped"
    assert (error <= step * torch.where(size <= 2 * step, 0.25, torch.where(size <= 4 * step, 0.5, 1.0))).all()
    assert torch.equal(torch.signbit(dequantise_mxfp4(data, scale, torch.float64)), torch.signbit(w))


@near
@given(bytes_of_codes, st.lists(st.integers(0, 254), min_size=GROUPS, max_size=GROUPS))
def test_bytes_survive_the_round_trip(data: list[int], scales: list[int]) -> None:
    """Any codes under any scales, larger than the rule's too, come back byte for byte when the scales are kept."""
    packed_bytes, scale = torch.tensor([data], dtype=torch.uint8), torch.tensor([scales], dtype=torch.uint8)
    again = quantise_mxfp4(dequantise_mxfp4(packed_bytes, scale, torch.float64), scale)
    assert torch.equal(again[0], packed_bytes) and torch.equal(again[1], scale)


@pytest.mark.parametrize("dtype", EXACT)
def test_every_scale_round_trips_in_every_dtype(dtype: torch.dtype) -> None:
    """0 (subnormal in bf16) to 252, the last under which 6 stays below 2^128, with all sixteen codes."""
    scale = torch.arange(253, dtype=torch.uint8).view(-1, 1).repeat(1, 2)
    data = packed([list(range(16)) * 2 + [1, 9] * 16]).repeat(253, 1)
    values = dequantise_mxfp4(data, scale, dtype)
    assert same(values.double(), reference.dequantise_mxfp4(data, scale))
    again = quantise_mxfp4(values, scale)
    assert torch.equal(again[0], data) and torch.equal(again[1], scale)


def test_official_bytes_round_trip() -> None:
    """Every expert of the tiny official checkpoint: its values, and its bytes again. Some scales are not the rule's any
    more: a maximum that was rounded down to 3 would now take half the scale."""
    moved = 0
    for path in sorted(ORACLE.glob("model-*.safetensors")):
        with safe_open(path, "pt") as shard:
            for name in [name for name in shard.keys() if name.endswith(".weight_packed")]:  # noqa: SIM118
                data, scale = shard.get_tensor(name), shard.get_tensor(name.replace("_packed", "_scale"))
                values = dequantise_mxfp4(data, scale, torch.bfloat16)
                assert same(values.double(), reference.dequantise_mxfp4(data, scale))
                again = quantise_mxfp4(values, scale)
                assert torch.equal(again[0], data) and torch.equal(again[1], scale)
                moved += int((quantise_mxfp4(values)[1] != scale).sum())
                if name.endswith("layers.1.block_sparse_moe.experts.0.w2.weight_packed"):
                    with safe_open(ORACLE / "trace.safetensors", "pt") as trace:
                        assert torch.equal(
                            values.float(), trace.get_tensor("example.dequant.layers.1.experts.0.w2").float()
                        )
    assert moved > 100


def test_zero_groups_keep_odd_scales_and_signs() -> None:
    data = packed([[0, 8] * 16, [8] * 32, [0] * 32])
    scale = torch.tensor([[254], [3], [0]], dtype=torch.uint8)
    values = dequantise_mxfp4(data, scale, torch.bfloat16)
    assert torch.equal(values, torch.zeros(3, 32)) and int(torch.signbit(values).sum()) == 48
    again = quantise_mxfp4(values, scale)
    assert torch.equal(again[0], data) and torch.equal(again[1], scale)
    assert quantise_mxfp4(values)[1].flatten().tolist() == [0, 0, 0], "the rule's scale for nothing is the smallest"


def test_given_scales_are_kept_only_where_exact() -> None:
    w = torch.zeros(5, 32)
    w[:, 0] = torch.tensor([4.0, 4.0, 4.0, 4.0, 2.0**-140])
    w[2, 1] = 0.25  # not on the grid of scale 2
    scale = torch.tensor([[127], [128], [128], [126], [147]], dtype=torch.uint8)
    _, kept = quantise_mxfp4(w, scale)
    # 4 is on the grids of 1 and 2; with 0.25 not on that of 2; 4 > 6 * 0.5; 2^-140 would vanish under 2^20.
    assert kept.flatten().tolist() == [127, 128, 127, 127, 0]


def test_groups_below_the_range_round_to_its_smallest_step() -> None:
    w = torch.zeros(1, 32)
    w[0, :4] = torch.tensor([2.0**-128, 2.0**-129, 3 * 2.0**-130, 2.0**-149])
    data, scale = quantise_mxfp4(w)
    got = dequantise_mxfp4(data, scale, torch.float32)[0, :4]
    assert int(scale) == 0
    assert got.tolist() == [2.0**-128, 0.0, 2.0**-128, 0.0]
    assert ((got.double() - w[0, :4].double()).abs() <= 2.0**-129).all()


def test_range_is_left_loudly() -> None:
    for value in (torch.inf, -torch.inf, torch.nan):
        w = torch.ones(2, 64)
        w[1, 40] = value
        with pytest.raises(ValueError, match="1 of 4 groups"):
            quantise_mxfp4(w)
        with pytest.raises(ValueError, match="1 of 4 groups"):
            quantise_mxfp8(w)
    largest = 6 * 2.0**127
    w = torch.full((1, 32), largest, dtype=torch.float64)
    data, scale = quantise_mxfp4(w)
    assert int(scale) == 254 and torch.equal(dequantise_mxfp4(data, scale, torch.float64), w)
    with pytest.raises(ValueError, match=r"6 \* 2\^127"):
        quantise_mxfp4(w * (1 + 2**-50))
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match="overflow"):
            dequantise_mxfp4(data, scale, dtype)
    small_codes = packed([[1, 2] * 16])  # 0.5 and 1 under 2^127: within the dtype
    assert dequantise_mxfp4(small_codes, scale, torch.float32).amax() == 2.0**127


def test_not_a_number_scale_is_refused() -> None:
    data, scale = quantise_mxfp4(draw(2, 64))
    scale[1, 0] = 255
    with pytest.raises(ValueError, match="1 of 4 groups have scale byte 255"):
        dequantise_mxfp4(data, scale, torch.float32)
    with pytest.raises(ValueError, match="given scales"):
        quantise_mxfp4(draw(2, 64), scale)
    with pytest.raises(ValueError, match="255"):
        dequantise_mxfp8(torch.zeros(2, 64, dtype=torch.float8_e4m3fn), scale, torch.float32)


@pytest.mark.parametrize("dtype", EXACT)
def test_fake_quantise_is_the_round_trip(dtype: torch.dtype) -> None:
    w = draw(17, 64, spread=3.0).to(dtype)
    want = dequantise_mxfp4(*quantise_mxfp4(w), dtype)
    leaf = w.requires_grad_()
    got = fake_quantise_mxfp4(leaf)
    assert same(got.detach(), want)
    probe = draw(17, 64, seed=1).to(dtype)
    (gradient,) = torch.autograd.grad(got, leaf, probe)
    assert torch.equal(gradient, probe), "straight through"


@near
@given(bytes_of_codes, st.lists(st.integers(0, 250), min_size=GROUPS, max_size=GROUPS))
def test_fake_quantise_leaves_quantised_values_alone(data: list[int], scales: list[int]) -> None:
    """Also where their scale is larger than the rule's: quantisation-aware training starts at the released weights."""
    values = dequantise_mxfp4(
        torch.tensor([data], dtype=torch.uint8), torch.tensor([scales], dtype=torch.uint8), torch.bfloat16
    )
    assert same(fake_quantise_mxfp4(values), values)


def test_fake_quantise_marks_what_is_not_finite() -> None:
    w = draw(2, 64)
    w[0, 3], w[1, 40] = torch.inf, torch.nan
    bad = torch.isnan(fake_quantise_mxfp4(w))
    assert bad[0, :32].all() and bad[1, 32:].all() and int(bad.sum()) == 64


@near
@given(floats_of_a_group)
def test_mxfp8_any_finite_group(values: list[float]) -> None:
    """The scale is the smallest that holds the maximum; an element errs by half its last bit (2^-4 of itself) or, under
    the smallest normal 2^-6, by half the subnormal step (2^-10 of the scale)."""
    w = torch.tensor([values], dtype=torch.float32)
    elements, scale = quantise_mxfp8(w)
    step, amax = 2.0 ** (int(scale) - 127), w.double().abs().amax()
    assert amax <= 448 * step and (amax > 224 * step or int(scale) == 0)
    error = (dequantise_mxfp8(elements, scale, torch.float64) - w.double()).abs()
    assert (error <= torch.maximum(2.0**-4 * w.double().abs(), torch.tensor(2.0**-10 * step))).all()


@pytest.mark.parametrize("dtype", EXACT)
def test_mxfp8_round_trip(dtype: torch.dtype) -> None:
    """All 254 finite codes under every scale whose products stay below 2^128; the values are exact in bf16."""
    codes = torch.tensor([c for c in range(256) if c % 128 != 127] + [0, 0], dtype=torch.uint8)
    elements = codes.view(torch.float8_e4m3fn).repeat(247, 1)
    scale = torch.arange(247, dtype=torch.uint8).view(-1, 1).repeat(1, 8)
    values = dequantise_mxfp8(elements, scale, dtype)
    exact = elements.double() * 2.0 ** (scale.double().repeat_interleave(32, 1) - 127)
    if dtype == torch.bfloat16:  # its subnormals end at 2^-133, E4M3's under the smallest scale at 2^-136
        values, exact = values[3:], exact[3:]
    assert same(values.double(), exact)
    with pytest.raises(ValueError, match="overflow"):
        dequantise_mxfp8(elements[:1], scale[:1] + 247, torch.float32)


def test_shapes_and_dtypes_are_checked() -> None:
    with pytest.raises(ValueError, match="32 divides"):
        quantise_mxfp4(torch.ones(2, 48))
    with pytest.raises(ValueError, match="32 divides"):
        fake_quantise_mxfp4(torch.ones(2, 32, dtype=torch.int32))
    data, scale = quantise_mxfp4(draw(2, 64))
    with pytest.raises(ValueError, match="float16 cannot hold"):
        dequantise_mxfp4(data, scale, torch.float16)
    with pytest.raises(ValueError, match="hold 64 columns.*cover 32"):
        dequantise_mxfp4(data, scale[:, :1], torch.float32)
    with pytest.raises(ValueError, match=r"want \(2, 2\) uint8"):
        quantise_mxfp4(draw(2, 64), scale[:, :1])
