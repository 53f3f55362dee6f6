"""Pictures of a run, one function each, from the rows of its files. No torch.

A line of more than `POINTS` steps is drawn through the means of equal stretches. Figures are made without pyplot: they
belong to nobody but the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

POINTS = 1200
Rows = Sequence[dict[str, Any]]


def losses(runs: Sequence[tuple[str, Rows]]) -> Figure:
    """Training loss of each run, held-out loss as points of the same colour; of a single run also each domain."""
    figure, axes = _figure("step", "nats a token")
    alone = len(runs) == 1
    for label, rows in runs:
        for name in ("loss", *(_names(rows, "loss/") if alone else ())):
            shown = label if not alone else name.replace("loss/", "").replace("loss", "all")
            line = _line(axes, rows, name, shown)
            axes.plot(*series(rows, f"held_out_{name}"), "o", ms=4, color=line.get_color())
    return _finished(figure, axes)


def norms(rows: Rows) -> Figure:
    """Gradient norms by kind of parameter, logarithmic."""
    return _lines(rows, ("gradient_norm", *_names(rows, "gradient_norm/")), "gradient_norm", "norm", log=True)


def updates(rows: Rows) -> Figure:
    """How far the weights of each kind move in one step."""
    return _lines(rows, _names(rows, "update_norm/"), "update_norm", "norm of the update", log=True)


def violations(rows: Rows) -> Figure:
    """Load violation by layer: largest load / mean load - 1."""
    figure, axes = _layers(rows, "load_violation", "max load / mean load - 1")
    axes.set_yscale("log")
    return _finished(figure, axes)


def dead(rows: Rows) -> Figure:
    """Experts of each layer that no token went to."""
    return _finished(*_layers(rows, "dead_experts", "experts without a token"))


def speed(rows: Rows) -> Figure:
    """Tokens a second, and MFU where it is known."""
    figure, axes = _figure("step", "tokens a second")
    _line(axes, rows, "tokens_per_second", "tokens a second")
    axes.set_ylim(bottom=0)
    if any("mfu" in row for row in rows):
        right = axes.twinx()
        steps, values = series(rows, "mfu")
        right.plot(steps, 100 * values, color="C1", lw=1)
        right.set_ylabel("MFU, % (orange)")
        right.set_ylim(bottom=0)
    return _finished(figure, axes, legend=False)


def loads(look: dict[str, Any]) -> Figure:
    """Heat map of one step's expert load, layer by expert, in shares of the mean; experts sorted by load."""
    figure, axes = _figure("expert, by falling load", "layer")
    layers = list(look["expert_load"])
    load_LE = np.array([look["expert_load"][layer] for layer in layers], dtype=float)
    share_LE = -np.sort(-load_LE / load_LE.mean(1, keepdims=True), axis=1)
    image = axes.imshow(share_LE, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2, interpolation="nearest")
    axes.set_yticks(range(len(layers)), layers)
    figure.colorbar(image, ax=axes, label="load / mean load", extend="max")
    return _finished(figure, axes, legend=False)


def attention(look: dict[str, Any]) -> Figure:
    """Heat map of the mean Attention-Residual weights, site by source; the running sum stands apart, at the right."""
    sites = look["attn_res"]
    most = max(len(weights_R) for weights_R in sites.values())
    map_SR = np.full((len(sites), most), np.nan)
    for row, weights_R in enumerate(sites.values()):
        map_SR[row, : len(weights_R) - 1] = weights_R[:-1]
        map_SR[row, -1] = weights_R[-1]
    figure, axes = _figure("source", "site")
    figure.set_figheight(1.2 + 0.2 * len(sites))
    image = axes.imshow(map_SR, aspect="auto", cmap="viridis", vmin=0, interpolation="nearest")
    axes.set_xticks(range(most), ["embedding", *(f"block {n}" for n in range(1, most - 1)), "running sum"][-most:])
    axes.set_yticks(range(len(sites)), [name.removeprefix("layers.") for name in sites], fontsize=7)
    figure.colorbar(image, ax=axes, label="mean weight")
    return _finished(figure, axes, legend=False)


def sizes(runs: Sequence[tuple[str, Rows]]) -> Figure:
    """Root mean square of what attention (solid) and feed-forward (dashed) of each layer add, at the last look of each
    run; of a single run also at the first."""
    figure, axes = _figure("layer", "RMS of the output")
    for label, looks in runs:
        before = f"{label}, " if len(runs) > 1 else ""
        for look in [looks[0], looks[-1]][-2 if len(runs) == 1 and len(looks) > 1 else -1 :]:
            color = None
            for part, style in (("attn", "o-"), ("mlp", "o--")):
                values = [size for name, size in look["output_rms"].items() if name.endswith(part)]
                shown = f"{before}step {look['step']}" if part == "attn" else None
                (line,) = axes.plot(values, style, ms=3, lw=1, color=color, label=shown)
                color = line.get_color()
    axes.set_yscale("log")
    return _finished(figure, axes)


def svg(figure: Figure) -> str:
    """The figure as an SVG element; equal figures give equal text."""
    import matplotlib

    stream = StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "rille", "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None, "Creator": None})
    return stream.getvalue()[stream.getvalue().index("<svg") :]


def series(rows: Rows, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values of a number where it was measured and finite; at most POINTS, means of equal stretches."""
    pairs = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    steps, values = np.array(pairs, dtype=float).reshape(-1, 2).T
    stretch = -(-len(pairs) // POINTS) if pairs else 1
    whole = len(pairs) // stretch * stretch
    means = [x[:whole].reshape(-1, stretch).mean(1) for x in (steps, values)]
    return means[0], means[1]


def _figure(x: str, y: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def _lines(rows: Rows, names: Iterable[str], what: str, y: str, log: bool) -> Figure:
    figure, axes = _figure("step", y)
    for name in names:
        _line(axes, rows, name, name.removeprefix(f"{what}/"))
    if log:
        axes.set_yscale("log")
    return _finished(figure, axes)


def _layers(rows: Rows, what: str, y: str) -> tuple[Figure, Axes]:
    """A line for each layer, from dark to light with the depth."""
    from matplotlib import colormaps

    figure, axes = _figure("step", y)
    names = _names(rows, f"{what}/")
    for place, name in enumerate(names):
        shade = colormaps["viridis"](0.9 * place / max(1, len(names) - 1))
        _line(axes, rows, name, f"layer {name.removeprefix(f'{what}/')}").set_color(shade)
    return figure, axes


def _line(axes: Axes, rows: Rows, name: str, label: str) -> Line2D:
    (line,) = axes.plot(*series(rows, name), lw=1, label=label)
    return line


def _names(rows: Rows, prefix: str) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row if name.startswith(prefix)))


def _finished(figure: Figure, axes: Axes, legend: bool = True) -> Figure:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if legend and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, frameon=False, ncols=3)
    return figure
