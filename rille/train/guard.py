"""Steps that are passed over: numbers that are not finite, losses that spike. No torch.

    skipped:  loss or |g| is not finite;   loss > median of the last `window` losses + spike   (from 16 losses on)

The weights, the optimiser and the router's biases stay as they were, the batch is not read again, the step counts. More
than `limit` such steps among the last `window` end the run. All decisions come from the numbers of the whole step, the
same on every rank that takes part in it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from math import isfinite
from statistics import median
from typing import Any

FEWEST = 16  # losses before a spike can be told


@dataclass(frozen=True)
class GuardConfig:
    """Which steps are passed over, and when that ends a run."""

    spike: float | None = None
    """Nats above the median of the last losses from which a step is passed over; none: only what is not finite."""

    window: int = 128
    """Steps over which the median is taken and skipped ones are counted."""

    limit: int = 5
    """Steps that may be skipped within the window; one more ends the run."""

    def __post_init__(self):
        """Raises ValueError that names a field out of range."""
        if self.spike is not None and not self.spike > 0:
            raise ValueError(f"guard.spike is {self.spike}; it must be above 0, or none")
        if self.window < FEWEST or self.limit < 0:
            raise ValueError(
                f"guard.window is {self.window} and guard.limit {self.limit}; they must be at least {FEWEST} and 0"
            )


class Guard:
    """The memory of a run's guard: recent losses, recent skips, how many steps were skipped in all."""

    def __init__(self, config: GuardConfig):
        self.config = config
        self.losses: deque[float] = deque(maxlen=config.window)
        self.skips: list[int] = []
        self.total = 0

    def fault(self, step: int, loss: float, gradient_norm: float) -> str | None:
        """Why this step must not reach the weights, or None; remembers either."""
        reason = self._reason(loss, gradient_norm)
        if reason is None:
            self.losses.append(loss)
            return None
        self.skips = [earlier for earlier in self.skips if earlier > step - self.config.window] + [step]
        self.total += 1
        return reason

    @property
    def exhausted(self) -> bool:
        """Whether more steps were skipped than are allowed."""
        return len(self.skips) > self.config.limit

    def _reason(self, loss: float, gradient_norm: float) -> str | None:
        if not (isfinite(loss) and isfinite(gradient_norm)):
            return f"loss {loss}, gradient norm {gradient_norm}"
        if self.config.spike is not None and len(self.losses) >= FEWEST:
            usual = median(self.losses)
            if loss > usual + self.config.spike:
                return f"loss {loss:.3f} after a median of {usual:.3f}"
        return None

    def state(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"losses": list(self.losses), "skips": self.skips, "total": self.total}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a `state()`."""
        self.losses = deque(state["losses"], maxlen=self.config.window)
        self.skips, self.total = list(state["skips"]), state["total"]
