"""A run's directory: one run at a time writes there, and this is where it begins.

    out/.lock    held with flock(2) as long as a run lives; it names the process

The kernel gives the lock back however a process ends, so the file that a killed run leaves stands in nobody's way.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from rille.model.locate import step_checkpoints
from rille.model.publish import write_whole
from rille.train.checkpoint import read_numbers, remove_unfinished
from rille.train.config import TrainConfig, check_resumable, settings

SETTINGS, LOCK = "run.json", ".lock"


@contextmanager
def sole_run(out: Path) -> Iterator[None]:
    """Hold a run's directory, made where it is not there, against all other runs.

    One that was made goes again if nothing was put into it. Raises ValueError, with nothing touched, for a file and
    where another run holds the directory; OSError where it cannot be made or locked.
    """
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; name a directory for the run")
    made = not out.exists()
    out.mkdir(parents=True, exist_ok=True)
    stream = _locked(out)
    try:
        stream.truncate(0)
        stream.write(f"{os.getpid()}\n")
        stream.flush()
        yield
    finally:
        (out / LOCK).unlink(missing_ok=True)
        stream.close()
        if made and not any(out.iterdir()):
            out.rmdir()


def _locked(out: Path) -> IO[str]:
    """The open lock file, locked. Closing it gives the lock back."""
    while True:
        stream = (out / LOCK).open("a+", encoding="utf-8")  # which changes nothing in it
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(stream, out / LOCK):
                return stream
        except BlockingIOError:
            stream.seek(0)
            process = f" (process {number})" if (number := stream.read().strip()) else ""
            stream.close()
            raise ValueError(
                f"{out}: another run{process} writes there; wait for its end, or give another --out"
            ) from None
        stream.close()  # the run that held it has ended and removed it since


def _is_named(stream: IO[str], path: Path) -> bool:
    """Whether the path still names the file that is open."""
    try:
        return os.path.samestat(os.fstat(stream.fileno()), path.stat())
    except FileNotFoundError:
        return False


def starting_point(config: TrainConfig, out: Path) -> Path | None:
    """The checkpoint to continue from, None to start at step 0.

    Raises ValueError for a directory that holds a run without `resume`, for `resume` where there is none, and for a run
    with other settings, before any work is done.
    """
    holds_run = (out / SETTINGS).exists()
    if not config.resume:
        if holds_run:
            raise ValueError(f"{out} holds a run already: add --resume to continue it, or give another --out")
        return None
    if not holds_run:
        raise ValueError(f"{out} holds no run to resume; leave --resume out to start one")
    remove_unfinished(out)
    checkpoints = step_checkpoints(out)
    if not checkpoints:
        check_resumable(read_settings(out), settings(config), str(out))
        print(f"{out} holds no whole checkpoint yet: starting at step 0")
        return None
    step, newest = checkpoints[-1]
    check_resumable(read_numbers(newest)["settings"], settings(config), str(newest))
    if step > config.steps:
        raise ValueError(f"{newest} is beyond the {config.steps} steps asked for; give --steps {step} or more")
    return newest


def write_settings(config: TrainConfig, out: Path) -> None:
    write_whole(out / SETTINGS, json.dumps(settings(config), indent=1))


def read_settings(out: Path) -> dict[str, Any]:
    """What `write_settings` wrote. Raises ValueError for a damaged file."""
    try:
        saved = json.loads((out / SETTINGS).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{out / SETTINGS} is damaged ({error}); remove {out} and start anew") from None
    if not isinstance(saved, dict):
        raise ValueError(f"{out / SETTINGS} holds no settings; remove {out} and start anew")
    return saved
