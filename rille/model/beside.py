"""Work on a second stream beside the first, where a few rows leave most of the card idle.

The second stream's work always begins by waiting for what the first has been given, and each piece of it is waited for
by itself before anyone reads it. So memory of either is safe with the other: whatever is freed in between is written to
again only behind such a wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

FEW_ROWS = 1024  # more of them fill the card by themselves, by count; what a training step would gain was not measured


def beside(work: Callable[[], Tensor], x_ND: Tensor) -> Callable[[], Tensor]:
    """Start `work`, which reads x; what is returned waits for it and gives its result. A call without gradients of few
    rows on a GPU runs on a stream of its own; any other at once."""
    if not x_ND.is_cuda or len(x_ND) > FEW_ROWS or torch.is_grad_enabled() or torch.compiler.is_compiling():
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
