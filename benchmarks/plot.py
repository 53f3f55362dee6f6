"""Draws measured times beside their byte floors: JSON files of `benchmarks/ops/*.py` in, one picture out.

    python benchmarks/plot.py docs docs/performance.png

Each panel is one file's table: bars for the floor, ours and the peer where it was measured, logarithmic.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

BARS = {"floor": "#b0b0b0", "ours": "#1f6fb4", "fla": "#d9822b"}


@dataclass(frozen=True)
class Panel:
    """One table: the file that holds it, its key there, and what its numbers are."""

    file: str
    key: str
    title: str
    unit: str


PANELS = (
    Panel("kda.json", "forward", "KDA forward", "ms"),
    Panel("kda.json", "train", "KDA forward + backward", "ms"),
    Panel("kda.json", "decode", "KDA decode step, one layer", "us"),
    Panel("kda.json", "verify", "KDA commit + verify", "us"),
)


def rows_of(folder: Path, panel: Panel) -> list[dict[str, Any]]:
    path = folder / panel.file
    if not path.is_file():
        return []
    table = json.loads(path.read_text())
    peers = {row["work"]: {"fla": row["fla"]} for row in table.get(f"fla {panel.key}", [])}
    return [peers.get(row["work"], {}) | row for row in table.get(panel.key, [])]


def draw(axes: Any, panel: Panel, rows: list[dict[str, Any]]) -> None:
    names = [row["work"] for row in rows]
    present = [bar for bar in BARS if any(isinstance(row.get(bar), float) for row in rows)]
    height = 0.8 / len(present)
    for i, bar in enumerate(present):
        at = [y + (i - (len(present) - 1) / 2) * height for y in range(len(names))]
        values = [row.get(bar) or 0 for row in rows]
        axes.barh(at, values, height, color=BARS[bar], label=bar)
        for y, value in zip(at, values, strict=True):
            if value:
                axes.text(value, y, f" {value:.3g}", va="center", fontsize=7)
    axes.set(yticks=range(len(names)), yticklabels=names, xscale="log", xlabel=panel.unit, title=panel.title)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.legend(fontsize=7)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("folder", type=Path, help="where the benchmarks wrote their JSON files")
    parser.add_argument("picture", type=Path)
    options = parser.parse_args()
    panels = [(panel, rows) for panel in PANELS if (rows := rows_of(options.folder, panel))]
    if not panels:
        raise SystemExit(f"{options.folder}: none of {', '.join(sorted({p.file for p in PANELS}))} is there")
    figure, axes = plt.subplots(
        len(panels), 1, figsize=(8, 0.45 * sum(len(r) + 2 for _, r in panels) + 1), squeeze=False
    )
    for ax, (panel, rows) in zip(axes[:, 0], panels, strict=True):
        draw(ax, panel, rows)
    figure.tight_layout()
    figure.savefig(options.picture, dpi=90)


if __name__ == "__main__":
    main()
