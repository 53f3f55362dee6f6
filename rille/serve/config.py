"""What `rille generate` is asked for. No torch here."""

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
