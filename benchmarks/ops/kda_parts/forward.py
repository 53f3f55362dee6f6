"""KDA forward: works, gate and times, for `benchmarks/ops/kda.py`.

The gate compares with the float64 recurrence, and the Gluon kernels with their Triton twins. Times are medians of
`triton.testing.do_bench`, the L2 cache overwritten before each call; the inputs are random. `graph` is the same call
replayed from a CUDA graph, so without the host's part, and `host us` what a call costs the host. A byte floor counts
q k v z in and o out once, at the speed of a device copy measured in the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
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
SOFTPLUS = Work("H96 T8192 softplus", 96, (8192,), bound=None)
GATE_WORKS = [
    Work("packed", 4, (1, 15, 16, 17, 63, 64, 65, 0, 1000)),
    Work("K64 V64", 4, (300, 200), 64, 64),
    Work("softplus", 4, (300, 200), bound=None),
    Work("repeated keys", 4, (1000,)),
]
SPLITS = {  # of V in the state pass
    "r128x2": kernels.Split(128, 8, 2, ring=True),
    "r64x3": kernels.Split(64, 4, 3, ring=True),
    "t64x3": kernels.Split(64, 4, 3, ring=False),
}


@dataclass
class Case:
    """Inputs of one call, as `kda` takes them."""

    tensors: list[Tensor]
    gate: Gate
    packing: Packing
    state: Tensor | None = None

    @cached_property
    def cu_seqlens(self) -> Tensor | None:
        """The same tensor for each call: fla keeps what it derives from it."""
        return self.packing.starts.long() if self.packing.num_sequences > 1 else None

    def ours(self, backend: str = "triton") -> tuple[Tensor, Tensor | None]:
        return kda(*self.tensors, self.gate, self.packing, self.state, backend=backend)

    def exact(self) -> tuple[Tensor, Tensor | None]:
        doubles = [x.double() for x in self.tensors]
        return kda(*doubles, self.gate, self.packing, self.state, backend="reference")

    def fla(self) -> tuple[Tensor, Tensor]:
        from fla.ops.kda import chunk_kda

        q, k, v, z, b = (x[None] for x in self.tensors)
        H = q.shape[2]
        bounded = self.gate.lower_bound is not None
        o, final = chunk_kda(
            q, k, v, z, b, initial_state=self.state, output_final_state=True, use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True, safe_gate=bounded,
            lower_bound=self.gate.lower_bound, A_log=self.gate.A_log[:H], dt_bias=self.gate.dt_bias.flatten(),
            state_v_first=True, cu_seqlens=self.cu_seqlens,
        )  # fmt: skip
        return o[0], final


def draw(work: Work, stateful: bool = False) -> Case:
    torch.manual_seed(0)
    N, H, K, V = sum(work.lengths), work.H, work.K, work.V
    q, k, z = (torch.randn(N, H, K, device="cuda") for _ in range(3))
    v, b = torch.randn(N, H, V, device="cuda"), torch.randn(N, H, device="cuda")
    if work.name == "repeated keys":
        k, z, b = k[:1] + 0.05 * k, torch.full_like(z, -12.0), torch.full_like(b, 9.0)
    gate = Gate(torch.randn(H, device="cuda") * 0.3, torch.randn(H, K, device="cuda"), work.bound)
    packing = Packing.of(work.lengths, device="cuda")
    state = torch.randn(len(work.lengths), H, V, K, device="cuda") if stateful else None
    return Case([x.bfloat16() for x in (q, k, v, z, b)], gate, packing, state)


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)).item()


def check_forward() -> list[dict[str, Any]]:
    """Errors against float64; for one batch each split of V and both forms of the first kernel."""
    rows = []
    for work in GATE_WORKS:
        case = draw(work, stateful=True)
        exact, calls = case.exact(), {"": case.ours()}
        if work is GATE_WORKS[0]:
            calls |= dict(forced_calls(case))
        for name, result in calls.items():
            errors = {n: distance(x, y) for n, x, y in zip(("o", "final"), result, exact, strict=True)}
            rows.append({"case": f"{work.name} {name}", **errors})
            print(" ", *(f"{k} {v:.2e}" if isinstance(v, float) else f"{v:<20}" for k, v in rows[-1].items()))
    return rows


def forced_calls(case: Case) -> Iterator[tuple[str, tuple[Tensor, Tensor | None]]]:
    chosen = kernels.value_block
    for name, split in SPLITS.items():
        kernels.value_block = lambda *_, split=split: split
        yield name, case.ours()
    kernels.value_block, kernels.TILED = chosen, False
    yield "first kernel in Triton", case.ours()
    kernels.TILED = True


def gate_failures(rows: list[dict[str, Any]], limit: float = 1e-2) -> list[str]:
    wrong = [(row["case"], n, row[n]) for row in rows for n in ("o", "final") if not row[n] <= limit]
    return [f"gate: {case}: {n} is off by {error:.2e}, at most {limit:.0e}" for case, n, error in wrong]


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


def gflop(work: Any, backward: bool = False) -> float:
    """What products execute, K = V = 128, a chunk and head: 13.7 million operations forward (without segments), 28 in
    the backward pass (6 and 8 in the two passes over chunks, 14 in the last kernel)."""
    return (41.3e-3 if backward else 13.7e-3) * sum(-(-n // 64) for n in work.lengths) * work.H


def replayed_ms(call: Callable[[], Any]) -> float:
    """Of the same launches out of a CUDA graph: what the device alone takes."""
    call()  # compiled and loaded before anything is captured
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return median_ms(graph.replay)


def host_us(call: Callable[[], Any], calls: int = 40) -> float:
    """Of one call among many that nothing waits for; the quickest of five rounds."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return min(rounds) / calls * 1e6


def compact(row: dict[str, Any]) -> str:
    return " ".join(f"{name} {value:.3g}" if isinstance(value, float) else str(value) for name, value in row.items())
