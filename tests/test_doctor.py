"""The doctor: what it says here, without torch, and with an old one; its extras are those of the package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rille import cli, doctor
from rille.model.presets import PRESETS
from rille.ops import backends

TOP = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("model", [(), ("--preset", "tiny")])
def test_report(model, capsys):
    assert cli.main(["doctor", *model]) == 0
    out = capsys.readouterr().out
    assert f"torch     {torch.__version__}" in out
    assert re.search(r"cpu     \d+ cores, torch threads: \d+.*; memory [\d.]+ GB", out)
    assert f"operations of {model[1] if model else 'nano'} on" in out
    assert re.search(r"^  kda +(chunk|triton|reference) +\w", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith("ready")


def test_mistakes_end_with_2(capsys):
    assert cli.main(["doctor", "--preset", "nanno"]) == 2
    assert "did you mean 'nano'?" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("libtorch.so: no such file")

sys.meta_path.insert(0, Block())
from rille.cli import main
sys.exit(main(["doctor"]))
"""


def test_without_torch():
    run = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True)
    assert run.returncode == 0 and not run.stderr
    assert "operations of nano on cpu" in run.stdout
    assert run.stdout.splitlines()[-1].startswith("not ready: torch cannot be imported: libtorch.so")


def test_a_failing_report_is_a_line(monkeypatch):
    monkeypatch.setattr(backends, "report", fail)
    lines = list(doctor.operation_lines(torch, PRESETS["tiny"], "cpu"))
    assert lines == ["  unknown: CUDA error: out of memory and more"]


def stub(release: str, **cuda) -> SimpleNamespace:
    """As much of torch as a verdict asks for."""
    return SimpleNamespace(__version__=release, cuda=SimpleNamespace(**cuda), version=SimpleNamespace(cuda="13.0"))


def fail(*_, **__):
    raise RuntimeError("CUDA error: out of memory\nand more")


def test_verdicts(monkeypatch):
    no_cuda = {"is_available": lambda: False}
    assert (
        doctor.verdict(stub("2.9.1", **no_cuda), "") == "not ready: torch 2.9.1 is too old: pip install 'torch>=2.11'"
    )
    broken = stub("2.13.0", is_available=lambda: True)
    broken.ones = fail
    assert doctor.cuda_line(broken).startswith("none: the CUDA device fails: CUDA error: out of memory")
    monkeypatch.setattr(doctor, "has_driver", lambda: True)
    assert doctor.verdict(stub("2.13.0", **no_cuda), "").startswith(
        "ready on the CPU only: torch (which is built for CUDA"
    )
    monkeypatch.setattr(doctor, "installed", lambda package: None if package == "tyro" else "1")
    assert doctor.verdict(stub("2.13.0", **no_cuda), "") == "not ready: tyro missing: pip install tyro"


def test_extras_are_those_of_the_package():
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[><=]", line)[0] for line in requirements if not line.startswith("rille[")}

    assert {"torch", *doctor.BASE} == names(project["dependencies"])
    declared = {name: names(lines) for name, lines in project["optional-dependencies"].items()}
    ours = {extra.name: set(extra.packages) for extra in doctor.EXTRAS}
    assert ours.keys() == declared.keys()
    assert all(declared[name] - declared["gpu"] == packages - declared["gpu"] for name, packages in ours.items())


def test_a_missing_extra_says_what_it_is_for():
    line = doctor.extra_line(doctor.Extra("fly", ("no-such-package",), "flying"))
    assert line == "  fly    missing  flying: no-such-package; pip install 'rille[fly]'"
