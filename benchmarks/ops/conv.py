"""The short convolution on one GPU: first right, then fast, beside the bytes that must move.

    PYTHONPATH=. python3 benchmarks/ops/conv.py --out FOLDER [--quick] [--no-fla]

The gate compares forward, final tails and gradients with the reference in fp32 and bf16, and two backward passes bit
for bit. Times are medians of `triton.testing.do_bench`. The floor reads x and writes y once (backward: x, dy, dx) at
the speed of a device copy measured in the same run. The table comes last; FOLDER/conv.json holds the same numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from rille.ops.conv import PooledTail, launch, short_conv
from rille.packing import Packing

CHANNELS = 3 * 96 * 128
MIXED = (1300, 547, 2048, 963, 271, 3063)
WORKS = {"T8192": (8192,), "8x1024": (1024,) * 8, "mixed": MIXED, "B32 T1": (1,) * 32}
FORWARD_BLOCKS = ((8, 256), (16, 256), (32, 256), (16, 512), (32, 128), (64, 64))
BACKWARD_BLOCKS = ((64, 512), (128, 256), (128, 512), (256, 512), (128, 1024), (256, 256))


def distance(got: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / (norm or 1.0)


def draw(lengths: tuple[int, ...], C: int, W: int, dtype: torch.dtype) -> tuple[Packing, Tensor, Tensor, Tensor]:
    x_NC = torch.randn(sum(lengths), C, device="cuda").to(dtype)
    weight_CW = torch.randn(C, W, device="cuda") * 0.5
    tail_SPC = torch.randn(len(lengths), W - 1, C, device="cuda").to(dtype)
    return Packing.of(lengths, device="cuda"), x_NC, weight_CW, tail_SPC


def outcomes(packing: Packing, x: Tensor, weight: Tensor, tail: Tensor | None, backend: str) -> list[Tensor]:
    """y, the final tail, and the gradients of both together."""
    inputs = [t.detach().requires_grad_() for t in (x, weight, tail) if t is not None]
    y, final = short_conv(inputs[0], inputs[1], packing, inputs[2] if tail is not None else None, backend=backend)
    g = torch.Generator("cuda").manual_seed(1)
    outputs = [y, final] if final is not None and final.numel() else [y]
    seeds = [torch.randn(out.shape, generator=g, device="cuda").to(out.dtype) for out in outputs]
    return [y, final, *torch.autograd.grad(outputs, inputs, seeds)]


NAMES = ("y", "final", "dx", "dweight", "dtail")


def check_case(
    lengths: tuple[int, ...], C: int, W: int, with_tail: bool, dtype: torch.dtype
) -> list[tuple[str, float, float]]:
    packing, x, weight, tail = draw(lengths, C, W, dtype)
    tail = tail if with_tail else None
    ours, again, exact = (outcomes(packing, x, weight, tail, n) for n in ("triton", "triton", "reference"))
    limit = 1e-5 if dtype == torch.float32 else 5e-3
    label = f"{sum(lengths)} rows C{C} W{W} {'tail' if with_tail else 'zeros'} {str(dtype)[6:]}"
    rows = [(f"{label} {n}", distance(a, b), limit) for n, a, b in zip(NAMES, ours, exact, strict=False)]
    twice = max(
        (a.float() - b.float()).abs().max().item() if a.numel() else 0.0 for a, b in zip(ours, again, strict=True)
    )
    return [*rows, (f"{label} twice", twice, 0.0)]


def check_pool() -> list[tuple[str, float, float]]:
    packing, x, weight, tail = draw((5, 0, 1, 2, 70), 512, 4, torch.bfloat16)
    slots = torch.tensor([4, 0, 2, 5, 7], device="cuda")
    pools = [torch.zeros(8, 2, 3, 512, device="cuda", dtype=torch.bfloat16)[:, 1] for _ in range(2)]
    for pool in pools:
        pool[slots] = tail
    got, _ = short_conv(x, weight, packing, PooledTail(pools[0], slots), backend="triton")
    want, _ = short_conv(x, weight, packing, PooledTail(pools[1], slots), backend="reference")
    apart = (pools[0].float() - pools[1].float()).abs().max().item()
    return [("pool y", distance(got, want), 5e-3), ("pool tails", apart, 0.0)]


def check_all() -> list[tuple[str, float, float]]:
    rows, ragged = check_pool(), (1, 15, 16, 17, 2, 3, 0, 400, 4, 0)
    for dtype in (torch.float32, torch.bfloat16):
        for W in (1, 2, 3, 4):
            rows += check_case(ragged, 520, W, True, dtype)
        rows += check_case(ragged, 768, 4, False, dtype)
    for what, error, limit in rows:
        if not error <= limit:
            print(f"  FAIL {what:<40} {error:.2e} (at most {limit:.0e})", flush=True)
    print(f"  gate: {len(rows)} comparisons, largest error {max(error for _, error, _ in rows):.1e}", flush=True)
    return rows


def median_us(call: Callable[[], Any], rep: int = 40) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=rep, return_mode="median")) * 1e3


def copy_speed() -> float:
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / median_us(lambda: target.copy_(source))


def measure(name: str, lengths: tuple[int, ...], speed: float, quick: bool) -> dict[str, Any]:
    packing, x, weight, tail = draw(lengths, CHANNELS, 4, torch.bfloat16)
    arguments = (x, weight, packing.starts, packing.sequence_of)
    dy, slots = torch.randn_like(x), torch.arange(len(lengths), device="cuda")
    row: dict[str, Any] = {"work": name, "floor": 2 * x.nbytes / speed}
    row["forward"] = median_us(lambda: launch.short_conv(*arguments, None))
    row["share"] = row["floor"] / row["forward"]
    row["pool"] = median_us(lambda: launch.short_conv_pooled(*arguments, tail, slots))
    row["floor b"] = 3 * x.nbytes / speed
    row["backward"] = median_us(lambda: launch.short_conv_backward(dy, None, *arguments, None))
    row["share b"] = row["floor b"] / row["backward"]
    row["b tail"] = median_us(lambda: launch.short_conv_backward(dy, None, *arguments, tail))
    if not quick and name in ("T8192", "mixed"):
        sweep(row, "f", ("FORWARD_ROWS", "CHANNELS"), FORWARD_BLOCKS, lambda: launch.short_conv(*arguments, None))
        blocks = ("BACKWARD_ROWS", "BACKWARD_CHANNELS")
        sweep(row, "b", blocks, BACKWARD_BLOCKS, lambda: launch.short_conv_backward(dy, None, *arguments, None))
    return row


def sweep(
    row: dict[str, Any],
    letter: str,
    names: tuple[str, str],
    blocks: tuple[tuple[int, int], ...],
    call: Callable[[], Any],
) -> None:
    """Time a call for several sizes of a program's block."""
    chosen = [getattr(launch, name) for name in names]
    for block in blocks:
        for name, value in zip(names, block, strict=True):
            setattr(launch, name, value)
        row[f"{letter}{block[0]}x{block[1]}"] = median_us(call, rep=20)
    for name, value in zip(names, chosen, strict=True):
        setattr(launch, name, value)


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print(*(f"{name:>8}" for name in columns))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print(*(f"{cell:>8.2f}" if isinstance(cell, float) else f"{cell:>8}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--quick", action="store_true", help="only the blocks that the op would choose by itself")
    parser.add_argument("--no-fla", action="store_true", help="as in the other benchmarks; fla is not measured here")
    options = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("torch", "triton")},
    }
    print(report["device"], report["versions"], flush=True)
    report["gate"] = check_all()
    speed = copy_speed()
    report["copy TB/s"] = speed * 1e-6
    report["rows"] = []
    for name, lengths in WORKS.items():
        report["rows"].append(measure(name, lengths, speed, options.quick))
        print(" ", report["rows"][-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "conv.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; microseconds; C {CHANNELS}, W 4, bf16")
    print_table(report["rows"])
    failures = [f"gate: {what} is off by {error:.2e}" for what, error, limit in report["gate"] if not error <= limit]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
