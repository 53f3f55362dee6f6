"""The commands of docs/training.md: those for a laptop run as they stand, on little text; those for a GPU parse."""

import re
import shlex
from pathlib import Path

import pytest
from tyro.extras import overridable_config_cli

from rille.cli import main
from rille.recipes.pretrain import RECIPES
from rille.train.metrics import read_metrics
from tests.train.small import write_text

PAGE = (Path(__file__).resolve().parent.parent.parent / "docs" / "training.md").read_text(encoding="utf-8")
LITTLE = (
    "--steps 4 --eval-tokens 128 --data.vocab-size 320 --model.vocab-size 320 --data.held-out 0.1 "
    "--data.batch-tokens 64 --data.sequence-length 64 --model.num-layers 4 --model.mla-layers 3"
).split()


def commands(language: str) -> list[list[str]]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line) for kind, block in blocks if kind == language for line in block.splitlines()]
    assert all(program == "rille" for program, *_ in lines)
    return [arguments for _, *arguments in lines]


def test_commands_for_a_laptop_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "notes")
    lines = commands("sh")
    assert len(lines) == 6
    for arguments in lines:
        assert main([*arguments, *LITTLE] if arguments[0] == "train" else arguments) == 0
    for run in ("first", "mean", "half"):
        assert [row["step"] for row in read_metrics(tmp_path / "runs" / run / "metrics.jsonl")] == [1, 2, 3, 4]
    for made in ("runs/first/report.html", "runs/mean/report.html", "runs/mean/model-ema", "pictures/loss.svg"):
        assert (tmp_path / made).exists()


def test_commands_for_a_gpu_parse():
    lines = [arguments for arguments in commands("") if arguments[0] == "train"]
    assert len(lines) == 3
    configs = [overridable_config_cli({a[1]: ("", RECIPES[a[1]]())}, args=a[1:]) for a in lines]
    assert [config.max_minutes for config in configs] == [50, 50, None]
    assert [stage.sequence_length for stage in configs[2].all_stages] == [4096, 16384, 65536]
    assert all((config.device, config.dtype, config.optim.rule) == ("cuda", "bfloat16", "muon") for config in configs)


@pytest.mark.parametrize("name", ["nano", "nano-160k", "mini"])
def test_what_the_table_says_of_the_recipes(name):
    config = RECIPES[name]()
    assert config.accumulate * config.data.batch_tokens == 131_072 and config.guard.spike == 1.0
    assert config.save_in_background
