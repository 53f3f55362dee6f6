"""Stopping in good order: the first SIGINT or SIGTERM is a wish that the loop obeys after its step.

A second one ends the process at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass
class Stop:
    """Which signal has asked for the end, or None."""

    signal: int | None = None


class Interrupted(Exception):
    """A run that a signal has stopped after `step` updates, saved.

    exit_code: 128 + the signal, 130 for Ctrl-C and 143 for SIGTERM.
    """

    def __init__(self, step: int, stop: Stop):
        assert stop.signal is not None
        super().__init__(f"stopped by {signal.Signals(stop.signal).name} after step {step}; a checkpoint is saved")
        self.step, self.exit_code = step, 128 + stop.signal


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
