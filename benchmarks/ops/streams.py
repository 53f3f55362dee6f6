"""Everything that is bound by bytes in one run on one GPU: Attention Residuals, norms, activations, head and loss, MX.

    PYTHONPATH=. python3 benchmarks/ops/streams.py --out FOLDER [--only attn_res,mx] [--seconds 240] [--quick]

First all gates side by side; they also compile most of what is timed later into one cache. Then the times, one program
after another and nothing beside it. --quick takes the programs that have a short form, and times them in this process.
FOLDER/NAME.json has a program's numbers, FOLDER/log.txt what all of them printed.
The tables come last, and after them each gate and program that failed or did not come to its end; then the run ends
with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROGRAMS: dict[str, list[str]] = {"attn_res": ["--sweep"], "mx": [], "norm": [], "cross_entropy": []}
QUICK = ["mx_experts", "embedding", "norm", "cross_entropy"]
HERE = Path(__file__).parent


def start(name: str, part: str, folder: Path, quick: bool) -> subprocess.Popen[str]:
    command = [sys.executable, str(HERE / f"{name}.py"), "--out", str(folder), "--part", part]
    more = ["--quick"] if quick else PROGRAMS[name] if part == "time" else []
    return subprocess.Popen([*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(program: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """What it printed, and in words what went wrong (empty where nothing did)."""
    try:
        text = program.communicate(timeout=max(1.0, seconds))[0]
    except subprocess.TimeoutExpired:
        program.kill()
        return program.communicate()[0], f"did not end within {seconds:.0f} s"
    return text, "" if program.returncode == 0 else f"ended with {program.returncode}"


def here(name: str, folder: Path) -> tuple[str, str]:
    """The quick times without a new process: what they printed, and what went wrong."""
    text = io.StringIO()
    try:
        with contextlib.redirect_stdout(text):
            importlib.import_module(name).main(["--out", str(folder), "--part", "time", "--quick"])
    except (RuntimeError, ValueError, TypeError, SystemExit) as error:  # the other programs' times are still wanted
        return text.getvalue(), f"{type(error).__name__}: {error}"
    return text.getvalue(), ""


def table_of(text: str) -> str:
    """The lines from the card's name on, and sweeps before them."""
    head, found, table = text.rpartition("\nNVIDIA ")[0], "\nNVIDIA " in text, text.rpartition("\nNVIDIA ")[2]
    sweeps = [line for line in head.splitlines() if line.startswith("sweep ")]
    return "\n".join([*sweeps, table]) if found else "\n".join(text.splitlines()[-6:])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--only", help="programs, with commas between")
    parser.add_argument("--seconds", type=float, default=240.0, help="for everything")
    parser.add_argument("--quick", action="store_true", help="short forms")
    options = parser.parse_args()
    known = QUICK if options.quick else list(PROGRAMS)
    names = options.only.split(",") if options.only else known
    unknown = set(names) - set(known)
    if unknown:
        raise SystemExit(f"--only: no program {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + options.seconds
    log: list[str] = []
    failures: list[str] = []
    tables: list[str] = []

    def note(name: str, part: str, outcome: tuple[str, str]) -> Any:
        text, wrong = outcome
        log.append(f"==== {name} {part}, {options.seconds - (end - time.monotonic()):.0f} s\n{text}")
        lines = [line.strip() for line in text.splitlines() if "FAIL" in line]
        failures.extend(f"{name} {part}: {line}" for line in [*lines, *([wrong] if wrong else [])])
        (options.out / "log.txt").write_text("\n".join(log))

    gates = {name: start(name, "gate", options.out, options.quick) for name in names}
    if options.quick:
        for name in names:
            importlib.import_module(name)  # while the gates run
    for name, program in gates.items():
        note(name, "gate", finish(program, min(end - time.monotonic(), options.seconds / 2)))
    print(f"gates: {options.seconds - (end - time.monotonic()):.0f} s", *failures, sep="\n", flush=True)
    for name in names:
        if options.quick:
            outcome = here(name, options.out)
        else:
            outcome = finish(start(name, "time", options.out, False), end - time.monotonic())
        note(name, "time", outcome)
        tables.append(f"-- {name}: {table_of(outcome[0])}")
        if options.quick:
            print(tables.pop(), flush=True)
    print(*tables, sep="\n")
    print(*(failures or ["all gates passed, all programs ended"]), sep="\n")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
