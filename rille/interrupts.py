"""Ctrl-C at moments when nobody can obey it."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager


def loading() -> AbstractContextManager[None]:
    """Ctrl-C waits while libraries are loaded: some swallow it half-way and fail later, without a word of it."""
    return held()


@contextmanager
def held() -> Iterator[None]:
    """Ctrl-C waits until what must not be left half done is over."""
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before != signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        return (yield)  # ignored, or somebody else's
    signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
