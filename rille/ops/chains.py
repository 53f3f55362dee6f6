"""Whether kernels that are launched now may begin before the ones ahead of them have ended (`chain_kernels.py`).

Only while a step is recorded whose kernels write no weights: they are read before anything is waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0


@contextmanager
def chain(wanted: bool = True) -> Iterator[None]:
    """Kernels launched inside may begin early, if wanted."""
    global _depth
    _depth += wanted
    try:
        yield
    finally:
        _depth -= wanted


def is_chain() -> bool:
    return _depth > 0
