"""Experts from packed MXFP4 weights on one GPU: first right, then fast, beside the packed bytes that must be read.

    PYTHONPATH=. python3 benchmarks/ops/mx_experts.py --out FOLDER [--part gate|time] [--quick]

The gate compares the kernels with float64, with their twins in plain Triton, with themselves bit for bit, and a NaN in
one token with the rest. Times are medians of CUDA graphs, microseconds, of one layer of K3 (latent 3584, experts of
3072, top 16 of 896): all four launches, and each alone. The floor reads codes and scales of the chosen experts once at
the speed of a device copy measured in the same run. Peers, on 112 experts and 8 tokens: all of them dequantised and
then multiplied, and the same product from bf16 weights (torch's grouped product). The table comes last;
FOLDER/mx_experts.json holds the numbers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import copy_speed, gate_then_times, graph_us, parser_of
from torch import Tensor

from rille.ops import moe
from rille.ops.moe import grouped, permute
from rille.ops.mx import dequantise_mxfp4, experts_launch, stream
from rille.ops.mx.experts import PackedExperts, packed_expert_glu
from rille.ops.situ import situ_glu

SITU = partial(situ_glu, cap_gate=4.0, cap_up=25.0)
CAPS = (4.0, 25.0, True)
L, F, E, A = 3584, 3072, 896, 16
TOKENS = (1, 2, 4, 8, 32)
DRAWS = 3  # of tokens that take turns, so that no weight is still in L2


def random_experts(E: int, L: int, F: int) -> PackedExperts:
    g = torch.Generator("cuda").manual_seed(E + L + F)

    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, device="cuda", dtype=torch.uint8)

    scales = draw(118, 122, E, 2 * F, L // 32), draw(118, 122, E, L, F // 32)
    return PackedExperts(draw(0, 256, E, 2 * F, L // 2), scales[0], draw(0, 256, E, L, F // 2), scales[1], SITU)


def draw_tokens(N: int, E: int, A: int, L: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator("cuda").manual_seed(1000 * seed + N)
    ids = torch.rand(N, E, generator=g, device="cuda").argsort(1)[:, :A].contiguous()
    x = torch.randn(N, L, generator=g, device="cuda").bfloat16()
    return x, ids, torch.rand(N, A, generator=g, device="cuda") / A


def packed_of(e: PackedExperts) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return e.w13, e.w13_scale, e.w2, e.w2_scale


def run(call: tuple[Tensor, Tensor, Tensor], e: PackedExperts, twin: bool = False) -> Tensor:
    return experts_launch.experts(*call, *packed_of(e), *CAPS, twin)


def exact(call: tuple[Tensor, Tensor, Tensor], e: PackedExperts) -> Tensor:
    w13, w2 = (dequantise_mxfp4(*pair, torch.float64) for pair in ((e.w13, e.w13_scale), (e.w2, e.w2_scale)))
    return grouped.expert_glu(call[0].double(), call[1], call[2].double(), w13, w2, SITU)


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def check_case(N: int, E: int, A: int, L: int, F: int) -> list[tuple[str, float, float]]:
    e, call = random_experts(E, L, F), draw_tokens(N, E, A, L)
    got, twin, label = run(call, e), run(call, e, True), f"N{N} E{E} A{A} L{L} F{F}"
    rows = [(f"{label} float64", distance(got, exact(call, e)), 5e-3), (f"{label} twin", distance(got, twin), 1e-3)]
    rows.append((f"{label} twice", float((got != run(call, e)).sum()), 0.0))
    sick = call[0].clone()
    sick[N // 2] = torch.nan
    there = torch.arange(N, device="cuda") != N // 2
    found = run((sick, *call[1:]), e)
    rows.append((f"{label} NaN", float((found[there] != got[there]).sum() + found[N // 2].isfinite().sum()), 0.0))
    return rows


def check_all() -> list[tuple[str, float, float]]:
    rows = check_case(1, 20, 16, L, F) + check_case(8, 6, 2, L, F) + check_case(7, 5, 3, 96, 160)
    rows += check_case(40, 3, 2, 256, 448)
    for what, error, limit in rows:
        print(f"  {'ok  ' if error <= limit else 'FAIL'} {what:<36} {error:.2e} (at most {limit:.0e})", flush=True)
    return rows


def measure(e: PackedExperts, N: int, speed: float) -> dict[str, Any]:
    E, tile = len(e.w13), experts_launch.tile_of(N)
    tiles = experts_launch.tiles_bound(N * A, E, tile)
    calls = [draw_tokens(N, E, A, L, seed) for seed in range(DRAWS)]
    chosen = sum(int(ids.unique().numel()) for _, ids, _ in calls) / DRAWS
    size = [chosen * sum(t[0].numel() for t in pair) for pair in (packed_of(e)[:2], packed_of(e)[2:])]
    row: dict[str, Any] = {"tokens": N, "experts": chosen, "MB": sum(size) * 1e-6, "floor": sum(size) / speed}
    row["ours"] = in_turns(lambda i: run(calls[i], e))
    row["share"] = row["floor"] / row["ours"]
    ready = [experts_launch.prepare(x, ids, tile, tiles) for x, ids, _ in calls]

    def first(i: int) -> Tensor:
        return experts_launch.first_product(ready[i][1], e.w13, e.w13_scale, ready[i][0], A, tile, CAPS, False)

    act = [first(i) for i in range(DRAWS)]

    def second(i: int) -> Tensor:
        return experts_launch.second_product(act[i], e.w2, e.w2_scale, ready[i][0], tile, False)

    y = [second(i) for i in range(DRAWS)]
    row["prepare"] = in_turns(lambda i: experts_launch.prepare(*calls[i][:2], tile, tiles))
    for name, product, bytes_read in (("1", first, size[0]), ("2", second, size[1])):
        row[f"product {name}"] = in_turns(product)
        row[f"share {name}"] = bytes_read / speed / row[f"product {name}"]
    row["combine"] = in_turns(lambda i: permute.combine(y[i], ready[i][0], calls[i][2], N, A, torch.float32))
    return row


def in_turns(call: Callable[[int], Any]) -> float:
    """Microseconds of one call, taken over all draws."""
    return graph_us(lambda: [call(i) for i in range(DRAWS)]) / DRAWS


def peers(N: int) -> dict[str, Any]:
    """Ours, dequantised and then multiplied, and multiplied from bf16 weights."""
    e = random_experts(112, L, F)
    call = draw_tokens(N, 112, A, L)
    wide = moe.ExpertOperands(*(
        stream.dequantise(codes, scale, torch.bfloat16, False)
        for codes, scale in ((e.w13, e.w13_scale), (e.w2, e.w2_scale))
    ), SITU)  # fmt: skip
    row: dict[str, Any] = {"tokens": N, "experts": int(call[1].unique().numel())}
    row["ours"] = graph_us(lambda: run(call, e))
    row["bf16 weights"] = graph_us(lambda: moe.expert_glu(*call, wide, backend="triton"))
    row["dequantised"] = graph_us(lambda: packed_expert_glu(*call, e, backend="dequantised"))
    return row


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(rows[0])
    print(*(f"{name:>12}" for name in columns))
    for row in rows:
        print(*(f"{c:>12.2f}" if isinstance(c, float) else f"{c:>12}" for c in row.values()))


def times(options: argparse.Namespace, report: dict[str, Any]) -> None:
    speed = copy_speed()
    report["copy TB/s"], report["rows"] = speed * 1e-6, []
    e = random_experts(E, L, F)
    for N in TOKENS:
        report["rows"].append(measure(e, N, speed))
        print(" ", report["rows"][-1], flush=True)
    del e
    torch.cuda.empty_cache()
    report["peers"] = peers(8)
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "mx_experts.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; microseconds, L {L} F {F}, top {A} of {E}")
    print_table(report["rows"])
    print_table([report["peers"]])


def main(arguments: list[str] | None = None) -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="as it is: this program is quick")
    options = parser.parse_args(arguments)
    gate_then_times(options.part, check_all, lambda report: times(options, report))


if __name__ == "__main__":
    main()
