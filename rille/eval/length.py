"""Loss by position: does a model use what lies further back than anything it was trained on?

    curve(i) = mean over documents of -log p(token i | all before it)

Only documents of at least the whole length count, so that every position is measured on the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rille.eval.config import LengthConfig
from rille.eval.intervals import UNDECIDED, mean_interval
from rille.eval.opened import open_checkpoint, read_sources
from rille.eval.result import Result, bar, show
from rille.eval.scoring import line_nats

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST = 64  # targets in the first bucket; each further one reaches twice as far


def length(config: LengthConfig) -> list[dict]:
    """Measure, show, and give the rows. Raises ValueError where no document is long enough."""
    opened = open_checkpoint(config)
    lines = [line for source in read_sources(opened, config.sources) for line in source.lines]
    long = [line[: config.length + 1] for line in lines if len(line) > config.length][: config.documents]
    if not long:
        most = max((len(line) - 1 for line in lines), default=0)
        raise ValueError(f"no document has {config.length:,} tokens, the longest {most:,}; give a smaller --length")
    with bar("loss by position", len(long) * config.length) as tell:
        nats_DN = np.stack(line_nats(opened.model, long, config.length, config.length, tell))
    trained = opened.settings().get("data.sequence_length")
    rows = by_bucket(nats_DN, trained)
    remarks = [f"documents: {len(long)}" + ("; intervals are over them" if len(long) > 1 else "")]
    if trained is not None and trained < config.length:
        remarks.append(beyond(nats_DN, trained))
    draw = [lambda axes: curve(axes, rows, trained)]
    title = f"Loss by position, {opened.place}"
    show(Result("length", title, config, rows, draw, tuple(remarks)), config.out)
    return rows


def edges(length: int) -> list[int]:
    """Bucket borders: 0, 64, 128, 256, ... , length."""
    borders = [0]
    while (border := max(FIRST, 2 * borders[-1])) < length:
        borders.append(border)
    return [*borders, length]


def by_bucket(nats_DN: np.ndarray, trained: int | None) -> list[dict]:
    """Mean loss of each bucket of positions. nats: [documents, positions]."""
    borders = edges(nats_DN.shape[1])
    return [
        {
            "from": a,
            "to": b - 1,
            "nats a token": mean_interval(nats_DN[:, a:b].mean(1).tolist()),
            "seen in training": None if trained is None else b <= trained,
        }
        for a, b in zip(borders[:-1], borders[1:], strict=True)
    ]


def beyond(nats_DN: np.ndarray, trained: int) -> str:
    """How the positions beyond the trained length compare with the last half of it, document by document."""
    before = nats_DN[:, trained // 2 : trained].mean(1)
    change = mean_interval((nats_DN[:, trained:].mean(1) - before).tolist())
    side = "which is not told apart from 0" if change.side == UNDECIDED else f"which is {change.side} 0"
    return f"beyond the {trained:,} tokens of a training sequence less the half before: {change} nats a token, {side}"


def curve(axes: Axes, rows: Sequence[dict], trained: int | None) -> None:
    middles = [(row["from"] + row["to"]) / 2 for row in rows]
    means = [row["nats a token"].mean for row in rows]
    halves = [row["nats a token"].half or 0.0 for row in rows]
    axes.errorbar(middles, means, yerr=halves, color="#0b6e8f", marker="o", ms=4, capsize=3)
    axes.set_xscale("log", base=2)
    if trained is not None:
        axes.axvline(trained, color="#c8553d", lw=1, ls="--", label="length of a training sequence")
        axes.legend(fontsize=8, frameon=False)
    axes.set_xlabel("position", fontsize=8)
    axes.set_ylabel("nats a token", fontsize=8)
