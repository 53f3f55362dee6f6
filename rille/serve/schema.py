"""What goes into the engine and what comes out: requests, sampling parameters, outputs, figures. No torch here.

    engine.submit(Request(prompt=ids, params=SamplingParams(max_tokens=64)))  ->  Handle
    for output in handle:  TokenOutput ... TokenOutput Finished         (`async for` from an event loop)

Token ids in, token ids out: text, channels and tool calls belong to whoever asks. With n > 1 the outputs of all
choices come interleaved, `index` says whose they are, and each choice ends with a `Finished` of its own. The iterator
ends after the last of them. Lengths and positions are tokens, times are seconds.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, trunc
from numbers import Real
from operator import index
from typing import TYPE_CHECKING, Any, Literal, Protocol

from rille.misspelt import named_fields

if TYPE_CHECKING:
    from rille.text.grammar import Grammar
    from rille.text.images import Images

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: a stop id, a stop string or the end of the grammar; length: max_tokens; abort: asked for, or the deadline
passed; error: this request alone failed, `Finished.error` says why."""

MissReason = Literal["cold", "evicted", "no_checkpoint", "below_unit", "draft"]
"""Why prompt tokens were computed: never seen; seen and evicted; latents are there, but no KDA checkpoint so deep; the
end of the prompt below one hash unit; given up for the drafter."""

MAX_TOP_LOGPROBS = 20
MAX_TOP_K = 1 << 53  # more than any vocabulary; up to there a float is exact
MAX_BIAS = 1e6  # of a logit: beyond, logits of 32 bits would come to infinity together with penalties


class Refused(Exception):
    """A request that is not taken, and the HTTP status that says so. retry_after_s: when to ask again, None where that
    is of no use. Its text is meant for the user."""

    status = 400

    def __init__(self, message: str, retry_after_s: float | None = None):
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TooLarge(Refused):
    """It could never run here: more tokens than a sequence may have, or than the memory holds."""

    status = 400


class QueueFull(Refused):
    """The queue, or the token budget of the request's class, is full now."""

    status = 429


class Unavailable(Refused):
    """The engine is shutting down, or has failed."""

    status = 503


def _whole(value: Any, name: str) -> int:
    try:
        return int(index(value))
    except TypeError:
        raise ValueError(f"{name} is {value!r:.80}; it must be a whole number") from None


def _number(value: Any, name: str) -> float:
    if not isinstance(value, Real):
        raise ValueError(f"{name} is {value!r:.80}; it must be a number")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} is a number of {int(trunc(value)).bit_length():,} bits; it must be a float") from None


def _list(value: Any, name: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Collection):
        raise ValueError(f"{name} is {value!r:.80}; give a list")
    return tuple(value)


@named_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen. Every field is honoured or refused; the checks run where the object is made.

    The order is that of the field: penalties and logit_bias change the logits, the grammar and min_tokens mask them,
    temperature divides them, then top_k, top_p and min_p cut, in this order, and one token is drawn.
    """

    max_tokens: int = 128
    temperature: float = 1.0  # 0: the likeliest token
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0  # a token needs this part of the likeliest one's probability
    presence_penalty: float = 0.0  # subtracted once from the logit of each token that the reply has
    frequency_penalty: float = 0.0  # subtracted for each time it was written
    repetition_penalty: float = 1.0  # divides positive logits of tokens of prompt and reply, multiplies negative ones
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None  # the same seed gives the same tokens whatever runs beside; None draws a new one
    n: int = 1
    stop: Sequence[str] = ()  # needs an engine with a tokenizer
    stop_ids: Sequence[int] = ()  # besides those of the model; the token is the last one of the output
    ignore_eos: bool = False  # the model's own stop ids are tokens like others
    min_tokens: int = 0  # before that no stop id can be drawn and no stop string ends the reply
    logprobs: bool = True  # of the chosen token, before temperature and cuts; always finite
    top_logprobs: int = 0
    expert_ids: bool = False  # record the chosen experts of every token
    grammar: Grammar | None = None
    """What may be written (`rille.text.continuations`); None: anything."""

    grammar_prefix: str = ""
    """Text of the reply that the prompt holds already (a partial message), fed to the grammar first."""

    def __post_init__(self) -> None:
        self._check_kinds()
        ranges: dict[str, tuple[float, float, float]] = {
            "max_tokens": (self.max_tokens, 1, inf),
            "temperature": (self.temperature, 0, 100),
            "min_p": (self.min_p, 0, 1),
            "repetition_penalty": (self.repetition_penalty, 0.01, 100),
            "top_k": (self.top_k, 0, MAX_TOP_K),
            "presence_penalty": (self.presence_penalty, -2, 2),
            "frequency_penalty": (self.frequency_penalty, -2, 2),
            "n": (self.n, 1, 128),
            "min_tokens": (self.min_tokens, 0, self.max_tokens),
            "top_logprobs": (self.top_logprobs, 0, MAX_TOP_LOGPROBS),
            "seed": (self.seed or 0, 0, 2**63 - 1),
        }
        for name, (value, low, high) in ranges.items():
            if not low <= value <= high:
                raise ValueError(f"{name} is {value}; it must be from {low} to {high}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1")
        if far := [bias for bias in self.logit_bias.values() if not abs(bias) <= MAX_BIAS]:
            raise ValueError(f"logit_bias has the value {far[0]}; it must be from {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if any(not text for text in self.stop):
            raise ValueError("stop has an empty string; give texts of at least one character")
        if self.min_tokens and self.grammar is not None:
            raise ValueError(
                f"min_tokens is {self.min_tokens}, but a grammar (of tools, or of a response format) decides where a "
                "reply may end; leave one of them out"
            )
        if self.grammar_prefix and self.grammar is None:
            raise ValueError(f"grammar_prefix is {self.grammar_prefix!r:.80}, but there is no grammar to feed it to")

    def _check_kinds(self) -> None:
        """A value of another kind would be a fault of the step in which it is read, and of all that runs in it: what is
        not refused becomes a plain number, list or mapping."""
        plain: dict[str, Any] = {}
        for name in ("max_tokens", "top_k", "n", "min_tokens", "top_logprobs"):
            plain[name] = _whole(getattr(self, name), name)
        plain["seed"] = None if self.seed is None else _whole(self.seed, "seed")
        numbers = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
        for name in numbers:
            plain[name] = _number(getattr(self, name), name)
        for name in ("ignore_eos", "logprobs", "expert_ids"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r:.80}; it must be True or False")
        for name in ("stop", "stop_ids"):
            plain[name] = _list(getattr(self, name), name)
        if not all(isinstance(text, str) for text in plain["stop"]):
            raise ValueError(f"stop is {self.stop!r:.80}; give a list of texts")
        plain["stop_ids"] = tuple(_whole(token, "an id of stop_ids") for token in plain["stop_ids"])
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias is {self.logit_bias!r:.80}; give a number for each of some token ids")
        plain["logit_bias"] = {
            _whole(token, "an id of logit_bias"): _number(bias, "a value of logit_bias")
            for token, bias in self.logit_bias.items()
        }
        for name, value in plain.items():
            object.__setattr__(self, name, value)


@named_fields
@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it."""

    prompt: Sequence[int]
    """Ids, at least one. Where pictures are, one media token for each row of features (`rille.text.expand_media`)."""

    params: SamplingParams = SamplingParams()
    images: Sequence[Images] = ()
    """The pictures of the prompt in the order of their media tokens."""

    marks: Sequence[int] = ()
    """Positions (numbers of tokens) after which a later prompt may go another way: turn ends, the place before the
    generation prompt. The engine prefers to keep a checkpoint there."""

    id: str | None = None  # the engine finds one
    priority: int = 0  # higher first
    deadline_s: float | None = None  # from submission; what is unfinished then is aborted
    kind: str | None = None  # budget class; None: chosen by the prompt's length

    def __post_init__(self) -> None:
        if isinstance(self.prompt, str | bytes) or not isinstance(self.prompt, Iterable):
            raise ValueError(f"the prompt is {self.prompt!r:.80}; give a list of token ids")
        object.__setattr__(self, "prompt", tuple(self.prompt))  # whoever gave a list may go on writing in it
        if not len(self.prompt):
            raise ValueError("the prompt has no tokens; give at least one")
        kinds = set(map(type, self.prompt))  # few, of however many tokens
        if not all(issubclass(kind, int) for kind in kinds):  # of a tensor, or no ids at all
            object.__setattr__(self, "prompt", tuple(_whole(token, "an id of the prompt") for token in self.prompt))
        self._check_kinds()
        if self.deadline_s is not None and not self.deadline_s > 0:
            raise ValueError(f"deadline_s is {self.deadline_s}; it must be above 0")
        if any(not 0 <= mark <= len(self.prompt) for mark in self.marks):
            raise ValueError(f"marks {list(self.marks)} must lie inside the prompt of {len(self.prompt)} tokens")

    def _check_kinds(self) -> None:
        """As `SamplingParams._check_kinds`."""
        if not isinstance(self.params, SamplingParams):
            raise ValueError(f"params is {self.params!r:.80}; give SamplingParams(...)")
        if self.id is not None and not isinstance(self.id, str):
            raise ValueError(f"id is {self.id!r:.80}; it must be a text")
        object.__setattr__(self, "priority", _whole(self.priority, "priority"))
        object.__setattr__(self, "images", () if self.images is None else _list(self.images, "images"))
        object.__setattr__(self, "marks", tuple(_whole(mark, "one of marks") for mark in _list(self.marks, "marks")))
        if self.deadline_s is not None:
            object.__setattr__(self, "deadline_s", _number(self.deadline_s, "deadline_s"))


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One token of choice `index`. version: of the weights that chose it. text: what became readable with it, held back
    as far as a stop string may begin there ("" without a tokenizer); the texts of a choice joined are its text without
    the stop string. experts: MoE layer -> ids, where asked for."""

    index: int
    token: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...] = ()
    version: int = 0
    text: str = ""
    experts: Mapping[int, tuple[int, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice: of the prompt, of those the ones that were not computed (0 <= cached < prompt), of the
    reply."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """Choice `index` is over. matched: the stop id or stop string that ended it; text: what was held back until now.
    is_refused: the error is of what the request asks for, and would come again."""

    index: int
    reason: FinishReason
    usage: Usage
    matched: int | str | None = None
    error: str | None = None
    text: str = ""
    is_refused: bool = False


Output = TokenOutput | Finished


@dataclass(frozen=True)
class Completion:
    """One choice of a finished request, as `rille.Engine.generate` returns it. All tuples have one entry a token."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    reason: FinishReason
    usage: Usage
    text: str = ""
    matched: int | str | None = None
    error: str | None = None
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    experts: tuple[Mapping[int, tuple[int, ...]], ...] | None = None


@dataclass(frozen=True)
class Histogram:
    """How many values were at most each of the rising bounds and above the one before; the last count is of those
    above all bounds. total: their sum."""

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


@dataclass(frozen=True)
class EngineStats:
    """Figures at this moment; totals since the start. Pages are those of the one pool."""

    running: int = 0
    waiting: int = 0
    pages_total: int = 0
    pages_used: int = 0  # by requests that run
    pages_cached: int = 0  # evictable
    page_tokens: int = 0  # latents to a page
    checkpoints: int = 0
    checkpoint_pages: int = 0  # that they lie on
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cache_queries: int = 0  # prompt tokens looked up
    cache_hits: int = 0  # of those not computed
    latent_hits: int = 0  # of those with latents there, whether or not a checkpoint let them be used
    external_queries: int = 0  # tokens that were looked for in the outer tier, for the pool did not have them
    external_hits: int = 0
    misses: Mapping[MissReason, int] = field(default_factory=dict)
    preemptions: int = 0
    aborted: int = 0
    refused: int = 0
    finished: Mapping[FinishReason, int] = field(default_factory=dict)
    steps: int = 0
    batch_tokens: int = 0  # of the last step
    queued_s: Histogram = Histogram()  # of every choice that has run: seconds before it did
    step_tokens: Histogram = Histogram()  # of every step
    resumed_tokens: Histogram = Histogram()  # of every choice: tokens of its prompt that were not computed
    drafts: int = 0  # rows of guesses that were verified
    drafted: int = 0  # tokens in them
    accepted: int = 0
    accepted_at: tuple[int, ...] = ()  # by place in the draft
    draft_length: int = 0  # of the last step
    version: int = 0


class Handle(Protocol):
    """A request under way. Iterate it from any thread, or with `async for`; one reader only. batches: the same in lists
    of what has come meanwhile."""

    @property
    def id(self) -> str: ...
    def __iter__(self) -> Iterator[Output]: ...
    def __aiter__(self) -> AsyncIterator[Output]: ...
    def batches(self) -> AsyncIterator[list[Output]]: ...


class ServingEngine(Protocol):
    """What the HTTP front asks of an engine; `rille.serve.engine.Engine` is one. Every method is safe from any
    thread and none waits for the device."""

    def check(self, request: Request) -> None:
        """Raise ValueError for what cannot be (ids outside the vocabulary, stop strings without a tokenizer, a grammar
        that does not compile) and `Refused` for what is not taken now or ever, with the numbers; change nothing."""
        ...

    def submit(self, request: Request) -> Handle:
        """Queue a request. Raises as `check`."""
        ...

    def abort(self, id: str, index: int | None = None) -> None:
        """Stop a request, or one choice of it; what is open finishes with reason "abort". An unknown id is a request
        that has ended."""
        ...

    def stats(self) -> EngineStats: ...

    def describe(self) -> list[str]:
        """What an operator wants to read at the start, one line each: memory, pages, hash unit, least cacheable length,
        retention, token budget."""
        ...

    def start(self) -> None:
        """Run in a thread of its own until `close`."""
        ...

    def close(self) -> None:
        """Abort what runs, refuse what comes, and wait for the thread."""
        ...
