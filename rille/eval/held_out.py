"""Bits per byte of held-out text by source: a loss that does not depend on the vocabulary.

    bits per byte = sum over targets of -log2 p(target) / bytes of text behind the targets

The end-of-text token is a target without bytes, as in the training's own held-out loss. Intervals are over the choice
of documents (`intervals.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import TYPE_CHECKING

import numpy as np

from rille.eval.config import HeldOutConfig
from rille.eval.intervals import ratio_interval
from rille.eval.opened import Opened, Source, head, open_checkpoint, read_sources
from rille.eval.result import Result, bar, show
from rille.eval.scoring import line_nats

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def held_out(config: HeldOutConfig) -> list[dict]:
    """Measure, show, and give the rows. Errors: see `read_sources`; ValueError for a source without tokens."""
    opened = open_checkpoint(config)
    sources = [
        Source(source.name, head(source.lines, config.tokens)) for source in read_sources(opened, config.sources)
    ]
    if empty := [source.name for source in sources if not source.lines]:
        raise ValueError(f"no text to predict in {', '.join(empty)}; give longer documents")
    total = sum(len(line) - 1 for source in sources for line in source.lines)
    with bar("held-out text", total) as tell:
        measured = [
            line_nats(opened.model, source.lines, config.context, config.batch_tokens, tell) for source in sources
        ]
    rows = [row(opened, source.name, source.lines, nats) for source, nats in zip(sources, measured, strict=True)]
    if len(sources) > 1:
        lines = [line for source in sources for line in source.lines]
        rows.append(row(opened, "all", lines, [nats for some in measured for nats in some]))
    draw = [lambda axes: bars(axes, rows)]
    show(Result("held-out", f"Held-out text, {opened.place}", config, rows, draw), config.out)
    return rows


def row(opened: Opened, name: str, lines: Sequence[np.ndarray], nats: Sequence[np.ndarray]) -> dict:
    """One source's numbers."""
    lengths_W = np.array(opened.tokenizer.byte_lengths())
    sizes = np.array([lengths_W[line[1:]].sum() for line in lines], dtype=np.float64)
    sums = np.array([some.sum() for some in nats])
    tokens = sum(map(len, nats))
    if not sizes.sum():
        raise ValueError(f"the text of {name} has no bytes; give longer documents")
    return {
        "source": name,
        "documents": len(lines),
        "tokens": tokens,
        "bytes": int(sizes.sum()),
        "nats a token": float(sums.sum() / tokens),
        "bits a byte": ratio_interval(sums / log(2), sizes),
    }


def bars(axes: Axes, rows: Sequence[dict]) -> None:
    names = [row["source"] for row in rows]
    values = [row["bits a byte"].mean for row in rows]
    halves = [row["bits a byte"].half or 0.0 for row in rows]
    axes.barh(names, values, xerr=halves, color="#0b6e8f", capsize=3, height=0.6)
    axes.invert_yaxis()
    axes.set_xlabel("bits a byte", fontsize=8)
