"""What the programs here share: times of calls, the copy speed of the card, and a gate before the times."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import triton

Gate = list[tuple[str, float, float]]  # what was compared, how far off it is, how far it may be


def graph_us(call: Callable[[], Any], rep: int = 10) -> float:
    """In a CUDA graph; NaN, and a line that says why, where that fails."""
    try:
        return float(triton.testing.do_bench_cudagraph(call, rep=rep, return_mode="median")) * 1e3
    except (RuntimeError, ValueError, TypeError, triton.TritonError) as error:
        print(f"  FAIL: {str(error).splitlines()[0][:160]}", flush=True)
        return float("nan")


def called_us(call: Callable[[], Any]) -> float:
    """Called from Python, for what cannot be captured in a graph."""
    return float(triton.testing.do_bench(call, warmup=10, rep=40, return_mode="median")) * 1e3


def copy_speed() -> float:
    """Bytes a microsecond, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / called_us(lambda: target.copy_(source))


def gate_then_times(part: str | None, gate: Callable[[], Gate], times: Callable[[dict[str, Any]], None]) -> None:
    """The gate, then the times, or the one half that `part` names. Ends the program with 1 where the gate fails."""
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "gate": [] if part == "time" else gate(),
    }
    if part != "gate":
        times(report)
    failures = [f"gate: {what} is off by {error:.2e}" for what, error, limit in report["gate"] if not error <= limit]
    if failures:
        raise SystemExit("\n".join(failures))


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """With the options that every such program has."""
    parser = argparse.ArgumentParser(description=str(description).partition("\n")[0])
    parser.add_argument("--out", default=".", help="folder for the numbers")
    parser.add_argument("--part", choices=("gate", "time"), help="one half only")
    return parser
