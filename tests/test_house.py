"""The house keeps its rules: what starts without torch, which way imports point, what stays out of files, lengths."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rille
from tests.conftest import POISON, poisoning
from tools import size_report

TOP = Path(__file__).resolve().parent.parent

# What starts without torch: patterns under rille/. One may match nothing yet; a new file is covered when it comes.
TORCH_FREE = (
    "__init__.py",
    "cli.py",
    "**/config.py",
    "recipes/**/*.py",
    "text/**/*.py",
    "sandbox/**/*.py",
    "envs/**/*.py",
    "router/**/*.py",
    "model/names.py",
    "model/presets.py",
    "parallel/balance.py",
    "serve/schema.py",
    "serve/pages.py",
    "serve/prefix.py",
    "serve/scheduler.py",
    "serve/api.py",
)
TORCH_FREE_PROMISE = re.compile(r"\b(?:no torch|never imports torch|without torch)\b", re.IGNORECASE)
HEAVY = ("torch", "triton", "transformers", "xgrammar")

IMPORT_IN_TURN = """
import importlib, sys
heavy = set(sys.argv[1].split(","))
for name in sys.argv[2:]:
    importlib.import_module(name)
    found = heavy & set(sys.modules)
    if found:
        sys.exit(f"{name} imports {', '.join(sorted(found))}")
"""


def module_name(path: Path) -> str:
    parts = path.relative_to(TOP).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def says_so(path: Path) -> bool:
    """Whether a module's docstring promises to need no torch."""
    return bool(TORCH_FREE_PROMISE.search(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""))


def torch_free_modules() -> list[str]:
    package = TOP / "rille"
    paths = {path for pattern in TORCH_FREE for path in package.glob(pattern)} | set(
        filter(says_so, package.rglob("*.py"))
    )
    return sorted(map(module_name, paths))


def import_in_turn(modules: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_IN_TURN, ",".join(HEAVY), *modules]
    return subprocess.run(command, cwd=TOP, capture_output=True, text=True)


def test_control_plane_starts_without_torch():
    modules = torch_free_modules()
    assert {"rille", "rille.cli", "rille.model.config", "rille.model.plan"} <= set(modules)
    run = import_in_turn(modules)
    assert run.returncode == 0, run.stderr


def test_the_torch_free_check_sees_torch():
    run = import_in_turn(["rille", "rille.packing"])
    assert run.returncode == 1
    assert "rille.packing imports torch" in run.stderr


def test_face_is_lazy_and_whole():
    assert set(rille.__all__) == set(dir(rille))
    for name in rille.__all__:
        assert getattr(rille, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        rille.__getattr__("no_such_name")


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).parent / "lint-imports", "--no-logo", "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


# A contract, the module that breaks it, the import that does, and the module that it reaches for.
VIOLATIONS = (
    ("Imports point down", "packing", "rille.model.config", None),
    ("Imports point down", "optim.probe", "rille.model.config", None),
    ("Imports point down", "train.probe", "rille.serve.target", "serve.target"),
    ("Imports point down", "a_room_without_a_layer", "os", None),
    ("No cycles between siblings", "model.config", "rille.model.presets", None),
    ("A reference imports neither Triton nor a kernel", "ops.norm.reference", "triton", None),
    ("A reference imports neither Triton nor a kernel", "ops.norm.reference", "rille.ops.kda.target", "ops.kda.target"),
    ("Only ops imports Triton", "model.probe", "triton", None),
    ("Serving knows nothing of data, optimisers, environments", "serve.probe", "rille.data.target", "data.target"),
    ("Training and data know nothing of environments", "train.probe", "rille.envs.target", "envs.target"),
)


def write_module(package: Path, name: str, line: str) -> None:
    """Append a line to a module, which is made, with its package, if it is not there."""
    path = package.joinpath(*name.split(".")).with_suffix(".py")
    path.parent.mkdir(exist_ok=True)
    (path.parent / "__init__.py").touch()
    with path.open("a") as file:
        file.write(f"{line}\n")


def test_contracts_hold():
    run = lint_imports(TOP)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize(("contract", "module", "imported", "target"), VIOLATIONS)
def test_contract_catches(tmp_path, contract, module, imported, target):
    shutil.copytree(TOP / "rille", tmp_path / "rille", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(TOP / "pyproject.toml", tmp_path)
    write_module(tmp_path / "rille", module, f"import {imported}")
    if target:
        write_module(tmp_path / "rille", target, "")
    run = lint_imports(tmp_path)
    assert run.returncode == 1
    assert f"{contract} BROKEN" in run.stdout


def tracked_files() -> list[Path]:
    """Every file that git knows and that is text."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=TOP, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout: no list of files")
    paths = [TOP / name for name in listing.stdout.split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8000]]


# An absolute path names one machine; a leftover mark or a ticket number belongs in the tracker.
ABSOLUTE_PATH = re.compile(r"(?<![\w.~:/-])/(?:home|root|work|Users|tmp|mnt|opt|data)/\w")
LEFTOVER = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b|\b[Ii]ssue #?\d{1,2}\b")


@pytest.mark.parametrize(
    ("pattern", "caught"),
    [(ABSOLUTE_PATH, "open('/home/someone/weights')"), (LEFTOVER, "# TODO: later"), (LEFTOVER, "as issue 7 asks")],
)
def test_files_are_clean(pattern, caught):
    assert pattern.search(caught)
    found = [
        f"{path.relative_to(TOP)}:{number}: {line.strip()}"
        for path in tracked_files()
        if path != Path(__file__)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert not found, "\n".join(found)


def test_no_drawers():
    """A module is named for what it holds."""
    drawers = {"utils", "util", "common", "core", "helpers", "misc"}
    assert not [path for path in (TOP / "rille").rglob("*") if path.stem in drawers]


@pytest.mark.parametrize(("folder", "others", "unnamed"), [("serve", ["page/"], ["__init__.py"]), ("ops/kda", [], [])])
def test_the_map_of_a_folder_has_every_file_once(folder, others, unnamed):
    """Of those that are too large to be read as a list: the first table of their README."""
    place = TOP / "rille" / folder
    rows = re.search(r"^\| part \|.*?\n\n", (place / "README.md").read_text() + "\n\n", re.DOTALL | re.MULTILINE)
    assert rows is not None
    named = re.findall(r"`(\w+\.py|page/)`", rows[0])
    files = {path.name for path in place.glob("*.py")} - set(unnamed)
    assert sorted(named) == sorted([*others, *files])


def test_sizes():
    assert not list(size_report.over_limit(size_report.measure_tree(TOP)))


@pytest.mark.parametrize(
    ("decorator", "lines", "over"),
    [("", 80, False), ("", 81, True), ("@triton.jit\n", 200, False), ("@gluon.jit(debug=True)\n", 201, True)],
)
def test_size_report_sees_a_long_function(decorator, lines, over):
    source = decorator + "def f():\n" + "    pass\n" * (lines - 1)
    assert bool(list(size_report.over_limit([size_report.measure("rille/f.py", source)]))) is over


@pytest.mark.parametrize(
    ("kernel", "lines", "over"), [("", 400, False), ("", 401, True), ("@jit\ndef f(): 0\n", 600, False)]
)
def test_size_report_sees_a_long_file(kernel, lines, over):
    source = kernel + "\n" * (lines - kernel.count("\n"))
    assert bool(list(size_report.over_limit([size_report.measure("rille/f.py", source)]))) is over


# Memory that the library asks for comes poisoned; torch's own and the tests' does not.
def ask_from(module: str, make, *args, **kwargs) -> torch.Tensor:
    space = {"__name__": module, "make": make, "args": args, "kwargs": kwargs}
    return eval("make(*args, **kwargs)", space)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_poison_is_nan_in_every_float(dtype):
    assert ask_from("rille.ops.probe", poisoning(torch.empty), (3, 2), dtype=dtype).float().isnan().all()


def test_poison_of_integers_and_strangers():
    empty = poisoning(torch.empty)
    assert (ask_from("rille.ops.probe", empty, 5, dtype=torch.uint8) == POISON).all()
    assert (ask_from("rille.ops.probe", empty, 5, dtype=torch.int64) == -1).all()
    assert ask_from("rille.ops.probe", empty, 5, dtype=torch.bool).all()
    assert ask_from("rille.ops.probe", empty, 5, device="meta").shape == (5,)
    assert not ask_from("torch.nn", poisoning(torch.zeros), 5).isnan().any()


@pytest.mark.parametrize(
    "call", ["torch.empty(4)", "torch.empty_like(x)", "torch.empty_strided((4,), (1,))", "x.new_empty(4)"]
)
def test_poison_reaches_every_door(poisoned_memory, call):
    assert eval(call, {"__name__": "rille.probe", "torch": torch, "x": torch.zeros(4)}).isnan().all()


# What PyTorch keeps to itself and Rille calls. A GPU has another kernel for it than the CPU of most tests, often for
# fewer dtypes: a name comes into this list when its call has run on one.
RAN_ON_A_GPU = {
    "_C",  # who looks on: modes, transforms, traces
    "_flash_attention_forward",
    "_foreach_copy_",
    "_foreach_div_",
    "_foreach_norm",
    "_foreach_sub_",
    "_grouped_mm",
}


def private_calls(source: str) -> set[str]:
    return set(re.findall(r"\btorch(?:\.\w+)*\.(_(?!_)\w+)", source))


def test_private_calls_of_torch_are_those_that_ran_on_a_gpu():
    assert private_calls("torch._amp_x_(g); torch.ops.aten._y(q); torch.__version__; torch.mul(a)") == {"_amp_x_", "_y"}
    sources = [path.read_text(encoding="utf-8") for path in sorted((TOP / "rille").rglob("*.py"))]
    assert set().union(*map(private_calls, sources)) == RAN_ON_A_GPU
