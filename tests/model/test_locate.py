"""Which checkpoint a path means."""

import os

import pytest

from rille.model.locate import checkpoint_name, find_checkpoint, step_checkpoints


def make(directory, age: int):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    os.utime(directory / "config.json", (10_000 - age, 10_000 - age))
    return directory


def test_itself(tmp_path):
    assert find_checkpoint(make(tmp_path / "model", 0)) == tmp_path / "model"


def test_the_last_written_of_a_run(tmp_path):
    old = make(tmp_path / "checkpoints" / checkpoint_name(100), 30)
    new = make(tmp_path / "checkpoints" / checkpoint_name(200), 20)
    (tmp_path / "checkpoints" / ".step-000300.partial-9").mkdir()
    (tmp_path / "checkpoints" / "step-000400").mkdir()  # no config.json: not whole
    assert step_checkpoints(tmp_path) == [(100, old), (200, new)]
    assert find_checkpoint(tmp_path) == new
    model = make(tmp_path / "model", 20)
    assert find_checkpoint(str(tmp_path)) == model
    newer = make(tmp_path / "checkpoints" / checkpoint_name(300), 10)
    assert find_checkpoint(tmp_path) == newer


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="absent does not exist; give a checkpoint directory"):
        find_checkpoint(tmp_path / "absent")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        find_checkpoint(tmp_path)
