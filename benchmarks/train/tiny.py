"""Training speed of `tiny` on a CPU: first right, then fast.

    python benchmarks/train/tiny.py [--steps 40] [--out FOLDER]

The gate runs the loop's tests (a resumed run must equal a whole one bit for bit). Then `rille train tiny` runs as a
user would run it, on the standard library's text, and its metrics.jsonl is read: the loss must fall, and the speed is
the median over the steps after a warm-up, evaluation and checkpoints not counted. FOLDER/tiny.json holds the same
numbers. The aim is 4,000 tokens/s on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from statistics import mean, median

AIM = 4000
WARM_UP = 3
TOP = Path(__file__).resolve().parents[2]


def run(command: list[str], **environment: str) -> None:
    """Run a Python module from the repository's top; end the process where it fails."""
    result = subprocess.run([sys.executable, "-m", *command], cwd=TOP, env={**os.environ, **environment})
    if result.returncode:
        sys.exit(f"{command[0]} ended with {result.returncode}: no times")


def train(steps: int) -> list[dict]:
    """The rows of a run of `rille train tiny`."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--out", f"{folder}/run", "--steps", str(steps), "--data.max-bytes", "2000000"]
        run(["rille.cli", "train", "tiny", *flags])
        return [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    run(["pytest", "-q", "-p", "no:cacheprovider", "tests/train/test_loop.py"], OMP_NUM_THREADS="1")
    rows = train(WARM_UP + arguments.steps)
    losses = [row["loss"] for row in rows]
    if mean(losses[-5:]) > losses[0] - 0.3:
        sys.exit(f"the loss did not fall: {losses[0]:.3f} at first, {mean(losses[-5:]):.3f} at last")
    rates = [row["tokens_per_second"] for row in rows[WARM_UP:]]
    rate, machine = median(rates), f"{platform.machine()}, {os.cpu_count()} cores, torch {version('torch')}"
    spread = f"{min(rates):,.0f} to {max(rates):,.0f}"
    print(f"\ntiny: {rate:,.0f} tokens/s, median of {len(rates)} steps ({spread}); {machine}")
    print(f"{rate / AIM:.2f} of the aim of {AIM:,}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        numbers = {"machine": machine, "tokens_per_second": rates, "losses": losses}
        (arguments.out / "tiny.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
