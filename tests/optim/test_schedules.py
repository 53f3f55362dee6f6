"""The learning rate at every step against the formulas, and where each piece begins and ends."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest

from rille.optim.config import OptimConfig
from rille.optim.schedules import SCHEDULES, learning_rate

CONFIG = OptimConfig(lr=2.0, warmup_fraction=0.1, decay_fraction=0.25, min_lr_ratio=0.2)


def course(config: OptimConfig, total: int, steps: int | None = None) -> list[float]:
    return [learning_rate(step, total, config) for step in range(steps or total)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warm_up_is_linear_and_reaches_the_peak(schedule):
    rates = course(replace(CONFIG, schedule=schedule), 100)
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert max(rates) == rates[9] == 2.0


def test_cosine():
    rates = course(CONFIG, 100)
    expected = [2.0 * (0.2 + 0.8 * (1 + math.cos(math.pi * (t - 9) / 90)) / 2) for t in range(10, 100)]
    assert rates[10:] == pytest.approx(expected)
    assert rates[54] == pytest.approx(2.0 * 0.6)  # half way
    assert rates[-1] == pytest.approx(0.4)
    assert course(CONFIG, 100, 130)[100:] == pytest.approx([0.4] * 30)


def test_constant():
    assert course(replace(CONFIG, schedule="constant"), 100)[9:] == [2.0] * 91


def test_wsd():
    rates = course(replace(CONFIG, schedule="wsd"), 100, 110)
    assert rates[9:75] == [2.0] * 66
    assert rates[75:100] == pytest.approx([2.0 * (1 - 0.8 * (i + 1) / 25) for i in range(25)])
    assert rates[99:] == pytest.approx([0.4] * 11)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 3, 7])
@pytest.mark.parametrize("shares", [(0.0, 0.0), (1.0, 0.0), (0.5, 0.5), (0.0, 1.0)])
def test_short_runs_stay_within_peak_and_floor(schedule, total: int, shares: tuple[float, float]):
    config = replace(CONFIG, schedule=schedule, warmup_fraction=shares[0], decay_fraction=shares[1])
    rates = course(config, total, total + 3)
    assert all(0 < rate <= 2.0 for rate in rates)
    if shares[0] == 0:
        assert min(rates) >= 0.4 - 1e-12


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.0},
        {"lr": float("nan")},
        {"lr": float("inf")},
        {"eps": -1e-8},
        {"eps": float("inf")},
        {"weight_decay": float("inf")},
        {"clip": 0.0},
        {"warmup_fraction": 1.5},
        {"decay_fraction": -0.1},
        {"min_lr_ratio": 2.0},
        {"betas": (0.9, 1.0)},
        {"weight_decay": -0.1},
        {"qk_clip": 0.0},
    ],
)
def test_config_names_what_is_out_of_range(change: dict):
    ((name, _),) = change.items()
    with pytest.raises(ValueError, match=rf"optim\.{name}"):
        OptimConfig(**change)


def test_wsd_needs_room_for_warm_up_and_decay():
    with pytest.raises(ValueError, match=r"0\.6 and optim\.decay_fraction 0\.5 exceed 1 together"):
        OptimConfig(schedule="wsd", warmup_fraction=0.6, decay_fraction=0.5)


def test_schedules_need_no_torch():
    code = "import sys, rille.optim.schedules; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
