"""The two-phase kernels against the one-phase definition: all sites of a block, values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.attn_res import attn_res_handed, attn_res_site, choose_phases, score_blocks, scored_site
from rille.ops.attn_res.form import bytes_of_block, check_form, choose_form

phases = pytest.importorskip("rille.ops.attn_res.phases", exc_type=ImportError)

EPS = 1e-5
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 2, 3, 5), (2, 3, 1, 64), (4, 6, 4, 24), (5, 1, 2, 33), (9, 2, 2, 16)]  # R, Q, N, D


def draw(R: int, Q: int, N: int, D: int, dtype: torch.dtype = torch.float32) -> dict[str, list[Tensor]]:
    """Blocks of very different size; an update for each site, queries, gains and norm gains."""
    g = torch.Generator().manual_seed(R + Q)

    def some(count: int, *shape: int) -> list[Tensor]:
        return [torch.randn(shape, generator=g).to(DEVICE, dtype) for _ in range(count)]

    blocks = [(block * 2.0**j).to(dtype) for j, block in enumerate(some(R, N, D))]
    # Every second site only reads the sum.
    return {"blocks": blocks, "updates": some(Q + 1, N, D)} | {
        name: some(Q, D) for name in ("queries", "gains", "norm_gains")
    }


def run(inputs: dict[str, list[Tensor]], form: str) -> list[Tensor]:
    """Inputs of the sub-layers, the last sum, the blocks, gradients of everything; the definition in float64."""
    wide = torch.float64 if form == "definition" else None
    made = {name: [x.detach().to(wide or x.dtype).requires_grad_() for x in xs] for name, xs in inputs.items()}
    blocks, (partial, *updates) = made["blocks"], made["updates"]
    one = form in ("definition", "one_phase")
    scored = None if one else score_blocks(blocks, made["queries"], made["gains"], EPS, backend=form)
    outputs = []
    for q, norm_gain in enumerate(made["norm_gains"]):
        update = None if q % 3 == 1 else updates[q]
        if scored is not None:
            x, partial = scored_site(scored, q, partial, update, norm_gain)
        else:
            weights = (made["queries"][q], made["gains"][q], norm_gain)
            backend = "reference" if wide else "triton"
            x, (*blocks, partial) = attn_res_handed([*blocks, partial], update, *weights, EPS, backend=backend)
        outputs.append(x)
    outputs += [partial, *(blocks if scored is None else scored.blocks)]
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for k, out in enumerate(outputs):
        wave = torch.arange(out.numel(), device=out.device, dtype=torch.float64).add(k).sin()
        loss = loss + (out.double() * wave.view_as(out)).sum()
    leaves = [x for xs in made.values() for x in xs]
    return [*outputs, *torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)]


def compare(got: list[Tensor], want: list[Tensor], limit: float) -> None:
    for a, b in zip(got, want, strict=True):
        assert a.isfinite().all()
        assert (a.double() - b).abs().max() <= limit * b.abs().max().clamp_min(1e-30)


@pytest.mark.parametrize("form", ["triton", "reference"])
@pytest.mark.parametrize("size", SIZES)
def test_all_sites_equal_the_definition(size: tuple[int, int, int, int], form: str) -> None:
    inputs = draw(*size)
    compare(run(inputs, form), run(inputs, "definition"), 3e-5)


def test_bfloat16_beside_one_phase() -> None:
    """Two roundings of a mixture where one phase has one. A block 128 times larger than another does not hide what the
    queries learn from the small one."""
    for ratio in (1, 128):
        inputs = draw(2, 2, 6, 72, torch.bfloat16)
        inputs["blocks"][1] = inputs["blocks"][0].roll(1, 1) * ratio
        two, one, want = (run(inputs, form) for form in ("triton", "one_phase", "definition"))
        for a, b, c in zip(two, one, want, strict=True):
            assert a.dtype == torch.bfloat16
            assert (a.double() - c).norm() <= 1.5 * (b.double() - c).norm() + 2**-8 * c.norm()


def test_zero_queries_average_and_learn() -> None:
    inputs = draw(3, 2, 6, 24)
    for query in inputs["queries"]:
        query.zero_()
    got, want = run(inputs, "triton"), run(inputs, "definition")
    compare(got, want, 3e-5)
    assert all(gradient.abs().max() > 0 for gradient in got[-6:-4])
    assert len(got) == 2 + 1 + 3 + 3 + 3 + 6


def test_nan_stays_in_its_token() -> None:
    inputs, outputs = draw(2, 2, 6, 24), []
    for poison in (0.0, torch.nan):
        inputs["blocks"][1] = inputs["blocks"][1].index_add(
            0, torch.tensor([4], device=DEVICE), torch.full((1, 24), poison, device=DEVICE)
        )
        outputs.append(run(inputs, "triton"))
    keep = [0, 1, 2, 3, 5]
    for clean, sick in zip(*outputs, strict=True):
        if clean.shape[0] == 6:
            assert torch.equal(clean[keep], sick[keep])


def test_the_mixtures_are_made_again_for_another_backward_pass() -> None:
    inputs = draw(2, 3, 4, 16)
    blocks = [x.requires_grad_() for x in inputs["blocks"]]
    scored = score_blocks(blocks, inputs["queries"], inputs["gains"], EPS, backend="triton")
    partial, xs = inputs["updates"][0].requires_grad_(), []
    for q in range(3):
        x, partial = scored_site(scored, q, partial, inputs["updates"][q + 1], inputs["norm_gains"][q])
        xs.append(x)
    loss = torch.stack([(x * x.detach().roll(1, 0)).sum() for x in xs]).sum()
    leaves = [inputs["updates"][0], *blocks]
    torch.autograd.grad(loss, leaves[:1], retain_graph=True)  # never comes to the blocks
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    again = torch.autograd.grad(loss, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    one = torch.autograd.grad(scored_site_alone(inputs, blocks, 1), blocks)
    want = torch.autograd.grad(one_phase_alone(inputs, blocks, 1), blocks)
    compare(list(one), [x.double() for x in want], 3e-5)


def scored_site_alone(inputs: dict[str, list[Tensor]], blocks: list[Tensor], site: int) -> Tensor:
    scored = score_blocks(blocks, inputs["queries"], inputs["gains"], EPS, backend="triton")
    x, _ = scored_site(scored, site, inputs["updates"][0].detach(), None, inputs["norm_gains"][site])
    return (x * x.detach().roll(1, 0)).sum()


def one_phase_alone(inputs: dict[str, list[Tensor]], blocks: list[Tensor], site: int) -> Tensor:
    weights = (inputs["queries"][site], inputs["gains"][site], inputs["norm_gains"][site])
    x, _ = attn_res_site([*blocks, inputs["updates"][0].detach()], None, *weights, EPS, backend="one_phase")
    return (x * x.detach().roll(1, 0)).sum()


def test_nothing_wide_is_kept_but_sources_and_sums() -> None:
    """Bytes that autograd keeps for the backward pass: what a plain residual keeps, and numbers a token."""
    inputs = draw(3, 6, 8, 64)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    blocks = [x.requires_grad_() for x in inputs["blocks"]]
    partial, unit = inputs["updates"][0].requires_grad_(), inputs["updates"][0].untyped_storage().nbytes()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        scored = score_blocks(blocks, inputs["queries"], inputs["gains"], EPS, backend="triton")
        for q in range(6):
            x, partial = scored_site(scored, q, partial, inputs["updates"][q + 1], inputs["norm_gains"][q])
    wide = [size for size in kept.values() if size >= unit]
    assert len(wide) == 3 + 6, "the blocks and one running sum a site"
    assert sum(kept.values()) - sum(wide) < 6 * 8 * 4 * (3 + 2 + 5 + 1) + 3 * 6 * 64 * 4 + 6 * 64 * 4


def test_without_gradients_and_without_tokens() -> None:
    inputs = draw(3, 4, 5, 24)
    want = run(inputs, "definition")
    with torch.no_grad():
        scored = score_blocks(inputs["blocks"], inputs["queries"], inputs["gains"], EPS, backend="triton")
        partial, found = inputs["updates"][0], []
        for q in range(4):
            update = None if q % 3 == 1 else inputs["updates"][q + 1]
            x, partial = scored_site(scored, q, partial, update, inputs["norm_gains"][q])
            found.append(x)
    compare([*found, partial], want[:5], 3e-5)
    assert all(not x.any() for x in run(draw(2, 2, 0, 8), "triton")[-6:])


def test_more_programs_than_rows_and_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(phases, "TILE_TOKENS", 16)
    monkeypatch.setattr(phases, "TILE_COLUMNS", 16)
    inputs = draw(2, 1, 20, 20)
    for programs in (1, 1000):
        monkeypatch.setattr(phases, "TILE_PROGRAMS", programs)
        compare(run(inputs, "triton"), run(inputs, "definition"), 3e-5)


def test_the_form_is_chosen_by_bytes() -> None:
    nano, unit = 131072 * 512 * 2, 32768 * 2048 * 2
    assert [choose_form(R, 6, nano, True)[0] for R in (1, 2, 3, 4)] == ["one_phase"] + ["two_phase"] * 3
    assert [choose_form(R, 12, unit, True)[0] for R in (1, 2, 3, 4)] == ["one_phase"] + ["two_phase"] * 3
    assert [choose_form(R, 12, unit, False)[0] for R in (1, 2, 3, 4)] == ["one_phase"] * 2 + ["two_phase"] * 2
    assert choose_form(9, 24, 32 * 7168 * 2, False)[0] == "one_phase", "the blocks stay in the cache"
    assert choose_form(8, 1, unit, True)[0] == "one_phase", "one site shares with nobody"
    found = bytes_of_block(4, 12, 10**9, True)
    assert found["one_phase"] == 12 * 16 * 10**9 and found["two_phase"] == (72 + 20) * 10**9 + 10**8
    with pytest.raises(ValueError, match="unknown form 'three'"):
        check_form("three")


def test_choice_and_refusal() -> None:
    inputs = draw(2, 3, 4, 8)
    blocks, queries, gains = (inputs[name] for name in ("blocks", "queries", "gains"))
    if DEVICE == "cpu":
        assert choose_phases(blocks, 3) == ("one_phase", "the tensors are on cpu")
    with pytest.raises(ValueError, match="float64"):
        score_blocks([x.double() for x in blocks], queries, gains, EPS, backend="triton")
    zeros = [torch.zeros(1, 8192, device=DEVICE)] * 8
    with pytest.raises(ValueError, match="do not fit the registers"):
        score_blocks(zeros, [zeros[0][0]], [zeros[0][0]], EPS, backend="triton")
    with pytest.raises(ValueError, match=r"running sum \(4, 8\) torch.float64"):
        scored = score_blocks(blocks, queries, gains, EPS)
        scored_site(scored, 0, blocks[0].double(), None, gains[0])
    with pytest.raises(ValueError, match="unknown backend 'fast'"):
        score_blocks(blocks, queries, gains, EPS, backend="fast")
    with pytest.raises(ValueError, match="3 queries and 2 gains"):
        score_blocks(blocks, queries, gains[:2], EPS)
