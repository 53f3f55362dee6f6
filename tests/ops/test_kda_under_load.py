"""What benchmarks/ops/kda_under_load.py does without a card: options, counts, how it tells of what differs."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "ops"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    return runpy.run_path(str(FOLDER / "kda_under_load.py"))


def test_help(program: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program["main"](["--help"])
    assert ended.value.code == 0 and "--repeating" in capsys.readouterr().out


def test_a_difference_is_told_with_its_bits(program: dict[str, Any]) -> None:
    expected = torch.zeros(2, 3, 8, dtype=torch.bfloat16)
    got = expected.clone()
    got[1, 2, :2], got[1, 2, 2] = torch.nan, -0.0
    assert program["described"](got, expected).startswith("3 of (2, 3, 8), 2 NaN, from [1, 2, 0]: 7fc0 7fc0 8000")
    assert program["described"](expected, expected.clone()) == "right at a second look"


def test_calls_are_compared_with_the_first(program: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    calls = iter(range(10**6))

    def run() -> list[tuple[str, torch.Tensor]]:
        return [("same", torch.ones(4)), ("o", torch.full((4,), -0.0 if next(calls) == 5 else 0.0))]

    assert program["repeat"]("bounded", run, 1e-3) == 1
    line, total = capsys.readouterr().out.splitlines()
    assert "bounded, 8 calls, o: 4 of (4,), 0 NaN, from [0]: 80000000" in line and total.endswith("1 differ")
