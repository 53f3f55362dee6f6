"""Training speed of `tiny` on a CPU: first right, then fast.

    PYTHONPATH=. python benchmarks/train/tiny.py [--steps 40] [--threads 2] [--out FOLDER]

The gate runs the loop's tests (a resumed run must equal a whole one bit for bit), then the benchmark's own steps must
lower the loss. Times are of the recipe's real steps on the standard library's text, after a warm-up; the table says
where a step spends them. FOLDER/tiny.json holds the same numbers. The aim is 4,000 tokens/s on 2 cores.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from time import perf_counter

import torch

from rille.data.corpus import prepare_corpus
from rille.recipes.pretrain import tiny
from rille.train import loop
from rille.train.losses import next_token_loss
from rille.train.pretrain import set_up

AIM = 4000
WARM_UP = 3
TOP = Path(__file__).resolve().parents[2]


def gate() -> None:
    """End the process unless the loop's tests pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/train/test_loop.py"]
    if subprocess.run(command, cwd=TOP, env={**os.environ, "OMP_NUM_THREADS": "1"}).returncode:
        sys.exit("the gate failed: no times")


def measure(steps: int) -> dict:
    """Losses, tokens a second of each step, and seconds of each of the loop's calls."""
    with tempfile.TemporaryDirectory() as folder:
        config = replace(tiny(), out=folder, steps=WARM_UP + steps, data=replace(tiny().data, max_bytes=2_000_000))
        run = set_up(config, prepare_corpus(config.data, Path(folder) / "corpus"))
        losses, rates, calls = [], [], []
        for step in range(WARM_UP + steps):
            work, seconds = timed_step(run)
            losses.append(float(work.loss))
            if step >= WARM_UP:
                rates.append(work.targets / sum(seconds.values()))
                calls.append(seconds)
    if mean(losses[-5:]) > losses[0] - 0.3:
        sys.exit(f"the loss did not fall: {losses[0]:.3f} at first, {mean(losses[-5:]):.3f} at last")
    parts = {name: median(each[name] for each in calls) for name in calls[0]}
    return {"tokens_per_second": median(rates), "slowest": min(rates), "fastest": max(rates), "ms": parts}


def timed_step(run: loop.Run) -> tuple[loop.Work, dict[str, float]]:
    """One step of the loop, its forward and backward passes apart."""
    marks = [perf_counter()]
    batches = loop.next_batches(run)
    marks.append(perf_counter())
    work = loop.Work(marks[0], torch.zeros(()), 0, loop.Counts())
    for batch in batches:
        result = next_token_loss(run.model, batch, work.counts)
        marks.append(perf_counter())
        result.loss_sum.backward()
        work.loss += result.loss_sum.detach()
        work.targets += int(result.count)
    marks.append(perf_counter())
    loop.reduce(run, work)
    loop.update(run, work)
    marks.append(perf_counter())
    names = ("next batch", "forward", "backward", "reduce and update")
    return work, {name: after - before for name, before, after in zip(names, marks, marks[1:], strict=False)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-gate", action="store_true", help="while profiling only")
    arguments = parser.parse_args()
    if not arguments.no_gate:
        gate()
    torch.set_num_threads(arguments.threads)
    numbers = measure(arguments.steps)
    machine = f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}"
    data = tiny().data
    print(f"\ntiny, {data.batch_tokens} tokens a batch, sequences of {data.sequence_length}; {machine}")
    for name, seconds in numbers["ms"].items():
        print(f"{name:<20}{1000 * seconds:>8.1f} ms")
    rate = numbers["tokens_per_second"]
    spread = f"{numbers['slowest']:,.0f} to {numbers['fastest']:,.0f}"
    print(f"{rate:,.0f} tokens/s (median of {arguments.steps} steps, {spread}): {rate / AIM:.2f} of the aim of {AIM:,}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "tiny.json").write_text(
            json.dumps({"machine": machine, **numbers}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    main()
