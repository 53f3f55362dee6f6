"""What a study compares, and at what size. No torch here.

A study trains every variant with every seed on the same text, reads the same numbers off each run, and compares the
variants seed by seed with the first one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rille.data.config import DataConfig
from rille.model.config import K3Config
from rille.optim.config import OptimConfig
from rille.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class StudyConfig:
    """Variants times seeds, one training run each. A study that was stopped goes on when it is given again: finished
    runs are not made twice."""

    out: str
    """Directory of the study: its runs, study.json, study.png."""

    steps: int
    """Updates of the weights in each run."""

    seeds: tuple[int, ...] = (0, 1, 2)
    """Each decides the initial weights and the order of the text; at least two, so that there is an interval."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where the models are trained."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and gradients."""

    eval_every: int = 20
    """Updates between two measurements of the held-out loss."""

    eval_tokens: int = 16_384
    """Held-out tokens of a measurement."""

    data: DataConfig = DataConfig()
    optim: OptimConfig = OptimConfig(lr=8e-3)
    model: K3Config

    def __post_init__(self):
        if len(set(self.seeds)) < 2 or len(set(self.seeds)) < len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds are {self.seeds}; give at least two different ones, none negative")
        self.run("any", {}, self.seeds[0])

    def run(self, name: str, changes: Mapping[str, Any], seed: int) -> TrainConfig:
        """The training run of one variant (changes of the model) and one seed."""
        return TrainConfig(
            out=f"{self.out}/runs/{name}-{seed}",
            steps=self.steps,
            seed=seed,
            device=self.device,
            dtype=self.dtype,
            eval_every=self.eval_every,
            eval_tokens=self.eval_tokens,
            checkpoint_every=self.steps,
            keep=1,
            data=replace(self.data, seed=self.data.seed + seed),
            optim=self.optim,
            model=self.model.replace(**changes),
        )


@dataclass(frozen=True)
class Reading:
    """One number of a run. metric: a name in metrics.jsonl, or all that begin with it where it ends in "/", folded.

    over: the last row that has it, the mean over the last quarter of the steps, or over all of them.
    """

    name: str
    metric: str
    over: Literal["end", "last quarter", "run"]
    fold: Literal["sum", "max"] = "sum"


@dataclass(frozen=True)
class Curve:
    """One panel of the picture: a metric by step, or the parts of a "/" metric in the last row that has it."""

    title: str
    metric: str
    along: Literal["step", "part"] = "step"
    log: bool = False


@dataclass(frozen=True)
class Study:
    """A question, the variants that answer it (changes of the model; the first one is compared with), what is read."""

    name: str
    line: str
    config: StudyConfig
    variants: dict[str, dict[str, Any]]
    readings: tuple[Reading, ...]
    curves: tuple[Curve, ...]
    remarks: tuple[str, ...] = ()
