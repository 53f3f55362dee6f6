"""The engine: requests in, tokens out, step by step.

`rille.serve.scheduler` decides what runs, `rille.serve.prefix` what need not, `runner` computes, `sampler` draws.
`stepping` is where they meet, a step at a time; the engine is the face to it. One thread steps; submit, abort and stats
are safe from any other.
"""

from __future__ import annotations

import itertools
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Lock, RLock, Thread, current_thread
from time import perf_counter, sleep

import torch
from torch import Tensor

from rille.interrupts import held
from rille.misspelt import check_names, named
from rille.model.model import K3
from rille.serve.assemble import count_pages, load, new_drafter, new_scheduler, record_steps
from rille.serve.generate import check_pair, model_stop_ids
from rille.serve.grammar import Matcher, Vocabulary
from rille.serve.handle import RequestHandle
from rille.serve.paged import Pages
from rille.serve.reply import Reply
from rille.serve.requests import check_request, collect, picture_spans, requests_of
from rille.serve.resident import Rest
from rille.serve.runner import Runner
from rille.serve.schema import (
    Completion,
    EngineStats,
    FinishReason,
    Output,
    QueueFull,
    Refused,
    Request,
    SamplingParams,
    Unavailable,
)
from rille.serve.sequences import Sequence as Choice
from rille.serve.settings import EngineConfig
from rille.serve.speculation import Drafter
from rille.serve.stepping import Stepper
from rille.serve.totals import Totals
from rille.serve.warm import warm_up
from rille.text.vocabulary import Tokenizer

FULL_S = 0.005  # between two looks at a queue that others fill


class Engine:
    """checkpoint: a directory, or a model, which stays as and where it is. config: how it uses the machine; single
    settings may be given by name. drafter: by its name there, or one of your own.

        engine = rille.Engine("runs/tiny", max_running=8)
        [[one]] = engine.generate([[1, 2, 3]], SamplingParams(max_tokens=16, temperature=0))

    Raises ValueError or FileNotFoundError as `rille.load_model`, and ValueError for settings that do not fit the model
    or the machine.
    """

    def __init__(
        self,
        checkpoint: str | Path | K3,
        *,
        tokenizer: Tokenizer | None = None,
        config: EngineConfig | None = None,
        drafter: Drafter | str | None = None,
        **settings,
    ) -> None:
        names = ("tokenizer", "config", "drafter", *(field.name for field in fields(EngineConfig)))
        check_names("Engine", settings, names)
        given = {} if drafter is None else {"drafter": drafter if isinstance(drafter, str) else "none"}
        self.config = replace(config or EngineConfig(), **settings, **given)
        self.model, found = load(checkpoint, self.config)
        self.tokenizer = tokenizer if tokenizer is not None else found
        if self.tokenizer is not None:
            check_pair(self.tokenizer, self.model)
        self.stop_ids = model_stop_ids(self.model, self.tokenizer)
        self._vocabulary: Vocabulary | None = None
        self._reading = Lock()
        num_pages = count_pages(self.model, self.config)
        self.pages = Pages(self.model.config, num_pages, self.model.dtype, self.model.device, poison=self.config.poison)
        self.scheduler = new_scheduler(self.pages, num_pages, self.config, self.model.config.max_positions)
        self.runner = Runner(self.model, self.pages, deterministic=self.config.deterministic)
        self.drafter = new_drafter(self.model, self.config, None if isinstance(drafter, str) else drafter)
        self.runner.keeps_hidden = self.drafter is not None and self.drafter.reads_hidden
        record_steps(self.runner, self.scheduler, self.config)
        self._handles: dict[str, RequestHandle] = {}
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._lock, self._numbers, self._pending = Lock(), itertools.count(1), 0
        self._stepping = RLock()  # whoever has it is between steps, or makes one
        self._thread: Thread | None = None
        self._wake, self._closing = Event(), False
        self._totals, self._versions = Totals(), {0}
        self._stepper = Stepper(
            self.config,
            self.pages,
            self.scheduler,
            self.runner,
            self.drafter,
            self._totals,
            deliver=lambda choice, outputs: self._handles[choice.id].put(outputs),
            end=self._end,
        )
        self._replies = self._stepper.replies

    # --- the face ---

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.scheduler.version

    @property
    def longest(self) -> int:
        """Tokens that one sequence may come to, prompt and reply."""
        return self.scheduler.longest

    def check(self, request: Request) -> None:
        """As `schema.ServingEngine.check`."""
        self._matchers(request)
        self._check_room(request)

    def _check_open(self) -> None:
        if self._closing:
            raise Unavailable("the engine is shutting down", retry_after_s=10)

    def _check_room(self, request: Request) -> None:
        self._check_open()
        self.scheduler.check(request, self._pending)

    def _matchers(self, request: Request) -> list[Matcher | None]:
        """The grammar of each choice, at its start. Raises ValueError for what the request asks and cannot be."""
        if not isinstance(request, Request):
            raise ValueError(f"a request is {request!r:.80}; give Request(prompt=ids, ...), or ids to `generate`")
        check_request(request, self.model.config, self.tokenizer)
        params = request.params
        if params.grammar is None:
            return [None] * params.n
        first = self.vocabulary.matcher(params.grammar, params.grammar_prefix)
        return [first, *(first.copy() for _ in range(params.n - 1))]

    @property
    def vocabulary(self) -> Vocabulary:
        """What compiles grammars; made when it is first asked for."""
        if self.tokenizer is None:
            raise ValueError("a grammar needs a tokenizer, and the checkpoint has none")
        with self._reading:  # of many that ask first at once one makes it
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self.tokenizer, self.model.config.vocab_size)
            return self._vocabulary

    def submit(self, request: Request) -> RequestHandle:
        """As `schema.ServingEngine.submit`."""
        handle = self._hand_in(request, self._matchers(request))
        assert handle is not None
        return handle

    def _hand_in(
        self, request: Request, matchers: Sequence[Matcher | None], *, waits: bool = False
    ) -> RequestHandle | None:
        """waits: where the queue is full there is no handle, and no refusal."""
        seed = request.params.seed if request.params.seed is not None else secrets.randbits(63)
        came = perf_counter()
        with self._lock:  # whoever comes at once is counted by who comes next, and whoever closes looks in once more
            try:
                self._check_room(request)
            except Refused as refusal:
                if waits and isinstance(refusal, QueueFull):
                    return None
                self._totals.refused += 1
                raise
            id = request.id or f"request-{next(self._numbers)}"
            if id in self._handles:
                raise ValueError(f"request id {id!r} is in use; give another one, or none")
            handle = RequestHandle(id, request.params.n, self._advance)
            self._handles[id] = handle
            self._pending += request.params.n
            self._post(lambda: self._take_in(request, handle, seed, came, matchers))
        return handle

    def abort(self, id: str, index: int | None = None) -> None:
        """As `schema.ServingEngine.abort`."""
        self._post(lambda: self._abort(id, index))

    @named
    def generate(
        self, prompts: Iterable[Sequence[int]], params: SamplingParams | Iterable[SamplingParams] | None = None
    ) -> list[list[Completion]]:
        """Continue prompts: for each the list of its `n` choices, ids in and out.

        params: for all, one for each, or the defaults. Works with the engine's thread and without, from several threads
        too. More prompts than may wait are handed in as others finish, whoever's those are. Raises ValueError and
        `Refused` for prompts that cannot run.
        """
        requests = requests_of(prompts, params)
        for request in requests:
            check_request(request, self.model.config, self.tokenizer)
        results: list[list[Completion]] = []
        open_handles: deque[tuple[RequestHandle, Request]] = deque()
        try:
            for request in requests:
                matchers = self._matchers(request)
                while (handle := self._hand_in(request, matchers, waits=True)) is None:
                    if not open_handles:  # others fill it
                        if not self._advance():
                            sleep(FULL_S)
                        continue
                    results.append(collect(*open_handles[0]))
                    open_handles.popleft()
                open_handles.append((handle, request))
            while open_handles:
                results.append(collect(*open_handles[0]))
                open_handles.popleft()
        finally:
            for handle, _ in open_handles:  # of prompts that nobody will read, since another was refused
                self.abort(handle.id)
        return results

    def update_weights(self, named: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace weights in place, between two steps; what is cached from before is not found any more.

        named: parameters by their names in the model (`model.named_parameters()`), some or all. version: a number that
        was not used before; every later token carries it. Requests under way go on with the new weights. Raises
        ValueError, with nothing changed, for an unknown name, another shape or kind, or a version that was used, and
        OSError where the engine's thread fails at it.
        """
        given = dict(named)
        there = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        if unknown := sorted(given.keys() - there.keys()):
            raise ValueError(
                f"update_weights: the model has no parameter {unknown[0]!r} ({len(unknown)} unknown names)"
            )
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or tensor.is_floating_point() != there[name].is_floating_point():
                found = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
                raise ValueError(f"update_weights: {name} is {found}, the model's is {there[name].dtype}")
            if tensor.is_meta or tensor.layout is not torch.strided:
                raise ValueError(f"update_weights: {name} holds no plain values ({tensor.device}, {tensor.layout})")
            if tensor.shape != there[name].shape:
                raise ValueError(
                    f"update_weights: {name} has shape {list(tensor.shape)}, the model's {list(there[name].shape)}"
                )
        with self._lock:  # of two who come with one number one is refused
            if not isinstance(version, int) or version in self._versions:
                raise ValueError(f"update_weights: version is {version!r}; give a whole number that was not used yet")
            self._versions.add(version)
        if not self._between_steps(lambda: self._replace(given, there, version)):
            raise OSError("update_weights: the engine has stopped with a part of them; its log says why")

    @torch.no_grad()
    def _replace(self, given: dict[str, Tensor], there: dict[str, Tensor], version: int) -> None:
        self._stepper.settle()
        for name, tensor in given.items():
            there[name].copy_(tensor)
        self.model.prepare()
        self.scheduler.renew(version)
        self.scheduler.cache.store.clear()

    def stats(self) -> EngineStats:
        """As `schema.ServingEngine.stats`."""
        return self._totals.stats(self.scheduler, self._pending)

    def describe(self) -> list[str]:
        """As `schema.ServingEngine.describe`."""
        c = self.config
        size = self.pages.bytes.numel() / 2**30
        drafts = "none" if self.drafter is None else f"{type(self.drafter).__name__}, at most {c.draft_length} tokens"
        return [
            *self.scheduler.cache.describe(),
            f"pool: {size:.2f} GiB on {self.model.device}; a sequence may have {self.longest:,} tokens"
            f" (the checkpoint was made for {self.model.config.max_positions:,})",
            f"steps: at most {self.scheduler.config.token_budget:,} tokens of at most {c.max_running:,} sequences; "
            f"{c.max_queued:,} may wait",
            f"drafts: {drafts}; deterministic: {'yes' if c.deterministic else 'no'}; weights: version {self.version}",
        ]

    # --- the thread ---

    def start(self) -> None:
        """As `schema.ServingEngine.start`."""
        with self._lock:
            if self._thread is None:
                self._thread = Thread(target=self._run, name="rille-engine", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """As `schema.ServingEngine.close`."""
        with self._lock:
            self._closing, thread = True, self._thread
        if thread is not None:
            self._wake.set()
            thread.join()
            self._thread = None
        self._end_all("abort")

    def warm_up(self) -> None:
        """Take the memory that requests will need, and load what they would wait for. On a GPU, where the pool is taken
        already and kernels are made for what is asked, there is nothing to do. Raises OSError where the engine's thread
        has failed at it."""
        if self.pages.device.type == "cpu":
            self._between_steps(lambda: warm_up(self.pages, self.scheduler.cache, self.runner))
        if self._closing:
            raise OSError("the engine has stopped before the first request; its log says why")

    def _run(self) -> None:
        rest = Rest()
        try:
            while not self._closing:
                if self.step():
                    rest.worked()
                else:
                    rest.idle()
                    self._wake.wait(timeout=0.05)  # deadlines pass without anybody waking us
                    self._wake.clear()
        finally:
            if not self._closing:  # it failed: nobody may wait for it, or ask again
                with self._lock:
                    self._closing = True
                self._end_all("error", "the engine has stopped after a fault; its log says which")

    def _end_all(self, reason: FinishReason, error: str | None = None) -> None:
        with self._stepping:
            self._drain()
            for choice, reply in list(self._replies.items()):
                self._end(choice, [reply.end(reason, error=error)])

    def _post(self, action: Callable[[], object]) -> None:
        self._inbox.put(action)
        self._wake.set()

    def _between_steps(self, action: Callable[[], None]) -> bool:
        """Carry an action out in the thread that steps, and wait for it. False where it was a fault of that thread."""
        thread = self._thread
        if thread is None or not thread.is_alive() or current_thread() is thread:
            with self._stepping, held():
                action()
            return True
        done, carried_out = Event(), Event()
        self._post(lambda: (action(), carried_out.set()))
        self._post(done.set)
        while not done.wait(timeout=0.1):
            if not thread.is_alive():  # it has ended without another look into the inbox
                self._drain()
        return carried_out.is_set()

    def _drain(self) -> None:
        with suppress(Empty):
            while True:
                self._inbox.get_nowait()()

    # --- requests ---

    def _take_in(
        self, request: Request, handle: RequestHandle, seed: int, came: float, matchers: Sequence[Matcher | None]
    ) -> None:
        spans = picture_spans(request, self.model.config)
        with self._lock:
            self._pending -= request.params.n
            choices = self.scheduler.submit(request, handle.id, came, spans, checked=True)
        for choice, matcher in zip(choices, matchers, strict=True):
            self._replies[choice] = Reply(choice, seed, self.stop_ids, self.tokenizer, matcher)

    def _abort(self, id: str, index: int | None) -> None:
        for choice in [choice for choice in self._replies if choice.id == id and index in (None, choice.index)]:
            self._end(choice, [self._replies[choice].end("abort")])

    def _end(self, choice: Choice, outputs: Sequence[Output]) -> None:
        """The last outputs of a choice; its pages go."""
        self.scheduler.finish(choice)
        self._stepper.forget(choice)
        self._totals.note_end(outputs)
        self._handles[choice.id].put(outputs)
        if not any(other.id == choice.id for other in self._replies):
            del self._handles[choice.id]

    def step(self) -> bool:
        """One step; False where there was nothing to run. Ctrl-C waits until it is over."""
        with self._stepping, held():
            self._drain()
            return self._stepper.step()

    def _advance(self) -> bool:
        """A step for a reader who waits, where no thread makes them. Whether so."""
        if self._thread is not None:
            return False
        self.step()
        return True
