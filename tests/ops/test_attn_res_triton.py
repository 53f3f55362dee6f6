"""The kernels of one site of Attention Residuals against the definition: values, gradients, refusals."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from rille.ops.attn_res import attn_res, attn_res_handed, attn_res_site, choose_backend

mix = pytest.importorskip("rille.ops.attn_res.mix", exc_type=ImportError)

EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 3, 5), (2, 1, 64), (3, 7, 24), (9, 5, 40), (5, 19, 16), (16, 2, 33)]  # R sources, N tokens, D width
# Registers for sources, forward and backward: groups of one source and nothing held; groups of several, some held.
TIGHT = [(2, 0), (4, 1), (8, 4)]


def draw(R: int, N: int, D: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor | list[Tensor]]:
    """Sources of very different size, an update of the last, query, gain and the gain of a norm."""
    g = torch.Generator().manual_seed(R)
    sources = [(torch.randn(N, D, generator=g) * 2.0**j).to(DEVICE, dtype) for j in range(R)]
    update, query, gain, norm_gain = (
        torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in ((N, D), (D,), (D,), (D,))
    )
    return {"sources": sources, "update": update, "query": query, "gain": gain, "norm_gain": norm_gain}


def run(inputs: dict, backend: str, site: bool, with_update: bool) -> list[Tensor]:
    """Outputs and all gradients, in float64 for the reference."""
    wide = torch.float64 if backend == "reference" else None
    sources = [x.detach().to(wide or x.dtype).requires_grad_() for x in inputs["sources"]]
    update, query, gain, norm_gain = (
        inputs[name].detach().to(wide or inputs[name].dtype).requires_grad_()
        for name in ("update", "query", "gain", "norm_gain")
    )
    leaves = [*sources, query, gain]
    if site:
        given = update if with_update else None
        outputs = list(attn_res_site(sources, given, query, gain, norm_gain, EPS, backend=backend))
        leaves += [norm_gain, *([update] if with_update else [])]
    else:
        outputs = [attn_res(sources, query, gain, EPS, backend=backend)]
    waves = [
        torch.arange(out.numel(), device=out.device, dtype=torch.float64).add(k).sin() for k, out in enumerate(outputs)
    ]
    loss = sum((out * wave.view_as(out).to(out.dtype)).sum() for out, wave in zip(outputs, waves, strict=True))
    return [*outputs, *torch.autograd.grad(loss, leaves)]


def compare(got: list[Tensor], want: list[Tensor], limit: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).abs().max() <= limit * b.abs().max().clamp_min(1e-30)


def limit_for(R: int) -> float:
    """A rounding of the gradient, 2^-24, against sources 2^(R - 1) times larger than the smallest, whose score's
    gradient is a difference of such terms; weights and the root of D take 16 of it."""
    return max(3e-5, 2.0 ** (R - 1 - 24 - 4))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["mix", "site", "site_update"])
@pytest.mark.parametrize("few", [True, False])
def test_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], form: str, few: bool
) -> None:
    """A program for each row, and programs of several."""
    monkeypatch.setattr(mix, "FEW_ELEMENTS", 2**30 if few else 0)
    inputs = draw(*size)
    got, want = (run(inputs, name, form != "mix", form == "site_update") for name in ("triton", "reference"))
    compare(got, want, limit_for(size[0]))


@pytest.mark.parametrize("registers", TIGHT)
@pytest.mark.parametrize("form", ["mix", "site_update"])
@pytest.mark.parametrize("few", [True, False])
def test_groups_and_sources_read_again(
    monkeypatch: pytest.MonkeyPatch, registers: tuple[int, int], form: str, few: bool
) -> None:
    monkeypatch.setattr(mix, "FEW_ELEMENTS", 2**30 if few else 0)
    monkeypatch.setattr(mix, "FORWARD_REGISTERS", registers[0] * 4)
    monkeypatch.setattr(mix, "BACKWARD_REGISTERS", registers[1] * 4)
    mix.plan.cache_clear()
    inputs = draw(9, 3, 40)
    got, want = (run(inputs, name, form != "mix", form == "site_update") for name in ("triton", "reference"))
    mix.plan.cache_clear()
    compare(got, want, 3e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["mix", "site", "site_update"])
def test_wide_rows(monkeypatch: pytest.MonkeyPatch, size: tuple[int, int, int], form: str) -> None:
    """The kernels of rows that do not fit with all their sources, at small sizes."""
    monkeypatch.setattr(mix, "WIDE", 0)
    mix.plan.cache_clear()
    inputs = draw(*size)
    got, want = (run(inputs, name, form != "mix", form == "site_update") for name in ("triton", "reference"))
    mix.plan.cache_clear()
    compare(got, want, limit_for(size[0]))


@pytest.mark.parametrize("wide", [4096, 0])
def test_sources_handed_from_site_to_site(monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    """Two sites, the second on what the first hands on, beside two sites on the same tensors."""
    monkeypatch.setattr(mix, "WIDE", wide)
    mix.plan.cache_clear()
    found = []
    for handed, dtype in ((True, torch.float32), (False, torch.float64)):
        inputs = draw(3, 5, 40)
        leaves = [
            x.to(dtype).requires_grad_()
            for x in (*inputs["sources"], inputs["update"], inputs["query"], inputs["gain"], inputs["norm_gain"])
        ]
        *sources, update, query, gain, norm_gain = leaves
        if handed:
            x, sources = attn_res_handed(sources, update, query, gain, norm_gain, EPS, backend="triton")
            y, sources = attn_res_handed(sources, None, gain, query, norm_gain, EPS, backend="triton")
        else:
            x, running = attn_res_site(sources, update, query, gain, norm_gain, EPS, backend="reference")
            sources = [*sources[:-1], running]
            y, _ = attn_res_site(sources, None, gain, query, norm_gain, EPS, backend="reference")
        wave = torch.arange(200, device=DEVICE, dtype=torch.float64).sin().view(5, 40).to(dtype)
        loss = (x * wave).sum() + (y * wave.flip(0)).sum() + (sources[1] * wave.flip(1)).sum()
        found.append([x, y, *sources, *torch.autograd.grad(loss, leaves)])
    mix.plan.cache_clear()
    compare(*found, 3e-5)


@pytest.mark.parametrize("wide", [4096, 0])
def test_bfloat16_is_computed_in_fp32(monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    """One rounding of the mixture; the interpreter truncates where the card rounds to nearest: an ulp."""
    monkeypatch.setattr(mix, "WIDE", wide)
    mix.plan.cache_clear()
    inputs = draw(4, 9, 72, torch.bfloat16)
    got, want = (run(inputs, name, False, False) for name in ("triton", "reference"))
    mix.plan.cache_clear()
    assert got[0].dtype == torch.bfloat16 and all(x.dtype == torch.bfloat16 for x in got)
    compare(got, want, 2**-7)


def test_plan_covers_every_source() -> None:
    for R in range(1, mix.MOST_SOURCES + 1):
        for D in (1, 64, 512, 768, 2048, 4096, 7168, 8192):
            for itemsize in (2, 4):
                for p in (mix.plan(R, D, itemsize, *flags) for flags in product((False, True), repeat=2)):
                    assert 1 <= p.GROUP <= R and 1 <= p.backward_group <= R and p.BLOCK >= D and p.programs >= 1
                    for warps in (p.forward_warps, p.backward_warps):
                        assert p.BLOCK % (32 * warps * p.VEC) == 0


def test_few_rows_have_a_program_each() -> None:
    """64 rows of 512 of a decoding step; a training step's share rows."""
    for rows, few in ((1, True), (64, True), (2**20, False)):
        assert mix.is_few(rows, 512, torch.device(DEVICE)) == few
    assert mix.plan(5, 512, 2, True, True).STEP == 1 and mix.plan(5, 512, 2, True).STEP == 8
    for R, D in ((5, 512), (9, 512), (4, 2048), (9, 4096)):
        assert mix.plan(R, D, 2, True, True).GROUP == R


def test_what_the_ring_takes() -> None:
    """Wide bf16 rows, several a processor, up to nine sources; whole slots, at least one for each entry of a row."""
    rows = 4 * mix.processors(torch.device("cpu"))
    wide = [torch.empty(rows, 7168, dtype=torch.bfloat16)] * 9
    assert mix.in_ring(wide, None, wide[0][0])
    assert not mix.in_ring(wide, None, wide[0][0].float()) and not mix.in_ring([*wide, wide[0]])
    assert not mix.in_ring([x[1:] for x in wide]) and not mix.in_ring([x[:, :4096] for x in wide])
    sizes = mix.ring_sizes(7168)
    assert sizes["SLOTS"] >= mix.RING_SOURCES + 1 and 2 * sizes["SLOTS"] * sizes["BLOCK"] <= mix.RING_BYTES


def test_zero_query_is_the_average_and_has_a_gradient() -> None:
    inputs = draw(4, 6, 24)
    inputs["query"].zero_()
    got, want = (run(inputs, name, False, False) for name in ("triton", "reference"))
    compare(got, want, 3e-5)
    assert got[5].abs().max() > 0


@pytest.mark.parametrize("wide", [4096, 0])
def test_nan_stays_in_its_token(monkeypatch: pytest.MonkeyPatch, wide: int) -> None:
    monkeypatch.setattr(mix, "WIDE", wide)
    mix.plan.cache_clear()
    inputs, outputs = draw(3, 6, 24), []
    for poison in (0.0, torch.nan):
        inputs["sources"][1][4] += poison
        outputs.append(run(inputs, "triton", True, True))
    mix.plan.cache_clear()
    keep = [0, 1, 2, 3, 5]
    for clean, sick in zip(outputs[0], outputs[1], strict=True):
        if clean.shape[0] == 6:
            assert torch.equal(clean[keep], sick[keep])


def test_a_single_source_is_returned_as_it_is() -> None:
    inputs = draw(1, 5, 40)
    assert torch.equal(
        attn_res(inputs["sources"], inputs["query"], inputs["gain"], EPS, backend="triton"), inputs["sources"][0]
    )


def test_no_tokens_and_no_gradient() -> None:
    inputs = draw(2, 0, 8)
    for tensor in run(inputs, "triton", True, True)[-4:]:
        assert not tensor.any()
    inputs = draw(3, 4, 8)
    with torch.no_grad():
        out = attn_res(inputs["sources"], inputs["query"], inputs["gain"], EPS, backend="triton")
    compare([out], [run(inputs, "reference", False, False)[0]], 1e-5)


def test_a_source_without_gradient_gets_none() -> None:
    inputs = draw(3, 6, 8)
    inputs["sources"][0].requires_grad_()
    out = attn_res(inputs["sources"], inputs["query"], inputs["gain"], EPS, backend="triton")
    out.sum().backward()
    assert inputs["sources"][0].grad is not None and inputs["sources"][1].grad is None


def test_rows_that_lie_apart() -> None:
    inputs = draw(3, 6, 8)
    apart = [torch.stack([source, source], 1)[:, 1] for source in inputs["sources"]]
    rest = (inputs["query"], inputs["gain"], EPS)
    assert torch.equal(attn_res(apart, *rest, backend="triton"), attn_res(inputs["sources"], *rest, backend="triton"))


def test_the_op_is_registered_whole() -> None:
    inputs = draw(2, 3, 8)
    sources = [source.requires_grad_() for source in inputs["sources"]]
    arguments = (sources, inputs["update"], inputs["query"], inputs["gain"], inputs["norm_gain"], EPS, True)
    torch.library.opcheck(mix.mix.registered, arguments, test_utils=("test_schema", "test_faketensor"))


def test_choice_and_refusal() -> None:
    inputs = draw(2, 3, 8)
    rest = (inputs["query"], inputs["gain"], EPS)
    name, reason = choose_backend(inputs["sources"])
    assert reason and name == ("triton" if DEVICE == "cuda" else "one_phase")
    with pytest.raises(ValueError, match="unknown backend"):
        attn_res(inputs["sources"], *rest, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        attn_res([source.double() for source in inputs["sources"]], *rest, backend="triton")
    with pytest.raises(ValueError, match="at most 16 sources, here are 17"):
        attn_res([inputs["sources"][0]] * 17, *rest, backend="triton")
    with pytest.raises(ValueError, match="update"):
        attn_res_site(inputs["sources"], torch.ones(2, 8), *rest[:2], inputs["gain"], EPS)
