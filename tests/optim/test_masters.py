"""16-bit parameters move as their fp32 twins do."""

import copy

import pytest
import torch
from torch import nn

from rille.optim.config import OptimConfig
from rille.optim.groups import Named
from rille.optim.masters import Masters
from rille.optim.rules import optimizer


def rows(dtype):
    generator = torch.Generator().manual_seed(0)
    matrix = nn.Parameter(torch.randn(24, 8, generator=generator).bfloat16().to(dtype))
    vector = nn.Parameter(torch.randn(8, generator=generator).float())
    return [Named("w", matrix, "matrix"), Named("v", vector, "vector")]


def advance(optim, named, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for row in named:
            row.parameter.grad = (
                torch.randn(row.parameter.shape, generator=generator).bfloat16().to(row.parameter.dtype)
            )
        optim.step()
        optim.zero_grad()


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_the_twin_moves_as_an_fp32_parameter(rule):
    config = OptimConfig(rule=rule, lr=1e-4)
    wide, held = rows(torch.float32), rows(torch.bfloat16)
    plain, masters = optimizer(wide, config), optimizer(held, config)
    assert isinstance(masters, Masters) and not isinstance(plain, Masters)
    before = held[0].parameter.detach().clone()
    advance(plain, wide, 20, 1)
    advance(masters, held, 20, 1)
    assert torch.equal(masters.pairs[0][1], wide[0].parameter)
    assert torch.equal(held[0].parameter, wide[0].parameter.bfloat16())
    assert torch.equal(held[1].parameter, wide[1].parameter), "fp32 parameters are their own twins"
    assert not torch.equal(held[0].parameter, before)


def test_small_steps_are_not_lost():
    held = rows(torch.bfloat16)
    before = held[0].parameter.detach().clone()
    optim = optimizer(held, OptimConfig(lr=1e-5, weight_decay=0.0))
    assert isinstance(optim, Masters)
    for _ in range(400):
        held[0].parameter.grad = torch.ones_like(held[0].parameter)
        optim.step()
    master = optim.pairs[0][1].detach()
    torch.testing.assert_close(before.float() - master, torch.full_like(master, 4e-3), rtol=0, atol=1e-5)
    assert torch.equal(held[0].parameter, master.bfloat16())
    assert (held[0].parameter != before).float().mean() > 0.3, "each step is far below the spacing of bf16"


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_saved_and_restored_it_goes_on_bit_for_bit(rule):
    config = OptimConfig(rule=rule, lr=1e-3)
    held, again = rows(torch.bfloat16), rows(torch.bfloat16)
    one, two = optimizer(held, config), optimizer(again, config)
    advance(one, held, 3, 2)
    state = copy.deepcopy(one.state_dict())
    with torch.no_grad():
        again[1].parameter.copy_(held[1].parameter)
    two.load_state_dict(state)
    advance(one, held, 3, 3)
    advance(two, again, 3, 3)
    assert all(torch.equal(a.parameter, b.parameter) for a, b in zip(held, again, strict=True))
    with pytest.raises(ValueError, match="master weights"):
        two.load_state_dict({k: v for k, v in state.items() if k != "masters"})


def test_learning_rates_reach_the_inner_groups():
    from rille.optim.adamw import set_learning_rate

    optim = optimizer(rows(torch.bfloat16), OptimConfig())
    set_learning_rate(optim, 0.25)
    assert isinstance(optim, Masters) and all(group["lr"] == 0.25 for group in optim.inner.param_groups)
