"""One choice of one request on its way through the engine. No torch here.

    waiting  ->  running (it holds pages)  ->  done
       ^--- set aside when memory is short ---|

Its chain has the prompt and what was written so far. What of it has not been consumed is read next: a whole prompt, the
rest of one, or the one token that was drawn last. All are the same to the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rille.serve.chain import Chain
from rille.serve.pages import Copy
from rille.serve.prefix import Holding
from rille.serve.schema import Request


@dataclass(eq=False, slots=True)
class Sequence:
    """order: when it came, among all. stops: places in the prompt that leave a checkpoint; fork: the one among them
    where others went another way. drafts: tokens to verify in the next step. copies, clear: what must happen to its
    pages before its next step. cached: tokens of the prompt that were there when it first ran, None before. parked_at:
    tokens that it had consumed when it was copied out. num_refusals: steps in which there was no memory for it. leader:
    the first choice of the request, which reads the prompt for all. came: when, by the clock of whoever submits."""

    request: Request
    id: str
    index: int
    order: int
    chain: Chain
    kind: str
    deadline: float | None = None
    leader: Sequence | None = None
    holding: Holding | None = None
    stops: list[int] = field(default_factory=list)
    fork: int = 0
    drafts: tuple[int, ...] = ()
    copies: tuple[Copy, ...] = ()
    clear: tuple[int, ...] = ()
    cached: int | None = None
    parked_at: int | None = None
    num_refusals: int = 0
    is_done: bool = False
    came: float = 0.0
    has_run: bool = False

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def num_written(self) -> int:
        return len(self.chain.ids) - len(self.request.prompt)

    @property
    def num_left(self) -> int:
        """Tokens that are known and not consumed; at least one while it runs."""
        return len(self.chain.ids) - (self.holding.length if self.holding is not None else 0)

    @property
    def rank(self) -> tuple[int, int]:
        """Lower goes first."""
        return -self.request.priority, self.order

    @property
    def longest(self) -> int:
        """Tokens that it can come to."""
        return len(self.request.prompt) + self.request.params.max_tokens

    @property
    def is_led(self) -> bool:
        """Whether it waits for another to read the prompt, whose checkpoint it then uses."""
        leader = self.leader
        return leader is not None and not leader.is_done and leader.num_written == 0


Save = tuple[int, tuple[int, ...]]  # a place inside a part, and the pages that keep the state there, by group


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence does in a step: tokens [start, start + count) of its chain, then the drafts.

    scratch: pages with a copy of the state, on which a step with drafts works; its own state stays where it is until it
    is known which drafts came true. source: where its one token is still being drawn, the row of the step that does it.
    saves: checkpoints on the way, rising; that of the end is a copy when the step is over.
    """

    sequence: Sequence
    start: int
    count: int
    drafts: tuple[int, ...] = ()
    scratch: tuple[int, ...] = ()
    source: int = -1
    saves: tuple[Save, ...] = ()

    @property
    def ends(self) -> bool:
        """Whether a token is drawn after it."""
        return self.source >= 0 or self.start + self.count == len(self.sequence.chain)

    @property
    def num_tokens(self) -> int:
        return self.count + len(self.drafts)
