"""The step after the one that runs, before anybody knows which tokens that one draws. No torch here.

    host      plan n+1      | take n          | plan n+2       | take n+1
    device    n             | n+1             | n+1            | n+2

Where every running sequence decodes one token, what comes next is known but for the tokens, and those lie on the
device. A sequence that turns out to have ended runs once too often: nobody looks at what it drew, and what it wrote
lies on pages that were its own when the step was launched, behind the end of all that others can find.
"""

from __future__ import annotations

from rille.serve.scheduler import Scheduler, Step
from rille.serve.sequences import Part


def follow(scheduler: Scheduler, step: Step, now: float = 0.0) -> Step | None:
    """The step behind one that runs: the same sequences, each with the token that is being drawn for it.

    None where what comes next is not plain: somebody waits who may run, or is late, another sequence runs besides, or
    pages are short. Then `step` must be over (`Scheduler.landed`) before the scheduler is asked again. Else call
    `Scheduler.settle` for the parts of `step` before the new one is carried out.
    """
    may_join = scheduler.num_waiting and len(scheduler.running) < scheduler.config.max_running
    if may_join and not scheduler.gathers(now):
        return None
    if any(s.deadline is not None and s.deadline <= now for s in (*scheduler.running, *scheduler.all_waiting())):
        return None
    alive = [(row, part) for row, part in enumerate(step.parts) if not part.sequence.is_done]
    if len(alive) != len(scheduler.running):
        return None
    parts, page_tokens = [], scheduler.cache.page_tokens
    for row, part in alive:
        sequence, start = part.sequence, part.start + 1
        if start + 1 >= sequence.longest:
            continue  # it ends with the token that is being drawn
        assert sequence.holding is not None
        if start >= len(sequence.holding.latents) * page_tokens and not scheduler.cache.extend(
            sequence.holding, start + 1
        ):
            return None
        parts.append(Part(sequence, start, 1, source=row))
    return Step(parts) if parts else None
