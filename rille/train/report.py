"""`rille report RUN`: one HTML page with the numbers and pictures of a run, from the files that it wrote. No torch.

metrics.jsonl, inspections.jsonl, run.json     ->     report.html, whole in one file
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from rille.model.publish import write_whole
from rille.train import plots
from rille.train.metrics import METRICS, read_metrics

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, SETTINGS, INSPECTIONS = "report.html", "run.json", "inspections.jsonl"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 56rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td { padding: .15rem 1.2rem .15rem 0; vertical-align: top; }
svg { max-width: 100%; height: auto; background: #fff; } p { color: #555; max-width: 44rem; }
details td { font-size: 13px; }
"""


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Draw a training run into one HTML page: losses, expert load, Attention Residuals, output sizes, speed."""

    run: Annotated[Positional[str], arg(metavar="RUN")]
    """The directory that `rille train` wrote; the run may still be going on."""

    beside: Annotated[tuple[str, ...], arg(metavar="RUN ...")] = ()
    """Other runs, whose losses and output sizes are drawn into the same pictures."""

    out: Annotated[str | None, arg(metavar="FILE")] = None
    """The page; none: report.html in the run's directory."""

    pictures: Annotated[str | None, arg(metavar="FOLDER")] = None
    """A folder that also gets each picture as an .svg file."""


@dataclass(frozen=True)
class Recorded:
    """What a run has written so far."""

    name: str
    rows: list[dict[str, Any]]
    looks: list[dict[str, Any]]
    settings: dict[str, Any]


def report(config: ReportConfig) -> Path:
    """Write the page; returns where it is.

    Raises ValueError for a directory without a run, or one whose rows are damaged; OSError where it cannot be written.
    """
    runs = [recorded(Path(directory)) for directory in (config.run, *config.beside)]
    drawn = {name: (text, plots.svg(figure)) for name, text, figure in pictures(runs)}
    if config.pictures is not None:
        folder = Path(config.pictures)
        folder.mkdir(parents=True, exist_ok=True)
        for name, (_, picture) in drawn.items():
            write_whole(folder / f"{name.lower().replace(' ', '-')}.svg", picture)
    out = Path(config.out) if config.out is not None else Path(config.run) / PAGE
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, page(runs[0], drawn))
    return out


def recorded(directory: Path) -> Recorded:
    """Read a run's files. Raises ValueError where there are no steps yet."""
    rows = read_metrics(directory / METRICS)
    if not rows:
        raise ValueError(f"{directory} holds no steps of a run ({METRICS}); name a directory that rille train wrote")
    settings, known = directory / SETTINGS, {}
    try:
        known = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{settings} is damaged ({error}); move it away to draw the run without it") from None
    return Recorded(directory.name or str(directory), rows, read_metrics(directory / INSPECTIONS), known)


def pictures(runs: list[Recorded]) -> Iterator[tuple[str, str, Figure]]:
    """(title, what it shows, figure) of what the runs have measured."""
    first = runs[0]
    losses = "Of each step (means where steps are many), held-out losses as points, in nats a token."
    yield "Loss", losses, plots.losses([(run.name, run.rows) for run in runs])
    if any(name.startswith("load_violation/") for name in first.rows[-1]):
        text = "How far the most loaded expert of each layer is above the mean; 0 is a perfect balance."
        yield "Load violation", text, plots.violations(first.rows)
    if any(value for row in first.rows for name, value in row.items() if name.startswith("dead_experts/")):
        text = "Experts of each layer that no token of a step went to (means where steps are many)."
        yield "Dead experts", text, plots.dead(first.rows)
    if first.looks and first.looks[-1].get("expert_load"):
        text = f"Tokens that each expert got in step {first.looks[-1]['step']}, by layer, in shares of the mean."
        yield "Expert load", text, plots.loads(first.looks[-1])
    if first.looks and first.looks[-1].get("attn_res"):
        text = f"Mean weight of each source at each site on held-out text, after step {first.looks[-1]['step']}."
        yield "Attention Residuals", text, plots.attention(first.looks[-1])
    seen = [(run.name, [look for look in run.looks if look.get("output_rms")]) for run in runs]
    seen = [(name, looks) for name, looks in seen if looks]
    if seen:
        text = "RMS of what attention (solid) and feed-forward (dashed) of each layer add, on held-out text."
        yield "Output RMS", text, plots.sizes(seen)
    yield "Gradient norms", "Before clipping, by kind of parameter, and all together.", plots.norms(first.rows)
    if any("update_norm/vector" in row for row in first.rows):
        yield "Update norms", "How far one step moves the weights of each kind.", plots.updates(first.rows)
    yield "Speed", "Of each step, held-out measurements and checkpoints left out.", plots.speed(first.rows)


def summary(run: Recorded) -> list[tuple[str, str]]:
    """The run in a few lines."""
    last, rows = run.rows[-1], run.rows
    lines = [("steps", f"{last['step']:,}"), ("tokens", f"{sum(row.get('targets', 0) for row in rows):,.0f}")]
    measured = [row for row in rows if row.get("held_out_loss") is not None]
    for name in ("loss", *(name for name in last if name.startswith("loss/"))):
        lines.append((name, _number(last.get(name))))
    for name in [name for name in (measured[-1] if measured else {}) if name.startswith("held_out_loss")]:
        lines.append((name.replace("_", " "), f"{_number(measured[-1][name])} after step {measured[-1]['step']:,}"))
    domains = [name for name in last if name.startswith("epochs/")]
    lines += [(f"passes over {name.removeprefix('epochs/')}", f"{last[name]:.2f}") for name in domains]
    if speeds := [row["tokens_per_second"] for row in rows if row.get("tokens_per_second") is not None]:
        lines.append(("tokens a second", f"{median(speeds):,.0f} (median)"))
    if mfu := [row["mfu"] for row in rows if row.get("mfu") is not None]:
        lines.append(("MFU", f"{median(mfu):.1%} (median)"))
    lines.append(("memory", f"{max(row.get('memory_gib', 0.0) for row in rows):.2f} GiB at most"))
    dead = sum(value for name, value in last.items() if name.startswith("dead_experts/"))
    return [
        *lines,
        ("experts without a token", f"{dead:.0f}"),
        ("steps passed over", f"{last.get('skipped_steps', 0):.0f}"),
    ]


def page(run: Recorded, drawn: dict[str, tuple[str, str]]) -> str:
    """The HTML."""
    title = f"Run {escape(run.name)}"
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"]
    parts.append(f"<meta name=viewport content='width=device-width'><style>{_STYLE}</style><h1>{title}</h1>")
    parts.append(_table(summary(run)))
    for name, (text, picture) in drawn.items():
        parts.append(f"<h2>{escape(name)}</h2><p>{escape(text)}</p>{picture}")
    settings = [(name, json.dumps(value)) for name, value in run.settings.items()]
    parts.append(f"<h2>Settings</h2><details><summary>all {len(settings)}</summary>{_table(settings)}</details>")
    return "\n".join([*parts, "</html>\n"])


def _table(lines: list[tuple[str, str]]) -> str:
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in lines)
    return f"<table>{rows}</table>"


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"
