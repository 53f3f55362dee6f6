"""Pictures by matplotlib, which is imported when one is drawn. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rille.eval.study_config import Study
from rille.eval.study_readings import Finished, points

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0b6e8f", "#c8553d", "#6b8e23", "#7a5195", "#8a6d3b")


def picture(path: Path, panels: Sequence[Callable[[Axes], None]], title: str = "") -> None:
    """Draw panels side by side into a PNG file. Needs no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.6 * len(panels), 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    if title:
        figure.suptitle(title, fontsize=10)
    for number, draw in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), number + 1)
        draw(axes)
        if not axes.images:
            axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def study_picture(path: Path, study: Study, runs: Sequence[Finished]) -> None:
    """A panel a curve: a thin line for every seed, a thick one for the mean of a variant."""
    names = [name for name in study.variants if any(run.variant == name for run in runs)]

    def panel(number: int) -> Callable[[Axes], None]:
        curve = study.curves[number]

        def draw(axes: Axes) -> None:
            for name, colour in zip(names, COLOURS, strict=False):
                lines = [points(run.rows, curve) for run in runs if run.variant == name]
                xs = range(len(lines[0][0])) if curve.along == "part" else lines[0][0]
                for _, ys in lines:
                    axes.plot(xs, ys, color=colour, lw=0.6, alpha=0.5)
                axes.plot(xs, np.mean([ys for _, ys in lines], axis=0), color=colour, lw=1.8, label=name)
            if curve.log:
                axes.set_yscale("log")
            axes.set_title(curve.title, fontsize=9)
            axes.set_xlabel("step" if curve.along == "step" else "sub-layer, in order of depth", fontsize=8)
            axes.legend(fontsize=8, frameon=False)

        return draw

    picture(path, [panel(number) for number in range(len(study.curves))], study.line)
