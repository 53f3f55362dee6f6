"""MX quantisation on one GPU: first the same bits, then fast, beside plain PyTorch and the bytes that must move.

    PYTHONPATH=. python3 benchmarks/ops/mx.py --out FOLDER [--part gate|time] [--no-compile]

The gate compares every result with the plain PyTorch form bit for bit, at values on both sides of every rounding. Times
are medians on the weights of four K3 experts, bf16: of CUDA graphs of one launch, and of single calls of the plain form
and the copy. The floor counts what is read and written, at the speed of a device copy measured in the same run. Peers:
the plain form, and torch.compile of it. The table comes last; FOLDER/mx.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measuring import called_us, copy_speed, gate_then_times, graph_us, parser_of
from torch import Tensor

from rille.ops.mx import blocks, stream

ROWS, COLUMNS = 4 * 3 * 3072, 3584
LARGEST = {False: blocks.LARGEST_E2M1, True: blocks.LARGEST_E4M3}  # by fp8


def plain_quantise(w: Tensor, fp8: bool) -> tuple[Tensor, Tensor]:
    w_QC = blocks.grouped(w)
    byte_Q = blocks.scale_bytes(w_QC, LARGEST[fp8])
    scaled_QC = w_QC / blocks.scales(byte_Q, w_QC.dtype)
    if fp8:
        return scaled_QC.to(torch.float8_e4m3fn).flatten(-2).view(torch.uint8), byte_Q
    return blocks.pack(blocks.encode_e2m1(scaled_QC).flatten(-2)), byte_Q


def plain_dequantise(codes: Tensor, byte_Q: Tensor, dtype: torch.dtype, fp8: bool) -> Tensor:
    wide = torch.float32
    element_I = codes.view(torch.float8_e4m3fn).to(wide) if fp8 else blocks.unpack_e2m1(codes, wide)
    scale_Q1 = blocks.scales(byte_Q, wide)
    return (element_I.unflatten(-1, (-1, blocks.GROUP)) * scale_Q1).flatten(-2).to(dtype)


def plain_fake(w: Tensor, fp8: bool) -> Tensor:
    return plain_dequantise(*plain_quantise(w, fp8), w.dtype, fp8)


def hard_values(fp8: bool, dtype: torch.dtype) -> Tensor:
    """[G, 32]: random of every size, and steps of 1/64 of the largest element with their neighbours."""
    g = torch.Generator("cuda").manual_seed(0)
    rows = [torch.randn(257, 32, generator=g, device="cuda") * 2.0**e for e in range(-150, 120, 9)]
    steps = torch.arange(32, device="cuda") * LARGEST[fp8] / 64
    for shift in (-(2.0**-20), 0.0, 2.0**-20):
        near = steps * (1 + shift)
        near[-1] = LARGEST[fp8]
        rows += [(near * sign * 2.0**e)[None] for e in (-130, -126, -3, 0, 7, 100) for sign in (1.0, -1.0)]
    return torch.cat([*rows, torch.zeros(1, 32, device="cuda"), -torch.zeros(1, 32, device="cuda")]).to(dtype)


def differing(a: Tensor, b: Tensor) -> float:
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return float((a.contiguous().view(kind) != b.contiguous().view(kind)).sum())


def check_all() -> list[tuple[str, float, float]]:
    rows = []
    for fp8 in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            w, label = hard_values(fp8, dtype), f"{'e4m3' if fp8 else 'e2m1'} {str(dtype)[6:]}"
            codes, scales = plain_quantise(w, fp8)
            for name, a, b in zip(("codes", "scales"), stream.quantise(w, fp8), (codes, scales), strict=True):
                rows.append((f"{label} {name}", differing(a, b), 0.0))
            values = plain_dequantise(codes, scales, dtype, fp8)
            rows.append((f"{label} values", differing(stream.dequantise(codes, scales, dtype, fp8), values), 0.0))
            rows.append((f"{label} fake", differing(stream.fake_quantise(w, fp8), values), 0.0))
    for what, error, _ in rows:
        if error:
            print(f"  FAIL {what:<30} {error:.0f} elements differ", flush=True)
    print(f"  gate: {len(rows)} comparisons bit for bit", flush=True)
    return rows


def measure(what: str, fp8: bool, speed: float, with_compile: bool) -> dict[str, Any]:
    w = torch.randn(ROWS, COLUMNS, device="cuda").bfloat16()
    codes, scales = stream.quantise(w, fp8)
    calls: dict[str, tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]] = {
        "fake": (stream.fake_quantise, plain_fake, (w, fp8)),
        "quantise": (stream.quantise, plain_quantise, (w, fp8)),
        "dequantise": (stream.dequantise, plain_dequantise, (codes, scales, torch.bfloat16, fp8)),
    }
    ours, plain, arguments = calls[what]
    packed = codes.numel() + scales.numel()
    moved = 2 * w.numel() + (2 * w.numel() if what == "fake" else packed)
    row: dict[str, Any] = {"op": f"{what} {'e4m3' if fp8 else 'e2m1'}", "floor": moved / speed}
    row["ours"] = graph_us(lambda: ours(*arguments))
    row["share"] = row["floor"] / row["ours"]
    row["plain"] = called_us(lambda: plain(*arguments))
    if with_compile:
        compiled = torch.compile(plain, dynamic=False)
        row["compile"] = graph_us(lambda: compiled(*arguments))
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print(*(f"{name:>16}" for name in columns))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print(*(f"{cell:>16.2f}" if isinstance(cell, float) else f"{cell:>16}" for cell in cells))


def times(options: argparse.Namespace, report: dict[str, Any]) -> None:
    speed = copy_speed()
    report["copy TB/s"], report["rows"] = speed * 1e-6, []
    for fp8 in (False, True):
        for what in ("fake", "quantise", "dequantise"):
            compiling = not options.no_compile and not fp8 and what == "fake"
            report["rows"].append(measure(what, fp8, speed, compiling))
            print(" ", report["rows"][-1], flush=True)
            torch.cuda.empty_cache()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "mx.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; microseconds, {ROWS} x {COLUMNS} bf16")
    print_table(report["rows"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile of the plain form")
    options = parser.parse_args()
    gate_then_times(options.part, check_all, lambda report: times(options, report))


if __name__ == "__main__":
    main()
