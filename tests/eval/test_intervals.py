"""Intervals: numbers from a table of Student's t, and that they hold the truth as often as they say."""

import numpy as np
import pytest

from rille.eval.intervals import Interval, mean_interval, ratio_interval


def test_three_numbers():
    found = mean_interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half == pytest.approx(2.4841, abs=1e-3)  # 4.303 * 1 / sqrt(3)
    assert str(found) == "2 ± 2.5"


def test_one_number_has_no_interval():
    assert mean_interval([1.5]) == Interval(1.5, None)
    assert str(Interval(1.5, None)) == "1.5"
    with pytest.raises(ValueError, match="no numbers"):
        mean_interval([])


@pytest.mark.parametrize(
    ("mean", "half", "side"),
    [(0.3, 0.2, "above"), (-0.3, 0.2, "below"), (0.1, 0.2, "not told apart"), (0.3, None, "not told apart")],
)
def test_side(mean, half, side):
    assert Interval(mean, half).side == side


@pytest.mark.parametrize("count", [2, 3, 5, 30])
def test_intervals_hold_the_truth(count):
    draw = np.random.default_rng(count)
    held = 0
    for _ in range(2000):
        found = mean_interval(draw.normal(7.0, 2.0, count).tolist())
        held += found.half is not None and abs(found.mean - 7.0) <= found.half
    assert 0.93 < held / 2000 < 0.975


def test_ratio_intervals_hold_the_truth():
    """Documents of very different sizes, with their own rate around 0.8."""
    draw, held = np.random.default_rng(0), 0
    for _ in range(1000):
        sizes = draw.lognormal(5, 0.5, 60)
        found = ratio_interval(sizes * draw.normal(0.8, 0.2, 60), sizes)
        held += found.half is not None and abs(found.mean - 0.8) <= found.half
    assert 0.91 < held / 1000 < 0.98
    assert ratio_interval(np.array([6.0]), np.array([3.0])) == Interval(2.0, None)
