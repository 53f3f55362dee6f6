"""A layer that nobody watches runs its sites in one pass: the same numbers, and the same gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.model.block import Block
from rille.model.context import Context
from rille.model.model import K3, new_model
from rille.model.presets import preset
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
