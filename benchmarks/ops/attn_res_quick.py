"""The main times of Attention Residuals on one GPU, and a few cases of the gate of `attn_res.py`, in about a minute.

    PYTHONPATH=. python3 benchmarks/ops/attn_res_quick.py --out FOLDER [--only ours,fast]

A mixture of nine sources, single launches of the kernels, the kernel with a ring beside the other after a gate
("ring-mix", "ring-site"; "ring-gate" is more of the gate), sites of few rows ("few"), ours and fast-attnres in one
process ("fast", the peer with few of its settings), and all sites of two models beside plain residuals with the same
norms. Medians in ms: of CUDA graphs, and with "events" of single calls from Python, the cache emptied before each.
Every part has a process, so that one that fails spoils no other and all compile at once; FOLDER/attn_res_quick.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from attn_res import (
    BF16,
    EPS,
    FORMS,
    GATE,
    SHAPES,
    STACKS,
    check_case,
    check_handed,
    copy_speed,
    distance,
    draw,
    launches,
    median_ms,
    peers,
    stack,
    timed,
    with_gradient,
)
from torch import Tensor
from triton.runtime.autotuner import Autotuner

from rille.ops.attn_res import mix

WAYS = ("f", "fb")
SETTINGS = ((1, 8), (1, 16), (2, 8), (2, 16))  # sources at a time, warps
RINGS = ("ring-mix", "ring-site", "ring-gate")
PARTS = ("ours", *RINGS, "few", "fast", "nano", "2048", "narrow", "gate")


def calls_of(part: str) -> dict[str, Callable[[], Any]]:
    if part in ("nano", "2048"):
        sizes = STACKS[part == "2048"]
        return {f"{part} {name}": stack(*sizes, form) for name, form in FORMS.items()}
    if part == "narrow":
        return launches(5, 131072, 512, True) | launches(3, 131072, 512, True)
    if part == "few":
        return few_rows()
    if part in RINGS:
        return rings(part)
    case = draw(*SHAPES[0], BF16, True)
    found = both_ways("ours R9 D7168", case.mix, [*case.sources, case.query] if part == "fast" else case.leaves(False))
    if part == "fast":
        fewer_settings()
        call = peers(case, ["fast"])["fast"]
        print(f"fast and ours apart {distance(call(), case.mix()):.1e}", file=sys.stderr, flush=True)
        return found | both_ways("fast R9 D7168", call, [*case.sources, case.query])
    return found | launches(*SHAPES[0], False) | launches(*SHAPES[0], True)


def without_gradient(call: Callable[[], Any]) -> Callable[[], Any]:
    def forward() -> Any:
        with torch.no_grad():
            return call()

    return forward


def both_ways(name: str, call: Callable[[], Tensor], leaves: list[Tensor]) -> dict[str, Callable[[], Any]]:
    return {f"{name} f": without_gradient(call), f"{name} fb": with_gradient(call, leaves)}


def fewer_settings() -> None:
    """The peer tries 48 settings each way, for a minute or more. Left are eight of them, with which sources so wide may
    fit registers: one or two at a time, 8 or 16 warps, its loop over sources unrolled or not."""
    if find_spec("attnres") is None:
        raise SystemExit("attnres (the package fast-attnres) is not installed")
    kernels = vars(importlib.import_module("attnres._kernels.fla_full_sources"))
    for kernel in kernels.values():
        if isinstance(kernel, Autotuner):
            some = [c for c in kernel.configs if c.num_stages == 2 and (c.kwargs.get("BL"), c.num_warps) in SETTINGS]
            chosen = some or kernel.configs[::4]
            print(f"fast: {len(chosen)} of {len(kernel.configs)} settings", file=sys.stderr, flush=True)
            kernel.configs = chosen


def few_rows() -> dict[str, Callable[[], Any]]:
    """A site of a decoding step, as it is and with programs of several rows."""
    found: dict[str, Callable[[], Any]] = {}
    for N in (1, 64, 512, 2048):
        case = draw(5, N, 512, BF16, True)
        call = without_gradient(case.site)
        found |= {f"site R5 D512 {N} rows": call, f"site R5 D512 {N} rows, before": with_value("FEW_ELEMENTS", 0, call)}
    wide = draw(9, 64, 7168, BF16, True)
    call = without_gradient(wide.site)
    return found | {"site R9 D7168 64 rows": call, "the same, before": with_value("FEW_ELEMENTS", 0, call)}


def with_value(name: str, value: Any, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call with another constant of `mix`."""

    def other() -> Any:
        before = getattr(mix, name)
        setattr(mix, name, value)
        try:
            return call()
        finally:
            setattr(mix, name, before)

    return other


# R sources, N tokens, D width, site: more rows than programs and not a multiple, other widths, few sources. 16 divides
# the rows of those that are timed too, so that one compilation serves both; each part compiles in a process.
RING_GATES = {
    "ring-mix": [(9, 1200, 7168, False)],
    "ring-site": [(9, 1200, 7168, True)],
    "ring-gate": [(5, 700, 8192, True), (2, 530, 4104, True), (1, 600, 7168, False)],
}


def check_ring(R: int, N: int, D: int, site: bool) -> None:
    """The kernel with a ring against float64 and against the other kernel: output, running sum and what is saved."""
    case = draw(R, N, D, BF16, False)
    norm = case.norm_gain if site else None
    arguments = (case.sources, case.update if site else None, case.query, case.gain, norm, EPS, True)
    call = without_gradient(lambda: mix.mix(*arguments))
    plain, ring, again = with_value("RING", False, call)(), call(), call()
    exact = case.to(torch.float64)
    with torch.no_grad():
        wanted = exact.site("reference")[0] if site else exact.mix("reference")
    same = all(torch.equal(a, b) for a, b in zip(ring, again, strict=True)) and torch.equal(plain[1], ring[1])
    errors = [distance(ring[0], wanted), distance(plain[0], wanted), distance(ring[2], plain[2])]
    words = ", ".join(f"{error:.1e}" for error in errors)
    print(f"ring R{R} N{N} D{D} {'site' if site else 'mix'}: {words}, bits {same}", file=sys.stderr, flush=True)
    if not (errors[0] <= max(1e-6, 1.05 * errors[1]) and errors[2] <= 1e-5 and same):
        raise SystemExit("the kernel with a ring is wrong")


def rings(part: str) -> dict[str, Callable[[], Any]]:
    for size in RING_GATES[part]:
        check_ring(*size)
    if part == "ring-gate":
        return {}
    name, call = list(launches(*SHAPES[0], part == "ring-site").items())[0]
    return {name: call, f"{name} no ring": with_value("RING", False, call)}


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
    calls = calls_of(part)
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
    if part == "fast":
        row |= {
            f"fast over ours {k}": row[f"fast R9 D7168 {k} events"] / row[f"ours R9 D7168 {k} events"] for k in WAYS
        }
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
