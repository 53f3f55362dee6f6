"""The gradient of embeddings on one GPU: first right, then fast, beside PyTorch's and the bytes that must move.

    PYTHONPATH=. python3 benchmarks/ops/embedding.py --out FOLDER [--part gate|time] [--quick]

The gate compares with fp32 sums of the definition and two runs bit for bit. Times are medians, microseconds: "ours" and
its parts (sort, fill of the table, sums) of CUDA graphs, "torch" of torch's own gradient called from Python. The floor
reads dy and writes the table once, at the speed of a device copy measured in the same run. Ids are drawn as words of a
text are (the k-th word about 1/k of the time), or all the same. The table comes last; FOLDER/embedding.json holds the
numbers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from measuring import called_us, copy_speed, gate_then_times, graph_us, parser_of
from torch import Tensor

from rille.ops.embedding import launch, reference

SHAPES = [(131072, 512, 32768), (131072, 512, 163840), (131072, 2048, 163840)]  # N tokens, D width, W words


def draw(N: int, D: int, W: int, kind: str) -> tuple[Tensor, Tensor]:
    """dy [N, D] bf16, ids [N]."""
    g = torch.Generator("cuda").manual_seed(N + D)
    u = torch.rand(N, generator=g, device="cuda", dtype=torch.float64)
    ids = (W**u - 1).long().clamp_(max=W - 1) if kind == "text" else torch.full((N,), W // 2, device="cuda")
    return torch.randn(N, D, generator=g, device="cuda").bfloat16(), ids


def check_all() -> list[tuple[str, float, float]]:
    """(what, how far off, at most): against rounding of exact sums to bf16."""
    rows = []
    for N, D, W, kind in ((4099, 512, 1000, "text"), (5000, 2048, 300, "text"), (9000, 512, 7, "same")):
        dy, ids = draw(N, D, W, kind)
        got, again = (launch.embed_backward(dy, ids, W) for _ in range(2))
        want = reference.gradient(dy.double(), ids, W)
        error = (got.double() - want).abs().sub(2**-8 * want.abs()).max().item()
        rows.append((f"{kind} N{N} D{D} W{W}", error, 1e-3))  # fp32 sums of 9,000 terms of size 1
        rows.append((f"{kind} N{N} D{D} W{W} twice", (got.float() - again.float()).abs().max().item(), 0.0))
    for what, error, limit in rows:
        if not error <= limit:
            print(f"  FAIL {what:<30} {error:.2e} (at most {limit:.0e})", flush=True)
    print(f"  gate: {len(rows)} comparisons", flush=True)
    return rows


def measure(N: int, D: int, W: int, kind: str, speed: float) -> dict[str, Any]:
    dy, ids = draw(N, D, W, kind)
    row: dict[str, Any] = {"work": f"{kind} N{N} D{D} W{W}", "words": int(ids.unique().numel())}
    row["floor"] = 2 * D * (N + W) / speed
    row["ours"] = graph_us(lambda: launch.embed_backward(dy, ids, W))
    row["share"] = row["floor"] / row["ours"]
    row["sort"] = graph_us(lambda: torch.sort(ids.to(torch.int32), stable=True))
    row["fill"] = graph_us(lambda: torch.zeros(W, D, dtype=dy.dtype, device="cuda"))
    row["called"] = called_us(lambda: launch.embed_backward(dy, ids, W))
    row["torch"] = called_us(lambda: torch.ops.aten.embedding_dense_backward(dy, ids, W, -1, False))
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print(f"{'work':<28}", *(f"{name:>9}" for name in columns[1:]))
    for row in rows:
        cells = [row.get(name, "") for name in columns[1:]]
        print(f"{row['work']:<28}", *(f"{c:>9.2f}" if isinstance(c, float) else f"{c:>9}" for c in cells))


def times(options: argparse.Namespace, report: dict[str, Any]) -> None:
    speed = copy_speed()
    report["copy TB/s"], report["rows"] = speed * 1e-6, []
    for shape in SHAPES:
        for kind in ("text", "same")[: 1 if shape is not SHAPES[0] else 2]:
            report["rows"].append(measure(*shape, kind, speed))
            print(" ", report["rows"][-1], flush=True)
            torch.cuda.empty_cache()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "embedding.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; microseconds, bf16")
    print_table(report["rows"])


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="as it is: this program is quick")
    options = parser.parse_args(arguments)
    gate_then_times(options.part, check_all, lambda report: times(options, report))


if __name__ == "__main__":
    main()
