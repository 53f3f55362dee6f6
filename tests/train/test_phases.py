"""Signals in every part of a run: it saves, nothing half-written is in sight, and a resume is bit-equal."""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from rille import cli
from rille.model.checkpoint import load_model
from rille.model.locate import step_checkpoints
from rille.recipes.pretrain import RECIPES
from rille.train.checkpoint import read_numbers, read_tensors
from rille.train.folder import LOCK
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from tests.train.small import small_config

INT, TERM = signal.SIGINT, signal.SIGTERM
SETTING_UP = ("rille.data.corpus.train_tokenizer", "rille.data.corpus._write_tokens", "rille.train.pretrain.set_up")
STEPPING = (
    "rille.train.pretrain.open_loggers",
    "rille.train.loop.next_batches",
    "rille.train.loop.all_losses",
    "rille.train.loop.clip_gradients",
    "rille.train.loop.update_biases",
    "rille.train.loop.mean_losses",
    "rille.train.loop.save_checkpoint",
    "rille.model.checkpoint._write_shards",
    "rille.train.snapshot.save_shard",
)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    pretrain(config_in(folder))
    return folder / "run"


def config_in(folder: Path, **changes):
    return small_config(folder, steps=6, checkpoint_every=2, eval_every=3, keep=1, **changes)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Starts the run of `config_in(tmp_path)`, or resumes it; gives the exit code."""

    def start() -> int:
        out = tmp_path / "run"
        monkeypatch.setitem(RECIPES, "small", lambda: config_in(tmp_path, resume=(out / "run.json").exists()))
        return cli.main(["train", "small"])

    return start


def send(monkeypatch, place: str, *numbers: int, after: bool = False) -> None:
    """The first call of a function comes with signals, before it or after it."""
    module, name = place.rsplit(".", 1)
    real = getattr(__import__(module, fromlist=[name]), name)
    left = [*numbers]

    def call(*arguments, **more):
        result = real(*arguments, **more) if after else None
        while left:
            os.kill(os.getpid(), left.pop())
        return result if after else real(*arguments, **more)

    monkeypatch.setattr(place, call)


def assert_whole(out: Path) -> list[int]:
    """Everything that counts as a checkpoint is one; gives their steps."""
    for step, path in step_checkpoints(out):
        load_model(path)
        assert read_numbers(path)["step"] == step and read_tensors(path)
    if (out / "model").exists():
        load_model(out / "model")
    assert not (out / LOCK).exists()
    return [step for step, _ in step_checkpoints(out)]


def assert_as_if_nothing_had_been(out: Path, undisturbed: Path) -> None:
    rows = [
        [{**row, **dict.fromkeys(MACHINE, 0)} for row in read_metrics(run / "metrics.jsonl")]
        for run in (out, undisturbed)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 6
    for name in ("model/model-00001-of-000001.safetensors", "checkpoints/step-000006/training/state.safetensors"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    assert [file.name for file in (out / "checkpoints").iterdir()] == ["step-000006"]


@pytest.mark.parametrize("place", SETTING_UP)
def test_ctrl_c_before_the_first_step(tmp_path, started, undisturbed, place, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        send(patch, place, INT)
        assert started() == 130
    assert capsys.readouterr().err.endswith("\nrille: interrupted\n")
    assert assert_whole(tmp_path / "run") == []
    assert started() == 0
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed)


@pytest.mark.parametrize(("number", "code"), [(INT, 130), (TERM, 143)])
@pytest.mark.parametrize("place", STEPPING)
def test_a_signal_in_every_part_of_a_step(tmp_path, started, undisturbed, place, number, code, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        send(patch, place, number)
        assert started() == code
    printed = capsys.readouterr().err
    assert "a checkpoint is saved. To go on: rille train small --resume\n" in printed and "Traceback" not in printed
    (step,) = assert_whole(tmp_path / "run")
    assert f"after step {step};" in printed
    assert started() == 0
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    "place",
    [
        "rille.model.checkpoint.save_shard",
        "rille.train.snapshot.save_shard",
        "rille.model.publish._flush",
        "rille.model.publish._swap",
    ],
)
def test_a_second_ctrl_c_while_saving_ends_at_once_and_loses_nothing(
    tmp_path, started, undisturbed, place, after, monkeypatch, capsys
):
    pretrain(replace(config_in(tmp_path), steps=2))
    old = {file: file.read_bytes() for file in (tmp_path / "run/checkpoints/step-000002").rglob("*") if file.is_file()}
    with monkeypatch.context() as patch:
        send(patch, place, INT, INT, after=after)
        assert started() == 130
    printed = capsys.readouterr().err
    assert printed.endswith("\nrille: interrupted\n") and "Traceback" not in printed
    steps = assert_whole(tmp_path / "run")
    assert steps[0] == 2 and all(file.read_bytes() == content for file, content in old.items())
    assert started() == 0
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert [file.name for file in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000006"]


def test_a_checkpoint_that_is_half_removed_is_none(tmp_path, started, undisturbed, monkeypatch):
    """Two signals, or a kill, while the one beyond `keep` is removed."""
    real = shutil.rmtree

    def half(path, **more):
        if "step-000002" in Path(path).name and not more:
            (Path(path) / "model-00001-of-000001.safetensors").unlink()
            os.kill(os.getpid(), INT)
            os.kill(os.getpid(), INT)
        real(path, **more)

    with monkeypatch.context() as patch:
        patch.setattr("rille.train.snapshot.shutil.rmtree", half)
        assert started() == 130
    assert assert_whole(tmp_path / "run") == [4]
    assert started() == 0
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed)


def test_a_signal_after_the_last_step_changes_nothing(tmp_path, started, undisturbed, monkeypatch, capsys):
    """All is done: the finished model is written out, and the run ends well."""
    send(monkeypatch, "rille.train.pretrain.save_model", INT)
    assert started() == 0
    assert_whole(tmp_path / "run")
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed)


def test_ctrl_c_in_the_summary(tmp_path, started, undisturbed, monkeypatch, capsys):
    send(monkeypatch, "rille.train.pretrain.summary", INT)
    assert started() == 130
    assert_whole(tmp_path / "run")
    assert_as_if_nothing_had_been(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("dies", ["first", "second"])
def test_where_names_cannot_be_exchanged_a_swap_that_dies_puts_the_old_one_back(tmp_path, dies, monkeypatch):
    from rille.model import publish

    target, calls, real = tmp_path / "model", [], Path.rename
    target.mkdir()
    (target / "old").touch()

    def rename(self, other):
        calls.append(self)
        if len(calls) == (1 if dies == "first" else 2):
            raise KeyboardInterrupt
        return real(self, other)

    monkeypatch.setattr(publish, "_exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(KeyboardInterrupt), publish.publishing(target) as fresh:
        (fresh / "new").touch()
    monkeypatch.undo()
    assert [file.name for file in tmp_path.iterdir()] == ["model"] and (target / "old").exists()
