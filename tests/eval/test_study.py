"""Studies: runs that are paired by seed, made once, compared rightly; those that the command line knows."""

import json
from dataclasses import replace

import pytest

from rille.eval import study as studies
from rille.eval.study import run_study
from rille.eval.study_config import Curve, Reading, Study, StudyConfig
from rille.eval.study_readings import Finished, compare, points, read
from rille.optim.config import OptimConfig
from rille.recipes.study import STUDIES
from tests.train.small import small_config


def small_study(tmp_path) -> Study:
    """Two names for the same variant, and a third that differs."""
    data = small_config(tmp_path).data
    sizes = {"eval_every": 2, "eval_tokens": 128, "data": data, "model": small_config(tmp_path).model}
    return Study(
        name="small",
        line="A small study",
        config=StudyConfig(out=str(tmp_path / "study"), steps=4, seeds=(0, 3), optim=OptimConfig(lr=3e-3), **sizes),
        variants={"one": {"balance": "quantile"}, "same": {"balance": "quantile"}, "plain": {"residual": "standard"}},
        readings=(Reading("held-out loss", "held_out_loss", "end"), Reading("dead", "dead_experts/", "run")),
        curves=(Curve("loss", "loss"), Curve("RMS", "output_rms/", along="part", log=True)),
    )


def test_a_study(tmp_path, capsys, monkeypatch):
    study = small_study(tmp_path)
    out = run_study(study, study.config)
    facts = json.loads((out / "study.json").read_text())
    assert (out / "study.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (out / "runs").iterdir()) == [
        f"{name}-{seed}" for name in ("one", "plain", "same") for seed in (0, 3)
    ]
    one, same, plain = facts["comparison"][:3]
    assert one["by_seed"] == same["by_seed"], "equal variants of a seed must be equal runs"
    assert same["difference"] == {"mean": 0.0, "half": 0.0}
    assert one["by_seed"]["0"] != one["by_seed"]["3"]
    assert plain["by_seed"] != one["by_seed"]
    assert "held-out loss" in capsys.readouterr().out

    monkeypatch.setattr(studies, "set_up", None)  # whoever trains again fails
    run_study(study, study.config)
    assert json.loads((out / "study.json").read_text())["comparison"] == facts["comparison"]
    with pytest.raises(ValueError, match=r"other settings: optim\.lr 0\.003, now 0\.5"):
        run_study(study, replace(study.config, optim=OptimConfig(lr=0.5)))
    with pytest.raises(ValueError, match="other settings: steps 4, now 5"):
        run_study(study, replace(study.config, steps=5))


def test_a_run_that_was_stopped_is_made_again(tmp_path):
    study = small_study(tmp_path)
    study = replace(study, variants={"one": {}})
    out = run_study(study, study.config)
    metrics = out / "runs" / "one-3" / "metrics.jsonl"
    whole = [json.loads(line) for line in metrics.read_text().splitlines()]
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in whole[:2]))
    run_study(study, study.config)
    again = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [row["loss"] for row in again] == [row["loss"] for row in whole]


def rows_of(losses: list[float], dead: list[tuple[int, int]]) -> list[dict]:
    return [
        {"step": step, "loss": loss, "dead_experts/1": a, "dead_experts/2": b}
        for step, (loss, (a, b)) in enumerate(zip(losses, dead, strict=True), 1)
    ]


def test_readings():
    rows = rows_of([4.0, 3.0, 2.0, 1.0], [(0, 1), (2, 3), (0, 0), (5, 1)])
    assert read(rows, Reading("", "loss", "end")) == 1.0
    assert read(rows, Reading("", "loss", "run")) == 2.5
    assert read(rows, Reading("", "loss", "last quarter")) == 1.0
    assert read(rows, Reading("", "dead_experts/", "run")) == 3.0
    assert read(rows, Reading("", "dead_experts/", "end", fold="max")) == 5
    assert points(rows, Curve("", "dead_experts/")) == ([1, 2, 3, 4], [1, 5, 0, 6])
    assert points(rows, Curve("", "dead_experts/", along="part")) == (["1", "2"], [5, 1])
    with pytest.raises(ValueError, match="the runs have no accuracy"):
        read(rows, Reading("", "accuracy", "end"))


def test_differences_are_taken_seed_by_seed(tmp_path):
    """Seeds differ by 10, variants by 1 in each: the difference is sure, the means are not."""
    study = replace(small_study(tmp_path), variants={"a": {}, "b": {}}, readings=(Reading("loss", "loss", "end"),))
    ends = {("a", 0): 10.0, ("a", 1): 20.0, ("b", 0): 11.0, ("b", 1): 21.1}
    runs = [Finished(name, seed, rows_of([end], [(0, 0)])) for (name, seed), end in ends.items()]
    _, row = compare(study, runs)
    assert row["difference"].mean == pytest.approx(1.05)
    assert row["difference"].half == pytest.approx(12.706 * 0.05, rel=1e-3)
    assert row["mean"].half > 60


@pytest.mark.parametrize("name", STUDIES)
def test_studies_of_the_command_line(name):
    study = STUDIES[name]()
    assert study.name == name
    for variant, changes in study.variants.items():
        plan = study.config.run(variant, changes, 7)
        assert (plan.seed, plan.data.seed) == (7, study.config.data.seed + 7)
        assert all(getattr(plan.model, key) == value for key, value in changes.items())


@pytest.mark.parametrize("seeds", [(0,), (1, 1), (0, -1), ()])
def test_seeds_that_are_refused(tmp_path, seeds):
    with pytest.raises(ValueError, match="give at least two different ones"):
        replace(small_study(tmp_path).config, seeds=seeds)
