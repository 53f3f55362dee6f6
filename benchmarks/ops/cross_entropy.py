"""Head and cross-entropy on one GPU: first right, then fast, beside plain PyTorch and the bare products.

    PYTHONPATH=. python3 benchmarks/ops/cross_entropy.py --out FOLDER [--part gate|time] [--no-peers] [--quick]

The gate compares loss, log-probabilities and gradients with float64 and two runs bit for bit. Times are medians of
`triton.testing.do_bench`. "score" is the kernel between the products on one chunk; its floor reads fp32 logits once and
writes bf16 gradients, at the speed of a device copy measured in the same run. "products" are the three matrix products
of all chunks alone, "op" is everything with gradients. Peers: the same in plain PyTorch, and all logits at once under
torch.compile. --quick: the smallest shape, no sweeps, beside eager torch.nn.functional.cross_entropy. The table comes
last; FOLDER/cross_entropy.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from measuring import gate_then_times, parser_of
from torch import Tensor

from rille.ops.cross_entropy import fused, linear_cross_entropy

SHAPES = [(131072, 512, 163840), (32768, 512, 32768), (4096, 7168, 163840)]  # N tokens, D width, W words
SWEEP = [(8, 8192), (4, 4096), (16, 8192), (8, 2048)]  # warps, block
BF16, FP32 = torch.bfloat16, torch.float32


def draw(N: int, D: int, W: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(N)
    x = torch.randn(N, D, device="cuda").to(dtype).requires_grad_()
    head = torch.randn(W, D, device="cuda").mul_(2 * D**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(0, W, (N,), device="cuda")
    targets[::7] = -100
    return x, head, targets


def distance(got: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / (norm or 1.0)


def step(x: Tensor, head: Tensor, targets: Tensor, backend: str, z_loss: float = 0.0, chunk: int | None = None) -> Any:
    result = linear_cross_entropy(x, head, targets, chunk, z_loss, backend=backend)
    return [result.loss_sum, result.log_probs, *torch.autograd.grad(result.loss_sum, (x, head))]


def check_case(N: int, D: int, W: int, dtype: torch.dtype, z_loss: float, chunk: int) -> list[tuple[str, float, float]]:
    x, head, targets = draw(N, D, W, dtype)
    wide = [t.detach().double().requires_grad_() for t in (x, head)]
    exact = step(*wide, targets, "chunked", z_loss, chunk)
    ours, again = (step(x, head, targets, "triton", z_loss, chunk) for _ in range(2))
    label = f"N{N} D{D} W{W} {str(dtype)[6:]} z{z_loss}"
    # fp32 operands: the card may round products to TF32 only where asked to, which nobody does here.
    limits = (1e-5, 1e-5, 1e-2, 1e-2) if dtype == BF16 else (1e-5, 1e-5, 1e-4, 1e-4)
    names = ("loss", "log_probs", "dx", "dhead")
    rows = [(f"{label} {n}", distance(a, b), lim) for n, a, b, lim in zip(names, ours, exact, limits, strict=True)]
    twice = max((a.float() - b.float()).abs().max().item() for a, b in zip(ours, again, strict=True))
    return [*rows, (f"{label} twice", twice, 0.0)]


def check_all(quick: bool) -> list[tuple[str, float, float]]:
    rows = check_case(300, 64, 163840, BF16, 0.0, 128) + check_case(65, 512, 32768, BF16, 1e-3, 1024)
    if not quick:
        rows += check_case(33, 72, 5001, BF16, 0.1, 16) + check_case(130, 64, 4099, FP32, 0.1, 64)
    for what, error, limit in rows:
        if not error <= limit:
            print(f"  FAIL {what:<44} {error:.2e} (at most {limit:.0e})", flush=True)
    print(f"  gate: {len(rows)} comparisons, largest error {max(error for _, error, _ in rows):.1e}", flush=True)
    return rows


def median_ms(call: Callable[[], Any], rep: int = 80) -> float:
    return float(triton.testing.do_bench(call, warmup=15, rep=rep, return_mode="median"))


def copy_speed() -> float:
    """Bytes a millisecond, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / median_ms(lambda: target.copy_(source))


def products(x: Tensor, head: Tensor, chunk: int) -> None:
    """The three products of every chunk and nothing else."""
    x, head = x.detach(), head.detach()
    dx, dhead = torch.empty_like(x), torch.zeros(head.shape, dtype=FP32, device=x.device)
    for start in range(0, len(x), chunk):
        rows = slice(start, start + chunk)
        dlogits = fused.gradient_in(fused.logits_of(x[rows], head), x.dtype)
        torch.mm(dlogits, head, out=dx[rows])
        fused.add_product(dhead, dlogits.T, x[rows])


def time_score(W: int, chunk: int, speed: float, quick: bool) -> dict[str, float]:
    """The kernel on one chunk. Its input is its own output after the first run: any bits will do for the time."""
    logits, targets = torch.randn(chunk, W, device="cuda"), torch.randint(0, W, (chunk,), device="cuda")
    call = lambda: fused.score_logits(logits, targets, 0.0, True, BF16)  # noqa: E731
    row = {"score floor": chunk * W * 6 / speed, "score": median_ms(call)}
    row["share"] = row["score floor"] / row["score"]
    chosen = fused.WARPS, fused.BLOCK
    for warps, block in [] if quick else SWEEP:
        fused.WARPS, fused.BLOCK = warps, block
        row[f"w{warps} b{block}"] = median_ms(call, rep=30)
    fused.WARPS, fused.BLOCK = chosen
    row["no gradient"] = median_ms(lambda: fused.score_logits(logits, targets, 0.0, False, BF16))
    return row


def all_at_once(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy((x @ head.T).float(), targets, reduction="sum")


def measure_quick(N: int, D: int, W: int, speed: float) -> dict[str, Any]:
    """The kernel between the products, the products and the whole, beside eager PyTorch with all logits at once."""
    chunk = fused.chunk_for(W)
    row: dict[str, Any] = {"work": f"N{N} D{D} W{W}", "chunk": chunk} | time_score(W, chunk, speed, True)
    x, head, targets = draw(N, D, W, BF16)
    row["products"] = median_ms(lambda: products(x, head, chunk), rep=40)
    row["op"] = median_ms(lambda: step(x, head, targets, "triton"), rep=40)
    row["op/products"] = row["op"] / row["products"]
    row["eager"] = median_ms(lambda: torch.autograd.grad(all_at_once(x, head, targets), (x, head)), rep=40)
    return row


def measure(N: int, D: int, W: int, speed: float, with_peers: bool) -> dict[str, Any]:
    chunk = fused.chunk_for(W)
    row: dict[str, Any] = {"work": f"N{N} D{D} W{W}", "chunk": chunk} | time_score(W, chunk, speed, False)
    torch.cuda.empty_cache()
    x, head, targets = draw(N, D, W, BF16)
    row["products"] = median_ms(lambda: products(x, head, chunk))
    row["TFLOP/s"] = 6e-9 * N * D * W / row["products"]
    row["op"] = median_ms(lambda: step(x, head, targets, "triton"))
    row["op/products"] = row["op"] / row["products"]
    for size in (chunk // 2, chunk * 2):
        row[f"chunk x{size / chunk:g}"] = median_ms(lambda size=size: step(x, head, targets, "triton", 0.0, size))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(x, head, targets, "triton")
    row["GB more"] = (torch.cuda.max_memory_allocated() - before) * 1e-9
    if with_peers and D <= 512:
        row["plain"] = median_ms(lambda: step(x, head, targets, "chunked"))
        if N * W <= 2**31:  # all logits in bf16 and fp32, and their gradients
            compiled = torch.compile(all_at_once, dynamic=False)
            row["compile"] = median_ms(lambda: torch.autograd.grad(compiled(x, head, targets), (x, head)))
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a number, one column a shape."""
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = (row.get(name, "") for row in rows)
        print(f"{name:<12}", *(f"{c:>20.4f}" if isinstance(c, float) else f"{c:>20}" for c in cells))


def times(options: argparse.Namespace, report: dict[str, Any]) -> None:
    speed = copy_speed()
    report["copy TB/s"], report["rows"] = speed * 1e-9, []
    for shape in SHAPES[1:2] if options.quick else SHAPES:
        row = measure_quick(*shape, speed) if options.quick else measure(*shape, speed, not options.no_peers)
        report["rows"].append(row)
        print(f"  {report['rows'][-1]['work']}", report["rows"][-1], flush=True)
        torch.cuda.empty_cache()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "cross_entropy.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; ms, bf16; w, b: score in other warps and blocks")
    print_table(report["rows"])


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--quick", action="store_true", help="the smallest shape, no sweeps")
    options = parser.parse_args(arguments)
    gate_then_times(options.part, lambda: check_all(options.quick), lambda report: times(options, report))


if __name__ == "__main__":
    main()
