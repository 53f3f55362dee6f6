"""Work on a second stream beside the first, where a few rows leave most of the card idle.

The second stream's work always begins by waiting for what the first has been given, and each piece of it is waited for
by itself before anyone reads it. So memory of either is safe with the other: whatever is freed in between is written to
again only behind such a wait.

Streams cost the host some 60 microseconds each time. A step that runs op by op waits for the host, not for the card,
and has nothing to win (`in_line`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor

FEW_ROWS = 1024  # more of them fill the card by themselves, by count; what a training step would gain was not measured


class _Entered(threading.local):
    in_line = 0  # how often, one inside another


_entered = _Entered()


@contextmanager
def in_line() -> Iterator[None]:
    """Inside, this thread gives all work to one stream."""
    _entered.in_line += 1
    try:
        yield
    finally:
        _entered.in_line -= 1


def beside(work: Callable[[], Tensor], x_ND: Tensor) -> Callable[[], Tensor]:
    """Start `work`, which reads x; what is returned waits for it and gives its result. A call without gradients of few
    rows on a GPU runs on a stream of its own, but `in_line`; any other at once."""
    few = x_ND.is_cuda and x_ND.shape[0] <= FEW_ROWS
    if not few or torch.compiler.is_compiling() or torch.is_grad_enabled() or _entered.in_line:
        at_once = work()
        return lambda: at_once
    first = torch.cuda.current_stream(x_ND.device)
    second = stream_beside(first)
    second.wait_stream(first)
    with torch.cuda.stream(second):
        result = work()
        done = second.record_event()  # work that follows on that stream is not waited for

    def joined() -> Tensor:
        torch.cuda.current_stream(x_ND.device).wait_event(done)
        return result

    return joined


@cache
def stream_beside(first: torch.cuda.Stream) -> torch.cuda.Stream:
    return torch.cuda.Stream(first.device)
