"""What runs in the next step: decoding sequences first, then prompts in chunks, within a budget of tokens. No torch.

    submit -> waiting (by kind, by rank) -> step: [ decode | chunks of short, medium, long prompts ] -> ... -> done

Every step every decoding sequence gets its token (and its drafts). What is left of the budget is divided among the
kinds of prompts by their shares, so that no prompt of 800K tokens keeps a short one waiting; what one kind does not use
the others get. Checkpoints inside a chunk are written on the way (`rille.serve.saves`). Where memory is short the
sequence of the lowest rank is set aside: it is computed again later (mostly from the cache) or copied out and back. The
sequence of the highest rank is never set aside and fits the pool alone, so something always finishes.

Rank is priority, then order of arrival. Times are seconds of one clock that the caller reads.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil

from rille.serve.chain import Chain, Span
from rille.serve.counts import Counts
from rille.serve.gather import Gather
from rille.serve.limits import Kind, SchedulerConfig, Shares
from rille.serve.pages import Copy
from rille.serve.parking import park, unpark
from rille.serve.prefix import PrefixCache
from rille.serve.saves import saves_of
from rille.serve.schema import QueueFull, Refused, Request, TooLarge, Unavailable
from rille.serve.sequences import Part, Sequence
from rille.serve.tier import Tier

QUEUED_S = (0.001, 0.005, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 480.0, 1920.0)
PATIENCE = 200  # steps in which a sequence finds no room, before those that came later are held back


@dataclass
class Step:
    """copies, clear: for before the step (`prefix.Admission`). expired: sequences whose deadline has passed; they hold
    nothing any more."""

    parts: list[Part] = field(default_factory=list)
    copies: list[Copy] = field(default_factory=list)
    clear: list[int] = field(default_factory=list)
    expired: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum([part.count + len(part.drafts) for part in self.parts])


class Scheduler:
    """park: where sequences go when they are set aside; None: they are computed again."""

    def __init__(self, cache: PrefixCache, config: SchedulerConfig | None = None, park: Tier | None = None) -> None:
        self.cache, self.config, self.park = cache, config or SchedulerConfig(), park
        self.running: list[Sequence] = []  # by rank
        self.waiting: dict[str, list[Sequence]] = {kind.name: [] for kind in self.config.kinds}
        self.num_preempted = 0
        self.queued = Counts(QUEUED_S)  # how long each waited before it ran first
        self.prefill_rate = 0.0  # tokens a second, measured
        self.version = 0  # of the weights
        self.is_closed = False
        self.takes_copies = True  # a step with drafts runs on a copy of the state
        self.gather = Gather()  # is told of times where steps are recorded
        self._order, self._now, self._shares = 0, 0.0, Shares(self.config.kinds)

    # --- what comes ---

    @property
    def num_waiting(self) -> int:
        return sum(map(len, self.waiting.values()))

    @property
    def longest(self) -> int:
        """Tokens that one sequence may come to: what is allowed, and what fits the pool."""
        pages = self.cache.store.pool.num_pages - self.cache.reserved - self.cache.groups
        room = pages * self.cache.page_tokens
        return min(self.config.max_length, room)

    def check(self, request: Request, pending: int = 0) -> None:
        """Raise `Refused` for what is not taken, now or ever. pending: sequences that are on their way here."""
        if self.is_closed:
            raise Unavailable("the engine is shutting down", retry_after_s=10)
        prompt, new = len(request.prompt), request.params.max_tokens
        if prompt + new > self.longest:
            pages, there = self.cache.pages_for(prompt + new), self.cache.store.pool.num_pages - self.cache.reserved
            raise TooLarge(
                f"a prompt of {prompt:,} tokens and max_tokens {new:,} make {prompt + new:,} tokens ({pages:,} pages); "
                f"here a sequence may have {self.longest:,} tokens (the memory has {there:,} pages)"
            )
        if request.params.n > (most := max(self.config.max_running, self.config.max_queued)):
            raise Refused(f"n is {request.params.n}; of one request at most {most} choices can run or wait here")
        kind = self._kind(request)
        queued = sum(len(s.chain) for s in self.waiting[kind.name])
        waiting = self.num_waiting + pending
        if waiting + request.params.n > self.config.max_queued and self._must_wait(request.params.n + pending):
            raise QueueFull(
                f"{waiting:,} sequences are waiting, {self.config.max_queued:,} may; {request.params.n} more "
                "do not fit",
                self._wait_s(),
            )
        if queued and queued + prompt > kind.max_queued_tokens:
            raise QueueFull(
                f"{queued:,} prompt tokens of kind {kind.name!r} are waiting, {kind.max_queued_tokens:,} may; "
                f"{prompt:,} more do not fit",
                self._wait_s(),
            )

    def _must_wait(self, number: int) -> bool:
        return self.num_waiting > 0 or len(self.running) + number > self.config.max_running

    def _wait_s(self) -> float:
        """When the queue will have moved, by what was measured; at least a second."""
        queued = sum(len(s.chain) for s in self.all_waiting())
        return float(max(1, min(600, ceil(queued / self.prefill_rate) if self.prefill_rate else 1)))

    def submit(
        self, request: Request, id: str, now: float, pictures: tuple[Span, ...] = (), *, checked: bool = False
    ) -> list[Sequence]:
        """Queue a request: one sequence for each choice. Raises as `check` (unless that was done); ValueError for an
        unknown kind."""
        if not checked:
            self.check(request)
        kind = self._kind(request)
        deadline = None if request.deadline_s is None else now + request.deadline_s
        made: list[Sequence] = []
        for index in range(request.params.n):
            self._order += 1
            chain = Chain(request.prompt, self.cache.unit, self.version, pictures)
            leader = made[0] if made else None
            made.append(Sequence(request, id, index, self._order, chain, kind.name, deadline, leader, came=now))
            self._enqueue(made[-1])
        return made

    def _kind(self, request: Request) -> Kind:
        if request.kind is None:
            return next(kind for kind in self.config.kinds if len(request.prompt) <= kind.up_to)
        for kind in self.config.kinds:
            if kind.name == request.kind:
                return kind
        raise ValueError(f"kind {request.kind!r} is not one of {', '.join(kind.name for kind in self.config.kinds)}")

    def _enqueue(self, sequence: Sequence) -> None:
        insort(self.waiting[sequence.kind], sequence, key=lambda s: s.rank)

    def all_waiting(self) -> Iterator[Sequence]:
        for queue in self.waiting.values():
            yield from queue

    # --- a step ---

    def step(self, now: float = 0.0) -> Step:
        """What runs next; without parts nothing can. Carry out clear and copies, run the parts, then call `settle` and
        `landed` for each of them, and `finish` for those that are over."""
        self._now = now
        step = Step(expired=self._expire(now))
        budget = self.config.token_budget
        for sequence in [s for s in self.running if s.num_left == 1]:
            if sequence.holding is not None:
                budget -= self._decode(sequence, budget, step)
        if self.gathers(now):
            return step
        unused, wanted = 0, {kind.name: self._wanted(kind, max(budget, 0)) for kind in self.config.kinds}
        for kind, room in self._shares.divide(budget, wanted):
            unused = self._prefill(kind, room + unused, step)
        for kind in self.config.kinds if not step.parts else ():  # those that had a share found no memory
            unused = self._prefill(kind, unused, step)
        return step

    def gathers(self, now: float) -> bool:
        """Whether prompts wait for each other, while others write."""
        return self.gather.waits(self.running, self.all_waiting(), self.config.token_budget, now)

    def _expire(self, now: float) -> list[Sequence]:
        every = (*self.running, *self.all_waiting())
        late = [s for s in every if s.deadline is not None and s.deadline <= now]
        for sequence in late:
            self.finish(sequence)
        return late

    def _decode(self, sequence: Sequence, budget: int, step: Step) -> int:
        """One token, and drafts as far as there is room for them; returns the tokens used."""
        holding = sequence.holding
        assert holding is not None
        if budget < 1 or not self._make_room(sequence, holding.length + 1, step):
            return 0
        room = min(budget - 1, sequence.longest - len(sequence.chain) - 1)
        if not self.cache.retention.exact:  # a step must not pass a boundary: the state there could not be kept
            room = min(room, self.cache.unit - holding.length % self.cache.unit - 1)
        drafts, scratch = sequence.drafts[: max(room, 0)], None
        if drafts and self.cache.extend(holding, holding.length + 1 + len(drafts)):
            scratch = self.cache.store.allocate(self.cache.groups if self.takes_copies else 0)
        drafts, scratch = ((), ()) if scratch is None else (drafts, tuple(scratch))
        self._add(Part(sequence, holding.length, 1, drafts, scratch), step)
        return 1 + len(drafts)

    def _add(self, part: Part, step: Step) -> None:
        sequence = part.sequence
        assert sequence.holding is not None
        step.clear += sequence.clear
        step.copies += sequence.copies
        step.copies += [Copy(a, z) for a, z in zip(sequence.holding.state, part.scratch, strict=False)]
        sequence.clear, sequence.copies = (), ()
        step.parts.append(part)

    def _make_room(self, sequence: Sequence, length: int, step: Step) -> bool:
        """Pages for so many tokens, at the cost of sequences of lower rank. False where it was set aside itself."""
        holding = sequence.holding
        assert holding is not None
        if self.cache.extend(holding, length):
            return True
        busy = {id(part.sequence) for part in step.parts}
        while not self.cache.extend(holding, length):
            if self.cache.forget_moving(holding):
                continue
            others = [s for s in self.running if id(s) not in busy and s.rank > sequence.rank]
            victim = others[-1] if others else sequence
            assert others or len(self.running) > 1, "a sequence that was admitted does not fit the pool alone"
            self._set_aside(victim)
            if victim is sequence:
                return False
        return True

    def _set_aside(self, sequence: Sequence) -> None:
        holding = sequence.holding
        assert holding is not None
        self.num_preempted += 1
        if holding.is_private:  # it is computed again with one version
            sequence.chain = sequence.chain.under(self.version)
        is_begun = not (holding.pinned or sequence.clear)  # else its state is still to be copied, or cleared
        if self.park is None or not is_begun or holding.is_private:
            self.cache.release(holding)
        elif park(self.cache, holding, self.park, _name(sequence)):
            sequence.parked_at = holding.length
        sequence.holding, sequence.drafts, sequence.copies, sequence.clear = None, (), (), ()
        self.running.remove(sequence)
        self._enqueue(sequence)

    def _wanted(self, kind: Kind, most: int) -> int:
        wanted = sum(s.num_left for s in self.running if s.kind == kind.name and s.num_left > 1)
        if len(self.running) < self.config.max_running:
            for sequence in self.waiting[kind.name]:
                if wanted >= most:
                    break
                wanted += 0 if sequence.is_led else sequence.num_left
        return min(wanted, most)

    def _prefill(self, kind: Kind, room: int, step: Step) -> int:
        """Prompts of one kind, those that have begun first; returns the tokens of `room` that are left."""
        busy = {id(part.sequence) for part in step.parts}
        for sequence in [s for s in self.running if s.kind == kind.name and id(s) not in busy]:
            if sequence.holding is not None and room > 0:
                room -= self._chunk(sequence, room, step)
        for sequence in [s for s in self.waiting[kind.name] if not s.is_led]:
            if room < 1 or len(self.running) >= self.config.max_running or self._must_yield(sequence):
                break
            if not self._admit(sequence):
                sequence.num_refusals += 1
                break
            room -= self._chunk(sequence, room, step)
        return max(room, 0)

    def _must_yield(self, sequence: Sequence) -> bool:
        """Whether another has waited for memory so long that what becomes free is kept for it."""
        heads = (queue[0] for queue in self.waiting.values() if queue)
        return any(s.num_refusals > PATIENCE and s is not sequence and s.rank < sequence.rank for s in heads)

    def _chunk(self, sequence: Sequence, room: int, step: Step) -> int:
        holding = sequence.holding
        assert holding is not None
        start, known = holding.length, len(sequence.chain)
        if self.config.deterministic:
            boundary = start // self.cache.unit * self.cache.unit + self.cache.unit
            until = min(boundary, sequence.num_prompt) if start < sequence.num_prompt else start + 1
        else:
            until = min(start + room, known)
        if not self._make_room(sequence, until, step):
            return 0
        saves = () if self.config.deterministic else saves_of(self.cache, sequence, start, until)
        self._add(Part(sequence, start, until - start, saves=saves), step)
        return until - start

    def _admit(self, sequence: Sequence) -> bool:
        """Give it pages. False where there are too few now; it then waits, and with it those behind."""
        if sequence.parked_at is not None and self.park is not None and self.park.has(_name(sequence)):
            return self._unpark(sequence)
        is_alone = not self.running
        fits = self.cache.cost(sequence.chain) <= self.cache.available - self._promised()
        if not fits and not is_alone:
            return False
        admission = self.cache.admit(sequence.chain, counted=sequence.cached is None, alone=not fits)
        assert admission is not None or not is_alone, "a sequence that was taken does not fit the empty pool"
        if admission is None:
            return False
        sequence.holding, sequence.parked_at = admission.holding, None
        sequence.copies, sequence.clear = admission.copies, admission.clear
        sequence.cached = admission.resumed if sequence.cached is None else sequence.cached
        sequence.fork = admission.fork
        sequence.stops = self.cache.retention.positions(
            sequence.num_prompt, admission.resumed, self.cache.unit, sequence.request.marks, sequence.fork
        )
        self._start(sequence)
        return True

    def _promised(self) -> int:
        """Pages that prompts under way have yet to take."""
        holdings = [(s.holding, len(s.chain)) for s in self.running if s.holding is not None]
        return sum(max(0, self.cache.pages_for(n) - len(h.latents) - len(h.state)) for h, n in holdings)

    def _unpark(self, sequence: Sequence) -> bool:
        assert self.park is not None and sequence.parked_at is not None
        holding = unpark(self.cache, sequence.chain, sequence.parked_at, self.park, _name(sequence))
        if holding is None:
            return False
        sequence.holding, sequence.parked_at = holding, None
        self._start(sequence)
        return True

    def _start(self, sequence: Sequence) -> None:
        sequence.num_refusals = 0
        if not sequence.has_run:
            sequence.has_run = True
            self.queued.add(max(0.0, self._now - sequence.came))
        self.waiting[sequence.kind].remove(sequence)
        insort(self.running, sequence, key=lambda s: s.rank)

    # --- after a step ---

    def settle(self, part: Part, accepted: int = 0) -> list[Copy]:
        """Note how many drafts came true (their tokens are in the chain); returns the copies that end the step. Where
        some but not all did, the caller has moved the state on by them."""
        sequence, holding = part.sequence, part.sequence.holding
        assert holding is not None
        if part.drafts and accepted == len(part.drafts) and part.scratch:
            unused, holding.state = holding.state, part.scratch
        else:
            unused = part.scratch
        if unused:
            self.cache.store.pool.give(unused)
        length = part.start + part.count + accepted
        if length in sequence.stops:
            return self.cache.checkpoint(holding, length, fork=length == sequence.fork)
        retention = self.cache.retention
        moves = length > sequence.num_prompt and retention.turn_end and not retention.exact
        if moves and not self.config.deterministic and length % self.cache.unit == 0:
            return self.cache.checkpoint(holding, length, moving=True)
        return []

    def landed(self, part: Part, accepted: int = 0) -> None:
        """The step's copies are done."""
        sequence, holding = part.sequence, part.sequence.holding
        assert holding is not None
        publish = None
        if self.config.deterministic:  # what single steps left has other bits than what a chunk would have left
            publish = sequence.num_prompt // self.cache.unit * self.cache.unit
        self.cache.landed(holding, part.start + part.count + accepted, publish)
        sequence.drafts = ()

    def finish(self, sequence: Sequence) -> None:
        """It is over, whatever it was doing; its pages go to the cache or are free. No step of it may be under way."""
        if sequence.is_done:
            return
        sequence.is_done = True
        if self.park is not None:  # it may lie there though it runs: old weights are not taken back
            self.park.drop(_name(sequence))
        if sequence.holding is None:
            self.waiting[sequence.kind].remove(sequence)
            return
        self.cache.release(sequence.holding)
        sequence.holding = None
        self.running.remove(sequence)

    def note_rate(self, tokens: int, seconds: float) -> None:
        """How long tokens of prompts took; from that follows when to ask again if the queue is full."""
        if tokens and seconds > 0:
            rate = tokens / seconds
            self.prefill_rate = 0.9 * self.prefill_rate + 0.1 * rate if self.prefill_rate else rate

    def condemn(self, sequence: Sequence) -> None:
        """What was computed for it is worth nothing; nobody may find any of it."""
        if sequence.holding is not None:
            self.cache.withdraw(sequence.holding)

    def renew(self, version: int) -> None:
        """The weights have changed: what is stored cannot match any more, nor what runs and now has two versions."""
        self.version = version
        for sequence in self.running:
            assert sequence.holding is not None
            sequence.holding.is_private = True
        for sequence in self.all_waiting():
            sequence.chain, sequence.parked_at = sequence.chain.under(version), None


def _name(sequence: Sequence) -> bytes:
    return b"parked %d" % sequence.order
