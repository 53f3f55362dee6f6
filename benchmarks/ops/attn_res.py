"""Attention Residuals on one GPU: first right, then fast, beside the peers and the bytes that must move.

    PYTHONPATH=. python3 benchmarks/ops/attn_res.py --out FOLDER [--sweep] [--no-compile] [--no-peers]

The gate compares outputs and gradients with the definition in float64, and two backward passes bit for bit. Times are
medians of `triton.testing.do_bench`, with gradients through autograd, ours and the peers' alike. "mix" is the mixture
alone, "site" adds to the running sum before it and norms after it. The floor counts each source read and each result
written once, at the speed of a device copy measured in the same run. Peers: fast-attnres, fla, torch.compile of the
definition. --sweep times other sizes of the kernels. The table comes last; FOLDER/attn_res.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from rille.ops.attn_res import attn_res, attn_res_site, mix, reference

EPS = 1e-6
SHAPES = [(9, 8192, 7168), (5, 8192, 7168), (4, 32768, 2048), (5, 131072, 512)]  # R sources, N tokens, D width
BF16, FP32 = torch.bfloat16, torch.float32
GATE = [
    (9, 112, 7168, BF16, False), (9, 112, 7168, BF16, True), (5, 1008, 512, BF16, False), (5, 1008, 512, BF16, True),
    (4, 256, 2048, BF16, True), (2, 3, 8192, BF16, True), (1, 33, 512, BF16, False),
    (9, 100, 7168, FP32, True), (3, 65, 770, FP32, False), (16, 64, 1024, FP32, False),
]  # fmt: skip


@dataclass
class Case:
    """Leaves of one site. The peers know no gain, so the timed cases have gain 1."""

    sources: list[Tensor]
    update: Tensor
    query: Tensor
    gain: Tensor
    norm_gain: Tensor

    def leaves(self, site: bool) -> list[Tensor]:
        return [*self.sources, self.query, self.gain, *([self.update, self.norm_gain] if site else [])]

    def mix(self, backend: str = "triton") -> Tensor:
        return attn_res(self.sources, self.query, self.gain, EPS, backend=backend)

    def site(self, backend: str = "triton") -> tuple[Tensor, Tensor]:
        return attn_res_site(self.sources, self.update, self.query, self.gain, self.norm_gain, EPS, backend=backend)

    def to(self, dtype: torch.dtype) -> Case:
        change = lambda x: x.detach().to(dtype).requires_grad_()  # noqa: E731
        rest = (self.update, self.query, self.gain, self.norm_gain)
        return Case([change(x) for x in self.sources], *(change(x) for x in rest))


def draw(R: int, N: int, D: int, dtype: torch.dtype, gain_of_one: bool) -> Case:
    torch.manual_seed(R)
    sources = [torch.randn(N, D, device="cuda").mul_(2.0 ** (j / 2)).to(dtype) for j in range(R)]
    update = torch.randn(N, D, device="cuda").to(dtype)
    query, gain, norm_gain = (torch.randn(D, device="cuda").mul_(scale).to(dtype) for scale in (D**-0.5, 1.0, 1.0))
    case = Case(sources, update, query, torch.ones_like(gain) if gain_of_one else gain, norm_gain)
    return case.to(dtype)


def distance(got: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / (norm or 1.0)


def outcomes(case: Case, site: bool, backend: str) -> list[Tensor]:
    outputs = list(case.site(backend)) if site else [case.mix(backend)]
    g = torch.Generator("cuda").manual_seed(1)
    seeds = [torch.randn(out.shape, generator=g, device="cuda").to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, case.leaves(site), seeds)]


def check_case(R: int, N: int, D: int, dtype: torch.dtype, site: bool) -> list[tuple[str, float, float]]:
    case = draw(R, N, D, dtype, False)
    ours, again = (outcomes(case, site, "triton") for _ in range(2))
    exact = outcomes(case.to(torch.float64), site, "reference")
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    label = f"R{R} N{N} D{D} {'site' if site else 'mix'} {str(dtype)[6:]}"
    errors = [distance(a, b) for a, b in zip(ours, exact, strict=True)]
    twice = max((a.float() - b.float()).abs().max().item() for a, b in zip(ours, again, strict=True))
    return [(label, max(errors), limit), (f"{label} twice", twice, 0.0)]


def check_all() -> list[tuple[str, float, float]]:
    rows = []
    for case in GATE:
        rows += check_case(*case)
    for what, error, limit in rows:
        if not error <= limit:
            print(f"  FAIL {what:<44} {error:.2e} (at most {limit:.0e})", flush=True)
    print(f"  gate: {len(rows)} comparisons, largest error {max(error for _, error, _ in rows):.1e}", flush=True)
    return rows


def median_ms(call: Callable[[], Any], rep: int = 60) -> float:
    return float(triton.testing.do_bench(call, warmup=15, rep=rep, return_mode="median"))


def copy_speed() -> float:
    """Bytes a millisecond, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / median_ms(lambda: target.copy_(source))


def with_gradient(forward: Callable[[], Tensor | tuple[Tensor, ...]], leaves: list[Tensor]) -> Callable[[], Any]:
    outputs = forward()
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    seeds = [torch.randn_like(out) for out in outputs]

    def step() -> Any:
        results = forward()
        return torch.autograd.grad([results] if isinstance(results, Tensor) else list(results), leaves, seeds)

    return step


def peers(case: Case, names: list[str]) -> dict[str, Callable[[], Tensor]]:
    """The mixture by others."""
    found: dict[str, Callable[[], Tensor]] = {}
    if "fast" in names and find_spec("attnres"):
        from attnres import attnres

        found["fast"] = lambda: attnres(case.sources, case.query, eps=EPS)
    if "fla" in names and find_spec("fla"):
        from fla.ops.attnres import fused_attnres

        found["fla"] = lambda: fused_attnres(case.query, case.sources, case.gain, rms_eps=EPS)
    if "compile" in names:
        compiled = torch.compile(reference.attn_res, dynamic=False)
        found["compile"] = lambda: compiled(case.sources, case.query, case.gain, EPS)
    return found


def measure(R: int, N: int, D: int, speed: float, names: list[str]) -> dict[str, Any]:
    case, unit = draw(R, N, D, torch.bfloat16, True), N * D * 2 / speed
    row: dict[str, Any] = {"work": f"R{R} N{N} D{D}", "floor f": (R + 1) * unit}
    arguments = (case.sources, None, case.query, case.gain, None, EPS, True)
    with torch.no_grad():
        row["mix f"] = median_ms(lambda: mix.mix(*arguments))
    row["share f"] = row["floor f"] / row["mix f"]
    row["floor fb"] = (3 * R + 2) * unit
    row["mix fb"] = median_ms(with_gradient(case.mix, case.leaves(False)))
    row["share fb"] = row["floor fb"] / row["mix fb"]
    arguments = (case.sources, case.update, case.query, case.gain, case.norm_gain, EPS, True)
    with torch.no_grad():
        row["site f"] = median_ms(lambda: mix.mix(*arguments))
    row["s share f"] = (R + 3) * unit / row["site f"]
    row["site fb"] = median_ms(with_gradient(case.site, case.leaves(True)))
    row["s share fb"] = (3 * R + 5) * unit / row["site fb"]
    for name, call in peers(case, names).items():
        with torch.no_grad():
            row[f"{name} f"] = median_ms(call)
        leaves = [*case.sources, case.query]
        row[f"{name} fb"] = median_ms(with_gradient(call, leaves))
        wanted = attn_res(case.sources, case.query, case.gain, EPS, backend="triton")
        row[f"{name} apart"] = distance(call(), wanted)
    return row


# Warps and GROUP; warps, HELD and programs a processor. Only those with 8 to 64 elements a thread are timed.
FORWARD_SWEEP = [(16, 3), (16, 2), (16, 5), (16, 9), (8, 1), (8, 2), (8, 3), (32, 9), (32, 5), (1, 5), (2, 5), (1, 3)]
BACKWARD_SWEEP = [
    (8, 2, 1), (8, 0, 1), (8, 4, 1), (16, 0, 1), (16, 3, 1), (32, 0, 1), (32, 9, 1), (8, 2, 2), (8, 0, 8),
    (1, 0, 16), (1, 5, 16), (2, 0, 8), (2, 5, 8), (2, 5, 16),
]  # fmt: skip


def sweep(R: int, N: int, D: int) -> dict[str, float]:
    """Times of single launches for other sizes: forward by warps and group, backward by warps, held, programs."""
    case, found, chosen = draw(R, N, D, torch.bfloat16, True), {}, mix.plan
    base = chosen(R, D, 2)
    arguments = (case.sources, None, case.query, case.gain, None, EPS, True)
    with torch.no_grad():
        out, _, stats = mix.mix(*arguments)
        fitting = lambda warps: 8 <= base.BLOCK // (32 * warps) <= 64  # noqa: E731
        for warps, group in (size for size in FORWARD_SWEEP if fitting(size[0])):
            mix.plan = lambda *_, w=warps, g=group: replace(base, forward_warps=w, GROUP=min(R, g))
            found[f"f w{warps} g{group}"] = median_ms(lambda: mix.mix(*arguments), rep=25)
        rest = (case.sources, case.query, case.gain, None, stats)
        for warps, held, programs in (size for size in BACKWARD_SWEEP if fitting(size[0])):
            change = dict(backward_warps=warps, HELD=min(R, held), programs=programs)
            mix.plan = lambda *_, change=change: replace(base, **change)
            found[f"b w{warps} h{held} p{programs}"] = median_ms(lambda: mix.mix_backward(out, None, *rest), rep=25)
    mix.plan = chosen
    return found


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a number, one column a shape."""
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = (row.get(name, "") for row in rows)
        print(f"{name:<12}", *(f"{c:>18.4f}" if isinstance(c, float) else f"{c:>18}" for c in cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--sweep", action="store_true", help="time other sizes of the kernels at the largest shape")
    parser.add_argument("--no-compile", action="store_true", help="without torch.compile of the definition")
    parser.add_argument("--no-peers", action="store_true")
    return parser.parse_args()


def main() -> None:
    options, began = parse(), time.perf_counter()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "gate": check_all(),
    }
    speed = copy_speed()
    report["copy TB/s"] = speed * 1e-9
    names = [] if options.no_peers else ["fast", "fla"]
    report["rows"] = []
    for shape in SHAPES:
        with_compile = not options.no_compile and not options.no_peers and shape == SHAPES[0]
        report["rows"].append(measure(*shape, speed, [*names, "compile"] if with_compile else names))
        print(f"  {time.perf_counter() - began:.0f} s", report["rows"][-1], flush=True)
        torch.cuda.empty_cache()
    if options.sweep:
        report["sweep"] = {f"R{R} N{N} D{D}": sweep(R, N, D) for R, N, D in (SHAPES[0], SHAPES[3])}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "attn_res.json").write_text(json.dumps(report, indent=1))
    for name, times in report.get("sweep", {}).items():
        print(f"\nsweep {name}, ms:", ", ".join(f"{what} {ms:.3f}" for what, ms in times.items()))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; ms, bf16; f forward, fb with gradients")
    print_table(report["rows"])
    failures = [f"gate: {what} is off by {error:.2e}" for what, error, limit in report["gate"] if not error <= limit]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
