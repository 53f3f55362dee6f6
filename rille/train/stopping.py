"""Stopping in good order: the first SIGINT or SIGTERM is a wish that the loop obeys after its step, as it does when the
time is over that the run was given.

A second signal ends the process at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """Why a run shall end before its last step: a signal that came, or a time on the monotonic clock, in seconds."""

    signal: int | None = None
    deadline: float | None = None

    @property
    def wanted(self) -> bool:
        return self.signal is not None or (self.deadline is not None and monotonic() >= self.deadline)


class Interrupted(Exception):
    """A run that was stopped after `step` updates, saved.

    exit_code: 128 + the signal (130 for Ctrl-C, 143 for SIGTERM); 0 where its time was over, as it was told.
    """

    def __init__(self, step: int, stop: Stop):
        cause = (
            "stopped, its time is over," if stop.signal is None else f"stopped by {signal.Signals(stop.signal).name}"
        )
        super().__init__(f"{cause} after step {step}; a checkpoint is saved")
        self.step, self.exit_code = step, 0 if stop.signal is None else 128 + stop.signal


class Diverged(ArithmeticError):
    """A run whose loss or gradient is not a finite number. The message says where and what to do."""


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Gives the wish to stop. Outside the main thread, where signals do not arrive, it stays None."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def wish(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        signal.signal(number, before[signal.Signals(number)])

    before = {number: signal.getsignal(number) for number in SIGNALS}
    for number in SIGNALS:
        signal.signal(number, wish)
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
