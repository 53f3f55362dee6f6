"""The softplus gate as the kernels have it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import log
from typing import Any

import pytest
from torch import Tensor

from rille.ops.kda import reference
from rille.ops.kda.intra import SHUT


@contextmanager
def decays_cut_off() -> Iterator[None]:
    """Inside this context the recurrence cuts the decays off at 2^-28, in every type: what the kernels must equal to
    rounding. That the cut itself does no harm is a test of its own."""

    def log_decay(*arguments: Any, literal: Any = reference.log_decay) -> Tensor:
        return literal(*arguments).clamp_min(-SHUT.value * log(2))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "log_decay", log_decay)
        yield
