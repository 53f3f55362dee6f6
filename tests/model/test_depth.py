"""A layer that nobody watches runs its sites in one pass: the same numbers, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.model import attn_res
from rille.model.block import Block, share_mixtures
from rille.model.context import Context
from rille.model.model import K3, new_model
from rille.model.presets import preset
from rille.ops.attn_res.form import Form
from rille.packing import Packing

SMALL = preset("tiny").replace(
    vocab_size=97, hidden_size=64, num_layers=5, mla_layers=(2, 4), num_experts=8, active_experts=2, block_layers=2
)


def run(model: K3, watched: bool) -> list[Tensor]:
    ctx = Context(Packing.of([5, 6]))
    if watched:
        ctx.tap = lambda name, tensor: tensor
    model.zero_grad(set_to_none=True)
    hidden_ND = model(torch.arange(11), ctx)
    hidden_ND.float().square().sum().backward()
    return [hidden_ND.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("residual", ["attn_res", "attn_res_full", "standard"])
def test_watched_and_not(residual: str) -> None:
    model = new_model(SMALL.replace(residual=residual), seed=1).float()
    for name, p in model.named_parameters():
        if name.endswith("query"):
            torch.nn.init.normal_(p)
    fused, plain = run(model, False), run(model, True)
    assert len(fused) == len(plain) > 10
    for a, b in zip(fused, plain, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max()


def test_a_watched_layer_takes_the_other_way(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[str] = []
    for name in ("tapped", "untapped"):
        way = getattr(Block, name)
        monkeypatch.setattr(Block, name, lambda *a, name=name, way=way: (taken.append(name), way(*a))[1])
    model = new_model(SMALL, seed=1)
    for watched in (False, True):
        taken.clear()
        run(model, watched)
        assert taken == ["tapped" if watched else "untapped"] * SMALL.num_layers


@pytest.mark.parametrize("grad", [True, False])
def test_both_forms_of_the_mixtures(grad: bool) -> None:
    """The finished blocks scored for all sites at once, or by each site: one model."""
    model = new_model(SMALL, seed=1).double()
    for name, p in model.named_parameters():
        if name.endswith("query"):
            torch.nn.init.normal_(p)
    found = []
    forms: tuple[Form, ...] = ("one_phase", "two_phase")
    for form in forms:
        share_mixtures(list(model.blocks()), model.output_mix, form)
        if grad:
            found.append(run(model, False))
        else:
            with torch.no_grad():
                found.append([model(torch.arange(11), Context(Packing.of([5, 6])))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-11 * b.abs().max()


def test_who_reads_which_blocks() -> None:
    """From the second site of the layer that opens a block to the first of the next one, or to the output."""
    model = new_model(SMALL, seed=1)
    blocks = list(model.blocks())
    names = {id(module): name for name, module in model.named_modules()}
    ahead = [[names[id(site)] for site in block.sites_ahead] for block in blocks]
    assert ahead[0] == ["layers.0.ffn_mix", "layers.1.attn_mix", "layers.1.ffn_mix", "layers.2.attn_mix"]
    assert ahead[4] == ["layers.4.ffn_mix", "output_mix"] and not ahead[1] and not ahead[3]
    plain = new_model(SMALL.replace(residual="standard"), seed=1)
    full = new_model(SMALL.replace(residual="attn_res_full"), seed=1)
    assert not any(block.sites_ahead for other in (plain, full) for block in other.blocks())
    with pytest.raises(ValueError, match="unknown form 'both'"):
        share_mixtures(blocks, model.output_mix, "both")  # pyright: ignore[reportArgumentType]


def test_two_phases_run_in_a_layer_that_opens_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    score = attn_res.score_blocks
    monkeypatch.setattr(
        attn_res, "score_blocks", lambda blocks, *a: (counted.append(len(blocks)), score(blocks, *a))[1]
    )
    model = new_model(SMALL, seed=1)
    expected_of: dict[Form, list[int]] = {"auto": [], "one_phase": [], "two_phase": [1, 2, 3]}
    for form, expected in expected_of.items():
        share_mixtures(list(model.blocks()), model.output_mix, form)
        counted.clear()
        run(model, False)
        assert counted == expected
