"""The main times of Attention Residuals on one GPU, and a few cases of the gate of `attn_res.py`, in about a minute.

    PYTHONPATH=. python3 benchmarks/ops/attn_res_quick.py --out FOLDER [--only ours,fast]

A mixture of nine sources beside fast-attnres, single launches of the kernels, and all sites of two models beside plain
residuals with the same norms. Medians in ms: of CUDA graphs, and with "events" of single calls from Python, the cache
emptied before each. Every part has a process, so that one that fails spoils no other; FOLDER/attn_res_quick.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from attn_res import (
    BF16,
    FORMS,
    GATE,
    SHAPES,
    STACKS,
    check_case,
    check_handed,
    copy_speed,
    draw,
    launches,
    median_ms,
    peers,
    stack,
    timed,
    with_gradient,
)

PARTS = ("ours", "fast", "nano", "2048", "narrow", "gate")


def calls_of(part: str) -> dict[str, Callable[[], Any]]:
    if part in ("nano", "2048"):
        sizes = STACKS[part == "2048"]
        return {f"{part} {name}": stack(*sizes, form) for name, form in FORMS.items()}
    case = draw(*SHAPES[0], BF16, True)
    if part == "fast":
        call, leaves = peers(case, ["fast"]).get("fast"), [*case.sources, case.query]
        if call is None:
            raise SystemExit("attnres (the package fast-attnres) is not installed")
    else:
        call, leaves = case.mix, case.leaves(False)
    step = with_gradient(call, leaves)

    def forward() -> Any:
        with torch.no_grad():
            return call()

    found = {f"{part} R9 D7168 f": forward, f"{part} R9 D7168 fb": step}
    if part == "ours":
        found |= launches(*SHAPES[0], False) | launches(*SHAPES[0], True)
    return found


def gate() -> None:
    rows = [row for case in (GATE[0], GATE[1], GATE[3]) for row in check_case(*case)]
    rows += [check_handed(9, 70, 7168, BF16), check_handed(4, 130, 2048, BF16)]
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps({"work": "gate"} | {what: error for what, error, _ in rows}), flush=True)
    failed = [f"{what}: {error:.1e}, at most {limit:.0e}" for what, error, limit in rows if not error <= limit]
    if failed:
        raise SystemExit("\n".join(failed))


def child(part: str) -> None:
    """Compile and run once, wait for a line on the standard input, so that nothing else is on the card, then time."""
    calls = launches(5, 131072, 512, True) | launches(3, 131072, 512, True) if part == "narrow" else calls_of(part)
    row: dict[str, Any] = {"work": part}
    for name, call in list(calls.items()):
        try:
            call()
        except (RuntimeError, ValueError, TypeError, triton.TritonError) as error:
            print(f"  FAIL {name}: {str(error).splitlines()[0][:160]}", file=sys.stderr, flush=True)
            del calls[name]
    torch.cuda.synchronize()
    print("ready", flush=True)
    sys.stdin.readline()
    if part == "ours":
        row["copy TB/s"] = copy_speed() * 1e-9
    for name, call in calls.items():
        row[f"{name} events"] = median_ms(call, 25)
        if part != "fast":  # it cannot be captured, and a failed capture poisons the process
            timed(row, name, call)
    print(json.dumps(row), flush=True)


def run(out: Path, only: list[str]) -> None:
    """Our parts compile at once, on a processor each, and are timed one after another; then the peer, which measures
    its settings on the card for so long that nothing of ours may wait for it."""
    rows: list[dict[str, Any]] = []
    failed = [part for some in (set(only) - {"fast"}, set(only) & {"fast"}) for part in together(out, some, rows)]
    if failed:
        raise SystemExit(f"parts that did not end well: {', '.join(failed)}")


def together(out: Path, only: set[str], rows: list[dict[str, Any]]) -> list[str]:
    """Compile these parts at once and time them in turn, a row each; those that failed."""
    here, started = [sys.executable, __file__, "--part"], time.perf_counter()
    parts = {
        part: subprocess.Popen([*here, part], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for part in PARTS
        if part in only
    }
    failed = []
    for part, process in parts.items():
        if "ready\n" in (process.stdout or ()):
            print(f"{part}: ready after {time.perf_counter() - started:.0f} s", flush=True)
        else:
            failed.append(part)
    for part, process in parts.items():
        answer = process.communicate("go\n" if part not in failed else None)[0].strip().splitlines()
        if part in failed or process.returncode or not answer:
            print(f"  FAIL {part}: exit {process.returncode}", flush=True)
            failed += [part] if part not in failed else []
            continue
        rows.append(json.loads(answer[-1]))
        for name, value in rows[-1].items():
            print(f"{name:<36}{value:>10.4f}" if isinstance(value, float) else f"{value}", flush=True)
        out.mkdir(parents=True, exist_ok=True)
        (out / "attn_res_quick.json").write_text(json.dumps(rows, indent=1))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--part", choices=PARTS, help="one part, which waits for a line before it is timed")
    parser.add_argument("--only", default=",".join(PARTS), help="parts with commas between them")
    options = parser.parse_args()
    only = options.only.split(",")
    if unknown := [part for part in only if part not in PARTS]:
        parser.error(f"unknown parts {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if options.part is None:
        run(options.out, only)
    elif options.part == "gate":
        gate()
    else:
        child(options.part)


if __name__ == "__main__":
    main()
