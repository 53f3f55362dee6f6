"""Checkpoints in the background: of their own step whatever happens meanwhile, one at a time, errors come up."""

import errno
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from rille.model.locate import step_checkpoints
from rille.train import loop, snapshot
from rille.train.guard import GuardConfig
from rille.train.metrics import read_metrics
from rille.train.pretrain import pretrain
from rille.train.stopping import Diverged, Interrupted, Stop
from tests.train.small import small_config


def contents(run: Path) -> dict[str, bytes]:
    files = (file for _, path in step_checkpoints(run) for file in sorted(path.rglob("*")) if file.is_file())
    return {str(file.relative_to(run)): file.read_bytes() for file in files if file.name != "state.json"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_bytes_as_in_the_foreground(tmp_path, dtype):
    config = small_config(tmp_path, steps=7, checkpoint_every=2, keep=9, dtype=dtype, ema=0.9)
    pretrain(config)
    pretrain(replace(config, out=str(tmp_path / "background"), save_in_background=True))
    assert [step for step, _ in step_checkpoints(tmp_path / "background")] == [2, 4, 6, 7]
    assert contents(tmp_path / "run") == contents(tmp_path / "background")


def test_training_goes_on_while_a_copy_is_written(tmp_path, monkeypatch):
    """The first checkpoint waits for the second step, which changes all weights."""
    config = small_config(tmp_path, steps=3, checkpoint_every=1, keep=9)
    pretrain(config)
    second, order = Event(), []
    real_write, real_step = snapshot.save_shard, loop.update

    def write(pending, path):
        assert second.wait(60)
        order.append("written")
        real_write(pending, path)

    def step(run, work):
        real_step(run, work)
        order.append(f"step {run.step}")
        if run.step == 2:
            second.set()

    monkeypatch.setattr(snapshot, "save_shard", write)
    monkeypatch.setattr(loop, "update", step)
    pretrain(replace(config, out=str(tmp_path / "background"), save_in_background=True))
    assert order == ["step 1", "step 2", "written", *order[3:]] and order.count("written") == 3
    assert contents(tmp_path / "run") == contents(tmp_path / "background")


@pytest.mark.parametrize("steps", [2, 5])
def test_a_full_disk_comes_up_in_the_loop(tmp_path, monkeypatch, steps):
    """Whether it is noticed between two steps or by the last checkpoint, which waits; what was whole stays."""
    config = small_config(tmp_path, steps=steps, checkpoint_every=1, save_in_background=True)
    real = snapshot.save_shard

    def full(pending, path):
        if "step-000002" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        real(pending, path)

    monkeypatch.setattr(snapshot, "save_shard", full)
    with pytest.raises(OSError, match="No space left") as error:
        pretrain(config)
    assert "The run goes on from its last checkpoint with --resume" in error.value.__notes__
    assert [step for step, _ in step_checkpoints(tmp_path / "run")] == [1]
    assert [file.name for file in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000001"]
    monkeypatch.setattr(snapshot, "save_shard", real)
    pretrain(replace(config, resume=True))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, steps + 1))


def test_an_error_of_the_run_waits_for_the_checkpoint(tmp_path, monkeypatch):
    config = small_config(tmp_path, steps=4, checkpoint_every=1, save_in_background=True, guard=GuardConfig(limit=0))
    real = loop.reduce

    def reduce(run, work):
        real(run, work)
        if run.step == 1:
            run.model.norm.grad[0] = float("inf")

    monkeypatch.setattr(loop, "reduce", reduce)
    with pytest.raises(Diverged):
        pretrain(config)
    assert [step for step, _ in step_checkpoints(tmp_path / "run")] == [1]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", [1, 2, 3, 4, 5])
def test_a_wish_that_comes_at_any_moment_of_saving_finds_its_step_saved(tmp_path, monkeypatch, background, at):
    """The loop asks several times a step whether it shall end; the answer turns to yes at one of these times."""
    asked = iter(range(1, 1000))
    monkeypatch.setattr(Stop, "wanted", property(lambda self: next(asked) >= at))
    config = small_config(tmp_path, steps=9, checkpoint_every=2, keep=9, save_in_background=background)
    with pytest.raises(Interrupted) as stopped:
        pretrain(config)
    assert [step for step, _ in step_checkpoints(tmp_path / "run")][-1] == stopped.value.step < 9


def test_who_is_told_to_stop_hears_of_a_checkpoint_that_failed(tmp_path, monkeypatch):
    asked = iter([False, True])
    monkeypatch.setattr(Stop, "wanted", property(lambda self: next(asked)))

    def full(pending, path):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(snapshot, "save_shard", full)
    with pytest.raises(OSError, match="No space left"):
        pretrain(small_config(tmp_path, steps=4, checkpoint_every=1, save_in_background=True))
