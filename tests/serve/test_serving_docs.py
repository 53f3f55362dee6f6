"""docs/serving.md and the table of reports are true: commands parse, code runs, names exist."""

import re
import shlex
from pathlib import Path

import pytest

from rille import cli
from rille.serve.api import create_app
from rille.serve.asking import Unheeded
from rille.serve.config import BenchServeConfig, ChatConfig, ServeConfig
from tests.serve.scripted import reply_ids, small_tokenizer
from tests.serve.served import serving

TOP = Path(__file__).resolve().parents[2]
TEXT = (TOP / "docs" / "serving.md").read_text(encoding="utf-8")
TABLE = (TOP / "tests" / "serve" / "README.md").read_text(encoding="utf-8")
KINDS = {"serve": ServeConfig, "chat": ChatConfig, "bench serve": BenchServeConfig}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("line", [line for block in blocks("sh") for line in block.splitlines() if line])
def test_commands_parse(line):
    words = shlex.split(line)
    verb = " ".join(words[1:3]) if words[1] == "bench" else words[1]
    assert cli.parse(KINDS[verb], words[1 + len(verb.split()) :], verb) is not None


def test_clients_code_runs():
    tokenizer = small_tokenizer()
    with serving(tokenizer) as server:
        space: dict = {}
        for block in blocks("py"):
            server.say(reply_ids(tokenizer, reasoning_content="Hm.", content="A channel."))
            exec(block.replace("http://127.0.0.1:8000", server.url), space)
        assert space["message"].stop_reason == "max_tokens" and space["reply"].model == "tiny"


def test_python_code_runs():
    space: dict = {}
    for block in blocks("python"):
        exec(block, space)
    named = set(re.findall(r"`(/[\w/]+)`", TEXT.partition("## Routes")[2].partition("## What")[0]))
    named = {path.replace("NAME", "{name:path}") for path in named}
    assert named and named <= {route.path for route in space["app"].routes}
    assert create_app.__module__ == "rille.serve.api"


def test_what_changes_nothing_is_listed():
    listed = re.findall(r"`(\w+)`", TEXT.partition("elsewhere (")[2].partition(")")[0])
    assert set(Unheeded.model_fields) <= set(listed)


def test_named_files_and_metrics_exist():
    assert not [path for path in re.findall(r"`(rille/[^`]+)`", TEXT) if not (TOP / path).is_file()]
    with serving(small_tokenizer()) as server:
        served = server.get("/metrics")[1].decode()
    section = TEXT.partition("## Metrics")[2].partition("## Events")[0]
    names = set(re.findall(r"`([a-z0-9]+_[a-z0-9_]+)`", section.partition("Ours")[0])) - {"finished_reason"}
    assert len(names) > 20
    for name in {f"vllm:{name}" for name in names} | set(re.findall(r"`(rille:\w+|process_\w+)`", section)):
        assert re.search(rf"^# TYPE {name} ", served, re.MULTILINE), name


ROWS = re.findall(r"^\| ([A-D]\d+(?:, [A-D]\d+)*) \| [^|]+ \| ([^|]+) \|$", TABLE, re.MULTILINE)


@pytest.mark.parametrize(("row", "tests"), ROWS, ids=[row for row, _ in ROWS])
def test_the_table_names_tests_that_exist(row, tests):
    for part in tests.split(";"):
        file = re.search(r"`([\w./]+\.py)`", part)
        assert file, part
        source = (Path(__file__).parent / file[1]).read_text(encoding="utf-8")
        names = re.findall(r"\b[a-z]\w*_\w+\b", re.sub(r"\(.*?\)|`[^`]*`", "", part))
        for name in names:
            assert re.search(rf"def (?:test_)?{name.removeprefix('test_')}|def {name}", source), f"{row}: {name}"
        assert names or "`" in part


def test_the_table_is_whole():
    """Every row that asks for a test without a GPU; the others say of themselves that they need a GPU or a fleet."""
    found = {name for row, _ in ROWS for name in row.split(", ")}
    elsewhere = {"B4", "C4", "C8", "D6", "D11"}
    wanted = {
        f"{letter}{n}" for letter, last in (("A", 21), ("B", 13), ("C", 9), ("D", 11)) for n in range(1, last + 1)
    }
    assert found == wanted - elsewhere
