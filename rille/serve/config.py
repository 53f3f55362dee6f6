"""What `rille generate`, `rille chat` and `rille serve` are asked for. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from rille.misspelt import named_fields
from rille.serve.settings import EngineConfig, check_max_length


@named_fields
@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Continue a prompt with a checkpoint's model, token by token."""

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT")]
    """A checkpoint directory, or a directory that `rille train` wrote (its newest checkpoint is taken)."""

    prompt: Annotated[str, arg(metavar="TEXT")]
    """The text to continue; it may be empty."""

    max_new_tokens: int = 128
    """Stop after so many tokens, or earlier at the end of the text."""

    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 samples from the model as it is."""

    top_p: float = 0.95
    """Sample from the likeliest tokens that have this much probability together."""

    seed: int = 0
    """The same seed gives the same text."""

    max_length: int | None = None
    """Tokens that prompt and continuation may come to; by default as many as the checkpoint was made for."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs, in fp32."""

    def __post_init__(self):
        check_max_length(self.max_length)


@named_fields
@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Talk with a checkpoint's model, or with a server's, in the terminal.

    Type a message and press Enter. Lines that begin with / are commands; /help lists them. Ctrl-C stops a reply, Ctrl-D
    leaves. With standard input from a pipe each line is a message: answers go to standard output, thinking and tool
    calls to standard error.
    """

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT|URL")]
    """A checkpoint directory, or a directory that `rille train` wrote (its newest checkpoint is taken).
    Or the address of a server (http://...; its key, if it needs one, in RILLE_API_KEY)."""

    tools: Annotated[str | None, arg(metavar="FILE.py")] = None
    """Let the model call the public functions of this Python file (with type hints and docstrings).
    They run here, as you, without asking."""

    image: Annotated[tuple[str, ...], arg(metavar="PATH")] = ()
    """Pictures that go with the first message."""

    system: Annotated[str | None, arg(metavar="TEXT")] = None
    """A system message, which stands before the conversation."""

    thinking: bool = True
    """Let the model think before it answers."""

    effort: Literal["low", "high", "max"] = "max"
    """How much to think."""

    max_new_tokens: int = 1024
    """Stop a reply after so many tokens, thinking included."""

    max_length: int | None = None
    """Tokens that a conversation may come to; by default as many as the checkpoint was made for."""

    max_rounds: int = 8
    """Stop after so many rounds of tool calls in one turn."""

    temperature: float = 0.8
    """0 takes the likeliest token each time; 1 samples from the model as it is."""

    top_p: float = 0.95
    """Sample from the likeliest tokens that have this much probability together."""

    seed: int = 0
    """The same seed and messages give the same replies."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in memory and the arithmetic."""

    experts: Literal["values", "mxfp4"] = "values"
    """mxfp4 keeps routed experts packed, as the checkpoint must have them: a quarter of their bytes in bf16."""

    def __post_init__(self):
        if self.max_new_tokens < 1 or self.max_rounds < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and max_rounds {self.max_rounds}; both must be at least 1"
            )
        check_max_length(self.max_length)


@named_fields
@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Serve a checkpoint over HTTP: OpenAI's and Anthropic's APIs, metrics, and a page to talk with it at /."""

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT")]
    """A checkpoint directory, or a directory that `rille train` wrote (its newest checkpoint is taken)."""

    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 is every one of this machine, and should go with api_key."""

    port: int = 8000
    """The port to listen on; 0 takes a free one."""

    name: Annotated[tuple[str, ...], arg(metavar="NAME")] = ()
    """What clients call the model; several are allowed, the first is the one that replies carry.
    By default the directory's name."""

    api_key: Annotated[tuple[str, ...], arg(metavar="KEY")] = ()
    """Only requests with one of these keys are answered (health, metrics and the page are open).
    Other users of this machine can see a command line: RILLE_API_KEY in the environment does the same, unseen."""

    timeout_s: float | None = None
    """A request that is not finished after so many seconds ends with 408."""

    max_body_mib: int = 64
    """The largest body of a request."""

    kv_events: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """Publish over ZMQ what can be resumed, in vLLM's format, at this address (tcp://*:5557)."""

    kv_events_topic: str = ""
    """What those messages begin with, for subscribers that choose by it."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Memory, batching, drafts."""

    def __post_init__(self):
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port is {self.port}; it must be from 0 to 65535")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s is {self.timeout_s}; it must be above 0")
        if self.max_body_mib < 1:
            raise ValueError(f"max_body_mib is {self.max_body_mib}; it must be at least 1")
        if any(not text for text in (*self.name, *self.api_key)):
            raise ValueError("name and api_key must not be empty texts")


@named_fields
@dataclass(frozen=True, kw_only=True)
class BenchServeConfig:
    """Put an agents' load on a server: conversations with shared beginnings and growing turns; print TTFT, TPOT,
    throughput and hit rate."""

    url: Annotated[Positional[str], arg(metavar="URL")]
    """The server's address; its key, if it needs one, in RILLE_API_KEY."""

    mode: Literal["closed", "open"] = "closed"
    """closed: so many conversations at once; open: conversations begin at a rate, whatever the server does."""

    concurrency: int = 8
    """Conversations at once (closed)."""

    rate: float = 1.0
    """Conversations that begin in a second, on average (open)."""

    sessions: int = 32
    """Conversations in all."""

    turns: int = 6
    """Requests of one conversation; each reads all before it."""

    groups: int = 4
    """Different beginnings that conversations share."""

    prefix: int = 2_048
    """Tokens of such a beginning."""

    output: int = 64
    """Tokens written in a turn, on average."""

    ratio: float = 131.0
    """Tokens read for each one written; what turns add to their prompts follows from it."""

    tool_s: float = 0.0
    """Seconds between a reply and the next turn."""

    seconds: float | None = None
    """Go on with new conversations until so many seconds have passed; sessions then counts those of one round."""

    aborts: float = 0.0
    """The share of replies that the client leaves, each after a random number of tokens; the conversation goes on."""

    check: int = 0
    """Ask so many of the requests again afterwards, one at a time: each must be answered as it was under load.
    Wait before that until nothing runs: no page may be held then. The server must be deterministic.
    At the end look once more, 10 s later, what memory it has given back."""

    temperature: float = 1.0
    """Of sampling."""

    vocab_size: int | None = None
    """Ids are drawn below this; by default the server says."""

    allow_loops: bool = False
    """Report figures even of replies that go in circles."""

    seed: int = 0
    """The same seed gives the same trace."""

    out: Annotated[str | None, arg(metavar="FOLDER")] = None
    """Write figures and samples (bench_serve.json) and a picture (bench_serve.png) here."""

    def __post_init__(self):
        if self.concurrency < 1 or not self.rate > 0 or self.tool_s < 0:
            raise ValueError(
                f"concurrency is {self.concurrency}, rate {self.rate}, tool_s {self.tool_s}; they must be at least 1, "
                "above 0, and not negative"
            )
        if not 0 <= self.aborts <= 1 or self.check < 0 or (self.seconds is not None and not self.seconds > 0):
            raise ValueError(
                f"aborts is {self.aborts}, check {self.check}, seconds {self.seconds}; they must be from 0 to 1, not "
                "negative, and above 0"
            )
