"""Which form of an op runs: its kernels wherever they can, the plain form elsewhere, or the one that was asked for; and
that what runs computes in the types that it names.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache, wraps
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

SLOWLY = "plain PyTorch runs on a GPU, slowly"


def settle(
    op: str, backend: str | None, plain: str, obstacle: Callable[[], str | None], x: Tensor, said: str = SLOWLY
) -> str:
    """Either "triton" or `plain`. obstacle: why the kernels cannot run, or None; asked only where they might. Where
    they cannot although x is on a GPU, `said` is a warning, once, with the reason. Raises ValueError for a backend that
    is unknown or cannot run."""
    if backend is None:
        reason = obstacle() if x.is_cuda else ""
        if reason:
            warn_once(f"{op}: {said}: {reason}")
        return "triton" if reason is None else plain
    if backend not in ("triton", plain):
        raise ValueError(f"{op}: unknown backend {backend!r}; there are triton, {plain}")
    if backend == "triton" and (reason := obstacle()) is not None:
        raise ValueError(f"{op}: backend 'triton' cannot run: {reason}")
    return backend


@cache
def warn_once(message: str) -> None:
    """For a function that the op calls, which its caller called: the warning names that line."""
    warnings.warn(message, stacklevel=4)


def without_autocast(run: Callable[P, R]) -> Callable[P, R]:
    """The plain form of an op, kept from what autocast would make of its products: no kernel hears of that either."""

    @wraps(run)
    def exact(*args: P.args, **kwargs: P.kwargs) -> R:
        if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
            return run(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return run(*args, **kwargs)

    return exact
