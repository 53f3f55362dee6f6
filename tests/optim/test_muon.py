"""Muon step by step against the equations in float64 NumPy, on every group of a small K3 and on shapes of its own."""

import copy
from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from rille.model.model import new_model
from rille.model.names import parameter_table
from rille.ops.muon import plain
from rille.ops.newton_schulz import COEFFICIENTS
from rille.optim import muon as module
from rille.optim.adamw import set_learning_rate
from rille.optim.config import OptimConfig
from rille.optim.groups import Named
from rille.optim.kinds import KINDS, MATRICES
from rille.optim.muon import cut_rows, muon
from rille.optim.rules import RULES, optimizer
from rille.train.pretrain import named_parameters
from tests.train.small import MODEL

CONFIG = OptimConfig(rule="muon", lr=0.02, momentum=0.9, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.3)


def orthogonalised(m: np.ndarray) -> np.ndarray:
    """One matrix, by the singular values."""
    u, s, vh = np.linalg.svd(m, full_matrices=False)
    s = s / (np.sqrt((s**2).sum()) + 1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    return u * s @ vh


def muon_step(x, g, state: dict, lr: float, maps: list[tuple]):
    """maps: for each linear map the index of its rows in x."""
    state["B"] = CONFIG.momentum * state.get("B", 0.0) + g
    u = g + CONFIG.momentum * state["B"]
    moved = x - lr * CONFIG.weight_decay * x
    for rows in maps:
        o = orthogonalised(u[rows])
        moved[rows] -= lr * 0.2 * np.sqrt(max(o.shape)) * o
    return moved


def adamw_step(x, g, state: dict, lr: float, decay: float):
    (b1, b2), t = CONFIG.betas, state.get("t", 0) + 1
    m, v = b1 * state.get("m", 0.0) + (1 - b1) * g, b2 * state.get("v", 0.0) + (1 - b2) * g**2
    state |= {"t": t, "m": m, "v": v}
    return x - lr * decay * x - lr * (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + CONFIG.eps)


HEADS = {"attn.q_proj": 2, "attn.k_proj": 2, "attn.v_proj": 2, "attn.gate_proj": 2, "attn.q_up": 2}
ADAMW = ("norm", "gain", "query", "qkv_conv", "A_log", "dt_bias", "router", "embed", "head")


def expected_maps(name: str, x: np.ndarray) -> list[tuple] | None:
    """Written out by hand for the small K3: the rows of each map; None for what takes AdamW."""
    if name.endswith(ADAMW):
        return None
    if name.endswith("experts.w13"):  # 8 experts, 32 gate rows and 32 up rows
        return [(e, slice(start, start + 32)) for e in range(8) for start in (0, 32)]
    if name.endswith("experts.w2"):
        return [(e,) for e in range(8)]
    if name.endswith("attn.kv_up"):  # 2 heads of 16 key and 16 value rows
        return [(slice(start, start + 16),) for start in (0, 16, 32, 48)]
    heads = next((count for end, count in HEADS.items() if name.endswith(end)), 1)
    height = x.shape[0] // heads
    return [(slice(h * height, (h + 1) * height),) for h in range(heads)]


def random_gradient(p: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    return torch.from_numpy(random.standard_normal(p.shape) * 10.0 ** -random.integers(0, 4)).to(p.dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 2e-14), (torch.float32, 1e-5)])
def test_ten_steps_of_every_parameter_of_a_small_k3(dtype: torch.dtype, tolerance: float):
    """The largest values, biases of -7, are rounded twice a step, to 2^-24 or 2^-53 of 7: 20 * 7 * 2^-24 = 8.4e-6 and
    1.6e-14. What Newton-Schulz adds is less: 1e-5 of a step of at most 0.03, and less in float64."""
    model = new_model(MODEL.replace(mtp_layers=1), seed=3).to(dtype)
    named = [row for row in named_parameters(model) if row.parameter.requires_grad]
    follow = muon(named, CONFIG)
    values = {row.name: row.parameter.detach().double().numpy().copy() for row in named}
    states: dict[str, dict] = {row.name: {} for row in named}
    random = np.random.default_rng(0)
    for t in range(1, 11):
        lr = CONFIG.lr / t
        for name, p, kind, _ in named:
            p.grad = random_gradient(p, random)
            x, g, maps = values[name], p.grad.double().numpy(), expected_maps(name, values[name])
            if maps is None:
                values[name] = adamw_step(x, g, states[name], lr, 0.0 if kind == "vector" else CONFIG.weight_decay)
            else:
                values[name] = muon_step(x, g, states[name], lr, maps)
        set_learning_rate(follow, lr)
        follow.step()
        off = {row.name: np.abs(row.parameter.detach().double().numpy() - values[row.name]).max() for row in named}
        assert max(off.values()) < tolerance, (t, max(off.items(), key=lambda item: item[1]))
    assert {kind for _, _, kind, _ in named} == set(KINDS)


def test_the_table_covers_the_model():
    model = new_model(MODEL)
    groups = muon(named_parameters(model), CONFIG).param_groups
    updates = {name: group["update"] for group in groups for name in group["param_names"]}
    for entry in parameter_table(MODEL):
        if not entry.parameter.endswith("router_bias"):
            assert updates[entry.parameter] == ("muon" if entry.kind in MATRICES else "adamw")
    assert [(g["update"], g["group"], g["weight_decay"]) for g in groups] == [
        ("muon", "decayed", 0.3),
        ("adamw", "decayed", 0.3),
        ("adamw", "exempt", 0.0),
    ]


def parameter(*shape: int, seed: int = 0, dtype=torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed)))


def test_row_blocks():
    x = torch.arange(24.0).reshape(12, 2)
    key, value = cut_rows(x, (4, 2))  # two heads of 4 key rows and 2 value rows
    assert torch.equal(key, torch.stack([x[0:4], x[6:10]]))
    assert torch.equal(value, torch.stack([x[4:6], x[10:12]]))
    assert key.data_ptr() == x.data_ptr()
    (whole,) = cut_rows(x.reshape(2, 6, 2), (3,))
    assert torch.equal(whole, x.reshape(4, 3, 2))


def test_unequal_blocks_move_alone():
    """Heads of 4 and 2 rows, stacked: the same numbers as four parameters."""
    whole = parameter(12, 5)
    pieces = [nn.Parameter(part.detach().clone()) for part in whole.split([4, 2, 4, 2])]
    one = muon([Named("kv", whole, "heads", (4, 2))], CONFIG)
    many = muon([Named(str(i), p, "matrix") for i, p in enumerate(pieces)], CONFIG)
    for t in range(3):
        whole.grad = parameter(12, 5, seed=t + 1).detach()
        for p, part in zip(pieces, whole.grad.split([4, 2, 4, 2]), strict=True):
            p.grad = part.clone()
        one.step()
        many.step()
    assert torch.allclose(whole, torch.cat(pieces), rtol=0, atol=1e-12)


def test_batches_are_bounded_and_change_nothing(monkeypatch):
    def run() -> tuple[list[torch.Tensor], list[tuple[int, ...]]]:
        seen = []
        real = plain.newton_schulz
        monkeypatch.setattr(plain, "newton_schulz", lambda u, **more: seen.append(u.shape) or real(u, **more))
        table = [Named(str(i), parameter(6, 4, 8, seed=i), "expert", (4,)) for i in range(3)]
        table.append(Named("tall", parameter(8, 4, seed=9), "matrix"))
        follow = muon(table, CONFIG)
        for row in table:
            row.parameter.grad = row.parameter.detach().cos()
        follow.step()
        monkeypatch.setattr(plain, "newton_schulz", real)
        return [row.parameter.detach() for row in table], [tuple(shape) for shape in seen]

    at_once, shapes = run()
    assert shapes == [(18, 4, 8), (1, 8, 4)]  # three stacks of six in one
    monkeypatch.setattr(module, "LARGEST_BATCH", 4 * 32)
    in_parts, shapes = run()
    assert all(n <= 4 for n, _, _ in shapes) and sum(n for n, _, _ in shapes) == 19
    for one, other in zip(at_once, in_parts, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_updates_have_the_size_of_adamws():
    """Root mean square 0.2 lr for full-rank gradients of any shape and size, within what Newton-Schulz leaves."""
    for shape in ((16, 16), (16, 128), (128, 16)):
        for size in (1e-4, 1e4):
            p = nn.Parameter(torch.zeros(shape))
            follow = muon([Named("w", p, "matrix")], replace(CONFIG, lr=1.0))
            p.grad = parameter(*shape, dtype=torch.float32).detach() * size
            follow.step()
            assert 0.6818 * 0.2 < float(p.detach().square().mean().sqrt()) < 1.2024 * 0.2


def test_heads_move_alike_whatever_their_gradients():
    p = nn.Parameter(torch.zeros(32, 64))
    follow = muon([Named("q", p, "heads", (16,))], CONFIG)
    p.grad = parameter(32, 64, dtype=torch.float32).detach()
    p.grad[16:] *= 1e-3
    follow.step()
    loud, quiet = (float(part.norm()) for part in p.detach().split(16))
    assert 0.9 < quiet / loud < 1.1


def test_parameters_without_gradient_stay():
    a, b = parameter(4, 4), parameter(4, 4, seed=1)
    follow = muon([Named("a", a, "matrix"), Named("b", b, "matrix"), Named("c", parameter(3), "vector")], CONFIG)
    before = b.detach().clone()
    follow.step()
    a.grad = torch.ones_like(a)
    follow.step()
    assert torch.equal(b, before)
    assert set(follow.state) == {a}


def test_state_restores_exactly():
    def table(ps):
        kinds = ("heads", "expert", "embedding", "vector")
        return [
            Named(str(i), p, kind, (2,) if i < 2 else ()) for i, (p, kind) in enumerate(zip(ps, kinds, strict=True))
        ]

    def run(follow, ps, steps):
        for t in steps:
            for p in ps:
                p.grad = torch.full_like(p, 0.1 * (t + 1)).sin() + p.detach().cos()
            set_learning_rate(follow, 0.01 * (t + 1))
            follow.step()

    shapes = ((4, 6), (3, 2, 5), (7, 4), (6,))
    one = [parameter(*shape, dtype=torch.float32, seed=i) for i, shape in enumerate(shapes)]
    first = muon(table(one), CONFIG)
    run(first, one, range(5))
    two = [nn.Parameter(p.detach().clone()) for p in one]
    second = muon(table(two), CONFIG)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    run(first, one, range(5, 9))
    run(second, two, range(5, 9))
    assert all(torch.equal(p, q) for p, q in zip(one, two, strict=True))


def test_blocks_that_do_not_fit_are_named():
    with pytest.raises(ValueError, match=r"'q': blocks of \(5,\) rows do not fill its 12 rows"):
        muon([Named("q", parameter(12, 4), "heads", (5,))], CONFIG)
    with pytest.raises(ValueError, match=r"'w' of shape \(3,\): Muon wants a contiguous matrix"):
        muon([Named("w", parameter(3), "matrix")], CONFIG)


def test_rules_are_those_of_the_config():
    assert get_args(get_type_hints(OptimConfig)["rule"]) == tuple(RULES)
    table = [Named("w", parameter(4, 4), "matrix")]
    assert type(optimizer(table, CONFIG)).__name__ == "Muon"
    assert isinstance(optimizer(table, replace(CONFIG, rule="adamw")), torch.optim.AdamW)
    with pytest.raises(ValueError, match=r"optim\.momentum is 1\.0"):
        OptimConfig(momentum=1.0)
