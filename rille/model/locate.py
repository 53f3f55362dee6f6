"""Where a checkpoint lies: the directory itself, or the newest one of a training run.

    RUN/model/                     the finished model
    RUN/checkpoints/step-000200/   after update 200, with what training needs to continue

No torch here.
"""

from __future__ import annotations

import re
from pathlib import Path

CONFIG = "config.json"
_STEP = re.compile(r"step-(\d{6,})")


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def step_checkpoints(run: Path) -> list[tuple[int, Path]]:
    """(step, directory) of a run's whole checkpoints, oldest first; half-written ones have other names."""
    folder = run / "checkpoints"
    found = [(_STEP.fullmatch(path.name), path) for path in folder.iterdir()] if folder.is_dir() else []
    return sorted((int(match[1]), path) for match, path in found if match and (path / CONFIG).is_file())


def find_checkpoint(path: str | Path) -> Path:
    """The checkpoint directory that a path means: itself, or a run's last written one.

    Raises FileNotFoundError that says what was looked for.
    """
    path = Path(path)
    if (path / CONFIG).is_file():
        return path
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; give a checkpoint directory, or one that `rille train` wrote")
    candidates = [directory for _, directory in step_checkpoints(path)]
    if (path / "model" / CONFIG).is_file():
        candidates.append(path / "model")
    if not candidates:
        raise FileNotFoundError(f"{path} holds no checkpoint: neither {CONFIG}, nor model or checkpoints of a run")
    return max(reversed(candidates), key=lambda directory: (directory / CONFIG).stat().st_mtime_ns)
