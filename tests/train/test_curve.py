"""What benchmarks/train/curve.py compares curves by: other roundings of weights, forms without kernels, the gate."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from rille.model.model import new_model
from rille.model.presets import preset
from rille.ops import moe, norm
from rille.ops.mla import choice
from rille.optim.config import OptimConfig

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "train" / "curve.py"
SPEC = importlib.util.spec_from_file_location("curve", PATH)
assert SPEC is not None and SPEC.loader is not None
curve = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(curve)


def test_another_rounding_moves_elements_by_one_unit_at_most() -> None:
    config = preset("tiny").replace(num_layers=4, mla_layers=(3,))
    a, b = (new_model(config, dtype=torch.bfloat16, seed=0) for _ in "12")
    curve.round_otherwise(b)
    for (name, x), y in zip(a.named_parameters(), b.parameters(), strict=True):
        if x.dtype == torch.bfloat16:
            units = (x.detach().view(torch.int16).int() - y.detach().view(torch.int16).int()).abs()
            assert units.max() <= 1, name
            assert not x.std() > 0 or 0.1 < units.float().mean() < 0.6, name
        else:
            assert torch.equal(x, y), f"{name} is held in fp32: nothing was rounded"


def test_plain_forms_take_no_kernel_and_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe, "HAS_TRITON", True)
    faster = choice.library_is_faster
    with pytest.raises(KeyError), curve.plain_forms():
        assert not moe.HAS_TRITON and not norm.HAS_TRITON
        assert choice.library_is_faster(torch.empty(1), torch.empty(1), None) == ""  # pyright: ignore[reportArgumentType]
        raise KeyError
    assert moe.HAS_TRITON and choice.library_is_faster is faster


def test_the_gate_sees_a_curve_that_is_off_by_more_than_noise() -> None:
    falling, draw = np.geomspace(9.0, 4.0, 200), np.random.default_rng(0)
    noisy = [list(falling + np.cumsum(draw.normal(0, 1e-3, 200))) for _ in range(4)]
    names = ("kernels", "kernels, other rounding", "PyTorch", "PyTorch, other rounding")
    same = curve.compared(dict(zip(names, noisy, strict=True)))
    assert same["passed"] and 0.1 < same["ratio"] < curve.LIMIT
    off = [[x + 0.1 for x in each] for each in noisy[:2]] + noisy[2:]
    assert not curve.compared(dict(zip(names, off, strict=True)))["passed"]


def test_curves_of_unequal_length_are_compared_as_far_as_all_came() -> None:
    names = ("kernels", "kernels, other rounding", "PyTorch", "PyTorch, other rounding")
    cut = curve.to_the_shortest({name: list(np.linspace(9, 5, 60 - i)) for i, name in enumerate(names)})
    assert {len(losses) for losses in cut.values()} == {57} and "noise" in curve.compared(cut)
    short = {name: losses[: 2 * curve.SMOOTH - 1] for name, losses in cut.items()}
    assert curve.compared(short) == {"passed": False}


def test_sizes_of_the_preset_may_be_changed() -> None:
    assert curve.config_of("nano", 0, 0) == preset("nano")
    config = curve.config_of("nano", 64, 8)
    assert (config.num_experts, config.num_layers, config.mla_layers) == (64, 8, (3, 7))


def test_no_step_begins_after_the_time_limit() -> None:
    config = preset("tiny").replace(num_layers=4, mla_layers=(3,))
    text = curve.batches(np.arange(100) % 40, config.vocab_size, 3, 1, 8)
    until = [float("inf"), 0.0]
    done = [len(curve.train(config, text, OptimConfig(), "cpu", False, "a run", curve.Clock(0.0, t))) for t in until]
    assert done == [3, 0]


def test_batches_follow_one_another_and_must_be_of_the_vocabulary() -> None:
    text = curve.batches(np.arange(50) % 40, 40, 3, 2, 8)
    assert [int(batch.tokens[0]) for batch in text] == [0, 16, 32] and text[0].lengths == (8, 8)
    assert torch.equal(text[1].tokens[1:], text[1].targets[:-1])
    with pytest.raises(SystemExit, match="39 of the text is none of the model's 30"):
        curve.batches(np.arange(50) % 40, 30, 3, 2, 8)
    with pytest.raises(SystemExit, match="more than the 50 tokens"):
        curve.batches(np.arange(50) % 40, 40, 4, 2, 8)
