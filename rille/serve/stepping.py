"""What the thread of an engine does, step by step.

    guess tokens  ->  schedule  ->  copies  ->  one forward  ->  draw  ->  replay what came true
         ->  checkpoints  ->  publish  ->  deliver

A recorded step draws on the device (`rille.serve.graphs`). With `overlap` it is launched and left to run: the next call
launches the one behind it (`rille.serve.ahead`), then waits for its tokens. Where the next step needs the tokens, or is
no plain decoding, the call only waits. Guesses need the tokens: while one is drawn it is looked ahead, from what is
known, whether there will be guesses that are worth the wait (`rille.serve.odds`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from rille.serve.ahead import follow
from rille.serve.drawing import count_true, draw_parts, experts_of
from rille.serve.graphs import Launched
from rille.serve.odds import Odds
from rille.serve.paged import Pages
from rille.serve.reply import Reply
from rille.serve.runner import Ran, Runner
from rille.serve.scheduler import Scheduler, Step
from rille.serve.schema import Output
from rille.serve.sequences import Part
from rille.serve.sequences import Sequence as Choice
from rille.serve.settings import EngineConfig
from rille.serve.speculation import Draft, Drafter
from rille.serve.totals import Totals
from rille.serve.watch import Watch

Deliver = Callable[[Choice, Sequence[Output]], None]


@dataclass
class Flight:
    """A recorded step that was launched. began: when; None where it had to be recorded first, so that its time says
    nothing. settled: its checkpoints are copied already."""

    step: Step
    launched: Launched
    began: float | None
    settled: bool = False


class Stepper:
    """deliver: hands outputs of a choice on; end: the last ones, after which the choice is forgotten here
    (`forget`)."""

    def __init__(
        self,
        config: EngineConfig,
        pages: Pages,
        scheduler: Scheduler,
        runner: Runner,
        drafter: Drafter | None,
        totals: Totals,
        deliver: Deliver,
        end: Deliver,
    ) -> None:
        self._config, self._pages, self._scheduler, self._runner = config, pages, scheduler, runner
        self._drafter, self._totals, self._deliver, self._end = drafter, totals, deliver, end
        self.replies: dict[Choice, Reply] = {}
        padded = not scheduler.takes_copies
        self.odds = Odds(config.draft_length, fixed=not config.adaptive_drafts, padded=padded)
        self._watch = Watch()
        self._drafts: dict[Choice, Draft] = {}
        self._flight: Flight | None = None
        self._open: Sequence[Part] = ()  # of a step whose scratch pages are not given back yet
        self._landed_at = 0.0
        self._read, self._reading_s = 0, 0.0  # of prompts, in steps since the last one that was waited for

    def forget(self, choice: Choice) -> None:
        """It has ended."""
        self.replies.pop(choice)
        self._drafts.pop(choice, None)
        self._runner.forget(choice)
        self.odds.forget(choice)
        self._watch.forget(choice)
        if self._drafter is not None:
            self._drafter.forget(choice)

    def settle(self) -> None:
        """Wait for what runs and take it in: after this nothing is under way."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._land(flight)

    def step(self) -> bool:
        """One step; False where there was nothing to run. One that breaks off ends all that runs: some layers have
        moved their states on and some have not, so that nobody may go on from them."""
        is_over = False
        try:
            there_was = self._step()
            is_over = True
            return there_was
        finally:
            if not is_over:
                self._break_off()

    def _break_off(self) -> None:
        for part in self._open:
            self._scheduler.cache.store.pool.give(part.scratch)
        self._flight, self._open = None, ()
        for choice in list(self._scheduler.running):
            self._scheduler.condemn(choice)
            self._end(choice, [self.replies[choice].end("error", error="the engine broke off a step after a fault")])

    def _step(self) -> bool:
        if (flight := self._flight) is not None:
            self._flight = self._launch_behind(flight)
            self._land(flight)
            if self._flight is not None and all(part.sequence.is_done for part in self._flight.step.parts):
                self._flight = None
            return True
        began = perf_counter()
        self._guess()
        step = self._scheduler.step(began)
        for choice in step.expired:
            self._end(choice, [self.replies[choice].end("abort", error="the deadline has passed")])
        if not step.parts:
            return False
        self._open = step.parts
        self._pages.clear(step.clear)
        self._pages.copy(step.copies)
        if self._watches:  # whoever is new, from the cache too, comes with a step that is not behind another one
            self._watch.enter(part.sequence for part in step.parts if part.ends)
        if self._can_launch(step):
            self._flight = self._launch(step, began)
            if not self._config.overlap or any(part.drafts for part in step.parts):  # guesses need the tokens
                self.settle()
        else:
            draws = any(part.ends for part in step.parts)  # asked before there are more tokens
            self._compute(step if self._scheduler.takes_copies else _without_drafts(step))
            self._finish_times(step, perf_counter() - began, draws)
        return True

    def _finish_times(self, step: Step, seconds: float | None, draws: bool = True) -> None:
        """For a step whose tokens were counted already. One that draws nothing is not waited for: what it read shows in
        the time of the next one that draws."""
        if self._config.poison:
            self._pages.poison(self._scheduler.cache.store.pool.free_pages())
        if seconds is None:
            return
        if self._config.gather_prompts and self._runner.graphs is not None and draws and not self._read:
            self._scheduler.gather.note(any(part.count > 1 for part in step.parts), seconds, perf_counter())
        if read := sum(part.count for part in step.parts if part.count > 1):
            self._read, self._reading_s = self._read + read, self._reading_s + seconds
            if draws:
                self._scheduler.note_rate(self._read, self._reading_s)
                self._read, self._reading_s = 0, 0.0
        elif self._drafter is not None:
            self.odds.note_time(len(step.parts), self._totals.batch_tokens, seconds)

    @property
    def _watches(self) -> bool:
        """Whether it is chosen who is looked up."""
        return self._drafter is not None and not self._drafter.reads_hidden and not self.odds.fixed

    def _guess(self) -> None:
        """Drafts for everything that decodes."""
        if self._drafter is None:
            return
        decoding = [choice for choice in self._scheduler.running if choice.num_left == 1]
        self._drafts = self._look(decoding) if self._can_verify(decoding) else {}
        for choice in decoding:
            choice.drafts = self._drafts[choice].tokens if choice in self._drafts else ()

    def _can_verify(self, decoding: Sequence[Choice]) -> bool:
        """Where drafts run in recorded steps alone, the device has to draw for all."""
        return self._scheduler.takes_copies or all(self.replies[choice].is_free(0) for choice in decoding)

    def _look(self, decoding: Sequence[Choice]) -> dict[Choice, Draft]:
        """Guesses for what follows all that is known, where they promise more than they cost."""
        if self._drafter is None or not decoding:
            return {}
        if self._drafter.reads_hidden:
            limit = self._totals.draft_length = self.odds.choose_dear(decoding)
            return {choice: self._propose(choice, limit) for choice in decoding} if limit else {}
        if self.odds.fixed:
            every = {choice: self._propose(choice, self.odds.most) for choice in decoding}
            return self._weigh({choice: draft for choice, draft in every.items() if draft.tokens}, len(decoding))
        due = self._watch.due()
        return self._weigh(self._look_up(due), len(decoding)) if due else {}

    def _propose(self, choice: Choice, limit: int) -> Draft:
        """The drafter's guesses, as far as they can come true: it may know other words than the model."""
        assert self._drafter is not None
        draft, words = self._drafter.propose(choice, limit).cut(limit), self._runner.model.config.vocab_size
        return draft.cut(next((n for n, token in enumerate(draft.tokens) if not 0 <= token < words), limit))

    def _weigh(self, found: dict[Choice, Draft], rows: int) -> dict[Choice, Draft]:
        """Of guesses for some of `rows` sequences what is worth a run."""
        limit = self._totals.draft_length = self.odds.choose(rows, found)
        if not limit:
            self._watch.pause()
            return {}
        self._watch.go_on()
        return {choice: draft.cut(limit) for choice, draft in found.items()}

    def _look_up(self, due: Sequence[Choice]) -> dict[Choice, Draft]:
        """Guesses for those whose turn it is, and how those before them did."""
        assert self._drafter is not None
        found = {}
        for choice in due:
            came_true = self.odds.settle(choice)
            if came_true:
                self._watch.trust(choice)
            if came_true is False and self._watch.rests(choice):
                continue
            draft = self._propose(choice, self.odds.most)
            if draft.tokens:
                found[choice] = draft
                self.odds.bet(choice, draft.tokens)
                self._watch.soon(choice)
            else:
                self._watch.later(choice)
        return found

    # --- recorded steps ---

    def _can_launch(self, step: Step) -> bool:
        """Whether the device can draw for a step, with what is recorded if another one runs."""
        graphs, ahead = self._runner.graphs, step.parts[0].source >= 0
        if graphs is None or self._runner.keeps_hidden or not (ahead or graphs.can_run(step.parts)):
            return False
        if not all(self.replies[part.sequence].is_free(int(ahead)) for part in step.parts):
            return False
        return not ahead or graphs.is_recorded(step.parts)

    def _launch(self, step: Step, began: float) -> Flight:
        assert self._runner.graphs is not None
        ahead = int(step.parts[0].source >= 0)
        lots = [self.replies[part.sequence].lots(ahead, 1 + len(part.drafts)) for part in step.parts]
        for part in step.parts:
            if part.sequence.holding is not None:
                part.sequence.holding.reach = part.start + 1
        is_recorded = self._runner.graphs.is_recorded(step.parts)
        return Flight(step, self._runner.graphs.launch(step.parts, lots), began if is_recorded else None)

    def _launch_behind(self, flight: Flight) -> Flight | None:
        """Send off the step after one that runs; None where that one has to land first."""
        began = perf_counter()
        if self._drafter is not None and self._needs_tokens(flight):
            return None
        step = follow(self._scheduler, flight.step, began)
        if step is None or not self._can_launch(step):
            return None
        flight.settled = True
        alive = [part for part in flight.step.parts if not part.sequence.is_done]
        self._pages.copy([copy for part in alive for copy in self._scheduler.settle(part)])
        return self._launch(step, began)

    def _needs_tokens(self, flight: Flight) -> bool:
        """Whether the step behind one that runs will have guesses, as far as what is known can say."""
        if self.odds.fixed:
            return True
        if not (due := self._watch.due()):
            return False
        rows = sum(not part.sequence.is_done for part in flight.step.parts)
        return bool(self._weigh(self._look_up(due), rows))

    def _land(self, flight: Flight) -> None:
        """Wait for the tokens of a step and take them in; choices that ended meanwhile are passed over."""
        drawn = flight.launched.wait()
        step, replies, outputs, accepted = Step(), [], [], []
        for part, some in zip(flight.step.parts, drawn, strict=True):
            if part.sequence.is_done:
                continue
            reply, true = self.replies[part.sequence], count_true(some, part.drafts) if part.drafts else 0
            step.parts.append(part)
            replies.append(reply)
            outputs.append(reply.take(some[: 1 + true], self._scheduler.version, [None] * (1 + true)))
            accepted.append(min(true, len(part.sequence.chain) - part.start - 1))
            if part.drafts and part.sequence.holding is not None:
                part.sequence.holding.reach = part.start + 1 + true
        self._finish_step(step, replies, accepted, outputs, flight.settled)
        now = perf_counter()
        self._finish_times(step, None if flight.began is None else now - max(flight.began, self._landed_at))
        self._landed_at = now

    # --- any step ---

    def _compute(self, step: Step) -> None:
        parts = step.parts
        replies = [self.replies[part.sequence] for part in parts]
        wants_experts = any(part.sequence.request.params.expert_ids for part in parts)
        ran = self._runner.run(parts, wants_experts)
        rows = [reply.rows(part.drafts) if part.ends else [] for part, reply in zip(parts, replies, strict=True)]
        drawn = draw_parts(ran.logits, parts, rows, self._drafts)
        experts = experts_of(ran.experts, rows)
        outputs, accepted = [], []
        for part, reply, tokens, chosen in zip(parts, replies, drawn, experts, strict=True):
            outputs.append(reply.take(tokens, self._scheduler.version, chosen[: len(tokens)]))
            # A draft that came true was consumed, unless the reply ended before it.
            accepted.append(min(max(len(tokens) - 1, 0), len(part.sequence.chain) - part.start - part.count))
        drafted = [(p, a) for p, a in zip(parts, accepted, strict=True) if p.drafts]
        self._runner.replay(ran, [p for p, _ in drafted], [a for _, a in drafted])
        self._observe(ran, parts, accepted)
        self._finish_step(step, replies, accepted, outputs)

    def _observe(self, ran: Ran, parts: Sequence[Part], accepted: Sequence[int]) -> None:
        """Show the drafter the rows that are now known, each with the token that follows it."""
        if ran.hidden is None or self._drafter is None:
            return
        for part, start, count in zip(parts, ran.starts, accepted, strict=True):
            ids = part.sequence.chain.ids
            known = min(part.count + count, len(ids) - 1 - part.start)
            following = ids[part.start + 1 : part.start + 1 + known].tolist()
            self._drafter.observe(part.sequence, part.start, ran.hidden[start : start + known], following)

    def _finish_step(
        self,
        step: Step,
        replies: Sequence[Reply],
        accepted: Sequence[int],
        outputs: Sequence[list[Output]],
        settled: bool = False,
    ) -> None:
        copies = []
        for part, reply, count in zip(step.parts, replies, accepted, strict=True):
            if reply.failed:
                self._scheduler.condemn(part.sequence)
            copies += [] if settled else self._scheduler.settle(part, count)
        self._open = ()
        self._pages.copy(copies)
        for part, reply, count, some in zip(step.parts, replies, accepted, outputs, strict=True):
            self._scheduler.landed(part, count)
            if part.drafts:
                self.odds.note(part.sequence, len(part.drafts), count)
                if count == len(part.drafts):
                    self._watch.trust(part.sequence)
            self._totals.note_part(part, count, some)
            if reply.is_done:
                self._end(part.sequence, some)
            elif some:
                self._deliver(part.sequence, some)
        self._totals.note_step(step)


def _without_drafts(step: Step) -> Step:
    """The same without what only a recorded step can take back."""
    return replace(step, parts=[replace(part, drafts=()) for part in step.parts])
