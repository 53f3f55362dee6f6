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


def test_help_and_a_form_that_does_not_exist(program: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in (["--help"], 0), (["--forms", "as it was"], 2):
        with pytest.raises(SystemExit) as ended:
            program["main"](words)
        assert ended.value.code == code
    printed = capsys.readouterr()
    assert "--forms" in printed.out and "no form 'as it was'; there are as it is, twin" in printed.err


def test_differences_are_counted_by_kind_and_tile(program: dict[str, Any]) -> None:
    expected = torch.zeros(2, 3, 64, 64, dtype=torch.bfloat16)
    got, same = expected.clone(), {"a": expected[0], "b": expected[1]}
    assert program["different"]({"a": got[0], "b": got[1]}, same) == []
    got[0, 1, :2] = torch.nan
    got[0, 1, 5, 5] = -0.0
    got.view(torch.int16)[0, 2, 63, 63] = 0x7FFF  # the NaN that a card computes
    assert program["different"]({"a": got[0], "b": got[1]}, same) == ["a"]
    text = program["described"](got, expected)
    assert text == (
        "(2, 3, 64, 64), 130 elements in 2 tiles, the first [0, 1, 0, 0]: 128 never written, 1 NaN, 1 other values"
    )
    tokens = torch.zeros(1000, 2, 8)
    tokens[60:70, 1] = 1.0
    assert "80 elements in 2 tiles, the first [60, 1, 0]" in program["described"](tokens, torch.zeros(1000, 2, 8))
    assert program["described"](expected, expected.clone()) == "right at a second look"
    heads = torch.arange(3.0)
    assert "2 elements in 2 tiles" in program["described"](heads, torch.zeros(3))


def test_runs_are_compared_and_counted(program: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    stages = program["controls"](3, False, "cpu")
    assert program["repeat"]("as it is", stages, 1e-3) == 0
    wrong = stages[0]._replace(run=lambda: {"pattern": torch.zeros(3, 1, 64, 64, dtype=torch.bfloat16)})
    assert program["repeat"]("as it is", [wrong], 1e-3) >= 1
    clean, *lines = capsys.readouterr().out.splitlines()
    assert clean.endswith("differing: none") and "in 3 tiles" in lines[0] and "differing: plain 3" in lines[-1]


def test_the_copy_that_waits_longer_has_one_more_line(program: dict[str, Any]) -> None:
    """Where the kernel's last line is another one, the form would be no form of it: then this fails."""
    from kda_parts import repeated  # pyright: ignore[reportMissingImports]

    from rille.ops.kda import intra_gluon

    copy = repeated.kernel_with_whole_wait()
    with repeated.in_form(program["FORMS"]["whole wait"]):
        assert intra_gluon.intra_tile_kernel is copy
    assert intra_gluon.intra_tile_kernel is not copy
    original: Any = intra_gluon.intra_tile_kernel
    assert copy.src.replace("    whole_wait()\n", "").rstrip() == original.src.rstrip()
    assert copy.src.count("whole_wait()") == 1
