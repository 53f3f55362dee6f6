"""All of KDA in one run on one GPU: first right, then fast, each number of ours beside fla's from the same minute.

    PYTHONPATH=. python3 benchmarks/ops/kda_table.py --out FOLDER [--seconds 450] [--no-fla]

First half, many processes side by side on all cores: every gate; gradients of ours and of fla beside float64; and
everything that is timed later is compiled into one cache, fla with all settings that it will try. No time is taken.

Second half, one process after another and nothing beside it: forward, forward and backward, decode, verify,
convolution, the most important first. Ours and fla are called in turn in one process; fla chooses its settings before
its time is taken (with shorter measurements than it would by itself, 25 ms each). Each row is appended to
FOLDER/rows.jsonl at once, FOLDER/log.txt has what the processes printed, FOLDER/kda_table.json everything. The table
comes last. A gate that fails is named, and the run ends with 1; so does one that did not come to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import conv
import kda as forward
import kda_backward as backward
import kda_decode as decode
import kda_segments as segments
import torch
import triton
from triton.runtime import driver
from triton.runtime.autotuner import Autotuner

COMPILERS = 16  # processes of the first half at a time
SETTINGS = 3  # processes that share the settings of one of fla's works
WORK_SECONDS = 50  # for ours and fla of one row

FORWARD = {work.name: work for work in forward.WORKS}
TRAIN = {work.name: work for work in backward.WORKS}
ERRORS = (RuntimeError, ValueError, AssertionError, triton.TritonError)  # that a work may end with
Row = tuple[str, str]  # forward, or train (forward and backward); and the work
GROUPS: dict[str, list[Row]] = {  # rows of one head count: one process, so that fla is tuned once
    "H96": [("forward", "H96 T8192"), ("train", "H96 T8192"), ("forward", "H96 8x1024"), ("forward", "H96 mixed")],
    "H16": [
        ("train", "H16 B4 T4096"), ("forward", "H16 T32768"), ("train", "H16 T32768"), ("forward", "H16 T8192"),
        ("train", "H16 T8192"),
    ],
    "H64": [("forward", "H64 T8192")],
    "H12": [("forward", "H12 T65536"), ("train", "H12 T65536")],
}  # fmt: skip
SPLIT_WORKS = ("H16 T32768", "H12 T65536", "H4 T65536", "H16 T8192")


@dataclass(frozen=True)
class Options:
    folder: Path
    with_fla: bool


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise TimeoutError inside after so many seconds, between two calls into a library."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"{seconds} s are over")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# --- jobs of the first half -------------------------------------------------------------------------------------------


def gate_forward() -> list[str]:
    with torch.no_grad():
        return forward.gate_failures(forward.check_forward())


def gate_backward() -> list[str]:
    return backward.check_gradients(backward.GATE_WORKS)[1]


def gate_decode() -> list[str]:
    rows = decode.check_all()
    return [f"gate: {what} is off by {error:.2e}, at most {limit:.0e}" for what, error, limit in rows if error > limit]


def gate_segments() -> list[str]:
    return segments.gate_failures() + segments.compile_failures()


def gate_conv() -> list[str]:
    rows = conv.check_all()
    return [f"gate: conv {what} is off by {error:.2e}" for what, error, limit in rows if not error <= limit]


def beside_fla(options: Options) -> list[str]:
    """Errors of both on the same inputs: one setting of each of fla's kernels is enough for that."""
    take_settings(lambda turn, found: not found)
    rows, failures = backward.check_beside_fla(backward.BESIDE_FLA)
    (options.folder / "errors.json").write_text(json.dumps(rows))
    return failures


def case_of(part: str, work: str) -> Any:
    return forward.draw(FORWARD[work]) if part == "forward" else backward.draw(TRAIN[work])


def compile_ours(group: str) -> list[str]:
    for part, work in GROUPS[group]:
        with torch.set_grad_enabled(part == "train"):
            case_of(part, work).ours()
        torch.cuda.empty_cache()
    return []


def compile_fla(group: str, share: int) -> list[str]:
    take_settings(lambda turn, found: turn % SETTINGS == share)
    for part, work in GROUPS[group]:
        with torch.set_grad_enabled(part == "train"):
            case_of(part, work).fla()
        torch.cuda.empty_cache()
    return []


def compile_decode() -> list[str]:
    for B in (1, 32, 128):
        decode.Bench(B, 0, count=1).decode()
    for spread in (None, *decode.VERIFY_SPREADS):
        decode.Bench(32, 8, count=1).verify(8, spread)
    return []


def compile_stages() -> list[str]:
    """Kernels of the backward pass with the settings that are tried."""
    backward.measure_stages(backward.draw(TRAIN["H96 T8192"]), variants=True)
    return []


def compile_segments(name: str) -> list[str]:
    segments.measure(next(work for work in segments.WORKS if work.name == name), counts=(3,))
    return []


def take_settings(wanted: Callable[[int, bool], bool]) -> None:
    """Triton's tuner runs a kernel once, untimed, with those settings for which wanted(its number, one has run) holds,
    and leaves the others out."""
    measure: Any = Autotuner._bench

    def once(self: Any, *arguments: Any, config: Any, **meta: Any) -> list[float]:
        nargs, turn, found = getattr(self, "_turns", (None, 0, False))
        if nargs is not self.nargs:
            turn, found = 0, False
        times = [float("inf")] * 3
        if wanted(turn, found):
            times = measure(self, *arguments, config=config, **meta)
        self._turns = (self.nargs, turn + 1, found or times[0] < float("inf"))
        return times

    def run(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
        call()
        return [1.0] * 3

    Autotuner._bench = once
    driver.active.get_benchmarker = lambda: run


# --- jobs of the second half ------------------------------------------------------------------------------------------


def append(options: Options, part: str, row: dict[str, Any]) -> None:
    with (options.folder / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"part": part, **row}) + "\n")
    print(part, forward.compact(row), flush=True)


def attempt(options: Options, part: str, work: str, measure: Callable[[dict[str, Any]], None]) -> None:
    """One row. What was measured before the time ran out, or before fla gave up, stands in it."""
    row: dict[str, Any] = {"work": work}
    try:
        with limited(WORK_SECONDS):
            measure(row)
    except (TimeoutError, *ERRORS) as error:
        row["error"] = f"{type(error).__name__}: {error}"[:200]
    append(options, part, row)
    torch.cuda.empty_cache()


def tune_briefly() -> None:
    driver.active.get_benchmarker = lambda: partial(triton.testing.do_bench, warmup=5, rep=25)


def fla_beside_ours(row: dict[str, Any], case: Any, rep: int) -> None:
    for _ in range(3):
        case.fla()
    row["fla"] = forward.median_ms(case.fla, rep)
    row["again"] = forward.median_ms(case.ours, rep)
    row["ratio"] = 2 * row["fla"] / (row["ours"] + row["again"])


def time_forward(row: dict[str, Any], options: Options, speed: float) -> None:
    work = FORWARD[row["work"]]
    case = forward.draw(work)
    with torch.no_grad():
        row |= {"floor": forward.floor_bytes(work) / speed, "ours": forward.median_ms(case.ours, 100)}
        row["graph"], row["host us"] = forward.replayed_ms(case.ours), forward.host_us(case.ours)
        if options.with_fla:
            fla_beside_ours(row, case, 100)
            row["differ"] = forward.distance(case.ours()[0], case.fla()[0])


def time_train(row: dict[str, Any], options: Options, speed: float) -> None:
    work = TRAIN[row["work"]]
    case = backward.draw(work)
    row |= {"floor": backward.floor_bytes(work) / speed, "ours": backward.median_ms(case.ours, 200)}
    row["extra GiB"] = backward.extra_gib(case.ours)
    if options.with_fla:
        fla_beside_ours(row, case, 200)
        row["fla GiB"] = backward.extra_gib(case.fla)


def time_group(group: str, options: Options) -> None:
    tune_briefly()
    speed = forward.copy_speed()
    append(options, "copy", {"work": group, "TB/s": speed * 1e-9})
    for part, work in GROUPS[group]:
        measure = time_forward if part == "forward" else time_train
        attempt(options, part, work, lambda row, measure=measure: measure(row, options, speed))


def time_decode(options: Options) -> None:
    speed, steps = decode.copy_speed(), {}
    for B in (32, 1, 128):
        [row] = decode.measure_decode([B], speed, quick=True)
        steps[row["work"]] = row["ours"]
        append(options, "decode", row)
    for row in decode.measure_verify(speed, False, steps, ((32, 8),)):
        append(options, "verify", row)
    row = conv.measure("T8192", conv.WORKS["T8192"], conv.copy_speed(), quick=True)
    append(options, "conv", row)
    if options.with_fla:
        for B in (32, 1, 128):
            append(options, "fla decode", {"work": f"decode B{B}", "fla": decode.Bench(B).fla()})


def time_stages(options: Options) -> None:
    for name, variants in (("H96 T8192", True), ("H16 B4 T4096", False)):
        times = backward.measure_stages(backward.draw(TRAIN[name]), variants)
        append(options, "stages", {"work": name, **times})


def time_segments(options: Options) -> None:
    for name in SPLIT_WORKS:
        for row in segments.measure(next(work for work in segments.WORKS if work.name == name)):
            append(options, "segments", row)
        torch.cuda.empty_cache()


# --- the run ----------------------------------------------------------------------------------------------------------

Job = Callable[[Options], list[str] | None]


def first_half(with_fla: bool) -> dict[str, Job]:
    """The longest first."""
    jobs: dict[str, Job] = {}
    for group in GROUPS if with_fla else ():
        for share in range(SETTINGS):
            jobs[f"fla {group} {share}"] = lambda _, g=group, s=share: compile_fla(g, s)
    jobs |= {"gate backward": lambda _: gate_backward(), "gate decode": lambda _: gate_decode()}
    jobs |= {"gate segments": lambda _: gate_segments(), "gate forward": lambda _: gate_forward()}
    jobs |= {f"ours {group}": lambda _, g=group: compile_ours(g) for group in GROUPS}
    jobs |= {"decode kernels": lambda _: compile_decode(), "stages kernels": lambda _: compile_stages()}
    jobs |= {"beside fla": beside_fla} if with_fla else {}
    jobs |= {f"segments {name}": lambda _, n=name: compile_segments(n) for name in SPLIT_WORKS}
    return jobs | {"gate conv": lambda _: gate_conv()}


def second_half() -> dict[str, tuple[Job, int]]:
    """The most important first, each with its limit in seconds."""
    jobs: dict[str, tuple[Job, int]] = {}
    for group, seconds in (("H96", 110), ("H64", 40), ("H16", 110), ("H12", 70)):
        jobs[f"time {group}"] = partial(time_group, group), seconds
        if group == "H64":
            jobs["time decode"] = time_decode, 50
    return jobs | {"time stages": (time_stages, 40), "time segments": (time_segments, 60)}


class Child:
    """One job in a process of its own, its output in a file."""

    def __init__(self, name: str, options: Options, scratch: Path) -> None:
        self.name, self.log, self.started = name, scratch / f"{name.replace(' ', '_')}.txt", time.time()
        self.result = self.log.with_suffix(".json")
        command = [sys.executable, __file__, "--out", str(options.folder), "--job", name, "--result", str(self.result)]
        command += [] if options.with_fla else ["--no-fla"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def finish(self, options: Options) -> list[str]:
        """What the job found wrong; its output goes to the common log."""
        seconds = time.time() - self.started
        failures = json.loads(self.result.read_text()) if self.result.exists() else [f"{self.name}: did not finish"]
        text = self.log.read_text(errors="replace")
        with (options.folder / "log.txt").open("a") as file:
            file.write(f"--- {self.name}, {seconds:.0f} s\n{text[-200_000:]}\n")
        print(f"{seconds:5.0f} s  {self.name}", *(failures[:6] or ["ok"]), sep="  ", flush=True)
        if not self.result.exists():
            print(*(f"         {line}" for line in text.strip().splitlines()[-4:]), sep="\n", flush=True)
        return failures


def run_first_half(options: Options, scratch: Path, seconds: float) -> list[str]:
    """As many at once as COMPILERS; those that have not finished in time are stopped."""
    waiting, running, failures = list(first_half(options.with_fla)), list[Child](), list[str]()
    limit = time.time() + seconds
    while (waiting or running) and time.time() < limit:
        while waiting and len(running) < COMPILERS:
            running.append(Child(waiting.pop(0), options, scratch))
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            failures += child.finish(options)
        time.sleep(0.2)
    for child in running:
        child.stop()
        failures += child.finish(options)
    failures += [f"{name}: not begun" for name in waiting]
    return [failure for failure in failures if failure.startswith(("gate", "beside"))]


def run_second_half(options: Options, scratch: Path, limit: float) -> None:
    for name, (_, seconds) in second_half().items():
        left = limit - time.time()
        if left < 10:
            print(f"         {name}: no time left", flush=True)
            continue
        child = Child(name, options, scratch)
        try:
            child.process.wait(min(seconds, left))
        except subprocess.TimeoutExpired:
            child.stop()
        child.finish(options)


def print_tables(rows: list[dict[str, Any]], errors: list[dict[str, Any]]) -> None:
    for part in dict.fromkeys(row["part"] for row in rows):
        table = [{k: v for k, v in row.items() if k != "part"} for row in rows if row["part"] == part]
        print(f"\n{part}")
        columns = list(dict.fromkeys(name for row in table for name in row))
        print(*(f"{name:>9}" if i else f"{name:<18}" for i, name in enumerate(columns)))
        for row in table:
            cells = (row.get(name, "") for name in columns)
            cells = (f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in cells)
            widths = [18, *(max(9, len(name)) for name in columns[1:])]
            print(*(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True)))
    print("\nerrors against float64, ours|fla")
    for case in dict.fromkeys(row["case"] for row in errors):
        pairs = [f"{r['gradient']} {r['ours']:.1e}|{r['fla']:.1e}" for r in errors if r["case"] == case]
        print(f"{case:<14}", *pairs)


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def run_all(options: Options, seconds: float) -> list[str]:
    started, scratch = time.time(), Path(tempfile.mkdtemp())
    for name in ("rows.jsonl", "log.txt", "errors.json"):
        (options.folder / name).unlink(missing_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(scratch / "compiled"))
    failures = run_first_half(options, scratch, 0.45 * seconds)
    print(f"{time.time() - started:5.0f} s  first half", flush=True)
    run_second_half(options, scratch, started + seconds)
    rows = [json.loads(line) for line in read(options.folder / "rows.jsonl").splitlines()]
    errors = json.loads(read(options.folder / "errors.json") or "[]")
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d %H:%M")}
    report["versions"] = {name: version(name) for name in ("torch", "triton")}
    report["fla"] = version("fla-core") if options.with_fla else None
    for row in rows:
        report.setdefault(row["part"], []).append(row)
    report |= {"errors": errors, "failures": failures, "seconds": time.time() - started}
    (options.folder / "kda_table.json").write_text(json.dumps(report, indent=1))
    print(report["device"], report["versions"], "fla", report["fla"], f"{report['seconds']:.0f} s")
    print_tables(rows, errors)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=450, help="for everything")
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--job", default="", help="one job alone, in this process")
    parser.add_argument("--result", type=Path, help="where a job writes what it found wrong")
    arguments = parser.parse_args()
    options = Options(arguments.out, not arguments.no_fla and find_spec("fla") is not None)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.job:
        failures = run_all(options, arguments.seconds)
    else:
        jobs = first_half(options.with_fla) | {name: job for name, (job, _) in second_half().items()}
        failures = jobs[arguments.job](options) or []
        if arguments.result is not None:
            arguments.result.write_text(json.dumps(failures))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
