"""What a checkpoint holds, and how it is written: it appears whole or not at all.

`checkpoint.py` takes one of a run and draws the files; `saving.py` writes it while training goes on.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from rille.model.checkpoint import save_model
from rille.model.locate import step_checkpoints
from rille.model.model import K3
from rille.model.publish import publishing
from rille.model.shards import Pending, save_shard
from rille.text.tokenizer import Tokenizer

TENSORS, NUMBERS = Path("training", "state.safetensors"), Path("training", "state.json")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """All that a checkpoint holds. `tensors` and `model` are the run's own, or copies."""

    path: Path
    keep: int
    model: K3
    tokenizer: Tokenizer
    tensors: dict[str, Tensor]
    numbers: dict[str, Any]

    def held_by(self, model: K3, tensors: dict[str, Tensor]) -> Snapshot:
        """The same with these copies."""
        return replace(self, model=model, tensors=tensors)


def write_checkpoint(held: Snapshot) -> Path:
    """Write a snapshot; the directory appears whole, then the oldest ones beyond `keep` go."""
    with publishing(held.path) as directory:
        save_model(held.model, directory, tokenizer=held.tokenizer)
        (directory / "training").mkdir()
        save_shard([Pending.of(name, tensor) for name, tensor in held.tensors.items()], directory / TENSORS)
        (directory / NUMBERS).write_text(json.dumps(held.numbers, indent=1), encoding="utf-8")
    for _, old in step_checkpoints(held.path.parent.parent)[: -held.keep]:
        doomed = old.with_name(f".{old.name}.old")  # so that one that is half removed is never taken for a whole one
        old.rename(doomed)
        shutil.rmtree(doomed)
    return held.path
