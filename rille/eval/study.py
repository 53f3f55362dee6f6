"""A study: train every variant with every seed, read, compare, draw.

    OUT/corpus/               the text, encoded once for all runs
    OUT/runs/VARIANT-SEED/    run.json, metrics.jsonl, inspections.jsonl, checkpoints of each run
    OUT/study.json            every run's readings, means, intervals, differences from the first variant
    OUT/study.png             the curves

All runs of a seed start from the same initial weights, as far as they share them, and read the same batches.
"""

from __future__ import annotations

import json
import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from rille.data.built import open_built
from rille.data.corpus import Corpus, prepare_corpus
from rille.data.dataset import is_dataset
from rille.eval.pictures import study_picture
from rille.eval.study_config import Study, StudyConfig
from rille.eval.study_readings import Finished, as_json, compare, comparison_table
from rille.model.publish import write_whole
from rille.train.config import TrainConfig, check_resumable, settings
from rille.train.folder import SETTINGS, read_settings, sole_run, write_settings
from rille.train.inspection import INSPECTIONS, Inspections
from rille.train.loop import train
from rille.train.metrics import METRICS, JsonLines, Logger, read_metrics
from rille.train.pretrain import check_device, set_up

# Of the settings that a resume may change, those that a study's runs must share.
MATTER = ("steps", "device", "eval_every", "eval_tokens")


def run_study(study: Study, config: StudyConfig) -> Path:
    """Make the runs that are not there yet, then compare all; returns the study's directory.

    Raises ValueError for a directory that holds runs of other settings, and as `rille train` does.
    """
    out = Path(config.out)
    with sole_run(out):
        plans = [
            (name, seed, config.run(name, changes, seed))
            for seed in config.seeds
            for name, changes in study.variants.items()
        ]
        check_device(plans[0][2])
        for _, _, plan in plans:
            check_same(plan)
        built = is_dataset(config.data.path)
        corpus = open_built(config.data) if built else prepare_corpus(config.data, out / "corpus")
        with progress(len(plans), config.steps) as tell:
            runs = [Finished(name, seed, rows_of(plan, corpus, tell(name, seed))) for name, seed, plan in plans]
        report(study, config, runs)
    return out


def check_same(plan: TrainConfig) -> None:
    """Raise ValueError where the run's directory holds one of other settings."""
    out = Path(plan.out)
    if not (out / SETTINGS).exists():
        return
    saved, now = read_settings(out), settings(plan)
    check_resumable(saved, now, str(out))
    if wrong := [f"{key} {saved.get(key)}, now {now[key]}" for key in MATTER if saved.get(key) != now[key]]:
        raise ValueError(f"{out} is a run of other settings: {'; '.join(wrong)}. Give another --out")


def rows_of(plan: TrainConfig, corpus: Corpus, logger: Logger) -> list[dict]:
    """The rows of a run, which is made unless it is there and whole."""
    out = Path(plan.out)
    rows = read_metrics(out / METRICS)
    if (out / SETTINGS).exists() and rows and rows[-1]["step"] == plan.steps:
        logger.log(plan.steps, rows[-1])
        return rows
    if out.exists():
        shutil.rmtree(out)  # what a stopped study left half-way
    out.mkdir(parents=True)
    with redirect_stdout(StringIO()):  # which says the same of every run
        run = set_up(plan, corpus)
    write_settings(plan, out)
    run.loggers = [JsonLines(out / METRICS, 0), logger]
    run.inspections = Inspections(out / INSPECTIONS, 0)
    train(run)
    return read_metrics(out / METRICS)


class Told:
    """A logger that moves the study's bar, or prints a line when a run is over."""

    def __init__(self, name: str, bar: Progress, steps: int):
        self.name, self.bar, self.steps, self.done = name, bar, steps, 0

    def log(self, step: int, values: dict[str, float]) -> None:
        numbers = f"{self.name} · step {step} · loss {values['loss']:.3f}"
        self.bar.update(self.bar.task_ids[0], advance=step - self.done, numbers=numbers)
        self.done = step
        if step == self.steps:
            held = f"held-out loss {values['held_out_loss']:.4f}"
            self.bar.console.print(f"{self.name}: {held}", highlight=False)


@contextmanager
def progress(runs: int, steps: int) -> Iterator:
    """Gives (variant, seed) -> logger; one bar over the steps of all runs, on standard error."""
    columns = (TextColumn("{task.fields[numbers]}"), BarColumn(bar_width=20), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        bar.add_task("", total=runs * steps, numbers="")
        yield lambda name, seed: Told(f"{name}, seed {seed}", bar, steps)


def report(study: Study, config: StudyConfig, runs: list[Finished]) -> None:
    """Write study.json and study.png, print the table."""
    out, rows = Path(config.out), compare(study, runs)
    seconds = sum(config.data.batch_tokens / row["tokens_per_second"] for run in runs for row in run.rows)
    facts = {
        "study": study.name,
        "question": study.line,
        "seeds": list(config.seeds),
        "steps": config.steps,
        "settings": settings(config.run("VARIANT", {}, config.seeds[0])),
        "variants": study.variants,
        "machine": machine(config.device),
        "seconds_of_steps": round(seconds, 1),
        "comparison": as_json(rows),
    }
    write_whole(out / "study.json", json.dumps(facts, indent=1))
    study_picture(out / "study.png", study, runs)
    console = Console()
    console.print(comparison_table(study, rows))
    for remark in study.remarks:
        console.print(remark, highlight=False)
    print(f"{out / 'study.json'}, {out / 'study.png'}; {seconds:.0f} s of training steps in all")


def machine(device: str) -> str:
    """What numbers may depend on."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU"
    threads = torch.get_num_threads()
    return f"{name}, {threads} threads, torch {torch.__version__}, Python {platform.python_version()}"
