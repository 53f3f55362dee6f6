"""A run's directory: one run at a time, whoever is killed; what a run may start from."""

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rille import cli
from rille.recipes.pretrain import RECIPES
from rille.train.folder import LOCK, sole_run
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from tests.train.small import small_config


def picture(folder: Path) -> dict:
    """Everything that can be seen of a directory: names, times, contents."""
    files = sorted([folder, *folder.rglob("*")])
    return {file: (file.stat().st_mtime_ns, file.read_bytes() if file.is_file() else None) for file in files}


@pytest.mark.parametrize("state", ["new", "setting up", "finished"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_second_run_is_refused_and_touches_nothing(tmp_path, state, resume, monkeypatch, capsys):
    config = small_config(tmp_path, steps=2, resume=resume)
    out = Path(config.out)
    if state == "finished":
        pretrain(replace(config, resume=False))
    monkeypatch.setitem(RECIPES, "small", lambda: config)
    with sole_run(out):
        if state == "setting up":
            (out / "corpus.partial").mkdir()
        before = picture(out)
        capsys.readouterr()
        assert cli.main(["train", "small"]) == 2
        assert picture(out) == before
    printed = capsys.readouterr().err
    assert printed == (
        f"rille: {out}: another run (process {os.getpid()}) writes there; wait for its end, or give another --out\n"
    )


def test_the_lock_is_held_from_beginning_to_end(tmp_path, monkeypatch):
    """In every part of a run a second one is refused; after it, none."""
    config = small_config(tmp_path, steps=2, checkpoint_every=1)
    out, seen = Path(config.out), []

    def watched(name, real):
        def call(*arguments, **more):
            with pytest.raises(ValueError, match="another run"), sole_run(out):
                pass
            seen.append(name)
            return real(*arguments, **more)

        return call

    from rille.train import loop
    from rille.train import pretrain as whole

    for module, names in (
        (whole, ("starting_point", "prepare_corpus", "set_up", "open_loggers", "save_model", "summary")),
        (loop, ("update", "save_checkpoint")),
    ):
        for name in names:
            monkeypatch.setattr(module, name, watched(name, getattr(module, name)))
    pretrain(config)
    assert len(set(seen)) == 8
    assert not (out / LOCK).exists()
    with sole_run(out):
        assert (out / LOCK).read_text() == f"{os.getpid()}\n"


def test_a_lock_file_without_a_run_is_no_lock(tmp_path):
    config = small_config(tmp_path, steps=2)
    Path(config.out).mkdir()
    (Path(config.out) / LOCK).write_text("4711\n")
    pretrain(config)
    assert not (Path(config.out) / LOCK).exists()


def test_a_lock_file_that_was_removed_in_between_does_not_let_two_in(tmp_path, monkeypatch):
    """The second opens the file, the first ends and removes it, a third makes a new one."""
    import rille.train.folder as folder

    out, real, third = tmp_path / "run", folder._is_named, []

    def others_are_faster(stream, path):
        if not third:
            path.unlink()
            third.append(sole_run(out))
            with monkeypatch.context() as patch:
                patch.setattr(folder, "_is_named", real)
                third[0].__enter__()
        return real(stream, path)

    monkeypatch.setattr(folder, "_is_named", others_are_faster)
    with pytest.raises(ValueError, match="another run"), sole_run(out):
        pass
    third[0].__exit__(None, None, None)
    with sole_run(out):
        pass


def test_a_directory_that_was_made_in_vain_goes_again(tmp_path):
    with pytest.raises(ZeroDivisionError), sole_run(tmp_path / "a" / "new"):
        raise ZeroDivisionError
    assert not (tmp_path / "a" / "new").exists()
    (tmp_path / "old").mkdir()
    with sole_run(tmp_path / "old"):
        pass
    assert (tmp_path / "old").is_dir()


@pytest.mark.parametrize("content", ["", "{", "[1]"])
def test_damaged_settings_are_named(tmp_path, content):
    config = small_config(tmp_path, resume=True)
    Path(config.out).mkdir()
    (Path(config.out) / "run.json").write_text(content)
    with pytest.raises(ValueError, match=r"run\.json (is damaged|holds no settings).*; remove .*run and start anew"):
        pretrain(config)


# Runs in children of a process that has imported everything and computed nothing; each is killed at a random moment.
KILLS = """
import os, random, signal, sys, time
from dataclasses import replace
from pathlib import Path
from rille.cli import main
from rille.recipes.pretrain import RECIPES
from rille.train.metrics import MACHINE, read_metrics
import rille.train.pretrain, torch.utils.tensorboard
from tests.train.small import small_config

folder, seed = Path(sys.argv[1]), int(sys.argv[2])
chance = random.Random(seed)
config = small_config(folder, steps=24, checkpoint_every=2, eval_every=5, keep=1)
RECIPES["small"] = lambda: config
out = folder / "run"
rows = lambda: len(read_metrics(out / "metrics.jsonl"))

def start():
    child = os.fork()
    if child == 0:
        sys.stderr = open(folder / "errors", "a")
        os.dup2(sys.stderr.fileno(), 2)
        os._exit(main(["train", "small", *(["--resume"] if (out / "run.json").exists() else [])]))
    return child

for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
    child, enough = start(), rows() + chance.randrange(1, 4)
    while rows() < enough:
        time.sleep(0.002)
    time.sleep(chance.random() * 0.05)
    os.kill(child, number)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, (out / ".lock").exists())
print(os.waitstatus_to_exitcode(os.waitpid(start(), 0)[1]), (out / ".lock").exists())
"""


@pytest.mark.parametrize("seed", [0])
def test_killed_at_random_again_and_again_a_run_ends_as_if_nothing_had_been(tmp_path, seed):
    command = [sys.executable, "-c", KILLS, str(tmp_path), str(seed)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    lines = [line for line in printed.splitlines() if line.endswith(("True", "False"))]
    killed = "-9 True"
    assert lines == [killed, "143 False", killed, "130 False", "0 False"]
    assert "Traceback" not in (tmp_path / "errors").read_text()

    whole = small_config(tmp_path, steps=24, checkpoint_every=2, eval_every=5, keep=1, out=str(tmp_path / "whole"))
    pretrain(whole)
    rows = [
        [{**row, **dict.fromkeys(MACHINE, 0)} for row in read_metrics(tmp_path / run / "metrics.jsonl")]
        for run in ("run", "whole")
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 24
    for name in ("model/model-00001-of-000001.safetensors", "checkpoints/step-000024/training/state.safetensors"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert [file.name for file in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000024"]


def test_a_lock_outlives_no_process(tmp_path):
    """kill -9: the file stays, the lock goes."""
    code = "import sys, time; from pathlib import Path; from rille.train.folder import sole_run\n"
    code += "with sole_run(Path(sys.argv[1])):\n    print('held', flush=True)\n    time.sleep(600)"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    with pytest.raises(ValueError, match=rf"another run \(process {process.pid}\)"), sole_run(tmp_path / "run"):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert (tmp_path / "run" / LOCK).exists()
    with sole_run(tmp_path / "run"):
        pass
    process.stdout.close()
