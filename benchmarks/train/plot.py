"""Draws where the time of training steps goes: `step-*.json` of benchmarks/train/step.py in, one picture out.

python benchmarks/train/plot.py FOLDER docs/step.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw(results: list[dict], picture: Path) -> None:
    """One bar a run, stacked by kind, milliseconds of kernels; the label says what the run reached."""
    kinds = sorted(
        {k for r in results for k in r["kinds_ms"]}, key=lambda k: -sum(r["kinds_ms"].get(k, 0) for r in results)
    )
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.7 * len(results)))
    colours = plt.get_cmap("tab20")
    names = [
        f"{r['preset']}, {r['residual']}\n{r['tokens_per_second'] / 1e3:,.0f}k tokens/s, MFU {r['mfu']:.0%}"
        for r in results
    ]
    left = [0.0] * len(results)
    for i, kind in enumerate(kinds):
        widths = [r["kinds_ms"].get(kind, 0.0) for r in results]
        axes.barh(names, widths, left=left, label=kind, color=colours(i))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="ms of kernels in a step of 131,072 tokens")
    axes.invert_yaxis()
    axes.legend(fontsize=7, ncols=2)
    figure.tight_layout()
    figure.savefig(picture, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    files = sorted(arguments.folder.glob("step-*.json"))
    if not files:
        parser.error(f"{arguments.folder} holds no step-*.json")
    draw([json.loads(file.read_text()) for file in files], arguments.picture)


if __name__ == "__main__":
    main()
