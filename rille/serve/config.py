"""What `rille generate` and `rille chat` are asked for. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg


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
    """Talk with a checkpoint's model in the terminal.

    Type a message and press Enter. Lines that begin with / are commands; /help lists them. Ctrl-C stops a reply, Ctrl-D
    leaves. With standard input from a pipe each line is a message: answers go to standard output, thinking and tool
    calls to standard error.
    """

    checkpoint: Annotated[Positional[str], arg(metavar="CHECKPOINT")]
    """A checkpoint directory, or a directory that `rille train` wrote (its newest checkpoint is taken)."""

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
