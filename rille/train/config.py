"""The settings of a training run. No torch here: the command line is made from these types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from rille.data.config import DataConfig
from rille.model.config import K3Config
from rille.model.vision_config import VisionConfig
from rille.optim.config import OptimConfig
from rille.train.curriculum import Stage, parse_stages
from rille.train.guard import GuardConfig

# What may change when a run is resumed; everything else decides the numbers.
FREE_ON_RESUME = (
    "out",
    "steps",
    "resume",
    "max_minutes",
    "device",
    "eval_every",
    "eval_tokens",
    "checkpoint_every",
    "keep",
    "save_in_background",
    "recompute",
    "guard.spike",
    "guard.window",
    "guard.limit",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A pretraining run, from text to an official checkpoint."""

    out: str
    """Directory of the run: metrics.jsonl, tensorboard, checkpoints, and model, the finished checkpoint."""

    steps: int
    """Updates of the weights in all, those before a resume included."""

    resume: bool = False
    """Continue the newest checkpoint in the directory; give the settings that the run was started with."""

    seed: int = 0
    """Of the initial weights; data.seed orders the text."""

    max_minutes: float | None = None
    """Stop in good order after so many minutes of steps, saved; --resume goes on. None: go to the last step."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the model is trained."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and gradients; bfloat16 weights are roundings of fp32 ones that the optimiser moves."""

    accumulate: int = 1
    """Batches whose gradients are summed for one update."""

    stages: tuple[str, ...] = ()
    """Later stages, see docs/training.md: "at=8000 sequence_length=16384 accumulate=2 code=0.4 prose=0.6"."""

    eval_every: int = 50
    """Updates between two measurements of the held-out loss; there is one after the last update too."""

    eval_tokens: int = 16_384
    """Held-out tokens of a measurement (all of them where there are fewer)."""

    checkpoint_every: int = 100
    """Updates between two checkpoints; there is one after the last update too."""

    mtp_weight: float = 0.0
    """Of the loss of the layers that predict further tokens (model.mtp_layers), beside the next token's 1."""

    keep: int = 2
    """Checkpoints that are kept, the newest ones."""

    save_in_background: bool = False
    """Write checkpoints while training goes on, from a copy in host memory; the last one is waited for."""

    ema: float | None = None
    """Keep a running mean of the weights with this decay (0.999); model-ema is the finished one. None: no mean."""

    recompute: bool = False
    """Keep of each layer only what enters it, and run it again in the backward pass: a third more work, less memory."""

    guard: GuardConfig = GuardConfig()

    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig()
    model: K3Config

    def __post_init__(self):
        """Raises ValueError that names a field out of range."""
        for name in ("steps", "accumulate", "eval_every", "eval_tokens", "checkpoint_every", "keep"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_minutes is not None and not self.max_minutes > 0:
            raise ValueError(f"max_minutes is {self.max_minutes}; it must be above 0, or none")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed is {self.seed}; it must be at least 0 and below 2^63")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"ema is {self.ema}; it is a decay, above 0 and below 1, or none")
        if self.all_stages[-1].at >= self.steps:
            raise ValueError(f"stages: the last begins at step {self.all_stages[-1].at}, but steps is {self.steps}")
        self._check_mtp()
        if not self.out:
            raise ValueError("out is empty; name a directory for the run")
        if self.data.vocab_size != self.model.vocab_size:
            raise ValueError(
                f"data.vocab_size is {self.data.vocab_size} and model.vocab_size {self.model.vocab_size}; the model "
                "reads what the tokenizer writes: set both to the same number"
            )

    @property
    def all_stages(self) -> tuple[Stage, ...]:
        """The stage that begins at step 0, from `data` and `accumulate`, and the later ones."""
        first = Stage(0, self.data.sequence_length, self.data.batch_tokens, self.accumulate)
        return parse_stages(first, self.stages)

    def _check_mtp(self):
        layers, weight = self.model.mtp_layers, self.mtp_weight
        if not (isfinite(weight) and weight >= 0):
            raise ValueError(f"mtp_weight is {weight}; it must be a number of at least 0")
        if weight > 0 and not layers:
            raise ValueError(f"mtp_weight is {weight}, but the model has no MTP layer; give --model.mtp-layers 1")
        if layers and weight == 0:
            raise ValueError(
                f"model.mtp_layers is {layers} and mtp_weight 0: the layers would keep their random weights; give "
                "--mtp-weight 0.3, or --model.mtp-layers 0"
            )


def settings(config: TrainConfig) -> dict[str, Any]:
    """The config as JSON can hold it, one dotted name a value: {"steps": 200, "optim.lr": 0.002, ...}.

    The text's path stands there in full, so that it means the same from any directory.
    """
    flat = dict(_flat(asdict(config), ""))
    if config.data.path is not None:
        flat["data.path"] = str(Path(config.data.path).resolve())
    return json.loads(json.dumps(flat))


def _flat(values: dict[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in values.items():
        if isinstance(value, dict) and prefix + name in PARTS:
            pairs += _flat(value, f"{prefix}{name}.")
        else:
            pairs.append((prefix + name, value))
    return pairs


def check_resumable(saved: dict[str, Any], now: dict[str, Any], place: str) -> None:
    """Raise ValueError that lists the settings in which a run differs from its checkpoint, but for FREE_ON_RESUME.

    A setting that the checkpoint does not know is newer than it and stood at its default then; one that is unknown
    here is a difference.
    """
    saved = {name: value for name, value in _defaults(TrainConfig, "", saved) if name in now} | saved
    names = [name for name in {**saved, **now} if name not in FREE_ON_RESUME and not _equal(name, saved, now)]
    if names:
        listed = "; ".join(f"{name} {_shown(name, saved)}, now {_shown(name, now)}" for name in names[:8])
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        raise ValueError(
            f"{place} is of a run with other settings: {listed}{more}. Resume with the same, or give another out"
        )


def _equal(name: str, saved: dict[str, Any], now: dict[str, Any]) -> bool:
    return name in saved and name in now and saved[name] == now[name]


def _shown(name: str, values: dict[str, Any]) -> str:
    return str(values[name]) if name in values else "unknown"


def _defaults(kind: type, prefix: str, saved: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted name and default of every setting that has one, but not of an optional part that was absent."""
    for field in fields(kind):
        name = prefix + field.name
        if name in PARTS and (field.default is not None or any(key.startswith(f"{name}.") for key in saved)):
            yield from _defaults(PARTS[name], f"{name}.", saved)
        elif field.default is not MISSING:
            yield name, json.loads(json.dumps(field.default))


# Where the settings of a run have settings of their own.
PARTS: dict[str, type] = {
    "data": DataConfig,
    "optim": OptimConfig,
    "guard": GuardConfig,
    "model": K3Config,
    "model.vision": VisionConfig,
}
