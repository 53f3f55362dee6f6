"""Where a run's numbers go. A logger has one method; a run has as many loggers as it likes.

    metrics.jsonl    one JSON object a step, see below
    tensorboard/     the same numbers as scalars
    the terminal     a progress bar, or a line now and then where output is not a terminal

Each step: loss, loss/DOMAIN, targets (tokens learned from), gradient_norm, gradient_norm/KIND, learning_rate,
expert_load_violation, load_violation/L, dead_experts/L, epochs/DOMAIN, skipped_steps (passed over so far),
tokens_per_second, memory_gib; mfu where the card's peak is known; mtp_loss and largest_attention_logit where asked for.
With each held-out measurement: held_out_loss, held_out_loss/DOMAIN, held_out_loss_ema where there is a mean,
update_norm/KIND, output_rms/SUBLAYER, attn_res/SITE/SOURCE (mean weight). A number that is not finite is null.

Losses are nats a token; mtp_loss is the mean over the MTP layers' own targets. Gradient norms are taken before
clipping. expert_load_violation is max load / mean load - 1 of the worst layer L: 0 is a perfect balance.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from math import isfinite
from pathlib import Path
from socket import gethostname
from time import time, time_ns
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rille.model.publish import write_whole

if TYPE_CHECKING:
    from google.protobuf.message import Message

METRICS = "metrics.jsonl"
MACHINE = ("tokens_per_second", "mfu", "memory_gib")  # what the machine decides: all else repeats, bit for bit on a CPU


class Logger(Protocol):
    """Takes the numbers of a step. It does not keep or change the dict."""

    def log(self, step: int, values: dict[str, float]) -> None: ...


def open_loggers(out: Path, step: int, steps: int, stack: ExitStack) -> list[Logger]:
    """The loggers of a run that continues after `step`; `stack` closes them."""
    console = Console(stderr=True)
    progress = Bar(console, step, steps, stack) if console.is_terminal else Lines(console, steps)
    return [JsonLines(out / METRICS, step), TensorBoard(out / "tensorboard", step, stack), progress]


class JsonLines:
    """One object a line, written before the next step begins. Rows after `step`, of a run that died, are cut off."""

    def __init__(self, path: Path, step: int):
        self.path = path
        cut_rows(path, step)

    def log(self, step: int, values: dict[str, float]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            numbers = {name: value if isfinite(value) else None for name, value in values.items()}
            file.write(f"{json.dumps({'step': step, **numbers})}\n")


def cut_rows(path: Path, step: int) -> None:
    """Leave the rows up to a step in a file of rows; it is made where there is none."""
    rows = [row for row in read_metrics(path) if row["step"] <= step]
    write_whole(path, "".join(f"{json.dumps(row)}\n" for row in rows))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All rows; none if there is no file. A last line that was cut off by a kill is left out."""
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else [""]
    try:
        rows = [json.loads(line) for line in lines[:-1]]
        if all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            return rows
        raise ValueError("a row without step")
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}); move it away to go on without its rows") from None


class TensorBoard:
    """Scalars for `tensorboard --logdir`, on disk before the next step begins.

    The library's own writer is a thread, where a full disk is a traceback and no error. After a resume the steps of a
    run that died count no more. The library is imported when the first run needs it; its messages are made at run time.
    """

    def __init__(self, directory: Path, step: int, stack: ExitStack):
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time_ns()}.{gethostname()}.{os.getpid()}"
        self.file = stack.enter_context((directory / name).open("wb"))
        self.records = RecordWriter(self.file)
        self.event, self.summary = vars(event_pb2)["Event"], vars(summary_pb2)["Summary"]
        start = vars(event_pb2)["SessionLog"](status="START")
        self._write(self.event(wall_time=time(), file_version="brain.Event:2"))
        self._write(self.event(wall_time=time(), step=step + 1, session_log=start))

    def log(self, step: int, values: dict[str, float]) -> None:
        scalars = [self.summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(self.event(wall_time=time(), step=step, summary=self.summary(value=scalars)))

    def _write(self, event: Message) -> None:
        self.records.write(event.SerializeToString())
        self.file.flush()


class Bar:
    """A progress bar on a terminal."""

    def __init__(self, console: Console, step: int, steps: int, stack: ExitStack):
        columns = (
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),  # the line fits 80 columns
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(),
        )
        self.progress = stack.enter_context(Progress(*columns, console=console))
        self.task = self.progress.add_task("", total=steps, completed=step, numbers="")
        self.held_out = ""

    def log(self, step: int, values: dict[str, float]) -> None:
        if "held_out_loss" in values:
            self.held_out = f" · held-out {values['held_out_loss']:.3f}"
        self.progress.update(self.task, completed=step, numbers=_short(values) + self.held_out)


class Lines:
    """A line for some twenty steps of a run and for each held-out loss, where there is no terminal to draw a bar on."""

    def __init__(self, console: Console, steps: int):
        self.console, self.steps, self.every = console, steps, max(1, steps // 20)

    def log(self, step: int, values: dict[str, float]) -> None:
        if step % self.every == 0 or step in (1, self.steps) or "held_out_loss" in values:
            held = f" · held-out {values['held_out_loss']:.3f}" if "held_out_loss" in values else ""
            self.console.print(f"step {step}/{self.steps} · {_short(values)}{held}", highlight=False)


def _short(values: dict[str, float]) -> str:
    return f"loss {values['loss']:.3f} · {values['tokens_per_second']:,.0f} tokens/s"
