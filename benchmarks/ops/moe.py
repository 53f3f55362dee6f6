"""Router, permutation and experts of Stable LatentMoE on one GPU: first right, then fast, beside a square matmul.

    PYTHONPATH=. python3 benchmarks/ops/moe.py --out FOLDER [--shape nano|k3] [--form fused|library]

The gate holds router and experts, outputs and gradients, against plain PyTorch in fp32 on the same bf16 values, with
memory that was filled with NaN before. Then the medians of `triton.testing.do_bench` of every part, of the experts
whole, and of a whole layer (router, latent products, norm, shared experts) forward and backward, bf16. A share is
useful FLOPs (what forward and backward need once, recomputation not counted) over time, relative to an 8192^3 bf16
matmul of the same run. The peer is the plain way to write it: sort, torch._grouped_mm with autograd, indexing; it has
our activation kernel. A part that fails is a row that says so. The table comes last; FOLDER/moe.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear
from triton.runtime.errors import TritonError

from rille.ops.moe import function, grouped, permute, products, router, select
from rille.ops.moe import reference as moe_reference
from rille.ops.moe.products import Glu, Tiles
from rille.ops.norm import rms_norm
from rille.ops.situ import situ_glu

CAPS = Glu(4.0, 25.0, True)
BINS = 4000
FAULTS = (RuntimeError, ValueError, TypeError, AttributeError, AssertionError, TritonError)
situ = partial(situ_glu, cap_gate=4.0, cap_up=25.0)


@dataclass(frozen=True)
class Shape:
    """N tokens, E experts with A of `routed` chosen a token, L latent, F expert width, D width, S shared width."""

    name: str
    N: int
    E: int
    A: int
    L: int
    F: int
    D: int
    S: int
    routed: int

    @property
    def expert_flops(self) -> float:
        """Forward of the routed experts."""
        return 6.0 * self.N * self.A * self.L * self.F

    @property
    def layer_flops(self) -> float:
        """Forward and backward of a layer."""
        dense = 2.0 * self.N * self.D * (2 * self.L + self.routed + 3 * self.S)
        return 3 * (self.expert_flops + dense)


SHAPES = {
    "nano": Shape("nano", 131072, 256, 6, 256, 448, 512, 896, 256),
    "k3": Shape("k3", 16384, 112, 16, 3584, 3072, 7168, 6144, 896),
}


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return (torch.randn(shape, device="cuda") * scale).to(dtype)


def random_ids(N: int, E: int, A: int) -> Tensor:
    """Distinct experts of each token, all equally likely."""
    return torch.rand(N, E, device="cuda").topk(A, dim=1).indices


def poison() -> None:
    """Leave NaN in the memory that comes next."""
    for size, times in ((2**26, 4), (2**17, 64)):
        held = [torch.full((size,), torch.nan, device="cuda") for _ in range(times)]
        del held


def distance(got: Tensor, expected: Tensor) -> float:
    norm = expected.double().norm().item()
    return (got.double() - expected.double()).norm().item() / (norm or 1.0)


def gate_experts(form: str) -> list[tuple[str, float, float]]:
    nano, wide = (256, 6, 256, 448), (112, 16, 3584, 3072)
    cases = {
        "few": (37, *nano), "same": (700, *nano), "middle": (4099, *nano), "idle": (5, 64, 2, 64, 64),
        "one": (1, 64, 2, 64, 64), "none": (0, 64, 2, 64, 64), "odd": (301, 7, 2, 208, 88), "wide": (512, *wide),
    }  # fmt: skip
    rows = []
    for name, (N, E, A, L, F) in cases.items():
        ids = random_ids(N, E, A) if name != "same" else torch.full((N, A), 3, device="cuda")
        weights = torch.rand(N, A, device="cuda") + 0.1
        values = [random(N, L), weights, random(E, 2 * F, L, scale=L**-0.5), random(E, L, F, scale=F**-0.5)]
        d_out, found = random(N, L, dtype=torch.float32), []
        for _ in range(2):
            poison()
            leaves = [x.clone().requires_grad_() for x in values]
            out = function.experts(leaves[0], ids, *leaves[1:], *CAPS, form)[0]
            found.append([out, *torch.autograd.grad(out, leaves, d_out)])
        exact = [x.float().requires_grad_() for x in values]
        out = grouped.expert_glu(exact[0], ids, *exact[1:], situ_plain)
        want = [out, *torch.autograd.grad(out, exact, d_out)]
        for what, a, b, again in zip(("out", "dx", "dweights", "dw13", "dw2"), found[0], want, found[1], strict=True):
            rows.append((f"{form} {name} {what}", distance(a, b), 1.5e-2))
            rows.append((f"{form} {name} {what} twice", 0.0 if torch.equal(a, again) else 1.0, 0.0))
        idle = torch.bincount(ids.flatten(), minlength=E) == 0
        left = max(float(x[idle].abs().amax()) if idle.any() else 0.0 for x in found[0][3:])
        rows.append((f"{form} {name} idle experts", left, 0.0))
    return rows


def situ_plain(gate: Tensor, up: Tensor) -> Tensor:
    return situ_glu(gate, up, 4.0, 25.0, backend="reference")


def gate_router() -> list[tuple[str, float, float]]:
    rows = []
    for N, E, A in ((4096, 896, 16), (4099, 256, 6), (513, 37, 5), (9, 4, 4)):
        logits = random(N, E, dtype=torch.float32).requires_grad_()
        bias = random(E, scale=0.3, dtype=torch.float32)
        ids, weights, _, cutoff, load, histogram = router.router(logits, bias, A, 2.5, True, BINS, False)
        scores = torch.sigmoid(logits)
        want_ids, want_cutoff = select.route(scores, bias, A)
        differ = (ids.sort(1).values != want_ids.sort(1).values).any(1).float().mean().item()
        want = moe_reference.route_weights(scores, ids, 2.5, True)
        d = torch.randn_like(weights)
        (got_d,), (want_d,) = (torch.autograd.grad(w, logits, d, retain_graph=True) for w in (weights, want))
        off = (histogram - required(scores, cutoff, bias)).abs().sum().item() / (2 * N * E)
        label = f"router {N}x{E}"
        rows += [
            (f"{label} choice", differ, 1e-3),
            (f"{label} cutoff", (cutoff - want_cutoff).nan_to_num().abs().max().item(), 1e-6),
            (f"{label} weights", distance(weights, want), 1e-5),
            (f"{label} gradient", distance(got_d, want_d), 1e-5),
            (f"{label} load", (load - torch.bincount(ids.flatten(), minlength=E)).abs().max().item(), 0.0),
            (f"{label} histogram", off, 1e-3),
        ]
    return rows


def required(scores: Tensor, cutoff: Tensor, bias: Tensor) -> Tensor:
    low, high = bias.min() - 1, bias.max() + 1
    bins = ((cutoff[:, None] - scores - low) / ((high - low) / BINS)).floor().long().clamp_(0, BINS - 1)
    flat = bins + torch.arange(len(bias), device="cuda") * BINS
    return torch.bincount(flat.flatten(), minlength=len(bias) * BINS).view(-1, BINS)


def median_us(call: Callable[[], Any], rep: int = 40) -> float:
    return float(triton.testing.do_bench(call, warmup=10, rep=rep, return_mode="median")) * 1e3


class Table:
    """Rows as they are measured, on the screen and in the file at once."""

    def __init__(self, path: Path, square: float):
        self.path, self.square, self.rows = path, square, []

    def measure(self, shape: str, part: str, call: Callable[[], Any], flops: float = 0.0, giga: float = 0.0) -> None:
        """flops: useful ones; giga: bytes that must move, 1e9."""
        row: dict[str, Any] = {"shape": shape, "part": part}
        try:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            row["us"] = median_us(call)
            row["GB peak"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            if flops:
                row["TFLOP/s"] = flops / row["us"] * 1e-6
                row["share"] = row["TFLOP/s"] / self.square
            if giga:
                row["TB/s"] = giga / row["us"] * 1e3
        except FAULTS as fault:
            row["fault"] = f"{type(fault).__name__}: {fault}"[:300]
        self.rows.append(row)
        print(" ", json.dumps(row), flush=True)
        self.path.write_text(json.dumps(self.rows, indent=1))


def parts(table: Table, s: Shape, forms: list[str]) -> None:
    """Every kernel alone, both ways where there are two."""
    x, w13, w2 = random(s.N, s.L), random(s.E, 2 * s.F, s.L, scale=s.L**-0.5), random(s.E, s.L, s.F, scale=s.F**-0.5)
    ids, weights = random_ids(s.N, s.E, s.A), torch.rand(s.N, s.A, device="cuda")
    logits, bias = random(s.N, s.routed, dtype=torch.float32), random(s.routed, scale=0.01, dtype=torch.float32)
    pairs, name, product = s.N * s.A, s.name, 2.0 * s.N * s.A * s.L * s.F
    routed = router.router(logits, bias, s.A, 1.0, True, BINS, False)
    m = table.measure
    for bins in (0, BINS):
        m(name, f"router, {bins} bins", lambda b=bins: router.router(logits, bias, s.A, 1.0, True, b, False),
          giga=logits.nbytes / 1e9)  # fmt: skip
    m(name, "router backward", lambda: router.router_backward(weights, routed[0], routed[2], s.routed, 1.0, True),
      giga=logits.nbytes / 1e9)  # fmt: skip
    m(name, "permute", lambda: permute.permute(ids, s.E))
    places = permute.permute(ids, s.E)
    rows, d_out = permute.gather(x, places, s.A, x.dtype), random(s.N, s.L, dtype=torch.float32)
    m(name, "gather x", lambda: permute.gather(x, places, s.A, x.dtype), giga=(pairs * s.L + x.numel()) * 2 / 1e9)
    m(name, "combine", lambda: permute.combine(rows, places, weights, s.N, s.A, torch.float32),
      giga=(pairs * s.L * 2 + x.numel() * 4) / 1e9)  # fmt: skip
    dy, p = permute.gather(d_out, places, s.A, x.dtype), products.plan(s.L, s.F)
    act = products.glu_product(rows, w13, places, CAPS, p.glu)
    d_h = torch.cat([act, act], 1)
    grouped_mm = partial(products.grouped, places=places)
    if "library" in forms:
        m(name, "gate/up: grouped_mm", lambda: grouped_mm(rows, w13.transpose(1, 2)), 2 * product)
        m(name, "activation alone", lambda: products.situ.glu(d_h[:, : s.F], d_h[:, s.F :], *CAPS))
        m(name, "down: grouped_mm", lambda: grouped_mm(act, w2.transpose(1, 2)), product)
        m(name, "dact: grouped_mm", lambda: grouped_mm(dy, w2), product)
        h, d = d_h.clone(), act.clone()  # overwritten
        m(name, "activation backward alone", lambda: products.glu_backward_rows(h, d, weights, places, CAPS),
          giga=pairs * s.F * 2 * 6 / 1e9)  # fmt: skip
        m(name, "dx: grouped_mm", lambda: grouped_mm(d_h, w13), 2 * product)
        m(name, "dw13: grouped_mm", lambda: grouped_mm(d_h.t(), rows), 2 * product)
        m(name, "dw2: grouped_mm", lambda: grouped_mm(dy.t(), act), product)
    if "fused" not in forms:
        return
    work: dict[str, tuple[Callable[..., Any], float]] = {
        "glu": (partial(products.glu_product, rows, w13, places, CAPS), 2 * product),
        "backward": (partial(products.glu_backward_product, rows, dy, w13, w2, weights, places, CAPS), 3 * product),
        "down": (partial(products.row_product, act, w2, places, True), product),
        "dx": (partial(products.row_product, d_h, w13, places, False), 2 * product),
        "dw13": (partial(products.weight_product, d_h, rows, s.E, places), 2 * product),
        "dw2": (partial(products.weight_product, dy, act, s.E, places), product),
    }
    for part, (call, flops) in work.items():
        for t in [getattr(p, part), *VARIANTS[name].get(part, [])]:
            m(
                name,
                f"{part} {t.columns}x{t.step} {t.warps}w {t.stages}s {t.parts}p {t.registers or 255}r",
                partial(call, t),
                flops,
            )


# Beside the plan's tiles.
VARIANTS: dict[str, dict[str, list[Tiles]]] = {
    "nano": {
        "glu": [Tiles(64, 64, 8, 2, parts=2), Tiles(64, 32, 8, 3, parts=2), Tiles(128, 64, 8, 3, parts=4)],
        "backward": [Tiles(64, 64, 8, 2, registers=128), Tiles(64, 64, 8, 3, parts=2), Tiles(32, 64, 8, 2)],
        "down": [Tiles(256, 64, 8, 3)],
        "dx": [Tiles(128, 64, 8, 3)],
        "dw13": [Tiles(128, 64, 8, 3)],
        "dw2": [Tiles(256, 64, 8, 3)],
    },
    "k3": {
        "glu": [Tiles(64, 64, 8, 4, parts=2), Tiles(128, 64, 8, 3, parts=4)],
        "backward": [Tiles(128, 32, 8, 4, parts=4)],
        "down": [Tiles(128, 64, 8, 4)],
    },
}


def peer_experts(x: Tensor, ids: Tensor, weights: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """Sort, two grouped products, indexing: what one writes first."""
    (N, A), E = ids.shape, len(w13)
    order = ids.flatten().argsort()
    offsets = torch.bincount(ids.flatten(), minlength=E).cumsum(0).int()
    h = torch._grouped_mm(x[order // A], w13.transpose(1, 2), offs=offsets)
    y = torch._grouped_mm(situ(*h.chunk(2, 1)), w2.transpose(1, 2), offs=offsets)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return (y[back].view(N, A, -1).float() * weights.unsqueeze(-1)).sum(1)


def experts_of(form: str) -> Callable[..., Tensor]:
    if form == "peer":
        return peer_experts
    return lambda x, ids, weights, w13, w2: function.experts(x, ids, weights, w13, w2, *CAPS, form)[0]


def whole(table: Table, s: Shape, forms: list[str]) -> None:
    """The experts alone, forward and with gradients."""
    x, w13, w2 = random(s.N, s.L), random(s.E, 2 * s.F, s.L, scale=s.L**-0.5), random(s.E, s.L, s.F, scale=s.F**-0.5)
    ids, weights = random_ids(s.N, s.E, s.A), torch.rand(s.N, s.A, device="cuda")
    leaves = [t.requires_grad_() for t in (x, weights, w13, w2)]
    d_out = random(s.N, s.L, dtype=torch.float32)
    for form in [*forms, "peer"]:
        call = experts_of(form)

        def forward(call: Callable[..., Tensor] = call) -> Tensor:
            with torch.no_grad():
                return call(x, ids, weights, w13, w2)

        def both(call: Callable[..., Tensor] = call) -> Any:
            return torch.autograd.grad(call(x, ids, weights, w13, w2), leaves, d_out)

        table.measure(s.name, f"experts forward, {form}", forward, s.expert_flops)
        table.measure(s.name, f"experts forward + backward, {form}", both, 3 * s.expert_flops)
        torch.cuda.empty_cache()


def layer(table: Table, s: Shape, forms: list[str]) -> None:
    """A whole layer. The experts of K3's shape are one device's share: a token's choices fall on the ones here."""
    x = random(s.N, s.D).requires_grad_()
    sizes = dict(router=(s.routed, s.D), down=(s.L, s.D), w13=(s.E, 2 * s.F, s.L), w2=(s.E, s.L, s.F), up=(s.D, s.L))
    sizes |= dict(s1=(s.S, s.D), s3=(s.S, s.D), s2=(s.D, s.S))
    w = {key: random(*size, scale=size[-1] ** -0.5).requires_grad_() for key, size in sizes.items()}
    gain, bias = torch.ones(s.L, device="cuda", dtype=x.dtype).requires_grad_(), torch.zeros(s.routed, device="cuda")
    d_y = random(s.N, s.D)

    def step(form: str) -> Any:
        experts = experts_of(form)
        logits = cast(Tensor, router.Logits.apply(x, w["router"]))
        if form == "peer":
            scores = torch.sigmoid(logits)
            ids = torch.topk(scores + bias, s.A, dim=1).indices
            weights = moe_reference.route_weights(scores, ids, 1.0, True)
        else:
            ids, weights, *_ = router.router(logits, bias, s.A, 1.0, True, BINS, False)
        u = experts(linear(x, w["down"]), ids % s.E, weights, w["w13"], w["w2"]).to(x.dtype)
        y = linear(rms_norm(u, gain, 1e-5), w["up"])
        y = y + linear(situ(linear(x, w["s1"]), linear(x, w["s3"])), w["s2"])
        return torch.autograd.grad(y, [x, gain, *w.values()], d_y)

    for form in [*forms, "peer"]:
        table.measure(s.name, f"layer forward + backward, {form}", partial(step, form), s.layer_flops)
        torch.cuda.empty_cache()


def gate(forms: list[str]) -> tuple[list[tuple[str, float, float]], list[str]]:
    """Comparisons, and the forms that are right."""
    rows, right = [], []
    for form in ["router", *forms]:
        try:
            found = gate_router() if form == "router" else gate_experts(form)
        except FAULTS as fault:
            print(f"  FAIL {form}: {type(fault).__name__}: {str(fault)[:600]}", flush=True)
            found = [(f"{form} ran", 1.0, 0.0)]
        for what, error, limit in found:
            if not error <= limit:
                print(f"  FAIL {what:<44} {error:.2e} (at most {limit:.0e})", flush=True)
        right += [form] if all(error <= limit for _, error, limit in found) else []
        worst = max((error for what, error, _ in found if "twice" not in what), default=0.0)
        print(f"  gate {form}: {len(found)} comparisons, largest error {worst:.1e}", flush=True)
        rows += found
    return rows, right


def square_speed() -> float:
    """TFLOP/s of an 8192^3 bf16 product."""
    a, b = random(8192, 8192), random(8192, 8192)
    return 2 * 8192**3 / median_us(lambda: a @ b, 100) * 1e-6


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = ("us", "TFLOP/s", "share", "TB/s", "GB peak")
    print(f"{'':<48}", *(f"{name:>9}" for name in columns))
    for row in rows:
        cells = (f"{row[name]:>9.2f}" if name in row else f"{'':>9}" for name in columns)
        print(f"{row['shape']:<5}{row['part']:<43}", *cells, row.get("fault", "")[:60])


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--form", choices=[*function.FORMS, "all"], default="all")
    options = parser.parse_args()
    torch.manual_seed(0)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    checks, right = gate([*function.FORMS] if options.form == "all" else [options.form])
    forms = [form for form in right if form != "router"]
    table = Table(options.out / "moe_rows.json", square_speed())
    print(f"  gate and matmul: {time.monotonic() - started:.0f} s", flush=True)
    for name in SHAPES if options.shape == "all" else [options.shape]:
        for section in (whole, layer, parts):
            try:
                section(table, SHAPES[name], forms)
            except FAULTS as fault:
                print(f"  FAIL {name} {section.__name__}: {type(fault).__name__}: {str(fault)[:400]}", flush=True)
            torch.cuda.empty_cache()
            print(f"  {name} {section.__name__}: {time.monotonic() - started:.0f} s", flush=True)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "gate": checks,
        "8192^3 TFLOP/s": table.square,
        "rows": table.rows,
    }
    (options.out / "moe.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, 8192^3 matmul {table.square:.0f} TFLOP/s, {report['date']}, {report['versions']}")
    print_table(table.rows)
    failures = [f"gate: {what} is off by {error:.2e}" for what, error, limit in checks if not error <= limit]
    if failures:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
