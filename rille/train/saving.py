"""Checkpoints written while training goes on.

    step s:  copy of everything to the host  ->  a thread writes and publishes it  |  steps s + 1, s + 2, ...

The copy is a checkpoint of step s, whatever the weights do meanwhile; its memory is kept for the next one, which waits
until this one is written. An error of the thread comes up in the loop after its next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Thread
from types import TracebackType

import torch
from torch import Tensor

from rille.model.model import K3
from rille.train.snapshot import Snapshot, write_checkpoint


class Writing(Thread):
    """One checkpoint on its way to the disk. `error` is what stopped it, or None."""

    def __init__(self, held: Snapshot):
        super().__init__(daemon=True)  # a process that must end at once does not wait for it
        self.held = held
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            write_checkpoint(self.held)
        except BaseException as error:  # noqa: BLE001 - the loop raises it
            self.error = error


@dataclass(eq=False)
class Saver:
    """Writes one checkpoint at a time in the background. Used as a context it waits for the last one."""

    writing: Writing | None = None
    model: K3 | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def start(self, live: Snapshot) -> None:
        """Copy what stands now and begin to write; waits for the checkpoint before this one, and raises its error."""
        self.wait()
        self.writing = Writing(self._copied(live))
        self.writing.start()

    def check(self) -> None:
        """Raise the error of a checkpoint that could not be written. Does not wait."""
        if self.writing is not None and not self.writing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until everything is on disk. Raises the error of what could not be written."""
        writing, self.writing = self.writing, None
        if writing is not None:
            writing.join()
            if writing.error is not None:
                raise writing.error

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if kind is None:
            self.wait()
        elif self.writing is not None and kind is not KeyboardInterrupt:  # which ends a run at once
            self.writing.join()

    @torch.no_grad()
    def _copied(self, live: Snapshot) -> Snapshot:
        """The same on the host, in this object's memory."""
        if self.model is None:
            self.model = K3(live.model.config, dtype=live.model.dtype, device="cpu")
            pinned = live.model.device.type == "cuda"
            self.tensors = {n: torch.empty(x.shape, dtype=x.dtype, pin_memory=pinned) for n, x in live.tensors.items()}
        for name, tensor in live.tensors.items():
            self.tensors[name].copy_(tensor, non_blocking=True)
        for mine, theirs in zip(self.model.parameters(), live.model.parameters(), strict=True):
            mine.copy_(theirs)
        if live.model.device.type == "cuda":
            torch.cuda.synchronize()
        return live.held_by(self.model, self.tensors)
