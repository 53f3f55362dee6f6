"""Newton-Schulz and Muon's whole step on one GPU: first right, then fast.

    PYTHONPATH=. python3 benchmarks/ops/newton_schulz.py --out FOLDER [--no-step | --only-step | --kernels]

The gate compares both forms in fp16 and bf16 with float64, and the kernels of Muon's step with the reference. Times are
medians of `triton.testing.do_bench`. For each batch of matrices: both forms in fp16 and bf16, every matrix alone in a
loop, and TFLOP/s counted by the plain form's FLOPs. Then what surrounds the products, for a layer's experts of `nano`.
"step" is `Muon.step` over tensors of `nano`'s shapes (from the parameter table), with the peak memory that it needs
beside weights, gradients and state. It is about a thousand launches, so a slow or busy host shows in its time:
"replayed" is the step from a CUDA graph, "called" the one from Python, "issued" what Python takes to issue it; several
steps are measured in turn. --kernels: instead, the backends with kernels of their own beside the library's for each
batch in fp16, their single launches, and the step with each. FOLDER/newton_schulz.json holds the
numbers. The bar for the step is 50 ms, the aim 36.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import triton
from torch import Tensor, nn

from rille.model.presets import preset
from rille.ops import newton_schulz as newton_schulz_module
from rille.ops.muon import Matrices, launch, muon_step
from rille.ops.newton_schulz import COEFFICIENTS, blocks, newton_schulz, obstacle, symmetric
from rille.optim.adamw import adamw
from rille.optim.config import OptimConfig
from rille.optim.groups import Named
from rille.optim.muon import muon
from rille.train.roles import newton_schulz_flops, parameter_roles

SHAPES = [(768, 256, 448), (1152, 128, 512), (96, 128, 7168), (36, 512, 896), (12, 512, 512)]  # matrices, rows, columns
LIMITS = {torch.float16: 1e-2, torch.bfloat16: 8e-2}


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected).norm() / expected.norm())


def check_all() -> list[tuple[str, float, float]]:
    rows = []
    for P, Q in ((256, 448), (128, 512), (128, 7168), (512, 512), (17, 63)):
        torch.manual_seed(P)
        m = torch.randn(4, P, Q, device="cuda")
        expected = newton_schulz(m.double(), backend="reference")
        for dtype, limit in LIMITS.items():
            for form in ("plain", "gram"):
                error = distance(newton_schulz(m * 1e-6, eps=1e-20, dtype=dtype, backend=form), expected)
                rows.append((f"{P} x {Q} {str(dtype)[6:]} {form}", error, limit))
    return rows + check_steps()


def said(rows: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """The rows, printed where they fail."""
    for what, error, limit in rows:
        if not error <= limit:
            print(f"  FAIL {what:<44} {error:.2e} (at most {limit:.0e})", flush=True)
    print(f"  gate: {len(rows)} comparisons, largest error {max(error for _, error, _ in rows):.1e}", flush=True)
    return rows


def experts(B: int, P: int, Q: int) -> Matrices:
    """A stack with gradient and momentum."""
    sizes = (0.02, 1e-4, 1e-3)
    return Matrices(*(torch.randn(B, P, Q, device="cuda").mul_(size) for size in sizes))


def check_kernels() -> list[tuple[str, float, float]]:
    """Every backend with kernels in fp16, against float64 and with itself bit for bit."""
    rows = []
    for P, Q in ((256, 448), (448, 256), (128, 512), (512, 896)):
        torch.manual_seed(P)
        m = torch.randn(300, P, Q, device="cuda")  # more than a wave of programs
        expected = newton_schulz(m.double(), backend="reference")
        for backend in kernel_backends(m.half()):
            got, again = (newton_schulz(m * 1e-6, eps=1e-20, dtype=torch.float16, backend=backend) for _ in range(2))
            rows.append((f"{P} x {Q} {backend}", distance(got, expected), LIMITS[torch.float16]))
            rows.append((f"{P} x {Q} {backend}, twice", float((got != again).any()), 0.0))
    return rows


def kernel_backends(x: Tensor) -> list[str]:
    """Those that can run for X and say something new."""
    found = [name for name in newton_schulz_module.BACKENDS if " " in name and obstacle(name, x) is None]
    return [name for name in found if "symmetric" not in name or min(x.shape[1:]) >= newton_schulz_module.SMALLEST]


def measure_kernels(B: int, P: int, Q: int) -> dict[str, Any]:
    """Whole iterations in fp16, and single launches in microseconds, the library's before ours."""
    m = torch.randn(B, P, Q, device="cuda")
    x = newton_schulz(m, dtype=torch.float16, steps=1)
    row: dict[str, Any] = {"work": f"{B} of {P}x{Q}"}
    for backend in ("plain", "gram", *kernel_backends(x)):
        row[backend] = median_ms(lambda b=backend: newton_schulz(m, dtype=torch.float16, backend=b), rep=20)
    square = blocks.square(x) * 0.01
    a, b, c = COEFFICIENTS
    row["X X'"] = 1e3 * median_ms(lambda: blocks.square(x), rep=10)
    row["bA+cAA"] = 1e3 * median_ms(lambda: torch.baddbmm(square, square, square, beta=b, alpha=c), rep=10)
    row["BA"] = 1e3 * median_ms(lambda: square @ square, rep=10)
    if P >= newton_schulz_module.SMALLEST:
        row["X X', half"] = 1e3 * median_ms(lambda: symmetric.product(x, x), rep=10)
        row["bA+cAA, half"] = 1e3 * median_ms(lambda: symmetric.product(square, square, square, c, b, a), rep=10)
        row["BA, half"] = 1e3 * median_ms(lambda: symmetric.product(square, square), rep=10)
    row["T X"] = 1e3 * median_ms(lambda: square @ x, rep=10)
    row["T of two steps"] = 1e3 * median_ms(lambda: blocks.transform(square, 2), rep=10)
    if P in symmetric.CHAINED:
        row["T, one launch"] = 1e3 * median_ms(lambda: symmetric.chain(square, 2), rep=10)
    return row


def measure_kernel_steps() -> dict[str, float]:
    """Muon's step over `nano`'s tensors with each."""
    named, steps = nano_parameters(), {}
    for kernels in ("", "symmetric", "chain"):
        follow = muon(named, OptimConfig(rule="muon"))

        def step(kernels: str = kernels, follow: torch.optim.Optimizer = follow) -> None:
            newton_schulz_module.KERNELS = kernels
            follow.step()

        steps[f"muon step, {kernels or 'library'}"] = step
    return steps_in_turn(steps)


def steps_in_turn(steps: dict[str, Callable[[], Any]], rounds: int = 9) -> dict[str, float]:
    """Medians in ms over rounds of all steps: replayed from a CUDA graph, called from Python, and Python's own part."""
    graphs = {name: torch.cuda.CUDAGraph() for name in steps}
    for name, step in steps.items():
        step()  # compiles, and makes the state
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[name]):
            step()
    found: dict[str, list[float]] = {}
    for name, step in [pair for _ in range(rounds) for pair in steps.items()]:
        found.setdefault(f"{name}, replayed", []).append(took(graphs[name].replay)[0])
        for what, value in zip(("called", "issued"), took(step), strict=True):
            found.setdefault(f"{name}, {what}", []).append(value)
    return {name: median(values) for name, values in found.items()}


def took(call: Callable[[], Any]) -> tuple[float, float]:
    """ms of one call on an idle card, first launch to last, and of the host until it returned."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    began = time.perf_counter()
    start.record()
    call()
    end.record()
    host = time.perf_counter() - began
    torch.cuda.synchronize()
    return start.elapsed_time(end), 1e3 * host


def check_steps() -> list[tuple[str, float, float]]:
    """Weights after a step of the kernels, next to one in float64: off by what fp16 leaves of a direction."""
    rows = []
    for P, Q in ((448, 256), (256, 448), (17, 63)):
        torch.manual_seed(P)
        ours = experts(3, P, Q)
        exact = Matrices(*(x.double() for x in ours))
        muon_step([ours], 0.95, 0.0, 1.0, dtype=torch.float16, backend="triton")
        muon_step([exact], 0.95, 0.0, 1.0, backend="reference")
        rows.append((f"{P} x {Q} step, weights", distance(ours.weight, exact.weight), LIMITS[torch.float16]))
        rows.append((f"{P} x {Q} step, momenta", distance(ours.momentum, exact.momentum), 2**-22))
    return rows


def measure_around() -> dict[str, Any]:
    """The kernels around the products, GB/s each, for the two stacks of a layer of `nano`."""
    row: dict[str, Any] = {}
    for B, P, Q in ((512, 448, 256), (256, 256, 448)):
        piece = experts(B, P, Q)
        x, parts = torch.empty(B, P, Q, dtype=torch.float16, device="cuda"), -(-P * Q // launch.PART)
        sums, extent = torch.empty(B, parts, device="cuda"), (P * Q, parts)
        before = median_ms(lambda p=piece, x=x, s=sums, e=extent: launch.push(p, x, s, e, 0.95, 1e-7))
        after = median_ms(lambda p=piece, x=x, e=extent: launch.pull(p, x, e, 0.999, 1e-4))
        row |= {f"{B} of {P}x{Q}, before, GB/s": 22e-6 * x.numel() / before}
        row |= {f"{B} of {P}x{Q}, after, GB/s": 10e-6 * x.numel() / after}
    return row


def median_ms(call, rep: int = 60) -> float:
    return float(triton.testing.do_bench(call, warmup=15, rep=rep, return_mode="median"))  # pyright: ignore[reportArgumentType]


def measure(B: int, P: int, Q: int) -> dict[str, Any]:
    m = torch.randn(B, P, Q, device="cuda")
    row: dict[str, Any] = {"work": f"{B} of {P}x{Q}"}
    for dtype, form in [(d, f) for d in LIMITS for f in ("plain", "gram")]:
        row[f"{form} {str(dtype)[6:]}"] = median_ms(lambda d=dtype, f=form: newton_schulz(m, dtype=d, backend=f))
    best = min(value for value in row.values() if isinstance(value, float))
    row["TFLOP/s, best"] = 1e-9 * B * newton_schulz_flops(P, Q) / best
    few = m[: min(B, 8)]
    row["each alone"] = median_ms(lambda: [newton_schulz(one[None], dtype=torch.float16) for one in few]) * B / len(few)
    return row


def nano_parameters() -> list[Named]:
    """Tensors of nano's sizes with gradients; a matrix as its row blocks stand."""
    named = []
    for role in parameter_roles(preset("nano")):
        if not role.name.endswith("router_bias"):
            p = nn.Parameter(torch.randn(role.count // role.columns, role.columns, device="cuda").mul_(0.02))
            p.grad = torch.randn_like(p).mul_(1e-4)
            named.append(Named(role.name, p, role.kind, role.blocks))
    return named


def measure_step() -> dict[str, float]:
    named, row = nano_parameters(), {}
    for name, rule in (("adamw", adamw), ("muon", muon)):
        follow = rule(named, OptimConfig(rule="adamw" if rule is adamw else "muon"))
        follow.step()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        follow.step()
        row[f"{name} GB more"] = (torch.cuda.max_memory_allocated() - before) * 1e-9
        row |= steps_in_turn({f"{name} step": follow.step})
        del follow
    numbers = sum(row.parameter.numel() for row in named)
    row["floor at 28 bytes"] = 28 * numbers / copy_speed()
    return row


def copy_speed() -> float:
    """Bytes a millisecond, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / median_ms(lambda: target.copy_(source))


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a number, one column a shape."""
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = (row.get(name, "") for row in rows)
        print(f"{name:<16}", *(f"{c:>16.3f}" if isinstance(c, float) else f"{c:>16}" for c in cells))


def write(report: dict[str, Any], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "newton_schulz.json").write_text(json.dumps(report, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--no-step", action="store_true")
    parser.add_argument("--only-step", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "gate": said(check_kernels() if options.kernels else check_all()),
    }
    rows = measure_kernels if options.kernels else measure
    report["rows"] = [rows(*shape) for shape in SHAPES if not options.only_step]
    print(f"\n{report['device']}; ms")
    print_table(report["rows"])
    write(report, options.out)  # what there is, should a step fail
    if options.kernels:
        report["step"] = measure_kernel_steps()
    elif not options.no_step:
        report["step"] = measure_around() | measure_step()
    write(report, options.out)
    for name, value in report.get("step", {}).items():
        print(f"{name:<34}{value:>10.3f}")
    failures = [f"gate: {what} is off by {error:.2e}" for what, error, limit in report["gate"] if not error <= limit]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
