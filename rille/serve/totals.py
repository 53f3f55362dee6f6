"""What an engine counts. No torch here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rille.serve.counts import Counts
from rille.serve.scheduler import Scheduler, Step
from rille.serve.schema import EngineStats, Finished, FinishReason, Output, TokenOutput
from rille.serve.sequences import Part

STEP_TOKENS = tuple(float(1 << power) for power in range(15))
RESUMED_TOKENS = (0.0, *(float(1 << power) for power in range(6, 21)))


class Totals:
    """Sums since the start, written by the thread that steps."""

    def __init__(self) -> None:
        self.refused = self.steps = self.batch_tokens = self.prompt_tokens = self.generated = 0
        self.drafts = self.drafted = self.accepted = self.draft_length = 0
        self._step_tokens, self._resumed_tokens = Counts(STEP_TOKENS), Counts(RESUMED_TOKENS)
        self._accepted_at: list[int] = []
        self._finished: Counter[FinishReason] = Counter()

    def note_part(self, part: Part, accepted: int, outputs: Sequence[Output]) -> None:
        """A part of a step is over."""
        if part.start < part.sequence.num_prompt:
            self.prompt_tokens += min(part.start + part.count, part.sequence.num_prompt) - part.start
        for output in outputs:
            self.generated += isinstance(output, TokenOutput)
        if not part.drafts:
            return
        self.drafts += 1
        self.drafted += len(part.drafts)
        self.accepted += accepted
        self._accepted_at += [0] * (len(part.drafts) - len(self._accepted_at))
        for place in range(accepted):
            self._accepted_at[place] += 1

    def note_step(self, step: Step) -> None:
        self.steps += 1
        self.batch_tokens = step.num_tokens
        self._step_tokens.add(self.batch_tokens)

    def note_end(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if isinstance(output, Finished):
                self._finished[output.reason] += 1
                self._resumed_tokens.add(output.usage.cached_tokens)

    def stats(self, scheduler: Scheduler, pending: int) -> EngineStats:
        cache = scheduler.cache
        store, counts = cache.store, cache.counts
        return EngineStats(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting + pending,
            pages_total=store.pool.num_pages,
            pages_used=store.pool.num_pages - store.available,
            pages_cached=store.num_evictable,
            page_tokens=cache.page_tokens,
            checkpoints=store.num_states,
            checkpoint_pages=store.num_states * cache.groups,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated,
            cache_queries=counts.queries,
            cache_hits=counts.hits,
            latent_hits=counts.latent_hits,
            external_queries=0 if store.tier is None else counts.queries - counts.hits + counts.external,
            external_hits=counts.external,
            misses=dict(counts.misses),
            preemptions=scheduler.num_preempted,
            aborted=self._finished["abort"],
            refused=self.refused,
            finished=dict(self._finished),
            steps=self.steps,
            batch_tokens=self.batch_tokens,
            queued_s=scheduler.queued.read(),
            step_tokens=self._step_tokens.read(),
            resumed_tokens=self._resumed_tokens.read(),
            drafts=self.drafts,
            drafted=self.drafted,
            accepted=self.accepted,
            accepted_at=tuple(self._accepted_at),
            draft_length=self.draft_length,
            version=scheduler.version,
        )
