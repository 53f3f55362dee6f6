"""Memory that the process has of the system: taken before the first request, given back when nothing runs. No torch
here.

    tensors of a step  ->  freed: the allocator's, for the next step  ->  nothing runs for a while: the system's

glibc keeps what was freed in the middle of its arenas until it is asked; many prompts at once leave more there than all
that lives in them. To ask takes milliseconds, and the next step takes the memory anew, so it is not done between steps.
"""

from __future__ import annotations

import ctypes
import os
from time import perf_counter

IDLE_S = 5.0
KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64"}

# Other C libraries have no such call: they give back by themselves, or keep.
_TRIM = getattr(ctypes.CDLL(None), "malloc_trim", None)


def keep_few_kernels() -> None:
    """Let oneDNN, and what calls it in torch, keep 64 compiled convolutions each instead of 1,024, where nothing else
    is asked for. One is for one number of tokens, and most steps have a number that none had before: all together took
    up to 45 MiB and saved no time. To be called before torch is loaded, which reads it then."""
    for name, number in KEPT.items():
        os.environ.setdefault(name, number)


def give_back() -> None:
    """Hand what was freed back to the system, where the C library can be asked to."""
    if _TRIM is not None:
        _TRIM(0)


class Rest:
    """Gives back once nothing has run for `IDLE_S` seconds; told by the thread that steps."""

    def __init__(self) -> None:
        self._worked_at: float | None = None  # None: since then all was given back

    def worked(self) -> None:
        """A step has run."""
        self._worked_at = perf_counter()

    def idle(self) -> None:
        """There was nothing to run."""
        if self._worked_at is not None and perf_counter() - self._worked_at >= IDLE_S:
            self._worked_at = None
            give_back()
