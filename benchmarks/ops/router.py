"""The router with its histogram counted by the kernel itself or apart, on one GPU: equal count by count, then timed.

    PYTHONPATH=. python3 benchmarks/ops/router.py [--out FOLDER]

Logits are as wide as in a trained router, and as narrow as in a new one, where counts crowd into few bins. Medians of
`triton.testing.do_bench`; "no bins" is the router alone. FOLDER/router.json holds the rows.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import triton

from rille.model.balance import BINS
from rille.ops.moe import router

WORKS = {"nano": (131_072, 256, 6), "k3's share": (16_384, 896, 16)}  # N tokens, E experts, A active


def measured(name: str, spread: float) -> dict[str, Any]:
    N, E, A = WORKS[name]
    logits = spread * torch.randn(N, E, device="cuda")
    bias = 0.01 * torch.randn(E, device="cuda")

    def call(bins: int) -> tuple[torch.Tensor, ...]:
        return router.router(logits, bias, A, 1.0, True, bins, False)

    row: dict[str, Any] = {"work": name, "spread": spread}
    histograms = []
    for kind, bins, router.APART in (("no bins", 0, False), ("within", BINS, False), ("apart", BINS, True)):
        histograms.append(call(bins)[-1])
        row[kind] = 1e3 * float(triton.testing.do_bench(lambda b=bins: call(b), return_mode="median"))
    row["equal"] = torch.equal(histograms[1], histograms[2])
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = [measured(name, spread) for name in WORKS for spread in (1.0, 0.02)]
    for row in rows:
        times = ", ".join(f"{kind} {row[kind]:.0f} us" for kind in ("no bins", "within", "apart"))
        print(f"  {row['work']:<10} spread {row['spread']:<5} {times}, {'equal' if row['equal'] else 'COUNTS DIFFER'}")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "router.json").write_text(json.dumps(rows, indent=1))
    return 0 if all(row["equal"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
