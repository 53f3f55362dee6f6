"""KDA in one run on one GPU: first right, then fast, each number of ours beside fla's from the same minute.

    PYTHONPATH=. python3 benchmarks/ops/kda.py --out FOLDER [--no-fla] [--studies] [--only "gate decode,time decode"]

First half, many processes side by side on all cores: every gate; errors of ours and of fla beside float64; and
everything that is timed later is compiled into one cache, fla with all settings that it will try. No time is taken.

Second half, one process after another and nothing beside it: forward, forward and backward, decode, verify,
convolution, the most important first. Ours and fla are called in turn in one process. Before fla's time is taken it
measures all settings of its kernels on the same inputs, each as long as it would by itself (--tuning says otherwise),
and keeps the best. (Left alone it would read from the cache what the first half "measured", where nothing was.)
--studies adds single kernels, settings that were not chosen, and other numbers of segments. Jobs of the second half
that --only names bring those of the first that compile for them. Each row is appended to FOLDER/rows.jsonl at once,
FOLDER/log.txt has what the processes printed, FOLDER/kda.json everything. The table comes last. A gate that fails is
named, and the run ends with 1; so does one that did not come to its end.

About seven minutes beside fla, two without. --half first and then --half second, with one FOLDER and one
TRITON_CACHE_DIR, are one run in two commands; the second one refuses to begin where a gate has failed.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from kda_parts.backward import pair
from kda_parts.jobs import Options, compilers_of, first_half, second_half

COMPILERS = 16  # processes of the first half at a time


class Child:
    """One job in a process of its own, its output in a file."""

    def __init__(self, name: str, options: Options, scratch: Path) -> None:
        self.name, self.log, self.started = name, scratch / f"{name.replace(' ', '_')}.txt", time.time()
        self.result = self.log.with_suffix(".json")
        command = [sys.executable, __file__, "--out", str(options.folder), "--job", name, "--result", str(self.result)]
        command += ["--tuning", str(options.tuning), "--try", options.tried]
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


def chosen(jobs: Iterable[str], words: str, studies: bool) -> list[str]:
    """Those that one of the words separated by commas names, or else those that begin so; all without words, studies
    only if wanted."""
    names = list(jobs)
    if words:
        wanted = [word.strip() for word in words.split(",")]
        beginnings = tuple(word for word in wanted if word not in names)
        return [name for name in names if name in wanted or name.startswith(beginnings)]
    return [name for name in names if studies or not name.startswith("study")]


def with_compilers(words: str, timed: list[str]) -> str:
    """Words that choose from the first half what `words` does and what compiles for the jobs `timed`; none, all."""
    wanted = [word for name in timed for word in compilers_of(name)]
    return ",".join([words, *wanted]) if words else words


def run_first_half(names: list[str], options: Options, scratch: Path, seconds: float) -> list[str]:
    """As many at once as COMPILERS; those that have not finished in time, or when this run is asked to end, are
    stopped."""
    waiting, running, failures = names, list[Child](), list[str]()
    limit = [time.time() + seconds]
    before = signal.signal(signal.SIGTERM, lambda *_: limit.__setitem__(0, 0.0))
    while (waiting or running) and time.time() < limit[0]:
        while waiting and len(running) < COMPILERS:
            running.append(Child(waiting.pop(0), options, scratch))
        for child in [child for child in running if child.process.poll() is not None]:
            running.remove(child)
            failures += child.finish(options)
        time.sleep(0.2)
    for child in running:
        child.stop()
        failures += child.finish(options)
    signal.signal(signal.SIGTERM, before)
    failures += [f"{name}: not begun" for name in waiting]
    return [failure for failure in failures if failure.startswith(("gate", "beside", "errors"))]


def compiled_kernels() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).glob("*/*.cubin")))


def run_second_half(names: list[str], options: Options, scratch: Path, limit: float) -> None:
    for name in names:
        _, seconds = second_half()[name]
        left = limit - time.time()
        if left < 10:
            print(f"         {name}: no time left", flush=True)
            continue
        child, before = Child(name, options, scratch), compiled_kernels()
        try:
            child.process.wait(min(seconds, left))
        except subprocess.TimeoutExpired:
            print(f"         {name}: stopped after {min(seconds, left):.0f} s", flush=True)
        finally:  # also where this run is asked to end
            child.stop()
            child.finish(options)
        if late := compiled_kernels() - before:
            print(f"         {late} kernels were compiled only there: most of its time", flush=True)


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
    print("\nerrors against float64, ours|fla: root mean square, mean of the draws' ratios (95 % of it)")
    for case in dict.fromkeys(row["case"] for row in errors):
        print(f"{case:<14}", *(pair(row) for row in errors if row["case"] == case))


def try_settings(words: str) -> None:
    """Constants of modules of `rille.ops.kda` with other values, "backward.TILED=False,forward.RING=False"."""
    for word in words.split(",") if words else ():
        place, _, value = word.partition("=")
        module, _, name = place.partition(".")
        found = import_module(f"rille.ops.kda.{module}")
        assert hasattr(found, name), f"{place} is no setting"
        setattr(found, name, ast.literal_eval(value))


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def run_all(options: Options, seconds: float, only: str, studies: bool, half: str) -> list[str]:
    started, scratch = time.time(), Path(tempfile.mkdtemp())
    os.environ.setdefault("TRITON_CACHE_DIR", str(scratch / "compiled"))
    timed, gates = chosen(second_half(), only, studies), options.folder / "gates.json"
    if half == "second":
        failures = json.loads(read(gates) or '["gate: the first half did not come to its end"]')
        if any(failure.startswith("gate") for failure in failures):
            return failures
    else:
        for name in ("rows.jsonl", "log.txt", "errors.jsonl", "gates.json"):
            (options.folder / name).unlink(missing_ok=True)
        first = chosen(first_half(options.with_fla), with_compilers(only, timed), studies)
        failures = run_first_half(first, options, scratch, seconds if half else 0.45 * seconds)
        gates.write_text(json.dumps(failures))
        print(f"{time.time() - started:5.0f} s  first half", flush=True)
    if half != "first":
        run_second_half(timed, options, scratch, started + seconds)
    rows = [json.loads(line) for line in read(options.folder / "rows.jsonl").splitlines()]
    errors = [json.loads(line) for line in read(options.folder / "errors.jsonl").splitlines()]
    report: dict[str, Any] = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d %H:%M")}
    report["versions"] = {name: version(name) for name in ("torch", "triton")}
    report |= {"fla": version("fla-core") if options.with_fla else None, "tried": options.tried}
    report["tuning ms"] = options.tuning
    for row in rows:
        report.setdefault(row["part"], []).append(row)
    report |= {"errors": errors, "failures": failures, "seconds": time.time() - started}
    (options.folder / "kda.json").write_text(json.dumps(report, indent=1))
    print(report["device"], report["versions"], "fla", report["fla"], f"{report['seconds']:.0f} s")
    print_tables(rows, errors)
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--seconds", type=float, default=450, help="for everything")
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--studies", action="store_true", help="single kernels and settings that were not chosen, too")
    parser.add_argument("--half", default="", choices=("first", "second"), help="this one alone")
    parser.add_argument("--only", default="", help="jobs of these names or beginnings, by commas")
    parser.add_argument("--try", dest="tried", default="", help="constants, as in backward.TILED=False, by commas")
    parser.add_argument("--tuning", type=int, default=100, help="ms for which fla measures each of its settings")
    parser.add_argument("--job", default="", help="one job alone, in this process")
    parser.add_argument("--result", type=Path, help="where a job writes what it found wrong")
    arguments = parser.parse_args()
    options = Options(arguments.out, not arguments.no_fla and find_spec("fla") is not None)
    options = replace(options, tried=arguments.tried, tuning=arguments.tuning)
    try_settings(options.tried)
    options.folder.mkdir(parents=True, exist_ok=True)
    if not arguments.job:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside; rows so far are in rows.jsonl"))
        os.environ["FLA_CACHE_RESULTS"] = "0"  # what one process measures stays in it
        failures = run_all(options, arguments.seconds, arguments.only, arguments.studies, arguments.half)
    else:
        jobs = first_half(options.with_fla) | {name: job for name, (job, _) in second_half().items()}
        failures = jobs[arguments.job](options) or []
        if arguments.result is not None:
            arguments.result.write_text(json.dumps(failures))
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
