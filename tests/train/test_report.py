"""`rille report`: a whole page from what a run wrote, the same each time; the numbers in the pictures are the rows'."""

import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pytest

from rille import cli
from rille.train import plots
from rille.train.pretrain import pretrain
from rille.train.report import ReportConfig, pictures, recorded, report, summary
from tests.train.small import small_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reported")
    pretrain(small_config(folder, steps=6, eval_every=3))
    pretrain(small_config(folder, steps=6, eval_every=3, out=str(folder / "other"), seed=1))
    return folder / "run"


def test_the_page_is_whole_and_repeats(run, capsys):
    assert cli.main(["report", str(run), "--pictures", str(run / "pictures")]) == 0
    assert capsys.readouterr().out == f"{run / 'report.html'}\n"
    first = (run / "report.html").read_text()
    titles = ("Loss", "Load violation", "Expert load", "Attention Residuals", "Output RMS", "Gradient norms", "Speed")
    assert all(f"<h2>{title}</h2>" in first for title in (*titles, "Update norms", "Settings"))
    assert first.count("<svg ") == first.count("</svg>") == 8 and not re.search(r"(src|href)=.(?!#|data:)", first)
    for file in (run / "pictures").iterdir():
        assert ElementTree.fromstring(file.read_text()).tag.endswith("svg") and file.read_text() in first
    assert len(list((run / "pictures").iterdir())) == 8
    report(ReportConfig(run=str(run)))
    assert (run / "report.html").read_text() == first


def test_two_runs_in_one_picture(run):
    page = report(ReportConfig(run=str(run), beside=(str(run.parent / "other"),), out=str(run.parent / "both.html")))
    assert page == run.parent / "both.html" and ">other<" in page.read_text()
    lines = plots.losses([(one.name, one.rows) for one in map(recorded, (run, run.parent / "other"))]).axes[0].lines
    assert [len(line.get_xdata()) for line in lines] == [6, 2, 6, 2]
    assert list(lines[1].get_ydata()) == [row["held_out_loss"] for row in recorded(run).rows if "held_out_loss" in row]


def test_maps_show_the_last_look(run):
    look = recorded(run).looks[-1]
    assert look["step"] == 6
    share_LE = plots.loads(look).axes[0].images[0].get_array()
    assert share_LE.shape == (2, 8) and np.allclose(share_LE.mean(1), 1)
    assert np.allclose(share_LE[0], sorted(np.array(look["expert_load"]["1"]) / 32, reverse=True))
    map_SR = np.asarray(plots.attention(look).axes[0].images[0].get_array(), dtype=float)
    assert np.allclose(np.nansum(map_SR, 1), 1) and np.isnan(map_SR).any()
    assert map_SR[-1].tolist() == look["attn_res"]["output_mix"]


def test_dead_experts_have_a_picture_of_their_own(run):
    rows = [{**row, "dead_experts/2": float(row["step"] == 4)} for row in recorded(run).rows]
    without, with_them = (pictures([replace(recorded(run), rows=these)]) for these in (recorded(run).rows, rows))
    drawn = {title: figure for title, _, figure in with_them}
    assert set(drawn) - {title for title, _, _ in without} == {"Dead experts"}
    lines = {line.get_label(): list(line.get_ydata()) for line in drawn["Dead experts"].axes[0].lines}
    assert lines == {"layer 1": [0] * 6, "layer 2": [0, 0, 0, 1, 0, 0]}


def test_long_runs_become_means():
    rows = [{"step": step, "loss": float(step % 2)} for step in range(1, 10 * plots.POINTS + 4)]
    steps, values = plots.series([*rows, {"step": 10**6, "loss": None}, {"step": 7}], "loss")
    assert len(steps) <= plots.POINTS and steps[0] == 6 and np.allclose(values, 0.5, atol=0.05)
    assert [len(x) for x in plots.series(rows, "absent")] == [0, 0]


def test_the_summary_is_of_the_rows(run):
    lines = dict(summary(recorded(run)))
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert (lines["steps"], lines["tokens"]) == ("6", "768") and lines["loss"] == f"{last['loss']:.3f}"
    assert lines["held out loss"] == f"{last['held_out_loss']:.3f} after step 6" and lines["steps passed over"] == "0"


def test_a_run_that_has_only_begun(tmp_path):
    row = {"step": 1, "loss": None, "gradient_norm": None, "tokens_per_second": 3.0, "learning_rate": 0.1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "lo')
    assert "not finite" in report(ReportConfig(run=str(tmp_path))).read_text()


def test_rows_and_looks_that_lack_what_others_have(tmp_path):
    """Of a run of another version: what is known is drawn."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2, "loss": 5.0}\n{"step": 3}\n')
    (tmp_path / "inspections.jsonl").write_text('{"step": 2}\n')
    page = report(ReportConfig(run=str(tmp_path), out=str(tmp_path / "pages" / "one.html"))).read_text()
    assert "<h2>Loss</h2>" in page and "<h2>Output RMS</h2>" not in page
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(ValueError, match=r"run.json is damaged .*; move it away"):
        report(ReportConfig(run=str(tmp_path)))


@pytest.mark.parametrize("name", ["absent", "."])
def test_a_directory_without_a_run(tmp_path, name, capsys):
    assert cli.main(["report", str(tmp_path / name)]) == 2
    assert "holds no steps of a run (metrics.jsonl); name a directory that rille train wrote" in capsys.readouterr().err
