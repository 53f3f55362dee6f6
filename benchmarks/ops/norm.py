"""Norms and gated activations on one GPU: first right, then fast, beside the bytes that must move.

    PYTHONPATH=. python3 benchmarks/ops/norm.py --out FOLDER [--part gate|time] [--no-compile] [--quick]

The gate compares outputs and gradients with the definitions in float64, and two backward passes bit for bit. Times are
medians of CUDA graphs of the forward and the backward launch alone; beside them stand the forward in eager PyTorch
(torch.nn.functional.rms_norm where it has the op, else the definition), torch.compile of the definition with its
forward, and both with gradients through autograd. --quick leaves out what is compiled, autograd, and the gate's odd
shapes. The floor counts each tensor read or written once, at the speed of a device copy measured in the same run. The
table comes last; FOLDER/norm.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import copy_speed, gate_then_times, graph_us, parser_of
from torch import Tensor
from torch.nn import functional

from rille.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from rille.ops.norm import launch as norms
from rille.ops.norm import reference as norm_reference
from rille.ops.situ import launch as glus
from rille.ops.situ import reference as situ_reference
from rille.ops.situ import situ_glu, swiglu

EPS = 1e-6


@dataclass(frozen=True)
class Op:
    """call(leaves, backend); plain(leaves) for torch.compile; bytes a row of forward and backward in units of its
    width, bf16."""

    name: str
    shape: tuple[int, ...]
    leaves: Callable[[tuple[int, ...], torch.dtype], list[Tensor]]
    call: Callable[[list[Tensor], str], Any]
    plain: Callable[[list[Tensor]], Any]
    forward_units: int
    backward_units: int


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, device="cuda").to(dtype).requires_grad_()


def normal(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)]


def added(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(shape[-1], dtype=dtype)]


def pair(shape: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    return [random(*shape, dtype=dtype), random(*shape, dtype=dtype)]


def ops() -> list[Op]:
    norm = lambda x, backend: rms_norm(x[0], x[1], EPS, backend=backend)  # noqa: E731
    add = lambda x, backend: add_rms_norm(x[0], x[1], x[2], EPS, backend=backend)  # noqa: E731
    gated = lambda x, backend: gated_rms_norm(x[0], x[1], x[2], EPS, backend=backend)  # noqa: E731
    situ = lambda x, backend: situ_glu(x[0], x[1], 4.0, 25.0, backend=backend)  # noqa: E731
    swish = lambda x, backend: swiglu(x[0], x[1], backend=backend)  # noqa: E731
    plain_norm = lambda x: norm_reference.rms_norm(x[0], x[1], EPS)  # noqa: E731
    plain_add = lambda x: (norm_reference.rms_norm(x[0] + x[1], x[2], EPS), x[0] + x[1])  # noqa: E731
    plain_gated = lambda x: norm_reference.gated_rms_norm(x[0], x[1], x[2], EPS, x[1].dtype)  # noqa: E731
    plain_situ = lambda x: situ_reference.situ_glu(x[0], x[1], 4.0, 25.0)  # noqa: E731
    plain_swish = lambda x: situ_reference.swiglu(x[0], x[1])  # noqa: E731
    return [
        Op("rms 7168", (16384, 7168), normal, norm, plain_norm, 2, 3),
        Op("rms 512", (131072, 512), normal, norm, plain_norm, 2, 3),
        Op("add 7168", (16384, 7168), added, add, plain_add, 4, 4),
        Op("add 512", (131072, 512), added, add, plain_add, 4, 4),
        Op("gated 128", (8192, 96, 128), added, gated, plain_gated, 3, 5),
        Op("situ 448", (262144, 448), pair, situ, plain_situ, 3, 5),
        Op("situ 3072", (32768, 3072), pair, situ, plain_situ, 3, 5),
        Op("swiglu 3072", (32768, 3072), pair, swish, plain_swish, 3, 5),
    ]


def distance(got: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / (norm or 1.0)


def outcomes(op: Op, leaves: list[Tensor], backend: str) -> list[Tensor]:
    outputs = op.call(leaves, backend)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    g = torch.Generator("cuda").manual_seed(1)
    seeds = [torch.randn(out.shape, generator=g, device="cuda").to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, seeds)]


def check_all(quick: bool) -> list[tuple[str, float, float]]:
    rows = []
    for op in ops():
        odd = (7, *op.shape[1:-1], op.shape[-1] - 5)
        cases = [((304, *op.shape[1:]), torch.bfloat16), (odd, torch.float32)]
        for shape, dtype in cases[: 1 if quick else 2]:
            leaves = op.leaves(shape, dtype)
            ours, again = (outcomes(op, leaves, "triton") for _ in range(2))
            exact = outcomes(op, [x.detach().double().requires_grad_() for x in leaves], "reference")
            label = f"{op.name} {shape} {str(dtype)[6:]}"
            errors = [distance(a, b) for a, b in zip(ours, exact, strict=True)]
            rows.append((label, max(errors), 1e-2 if dtype == torch.bfloat16 else 1e-5))
            twice = [(a.float() - b.float()).abs().max().item() for a, b in zip(ours, again, strict=True)]
            rows.append((f"{label} twice", max(twice), 0.0))
    for what, error, limit in rows:
        if not error <= limit:
            print(f"  FAIL {what:<44} {error:.2e} (at most {limit:.0e})", flush=True)
    print(f"  gate: {len(rows)} comparisons, largest error {max(error for _, error, _ in rows):.1e}", flush=True)
    return rows


def launches(op: Op, leaves: list[Tensor]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The forward and the backward launch without autograd."""
    flat = [x.detach().reshape(-1, x.shape[-1]) if x.ndim > 1 else x.detach() for x in leaves]
    dy = torch.randn_like(flat[0])
    kind = op.name.split()[0]
    if kind in ("rms", "add"):
        residual, weight = (flat[1], flat[2]) if kind == "add" else (None, flat[1])
        rstd = norms.rms_norm(flat[0], residual, weight, EPS)[2]
        return (
            lambda: norms.rms_norm(flat[0], residual, weight, EPS),
            lambda: norms.rms_norm_backward(dy, residual, flat[0], weight, rstd),
        )
    if kind == "gated":
        rstd = norms.gated_rms_norm(*flat, EPS, dy.dtype)[1]
        return (
            lambda: norms.gated_rms_norm(*flat, EPS, dy.dtype),
            lambda: norms.gated_rms_norm_backward(dy, *flat, rstd),
        )
    caps = (4.0, 25.0, kind == "situ")
    return lambda: glus.glu(*flat, *caps), lambda: glus.glu_backward(dy, *flat, *caps)


def with_gradient(call: Callable[[], Any], leaves: list[Tensor]) -> Callable[[], Any]:
    outputs = call()
    seeds = [torch.randn_like(x) for x in ([outputs] if isinstance(outputs, Tensor) else outputs)]

    def step() -> Any:
        outputs = call()
        return torch.autograd.grad([outputs] if isinstance(outputs, Tensor) else list(outputs), leaves, seeds)

    return step


def eager(op: Op, leaves: list[Tensor]) -> Callable[[], Any]:
    """The forward as eager PyTorch has it."""
    if op.name.startswith("rms"):
        return lambda: functional.rms_norm(leaves[0], leaves[1].shape, leaves[1], EPS)
    if op.name.startswith("add"):
        return lambda: functional.rms_norm(leaves[0] + leaves[1], leaves[2].shape, leaves[2], EPS)
    return lambda: op.plain(leaves)


def measure(op: Op, speed: float, with_compile: bool, quick: bool) -> dict[str, Any]:
    leaves = op.leaves(op.shape, torch.bfloat16)
    unit = leaves[0].numel() * 2 / speed
    forward, backward = launches(op, leaves)
    row: dict[str, Any] = {"op": op.name, "floor f": op.forward_units * unit, "f": graph_us(forward)}
    row |= {"share f": row["floor f"] / row["f"], "floor b": op.backward_units * unit, "b": graph_us(backward)}
    row |= {"share b": row["floor b"] / row["b"]}
    with torch.no_grad():
        row["eager f"] = graph_us(eager(op, leaves))
    if quick:
        return row
    row["f+b"] = graph_us(with_gradient(lambda: op.call(leaves, "triton"), leaves))
    if with_compile:
        compiled = torch.compile(op.plain, dynamic=False)
        with torch.no_grad():
            row["compile f"] = graph_us(lambda: compiled(leaves))
        row["compile f+b"] = graph_us(with_gradient(lambda: compiled(leaves), leaves))
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print(*(f"{name:>11}" for name in columns))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print(*(f"{cell:>11.2f}" if isinstance(cell, float) else f"{cell:>11}" for cell in cells))


def times(options: argparse.Namespace, report: dict[str, Any]) -> None:
    speed = copy_speed()
    report["copy TB/s"], report["rows"] = speed * 1e-6, []
    for op in ops():
        compiling = not options.no_compile and op.name in ("rms 7168", "gated 128", "situ 3072")
        report["rows"].append(measure(op, speed, compiling, options.quick))
        print(" ", report["rows"][-1], flush=True)
        torch.cuda.empty_cache()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "norm.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; microseconds, bf16; f forward, b backward")
    print_table(report["rows"])


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile of the definitions")
    parser.add_argument("--quick", action="store_true", help="our kernels and eager PyTorch, timed shapes alone")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    gate_then_times(options.part, lambda: check_all(options.quick), lambda report: times(options, report))


if __name__ == "__main__":
    main()
