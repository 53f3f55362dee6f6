"""Publishing a directory whole: written beside its place and swapped in, so that a failed save leaves the old one."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100


@contextmanager
def publishing(path: Path) -> Iterator[Path]:
    """Gives an empty directory to fill; on success it becomes `path`, on any error it goes and `path` is as it was.

    A directory that stands at `path` already is replaced in one step (Linux: an atomic exchange; else two renames).
    """
    path = path.absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: a file stands there; name a directory")
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.partial-{os.getpid()}")
    _sweep(path)
    fresh.mkdir()
    try:
        yield fresh
        _flush(*fresh.rglob("*"), fresh)  # the bytes are durable before the name points to them
        _swap(fresh, path)
        _flush(path.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove what killed saves to this place have left: whole models, which nothing else would ever remove."""
    start = f".{path.name}.partial-"
    for left in path.parent.iterdir():
        pid = left.name.removeprefix(start)
        if left.name.startswith(start) and pid.isdecimal() and not _is_another(int(pid)):
            shutil.rmtree(left, ignore_errors=True)


def _is_another(pid: int) -> bool:
    """Whether a process of that number runs that is not this one."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


def write_whole(path: Path, text: str) -> None:
    """Write a text file whose name points to the old content or to all of the new one, whatever happens."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _flush(*paths: Path) -> None:
    """Make files and names in directories durable."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _swap(fresh: Path, path: Path) -> None:
    if not path.exists():
        fresh.rename(path)
        return
    if sys.platform == "linux" and _exchange(fresh, path):
        return
    old = path.with_name(f".{path.name}.old-{os.getpid()}")
    try:
        path.rename(old)
        fresh.rename(path)
    except BaseException:
        if old.exists() and not path.exists():
            old.rename(path)
        raise
    shutil.rmtree(old)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two names atomically; False where the kernel or the file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(b))
