"""What the benchmarks of MLA share: rows written as they are measured, timing, and the tables at the end."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.errors import TritonError

FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, AssertionError, TritonError)


class Report:
    """Rows as they are measured, written at once."""

    def __init__(self, path: Path, part: str) -> None:
        self.path, self.rows, self.failed, self.complete = path / f"mla_{part}.json", [], [], False
        self.started = time.time()
        self.versions = {"device": torch.cuda.get_device_name(), "date": time.strftime("%Y-%m-%d %H:%M")}
        self.versions |= {name: version(name) for name in ("torch", "triton")}

    def add(self, **row: Any) -> dict[str, Any]:
        self.rows.append(row)
        self.write()
        print(f"  {time.time() - self.started:4.0f} s ", *(f"{n} {shown(x)}" for n, x in row.items()), flush=True)
        return row

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held = {"complete": self.complete, "failed": self.failed, "rows": self.rows}
        self.path.write_text(json.dumps({**self.versions, **held}, indent=1))

    def gate(self, name: str, limit: float, **errors: float) -> None:
        self.add(gate=name, **errors)
        self.failed += [
            f"{name}: {n} is off by {e:.2e}, at most {limit:.0e}" for n, e in errors.items() if not e <= limit
        ]


def shown(x: Any) -> str:
    return f"{x:.4g}" if isinstance(x, float) else str(x)


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30)).item()


def milliseconds(call: Callable[[], Any], rep: int = 50) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=rep, return_mode="median"))


def replayed(call: Callable[[], Any], rep: int = 50) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return milliseconds(graph.replay, rep)


def attempted(call: Callable[[], float]) -> float | str:
    """What it measures, or the first line of why it cannot run."""
    try:
        return call()
    except FAULTS as fault:
        torch.cuda.empty_cache()
        return (str(fault).strip().splitlines() or [type(fault).__name__])[0][:90]


def copy_speed() -> float:
    """Bytes read and written a millisecond by a device copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / milliseconds(lambda: target.copy_(source))


def print_tables(folder: Path, parts: tuple[str, ...]) -> int:
    """The short tables, from what the parts have written; 1 where a gate failed or a part is missing."""
    broken = 0
    for part in parts:
        path = folder / f"mla_{part}.json"
        if not path.exists():
            print(f"{part}: no figures")
            broken = 1
            continue
        report = json.loads(path.read_text())
        rows = [row for row in report["rows"] if "gate" not in row]
        print(f"\n{part}: {report['device']}, torch {report['torch']}, triton {report['triton']}; milliseconds")
        for row in rows:
            print(
                " ",
                *(f"{n} {shown(x)}" if n in ("ms", "TFLOPs", "of copy") else f"{shown(x):<24}" for n, x in row.items()),
            )
        print_ratios(rows)
        ended = "passed" if report["complete"] else "UNFINISHED: the part stopped before its end"
        print(f"gate of {part}:", "; ".join(report["failed"]) or ended)
        broken |= bool(report["failed"]) or not report["complete"]
    return broken


def print_ratios(rows: list[dict[str, Any]]) -> None:
    for case in dict.fromkeys(row["case"] for row in rows if "form" in row):
        for way in ("forward", "with backward"):
            found = {r["form"]: r[way] for r in rows if r.get("case") == case and isinstance(r.get(way), float)}
            theirs = {n: ms for n, ms in found.items() if not n.startswith("ours") and "gated" not in n}
            if theirs and "ours fp32" in found:
                best = min(theirs, key=theirs.__getitem__)
                print(f"  {case}, {way}: ours {found['ours fp32']:.3f}, {best} {theirs[best]:.3f}: "
                      f"{theirs[best] / found['ours fp32']:.2f}x")  # fmt: skip
