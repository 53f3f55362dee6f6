"""AdamW against the equations in float64 NumPy, and which parameters are decayed."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from rille.optim.adamw import adamw, set_learning_rate
from rille.optim.config import OptimConfig
from rille.optim.groups import KINDS, decay_groups

CONFIG = OptimConfig(lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


def parameter(*shape: int, dtype=torch.float64, seed: int = 0) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)))


def step(x, g, m, v, t: int, lr: float, decay: float):
    """One update as the equations say it."""
    b1, b2 = CONFIG.betas
    m = b1 * m + (1 - b1) * g
    v = b2 * v + (1 - b2) * g**2
    x = x - lr * decay * x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + CONFIG.eps)
    return x, m, v


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2.9e-6)])
def test_eight_steps_of_every_kind(dtype: torch.dtype, tolerance: float):
    """fp32: 8 updates, each rounded twice (decay, step) to 2^-24 of values up to 3: 8 * 2 * 1.8e-7 = 2.9e-6 at most."""
    table = [(kind, parameter(3, 5, dtype=dtype, seed=i), kind) for i, kind in enumerate(KINDS)]
    optimizer = adamw(table, CONFIG)
    expected = {name: (p.detach().double().numpy().copy(), 0.0, 0.0) for name, p, _ in table}
    random = np.random.default_rng(0)
    for t in range(1, 9):
        lr = 0.05 / t
        for name, p, kind in table:
            g = random.standard_normal(p.shape) * 10.0 ** -random.integers(0, 4)
            p.grad = torch.from_numpy(g).to(dtype)
            decay = 0.0 if kind == "vector" else CONFIG.weight_decay
            expected[name] = step(*_with_gradient(expected[name], p.grad), t, lr, decay)
        set_learning_rate(optimizer, lr)
        optimizer.step()
    for name, p, _ in table:
        assert np.abs(p.detach().numpy() - expected[name][0]).max() < tolerance


def _with_gradient(state, gradient: torch.Tensor):
    x, m, v = state
    return x, gradient.double().numpy(), m, v


def test_groups_follow_the_kinds():
    table = [(f"{kind}.{i}", parameter(2), kind) for i in range(2) for kind in KINDS]
    decayed, exempt = decay_groups(table, 0.1)
    assert [name for name, _ in exempt["params"]] == ["vector.0", "vector.1"]
    assert (decayed["weight_decay"], exempt["weight_decay"]) == (0.1, 0.0)
    assert sorted(name for group in (decayed, exempt) for name, _ in group["params"]) == sorted(n for n, _, _ in table)
    assert [group["group"] for group in decay_groups(table[:1], 0.1)] == ["decayed"]


def test_parameters_without_gradient_are_left_out():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = adamw([("w", parameter(2), "matrix"), ("router_bias", frozen, "vector")], CONFIG)
    assert [group["param_names"] for group in optimizer.param_groups] == [["w"]]
    with pytest.raises(ValueError, match="none of 1 parameters takes a gradient"):
        decay_groups([("router_bias", frozen, "vector")], 0.1)
    with pytest.raises(ValueError, match="none of 0"):
        decay_groups([], 0.1)


def test_wrong_tables_are_refused():
    w = parameter(2)
    with pytest.raises(ValueError, match="'w' is of kind 'norm'; the kinds are heads, matrix"):
        decay_groups([("w", w, "norm")], 0.1)  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"'head' comes twice \(before as 'embed'\)"):
        decay_groups([("embed", w, "embedding"), ("head", w, "embedding")], 0.1)
    with pytest.raises(ValueError, match=r"'w' comes twice"):
        decay_groups([("w", w, "matrix"), ("w", parameter(2), "matrix")], 0.1)


def test_state_restores_exactly():
    def run(optimizer, p, steps):
        for t in steps:
            p.grad = torch.full_like(p, 0.1 * (t + 1)).sin()
            set_learning_rate(optimizer, 0.01 * (t + 1))
            optimizer.step()

    one = parameter(4, 4, dtype=torch.float32)
    first = adamw([("w", one, "matrix")], CONFIG)
    run(first, one, range(5))
    two = nn.Parameter(one.detach().clone())
    second = adamw([("w", two, "matrix")], CONFIG)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # as through a file: loading shares tensors
    run(first, one, range(5, 9))
    run(second, two, range(5, 9))
    assert torch.equal(one, two)
    assert first.state_dict()["param_groups"][0]["param_names"] == ["w"]
