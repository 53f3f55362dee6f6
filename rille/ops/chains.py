"""Whether kernels that this thread launches now may begin before the ones ahead of them have ended.

That is for steps that are recorded, whose kernels write no weights: they are read before anything is waited for. How:
`chain_kernels.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Depth(threading.local):
    chains = 0


_depth = _Depth()


@contextmanager
def chain(wanted: bool = True) -> Iterator[None]:
    """Kernels launched inside may begin early, if wanted."""
    _depth.chains += wanted
    try:
        yield
    finally:
        _depth.chains -= wanted


def is_chain() -> bool:
    return _depth.chains > 0
