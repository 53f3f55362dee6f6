"""The commands of docs/eval.md run as they stand there; each verb explains itself; mistakes are one line."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest

from rille.cli import main
from rille.eval.commands import VERBS
from tests.train.small import write_text

TOP = Path(__file__).resolve().parent.parent.parent
PAGE = TOP / "docs" / "eval.md"


def test_the_page_is_true(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path / "notes")
    (tmp_path / "notes/00.py").rename(tmp_path / "notes/one.txt")
    shutil.copytree(run, tmp_path / "runs" / "first")
    ran = 0
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            program, *arguments = shlex.split(line)
            assert program == "rille"
            assert main(arguments) == 0
            ran += 1
    assert ran == 7
    assert json.loads((tmp_path / "evals/first/held-out.json").read_text())["rows"]
    facts = json.loads((tmp_path / "studies/small/study.json").read_text())
    assert {row["variant"] for row in facts["comparison"]} == {"plain", "attnres"}
    assert "minus plain, by seed" in capsys.readouterr().out


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as end:
        main(["eval", verb, "--help"])
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert f"rille eval {verb}" in printed
    assert (
        f"`rille eval {verb}" in PAGE.read_text() or f"`{verb}`" in PAGE.read_text() or f" {verb} " in PAGE.read_text()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "recal"], "unknown verb 'eval recal'; did you mean 'recall'? the verbs are held-out"),
        (["eval", "xyz"], "unknown verb 'eval xyz'; the verbs are held-out"),
        (["eval", "held-out", "nowhere"], "nowhere does not exist"),
        (["eval", "held-out", "nowhere", "--context", "0"], "context is 0; it must be at least 1"),
        (["eval", "needle", "nowhere", "--depths", "2"], "depths are (2.0,)"),
        (["eval", "harness", "nowhere", "--tasks", "arc_easy", "--limit", "0"], "limit 0"),
        (["eval", "recall", "nowhere", "--tasks"], "no tasks; name at least one"),
        (["eval", "learn", "mqar", "--lr", "inf"], "lr is inf; it must be above 0 and finite"),
        (["eval", "learn", "mqar", "--symbols", "8"], "has 16 pairs, of 4 keys"),
        (["study", "attnres"], "unknown study 'attnres'; did you mean 'attnres-tiny'?"),
        (["study", "attnres-tiny", "--steps", "0"], "steps is 0; it must be at least 1"),
        (["study", "attnres-tiny", "--seeds", "1"], "give at least two different ones"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert printed.count("\n") == 1


@pytest.mark.parametrize("verb", ["eval", "study"])
def test_overviews(verb, capsys):
    assert main([verb]) == 2
    assert main([verb, "--help"]) == 0
    assert f"usage: rille {verb}" in capsys.readouterr().out


def test_the_harness_is_asked_for_by_its_extra(monkeypatch, capsys):
    monkeypatch.setattr("rille.eval.commands.find_spec", lambda name: None)
    assert main(["eval", "harness", "nowhere", "--tasks", "arc_easy"]) == 2
    assert "pip install 'rille[eval]'" in capsys.readouterr().err
