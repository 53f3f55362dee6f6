"""When prompts join the sequences that write: together, where each step with prompts costs as much. No torch.

    step that only writes    w seconds
    step with prompts        r seconds, however short they are; op by op many times as many

Between two steps with prompts those that come wait for each other, as long as the last one took beyond a recorded one,
up to a limit: so at most half of the time goes to starting prompts one by one, and one step starts all that came. Who
finds nobody writing, or comes some time after the last prompt, waits for nothing; nor do prompts that fill a step, and
further choices of one that was read.
"""

from __future__ import annotations

from collections.abc import Iterable

from rille.serve.sequences import Sequence

LONGEST_WAIT_S = 0.1
RISE = 0.05  # of what is beyond the least time so far: kernels that compile are soon forgotten, a faster step counts


class Gather:
    """Knows how long steps take. Without figures nobody waits."""

    def __init__(self) -> None:
        self._reads_s: float | None = None
        self._writes_s: float | None = None
        self._until = 0.0

    def note(self, reads: bool, seconds: float, now: float) -> None:
        """A step is over. reads: whether it had prompts; the others only wrote."""
        if not reads:
            self._writes_s = _least(self._writes_s, seconds)
            return
        self._reads_s = _least(self._reads_s, seconds)
        if self._writes_s is not None:
            self._until = now + min(max(0.0, self._reads_s - self._writes_s), LONGEST_WAIT_S)

    def waits(self, running: Iterable[Sequence], waiting: Iterable[Sequence], budget: int, now: float) -> bool:
        """Whether prompts that wait go on waiting. budget: tokens of a step, which are worth one."""
        if now >= self._until:
            return False
        left = [sequence.num_left for sequence in running]
        if not left or max(left) > 1:  # nobody writes, or a prompt is half read
            return False
        for sequence in waiting:
            if sequence.leader is not None and not sequence.is_led:  # its prompt has been read
                return False
            budget -= 0 if sequence.is_led else sequence.num_left
            if budget <= 0:
                return False
        return True


def _least(known: float | None, seconds: float) -> float:
    return seconds if known is None or seconds < known else known + RISE * (seconds - known)
