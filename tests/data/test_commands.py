"""The commands of docs/data.md run as they stand there; each verb explains itself; mistakes are one line."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rille.cli import main
from rille.data.commands import VERBS
from tests.data.sets import essay, write_jsonl
from tests.data.test_filters import ENGLISH, GERMAN, sentences

TOP = Path(__file__).resolve().parent.parent.parent
PAGE = TOP / "docs" / "data.md"


def write_sources(folder: Path) -> None:
    """What the page speaks of."""
    (folder / "notes").mkdir()
    for seed in range(12):
        (folder / "notes" / f"{seed}.txt").write_text(essay(seed, 200), encoding="utf-8")
    modules = sorted((TOP / "rille" / "data").glob("*.py"))[:12]
    write_jsonl(folder / "code.jsonl", [module.read_text(encoding="utf-8")[:2500] for module in modules])
    write_jsonl(folder / "english.jsonl", sentences(ENGLISH, 100, 0))
    write_jsonl(folder / "german.jsonl", sentences(GERMAN, 100, 1))
    write_jsonl(folder / "mail.jsonl", [essay(seed) for seed in range(50, 70)] + sentences(GERMAN, 3, 2))


def test_the_page_is_true(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    monkeypatch.chdir(tmp_path)
    write_sources(tmp_path)
    ran = 0
    for language, block in re.findall(r"^```(sh|python)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        if language == "python":
            exec(compile(block, PAGE, "exec"), {})
            continue
        for line in block.replace("\\\n", " ").splitlines():
            program, *arguments = shlex.split(line)
            assert program == "rille"
            assert main([*arguments, "--workers", "1"] if arguments[:2] == ["data", "build"] else arguments) == 0
            ran += 1
    assert ran == 8
    printed = capsys.readouterr().out
    assert "shards are as they were written" in printed
    assert "What became of the records" in printed
    assert "rille train RECIPE --data sets/first --data.vocab-size 400 --model.vocab-size 400" in printed
    assert json.loads((tmp_path / "sets" / "first" / "report.json").read_text())["domains"]["code"]["records"] == 12


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as end:
        main(["data", verb, "--help"])
    assert end.value.code == 0
    assert f"usage: rille data {verb}" in capsys.readouterr().out


def test_overview_lists_every_verb(capsys: pytest.CaptureFixture):
    assert main(["data", "--help"]) == 0
    printed = capsys.readouterr().out
    assert all(f"\n  {verb} " in printed for verb in VERBS)
    assert main(["data"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data", "bild"], "unknown verb 'data bild'; did you mean 'build'? the verbs are build"),
        (["data", "build", "a=nowhere", "--out", "set"], "nowhere does not exist"),
        (["data", "report", "nowhere"], "holds no report.json"),
        (["data", "synthesise", "nowhere", "--out", "x.jsonl"], "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_pipeline_needs_no_torch():
    modules = "build, commands, filter_training, rephrase, synthesis, report, dataset, gather, shards"
    code = f"import sys\nfrom rille.data import {modules}\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=TOP)
