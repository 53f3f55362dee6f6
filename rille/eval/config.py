"""What each verb of `rille eval` is asked. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Literal

from tyro.conf import Positional, arg

Checkpoint = Annotated[Positional[str], arg(metavar="CHECKPOINT")]
Task = Literal["palindrome", "mqar", "stack"]


def at_least(config: object, least: int, *names: str) -> None:
    """Raise ValueError that names the first of these fields (numbers, or tuples of them) below `least`."""
    for name in names:
        value = getattr(config, name)
        if min(value if isinstance(value, tuple) else (value,), default=least - 1) < least:
            raise ValueError(f"{name} is {value}; it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class Where:
    """A checkpoint, and where it is evaluated."""

    checkpoint: Checkpoint
    """A checkpoint directory, or a directory that `rille train` wrote (its newest checkpoint is taken)."""

    out: str | None = None
    """Directory for the numbers (JSON) and the picture (PNG); none: the table alone."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""

    dtype: Literal["fp32", "bf16"] = "fp32"
    """Of the weights in memory and the arithmetic."""


@dataclass(frozen=True, kw_only=True)
class HeldOutConfig(Where):
    """Bits per byte of text that the model has not seen, by source."""

    sources: tuple[str, ...] = ()
    """NAME=PATH: a text file, a folder, .jsonl[.gz|.xz|.zst] or .parquet, or of a built set its held-out side.
    None: the held-out text of the run itself."""

    context: int = 4096
    """Documents are cut into pieces of at most so many tokens; each starts anew."""

    tokens: int = 65_536
    """Measure at most so many tokens of a source, its first ones."""

    batch_tokens: int = 8192
    """Tokens in memory at once; the result does not depend on it."""

    def __post_init__(self):
        at_least(self, 1, "context", "tokens", "batch_tokens")


@dataclass(frozen=True, kw_only=True)
class LengthConfig(Where):
    """Loss by position, beyond the length that the model was trained on too."""

    sources: tuple[str, ...] = ()
    """NAME=PATH as for held-out; none: the held-out text of the run itself."""

    length: int = 2048
    """Tokens of each document that are looked at; shorter documents are left out."""

    documents: int = 16
    """Look at most at so many documents."""

    def __post_init__(self):
        at_least(self, 2, "length")
        at_least(self, 1, "documents")


@dataclass(frozen=True, kw_only=True)
class NeedleConfig(Where):
    """Find one sentence in a long text, by its depth and the text's length."""

    lengths: tuple[int, ...] = (512, 1024, 2048)
    """Tokens before the answer, the needle and the question among them."""

    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Where the needle stands: 0 at the beginning, 1 right before the question."""

    samples: int = 4
    """Texts for each length and depth."""

    haystack: str | None = None
    """The text around: a file, a folder, .jsonl[.gz|.xz|.zst] or .parquet; none: the library of this Python."""

    seed: int = 0
    """Of the choice of text and needle."""

    def __post_init__(self):
        at_least(self, 1, "lengths", "samples")
        at_least(self, 0, "seed")
        if not self.depths or not all(0 <= depth <= 1 for depth in self.depths):
            raise ValueError(f"depths are {self.depths}; give at least one, each from 0 to 1")


@dataclass(frozen=True, kw_only=True)
class RecallConfig(Where):
    """Synthetic recall in context, on token ids of the checkpoint's vocabulary: it was not trained on these tasks."""

    tasks: tuple[Task, ...] = ("palindrome", "mqar", "stack")
    """Which of them."""

    lengths: tuple[int, ...] = (64, 256, 1024)
    """Tokens of an example."""

    samples: int = 8
    """Examples for each task and length."""

    symbols: int = 512
    """Ids of the vocabulary that an example draws on."""

    seed: int = 0
    """Of the choice of ids and examples."""

    def __post_init__(self):
        at_least(self, 1, "lengths", "samples")
        at_least(self, 0, "seed")
        if not self.tasks:
            raise ValueError("no tasks; name at least one of palindrome, mqar, stack")


@dataclass(frozen=True, kw_only=True)
class LearnConfig:
    """Train a small model from scratch on one synthetic recall task and say after how many steps it has it."""

    task: Annotated[Positional[Task], arg(metavar="TASK")]
    """palindrome: a sequence backwards; mqar: values of keys; stack: what each of many stacks gives back."""

    mixer: Literal["kda", "mla", "hybrid"] = "kda"
    """Attention of the layers: all KDA, all MLA (without positions), or MLA in the last one."""

    length: int = 64
    """Tokens of a training example."""

    lengths: tuple[int, ...] = (64, 128)
    """Lengths that the trained model is tested at."""

    symbols: int = 64
    """Size of the vocabulary."""

    stacks: int = 8
    """Stacks of the task stack."""

    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    """Channels of a head; the model is heads x head_dim wide."""

    steps: int = 600
    """Updates at most."""

    batch: int = 32
    """Examples of an update."""

    lr: float = 3e-3
    """Peak learning rate of AdamW."""

    enough: float = 0.95
    """Stop where so large a share of the answers of unseen examples is right."""

    eval_every: int = 20
    """Updates between two tests."""

    samples: int = 64
    """Examples of a test."""

    seed: int = 0
    """Of weights and examples."""

    out: str | None = None
    """Directory for the numbers (JSON) and the picture (PNG); none: the table alone."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model runs."""

    def __post_init__(self):
        at_least(self, 1, "layers", "heads", "head_dim", "steps", "batch", "eval_every", "samples", "stacks", "lengths")
        at_least(self, 0, "seed")
        if not 0 < self.enough <= 1:
            raise ValueError(f"enough is {self.enough}; it is a share, above 0 and at most 1")
        if not 0 < self.lr < inf:
            raise ValueError(f"lr is {self.lr}; it must be above 0 and finite")


@dataclass(frozen=True, kw_only=True)
class HarnessConfig(Where):
    """Multiple choice and exact match tasks of lm-evaluation-harness (`pip install 'rille[eval]'`)."""

    tasks: tuple[str, ...]
    """Names of the harness's tasks, such as arc_easy hellaswag gsm8k."""

    include: str | None = None
    """A folder with task descriptions of your own."""

    shots: int | None = None
    """Examples before each question; none: as the task says."""

    limit: int | None = None
    """Ask at most so many questions of a task."""

    max_new_tokens: int = 256
    """Of an answer that is written, where the task says nothing."""

    def __post_init__(self):
        at_least(self, 1, "max_new_tokens")
        if not self.tasks:
            raise ValueError("no tasks; name at least one, such as arc_easy")
        if (self.shots is not None and self.shots < 0) or (self.limit is not None and self.limit < 1):
            raise ValueError(f"shots is {self.shots} and limit {self.limit}; at least 0 and at least 1, or none")
