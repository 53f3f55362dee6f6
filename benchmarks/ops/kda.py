"""KDA on one GPU: first right, then fast, beside fla and beside the bytes that must move.

    PYTHONPATH=. python3 benchmarks/ops/kda.py --out FOLDER [--only H96] [--no-fla]

The gate compares with the float64 recurrence (and fla with it, on the same bf16 inputs); where an error is too large,
the run ends with 1. Times are medians of `triton.testing.do_bench`, the L2 cache overwritten before each call; the
inputs are random. A byte floor counts q k v z in and o out once, at the speed of a device copy measured in the same
run. The table comes last; FOLDER/kda.json holds the same numbers.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from rille.ops.kda import Gate, kda
from rille.ops.kda import forward as kernels
from rille.packing import Packing

MIXED = (1300, 547, 2048, 963, 271, 3063)


@dataclass(frozen=True)
class Work:
    name: str
    H: int
    lengths: tuple[int, ...]
    K: int = 128
    V: int = 128
    bound: float | None = -5.0


WORKS = [
    Work("H96 T8192", 96, (8192,)),
    Work("H96 8x1024", 96, (1024,) * 8),
    Work("H96 mixed", 96, MIXED),
    Work("H64 T8192", 64, (8192,)),
    Work("H16 4x4096", 16, (4096,) * 4),
    Work("H16 T8192", 16, (8192,)),
    Work("H16 T32768", 16, (32768,)),
    Work("H12 T65536", 12, (65536,)),
]
GATE_WORKS = [
    Work("packed", 4, (1, 15, 16, 17, 63, 64, 65, 0, 1000)),
    Work("K64 V64", 4, (300, 200), 64, 64),
    Work("K128 V256", 4, (300, 200), 128, 256),
    Work("softplus", 4, (300, 200), bound=None),
    Work("repeated keys", 4, (1000,)),
    Work("shut gate", 4, (1000,)),
    Work("open gate", 4, (4096,)),
    Work("drift", 1, (65536,)),
]
CONSTANT_GATES = {"shut gate": 12.0, "open gate": -8.0, "drift": -12.0}


@dataclass
class Case:
    """Inputs of one call, as `kda` takes them."""

    tensors: list[Tensor]
    gate: Gate
    packing: Packing
    state: Tensor | None = None

    def ours(self, backend: str = "triton") -> tuple[Tensor, Tensor | None]:
        return kda(*self.tensors, self.gate, self.packing, self.state, backend=backend)

    def exact(self) -> tuple[Tensor, Tensor | None]:
        doubles = [x.double() for x in self.tensors]
        backend = "reference" if self.packing.longest <= 1000 else "chunk"  # in float64 they differ by 1e-12
        return kda(*doubles, self.gate, self.packing, self.state, backend=backend)

    def fla(self) -> tuple[Tensor, Tensor]:
        from fla.ops.kda import chunk_kda

        q, k, v, z, b = (x[None] for x in self.tensors)
        H = q.shape[2]
        bounded = self.gate.lower_bound is not None
        o, final = chunk_kda(
            q, k, v, z, b, initial_state=self.state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=bounded,
            lower_bound=self.gate.lower_bound, A_log=self.gate.A_log[:H], dt_bias=self.gate.dt_bias.flatten(),
            state_v_first=True, cu_seqlens=self.packing.starts.long() if self.packing.num_sequences > 1 else None,
        )  # fmt: skip
        return o[0], final


def draw(work: Work, stateful: bool = False) -> Case:
    torch.manual_seed(0)
    N, H, K, V = sum(work.lengths), work.H, work.K, work.V
    q, k, z = (torch.randn(N, H, K, device="cuda") for _ in range(3))
    v, b = torch.randn(N, H, V, device="cuda"), torch.randn(N, H, device="cuda")
    if work.name == "repeated keys":
        k, z, b = k[:1] + 0.05 * k, torch.full_like(z, -12.0), torch.full_like(b, 9.0)
    if work.name in CONSTANT_GATES:
        z = torch.full_like(z, CONSTANT_GATES[work.name])
    gate = Gate(torch.randn(H, device="cuda") * 0.3, torch.randn(H, K, device="cuda"), work.bound)
    packing = Packing.of(work.lengths, device="cuda")
    state = torch.randn(len(work.lengths), H, V, K, device="cuda") if stateful else None
    return Case([x.bfloat16() for x in (q, k, v, z, b)], gate, packing, state)


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


def check_forward(with_fla: bool) -> list[dict[str, Any]]:
    """Errors against float64. Ours must be below 0.5 % or 1.2 times fla's; without fla below 1 %."""
    rows = []
    for work in GATE_WORKS:
        case = draw(work, stateful=True)
        exact, ours = case.exact(), case.ours()
        row: dict[str, Any] = {"case": work.name}
        row |= {f"ours {n}": distance(x, y) for n, x, y in zip(("o", "final"), ours, exact, strict=True)}
        if with_fla:
            row |= {f"fla {n}": distance(x, y) for n, x, y in zip(("o", "final"), case.fla(), exact, strict=True)}
        print(" ", *(f"{k} {v:.2e}" if isinstance(v, float) else f"{v:<14}" for k, v in row.items()), flush=True)
        rows.append(row)
    return rows


def gate_failures(rows: list[dict[str, Any]]) -> list[str]:
    failures = []
    for row in rows:
        for n in ("o", "final"):
            got, limit = row[f"ours {n}"], max(5e-3, 1.2 * row[f"fla {n}"]) if f"fla {n}" in row else 1e-2
            if not got <= limit:
                failures.append(f"gate: {row['case']}: {n} is off by {got:.2e}, at most {limit:.2e}")
    return failures


def median_ms(call: Callable[[], Any], rep: int = 60) -> float:
    return float(triton.testing.do_bench(call, warmup=15, rep=rep, return_mode="median"))


def copy_speed() -> float:
    """Bytes read and written a millisecond by a device copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / median_ms(lambda: target.copy_(source))


def floor_bytes(work: Work) -> int:
    N, S = sum(work.lengths), len(work.lengths)
    return work.H * (2 * N * (3 * work.K + 2 * work.V) + 4 * S * work.K * work.V)


def measure_forward(work: Work, speed: float, with_fla: bool) -> dict[str, Any]:
    case = draw(work)
    q, k, v, z, b = case.tensors
    gate, chunks, starts = case.gate, case.packing.chunks(64), case.packing.starts
    row: dict[str, Any] = {"work": work.name, "floor": floor_bytes(work) / speed}
    with torch.no_grad():
        row["ours"] = median_ms(case.ours)
        first_arguments = (q, k, z, b, gate.A_log, gate.dt_bias, gate.lower_bound, chunks.spans)
        made = kernels.intra(*first_arguments)
        row["intra"] = median_ms(lambda: kernels.intra(*first_arguments))
        row["unsolved"] = median_ms(lambda: kernels.intra(*first_arguments, made.t_MHCC))
        final = v.new_empty(len(work.lengths), work.H, work.V, work.K, dtype=torch.float32)
        pass_arguments = (made, v, starts, case.packing.longest_first, chunks.first, None, final)
        row["pass"] = median_ms(lambda: kernels.state_pass(*pass_arguments))
        row |= measure_intra(lambda: kernels.intra(*first_arguments))
        row |= measure_blocks(lambda: kernels.state_pass(*pass_arguments))
        row["TFLOP/s"] = 13.7e6 * chunks.spans.shape[0] * work.H / row["ours"] * 1e-9
        if with_fla:
            row["fla"] = median_ms(case.fla, rep=100)
            row["ratio"] = row["fla"] / row["ours"]
            row["differ"] = distance(case.ours()[0], case.fla()[0])
    return row


BLOCKS = {  # Gluon or not, value channels a program, warps, stages
    "r128x2": (True, 128, 8, 2),
    "r64x3": (True, 64, 4, 3),
    "t128x2": (False, 128, 8, 2),
    "t64x3": (False, 64, 4, 3),
}


def measure_blocks(call: Callable[[], Any]) -> dict[str, float]:
    """The state pass for each way to split V."""
    chosen, times = (kernels.value_block, kernels.RING), {}
    for name, (ring, *block) in BLOCKS.items():
        kernels.RING, kernels.value_block = ring, lambda *_, block=block: block
        times[name] = median_ms(call, rep=30)
    kernels.value_block, kernels.RING = chosen
    return times


def twin_failures() -> list[str]:
    """The Gluon state pass must agree with its Triton twin, for both splits of V."""
    failures, chosen = [], (kernels.value_block, kernels.RING)
    for work in GATE_WORKS:
        case, outputs = draw(work, stateful=True), {}
        for name, (ring, *block) in BLOCKS.items():
            kernels.RING, kernels.value_block = ring, lambda *_, block=block: block
            if work.V % block[0] == 0:
                outputs[name] = case.ours()[0]
        differ = {name: distance(o, outputs["t64x3"]) for name, o in outputs.items()}
        print("  twins", work.name, *(f"{name} {x:.1e}" for name, x in differ.items()), flush=True)
        failures += [
            f"gate: {work.name}: {name} is off its twin by {x:.1e}" for name, x in differ.items() if not x <= 2e-3
        ]
    kernels.value_block, kernels.RING = chosen
    return failures


INTRA = {"i4": {"num_warps": 4}, "i4r168": {"num_warps": 4, "maxnreg": 168}, "i8": {"num_warps": 8}}


def measure_intra(call: Callable[[], Any]) -> dict[str, float]:
    """The first kernel for some numbers of warps and of registers a thread."""
    chosen, times = kernels.INTRA_OPTIONS, {}
    for name, options in INTRA.items():
        kernels.INTRA_OPTIONS = options
        times[name] = median_ms(call, rep=30)
    kernels.INTRA_OPTIONS = chosen
    return times


def measure_all(only: str, speed: float, with_fla: bool, seconds: float) -> list[dict[str, Any]]:
    started, rows = time.time(), []
    for work in WORKS:
        if only in work.name:
            rows.append(measure_forward(work, speed, with_fla and time.time() - started < seconds))
            print(f"  {time.time() - started:5.0f} s", rows[-1], flush=True)
            torch.cuda.empty_cache()
    return rows


def print_table(rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    print(*(f"{name:>9}" if i else f"{name:<12}" for i, name in enumerate(columns)))
    for row in rows:
        cells = (row.get(name, "") for name in columns)
        print(*(f"{cell:>9.3f}" if isinstance(cell, float) else f"{cell:<12}" for cell in cells))


def fla_version() -> str:
    try:
        return version("fla-core")
    except PackageNotFoundError:
        return "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument(
        "--part", default="forward", choices=["forward", "once"], help="once: two calls, for a profiler"
    )
    parser.add_argument("--only", default="", help="only works with this word in their name")
    parser.add_argument("--no-fla", action="store_true")
    parser.add_argument("--seconds", type=float, default=170, help="after this time fla is no longer measured")
    options = parser.parse_args()
    with_fla = not options.no_fla and find_spec("fla") is not None
    if options.part == "once":
        case = draw(next(work for work in WORKS if options.only in work.name))
        for _ in range(2):
            case.ours()
        return
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "date": time.strftime("%Y-%m-%d %H:%M"),
        "versions": {name: version(name) for name in ("torch", "triton")},
        "fla": fla_version() if with_fla else None,
        "works": [asdict(work) for work in WORKS],
    }
    print(report["device"], report["versions"], "fla", report["fla"], flush=True)
    report["gate"] = check_forward(with_fla)
    twins = twin_failures()
    report["copy TB/s"] = copy_speed() * 1e-9
    report["forward"] = measure_all(options.only, report["copy TB/s"] * 1e9, with_fla, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kda.json").write_text(json.dumps(report, indent=1))
    print(f"\n{report['device']}, copy {report['copy TB/s']:.2f} TB/s; milliseconds")
    print_table(report["forward"])
    if failures := gate_failures(report["gate"]) + twins:
        raise SystemExit("\n".join(failures))


if __name__ == "__main__":
    main()
