"""The documents are true: their Python runs, the files, targets and names that they mention exist."""

import re
import tomllib
from pathlib import Path

import pytest

import rille
from rille.cli import VERBS

TOP = Path(__file__).resolve().parent.parent
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "docs/api.md",
    "docs/chat.md",
    "docs/data.md",
    "docs/eval.md",
    "docs/performance.md",
    "docs/serving.md",
    "docs/results.md",
    "docs/training.md",
    "docs/paper-map.md",
)
RUN = ("README.md", "docs/api.md", "docs/chat.md")


def text(document: str) -> str:
    return (TOP / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", RUN)
def test_python_blocks_run(document, tmp_path, monkeypatch):
    """The blocks of one document are one program, read from top to bottom."""
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    for block in re.finditer(r"^```python\n(.*?)^```", text(document), re.MULTILINE | re.DOTALL):
        lines_above = text(document)[: block.start(1)].count("\n")
        exec(compile("\n" * lines_above + block[1], TOP / document, "exec"), space)
    assert space


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document):
    """A path in code font that starts at the repository's top names something; one with CAPITALS is a place-holder."""
    paths = r"`((?:rille|tests|tools|docs|benchmarks|\.ci)/[^`\s]*|[A-Za-z.]+\.(?:md|toml))`"
    named = re.findall(paths, text(document))
    place_holder = re.compile(r"/\w*[A-Z]{2}\w*")
    assert not [path for path in named if not place_holder.search(path) and not (TOP / path).exists()]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_targets_exist(document):
    targets = set(re.findall(r"^(\w+):", text("Makefile"), re.MULTILINE))
    code = re.findall(r"```.*?```|`[^`\n]+`", text(document), re.DOTALL)
    assert set(re.findall(r"\bmake ([a-z]+)\b", "\n".join(code))) <= targets


@pytest.mark.parametrize("document", ["README.md", "ARCHITECTURE.md"])
def test_the_tree_names_every_verb(document):
    [listed] = re.findall(r"^  cli\.py +.*?verbs: ([a-z, ]+)", text(document), re.MULTILINE)
    assert set(re.findall(r"\w+", listed)) == set(VERBS)


def test_architecture_draws_the_layers_and_lists_the_extras():
    project = tomllib.loads(text("pyproject.toml"))
    layers = next(c["layers"] for c in project["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    [drawn] = re.findall(r"```\n(__main__ > .*?)```", text("ARCHITECTURE.md"), re.DOTALL)
    assert drawn.split() == re.sub(r"[()]", "", " > ".join(layers)).split()
    [listed] = re.findall(r"The extras are (.*?);", text("ARCHITECTURE.md"))
    assert re.findall(r"`(\w+)`", listed) == list(project["project"]["optional-dependencies"])


def test_public_names_are_documented():
    api = text("docs/api.md")
    assert not [name for name in rille.__all__ if name != "__version__" and f"`rille.{name}" not in api]


# Not mechanisms: how the package is put together.
SCAFFOLD = ("allocate", "arguments", "beside", "context", "locate", "plan_table", "tracing", "__init__")


def test_the_map_is_whole():
    """Each row names a file and a test; each mechanism of the model, its ops and its text has a row."""
    rows = re.findall(r"^\| (?!mechanism)[^-].*$", text("docs/paper-map.md"), re.MULTILINE)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert len(rows) > 30
    assert not [row for row in cells if len(row) != 4 or "`rille/" not in row[2] or "`tests/" not in row[3]]
    files = [*TOP.glob("rille/model/*.py"), *TOP.glob("rille/text/*.py"), *TOP.glob("rille/ops/*/reference.py")]
    named = {name for row in cells for name in re.findall(r"`(rille/[^`]+)`", row[2])}
    missing = {str(file.relative_to(TOP)) for file in files if file.stem not in SCAFFOLD} - named
    assert not missing
