"""What `rille generate`, `rille chat` and `rille serve` are asked for. No torch here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from rille.serve.settings import EngineConfig


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

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs, in fp32."""


@dataclass(frozen=True, kw_only=True)
class ChatConfig:
    """Talk with a checkpoint's model, or with a server's, in the terminal.

    Type a message and press Enter. Lines that begin with / are commands; /help lists them. Ctrl-C stops a reply, Ctrl-D
    leaves. With standard input from a pipe each line is a message: answers go to standard output, thinking and tool
    calls to standard error.
    """

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT|URL")]
    """A checkpoint directory, a directory that `rille train` wrote (its newest checkpoint is taken), or the address of
    a server (http://...; its key, if it needs one, in RILLE_API_KEY)."""

    tools: Annotated[str | None, arg(metavar="FILE.py")] = None
    """Let the model call the public functions of this Python file (with type hints and docstrings). They run here, as
    you, without asking."""

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

    def __post_init__(self):
        if self.max_new_tokens < 1 or self.max_rounds < 1:
            raise ValueError(
                f"max_new_tokens is {self.max_new_tokens} and max_rounds {self.max_rounds}; both must be at least 1"
            )


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
    """What clients call the model; several are allowed, the first is the one that replies carry. By default the
    directory's name."""

    api_key: Annotated[tuple[str, ...], arg(metavar="KEY")] = ()
    """Only requests with one of these keys are answered (health, metrics and the page are open). Other users of this
    machine can see a command line: RILLE_API_KEY in the environment does the same, unseen."""

    timeout_s: float | None = None
    """A request that is not finished after so many seconds ends with 408."""

    max_body_mib: int = 64
    """The largest body of a request."""

    kv_events: Annotated[str | None, arg(metavar="ADDRESS")] = None
    """Publish over ZMQ what can be resumed, in vLLM's format, at this address (tcp://*:5557)."""

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
