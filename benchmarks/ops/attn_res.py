"""Attention Residuals on one GPU: first right, then fast, beside the peers and the bytes that must move.

    PYTHONPATH=. python3 benchmarks/ops/attn_res.py --out FOLDER [--part gate|time] [--compile] [--fla]
        [--no-peers]

The gate compares outputs and gradients with the definition in float64, and two backward passes bit for bit. Times are
medians of CUDA graphs, with gradients through autograd, ours and the peers' alike ("host" is one forward and backward
called from Python instead). "mix" is the mixture alone, "site" adds to the running sum before it and norms after it.
The floor counts each source read and each result written once, at the speed of a device copy measured in the same run.
Peers: fast-attnres, fla, torch.compile of the definition. All sites of a model alone, beside plain residuals with the
same norms, say what a training step pays. A time that fails is
named and the others go on; `attn_res_quick.py` has the main times alone. The tables come last;
FOLDER/attn_res.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor, nn

from rille.model.attn_res import Depth, Mix, Plain
from rille.ops.attn_res import attn_res, attn_res_handed, attn_res_site, mix, reference
from rille.ops.attn_res.form import Form

EPS = 1e-6
# Layers, layers of a block, N, D: the sites of `nano` and of a stack of 24 layers in 4 blocks.
STACKS = [(12, 3, 131072, 512), (24, 6, 32768, 2048)]
FORMS: dict[str, Form | None] = {"plain": None, "one phase": "one_phase", "two phases": "two_phase", "chosen": "auto"}
SHAPES = [(9, 8192, 7168), (5, 8192, 7168), (4, 32768, 2048), (5, 131072, 512)]  # R sources, N tokens, D width
BF16, FP32 = torch.bfloat16, torch.float32
GATE = [
    (9, 112, 7168, BF16, False), (9, 112, 7168, BF16, True), (5, 1008, 512, BF16, False), (5, 1008, 512, BF16, True),
    (4, 256, 2048, BF16, True), (2, 3, 8192, BF16, True), (1, 33, 512, BF16, False),
    (9, 100, 7168, FP32, True), (3, 65, 770, FP32, False), (16, 64, 1024, FP32, False), (16, 64, 1024, BF16, True),
    (5, 400, 7168, BF16, True), (9, 300, 4096, BF16, True), (1, 200, 7168, BF16, True), (16, 150, 8192, BF16, False),
    (9, 560, 7168, BF16, True), (4, 600, 6144, BF16, False),  # rows enough for the ring
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


def two_sites(case: Case, backend: str) -> list[Tensor]:
    """Outputs and gradients of a site and one that reads what it hands on."""
    weights = (case.query, case.gain, case.norm_gain, EPS)
    x, sources = attn_res_handed(case.sources, case.update, *weights, backend=backend)
    y, sources = attn_res_handed(sources, x, *weights, backend=backend)
    outputs = [x, y, *sources]
    g = torch.Generator("cuda").manual_seed(2)
    seeds = [torch.randn(out.shape, generator=g, device="cuda").to(out.dtype) for out in outputs]
    return [*outputs, *torch.autograd.grad(outputs, case.leaves(True), seeds)]


def check_handed(R: int, N: int, D: int, dtype: torch.dtype) -> tuple[str, float, float]:
    case = draw(R, N, D, dtype, False)
    exact = two_sites(case.to(torch.float64), "reference")
    errors = [distance(a, b) for a, b in zip(two_sites(case, "triton"), exact, strict=True)]
    return f"R{R} N{N} D{D} handed {str(dtype)[6:]}", max(errors), 2e-5 if dtype == FP32 else 2e-2


def check_all() -> list[tuple[str, float, float]]:
    rows = []
    for case in GATE:
        rows += check_case(*case)
    rows += [check_handed(*size) for size in ((3, 70, 512, FP32), (3, 65, 7168, FP32), (4, 130, 2048, BF16))]
    for what, error, limit in rows:
        if not error <= limit:
            print(f"  FAIL {what:<44} {error:.2e} (at most {limit:.0e})", flush=True)
    print(f"  gate: {len(rows)} comparisons, largest error {max(error for _, error, _ in rows):.1e}", flush=True)
    return rows


def median_ms(call: Callable[[], Any], rep: int = 40) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=rep, return_mode="median"))


def timed(row: dict[str, Any], name: str, call: Callable[[], Any]) -> None:
    """row[name]: the median of a call in a CUDA graph, ms."""
    try:
        row[name] = float(triton.testing.do_bench_cudagraph(call, rep=15, return_mode="median"))
    except (RuntimeError, ValueError, TypeError, triton.TritonError) as error:
        row[name] = float("nan")
        print(f"  FAIL {row.get('work', '')} {name}: {str(error).splitlines()[0][:160]}", flush=True)


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


def beside(gradient: Tensor, R: int, site: bool) -> tuple[list[Tensor], int]:
    """A site's running sum has another reader."""
    return ([gradient], 1 << (R - 1)) if site else ([], 0)


def measure(R: int, N: int, D: int, speed: float, names: list[str]) -> dict[str, Any]:
    case, unit = draw(R, N, D, torch.bfloat16, True), N * D * 2 / speed
    row: dict[str, Any] = {"work": f"R{R} N{N} D{D}"}
    weights = (case.query, case.gain)
    for form, update, norm, more in (("mix", None, None, 0), ("site", case.update, case.norm_gain, 1)):
        arguments = (case.sources, update, *weights, norm, EPS, True)
        call, leaves = (case.site, case.leaves(True)) if more else (case.mix, case.leaves(False))
        with torch.no_grad():
            out, _, stats = mix.mix(*arguments)
            timed(row, f"{form} f", lambda arguments=arguments: mix.mix(*arguments))
            rest = (out, *beside(out, R, more), case.sources, *weights, norm, stats, EPS)
            timed(row, f"{form} b", lambda rest=rest: mix.mix_backward(*rest))
        timed(row, f"{form} fb", with_gradient(call, leaves))
        units = (R + 1 + 2 * more, 2 * R + 1 + more)
        row[f"{form} floor f"], row[f"{form} floor b"] = (n * unit for n in units)
        row |= {f"{form} share {k}": row[f"{form} floor {k}"] / row[f"{form} {k}"] for k in "fb"}
    row["mix fb host"] = median_ms(with_gradient(case.mix, case.leaves(False)))
    for name, call in peers(case, names).items():
        try:
            wanted = attn_res(case.sources, *weights, EPS, backend="triton")
            row[f"{name} apart"] = distance(call(), wanted)
            with torch.no_grad():
                timed(row, f"{name} f", call)
            step = with_gradient(call, [*case.sources, case.query])
            if name == "fast":  # cannot be captured, and a failed capture poisons the process
                row["fast fb events"] = median_ms(step)
            else:
                timed(row, f"{name} fb", step)
        except (RuntimeError, ValueError, TypeError, triton.TritonError) as error:
            print(f"  FAIL {row['work']} {name}: {str(error).splitlines()[0][:160]}", flush=True)
    return row


def stack(layers: int, block_layers: int, N: int, D: int, form: Form | None) -> Callable[[], Any]:
    """Forward and backward of all sites of a model, whose sub-layers return what they read; None: plain residuals."""

    def new(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(shape, device="cuda").mul_(D**-0.5).bfloat16())

    sites = [(Mix(new, D, EPS) if form else Plain(), new(D)) for _ in range(2 * layers)]
    readers = [site for site, _ in sites if isinstance(site, Mix)]
    embedded = torch.randn(N, D, device="cuda").bfloat16().requires_grad_()
    seed = torch.randn_like(embedded)
    leaves = [embedded, *(gain for _, gain in sites)]
    leaves += [x for site, _ in sites[1:] for x in site.parameters()]  # the first site reads one source

    def step() -> Any:
        depth = Depth(embedded)
        for layer in range(layers):
            (attn, attn_gain), (ffn, ffn_gain) = sites[2 * layer : 2 * layer + 2]
            x, depth = attn.normed(depth, None, attn_gain, EPS)
            if form and layer % block_layers == 0:
                depth = depth.close().look_ahead(tuple(readers[2 * layer + 1 :][: 2 * block_layers]), form)
            x, depth = ffn.normed(depth, x, ffn_gain, EPS)
            depth = depth.add(x)
        return torch.autograd.grad(depth.sum, leaves, seed)

    return step


def measure_stack(layers: int, block_layers: int, N: int, D: int) -> dict[str, Any]:
    """What Attention Residuals add to a training step beside plain residuals: ms, and GB at the peak."""
    row: dict[str, Any] = {"work": f"{layers} layers, {block_layers} a block, N{N} D{D}"}
    for name, form in FORMS.items():
        step = stack(layers, block_layers, N, D, form)
        timed(row, f"{name} ms", step)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        row[f"{name} GB"] = (torch.cuda.max_memory_allocated() - before) * 1e-9
    row |= {f"{name} more ms": row[f"{name} ms"] - row["plain ms"] for name in list(FORMS)[1:]}
    return row


def launches(R: int, N: int, D: int, site: bool) -> dict[str, Callable[[], Any]]:
    """One kernel each way."""
    case = draw(R, N, D, BF16, True)
    norm = case.norm_gain if site else None
    arguments = (case.sources, case.update if site else None, case.query, case.gain, norm, EPS, True)
    with torch.no_grad():
        out, _, stats = mix.mix(*arguments)
    rest = (out, *beside(out, R, site), case.sources, case.query, case.gain, norm, stats, EPS)

    def without_gradient(op: Any, given: tuple[Any, ...]) -> Callable[[], Any]:
        def call() -> Any:
            with torch.no_grad():
                return op(*given)

        return call

    work = f"R{R} D{D} {'site' if site else 'mix'}"
    return {f"{work} f": without_gradient(mix.mix, arguments), f"{work} b": without_gradient(mix.mix_backward, rest)}


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line a number, one column a shape."""
    for name in dict.fromkeys(name for row in rows for name in row):
        cells = (row.get(name, "") for row in rows)
        print(f"{name:<13}", *(f"{c:>19.4f}" if isinstance(c, float) else f"{c:>19}" for c in cells))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--part", choices=("gate", "time"), help="one half only")
    parser.add_argument("--compile", action="store_true", help="with torch.compile of the definition")
    parser.add_argument("--fla", action="store_true", help="with fla, which tries its settings for minutes")
    parser.add_argument("--no-peers", action="store_true")
    return parser.parse_args()


def times(options: argparse.Namespace, report: dict[str, Any]) -> None:
    speed = copy_speed()
    report["copy TB/s"], report["rows"] = speed * 1e-9, []
    names = [] if options.no_peers else ["fast", *(["fla"] if options.fla else [])]
    for shape in SHAPES:
        more = ["compile"] if options.compile and shape == SHAPES[0] else []
        report["rows"].append(measure(*shape, speed, [*names, *more]))
        print(" ", report["rows"][-1], flush=True)
        torch.cuda.empty_cache()
    report["stacks"] = [measure_stack(*sizes) for sizes in STACKS]


def main() -> None:
    options = parse()
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "gate": [] if options.part == "time" else check_all(),
    }
    if options.part != "gate":
        times(options, report)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "attn_res.json").write_text(json.dumps(report, indent=1))
        print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; ms, bf16; f forward, b backward")
        print_table(report["rows"])
        print("all sites of a model, forward and backward:")
        print_table(report["stacks"])
    failures = [f"gate: {what} is off by {error:.2e}" for what, error, limit in report["gate"] if not error <= limit]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
