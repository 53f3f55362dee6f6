"""KDA with few heads: sequences cut into segments beside whole ones; works, gate, times, for `benchmarks/ops/kda.py`.

The gate compares cut with whole and both with the float64 blocked form, results and gradients. Times are medians of
`triton.testing.do_bench`, in milliseconds: `whole` and `auto` are the forward without and with the planner, `train w`
and `train a` forward and backward; `intra` is the first kernel, `serial` the state pass over whole sequences; then for
numbers of segments the kernels `segment` and `fold`, the state `pass` over segments, and the three together (`sum`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import triton
from torch import Tensor

from rille.ops.kda import Gate, PooledState, cutting, kda, segment_transition
from rille.ops.kda import forward as kernels
from rille.ops.kda import segment_launch as launch
from rille.ops.kda.segments import Costs, microseconds, plan_segments, segments_of
from rille.packing import Packing


@dataclass(frozen=True)
class Work:
    name: str
    H: int
    lengths: tuple[int, ...]
    logit: float | None = None  # of every gate, give or take; random without


WORKS = [
    Work("H16 T8192", 16, (8192,)),
    Work("H16 T32768", 16, (32768,)),
    Work("H12 T65536", 12, (65536,)),
    Work("H4 T65536", 4, (65536,)),
]
SEGMENTS = {  # numbers of them that are tried
    "H16 T8192": (3,), "H16 T32768": (2, 3, 4, 5, 7), "H12 T65536": (3, 4, 5, 7), "H4 T65536": (8, 12, 16, 32)
}  # fmt: skip
GATE_WORKS = [  # and the size of segments, in chunks
    (Work("packed", 4, (1, 15, 1000, 0, 64, 129), -7.0), 1),
    (Work("uneven", 4, (5000, 300, 70), -8.0), 7),
    (Work("shut gate", 4, (2000,), 12.0), 3),
    (Work("open gate", 4, (4096,), -8.0), 8),
    (Work("drift", 2, (65536,), -12.0), 32),
]


@dataclass
class Case:
    tensors: list[Tensor]
    gate: Gate
    packing: Packing
    state: Tensor | None = None

    def run(self, size: Any = None, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
        backend = "chunk" if dtype == torch.float64 else "triton"
        q, k, v, z, b = (x.to(dtype) for x in self.tensors)
        with cutting(size), torch.no_grad():
            o, final = kda(q, k, v, z, b, self.gate, self.packing, self.state, backend=backend)
        assert isinstance(final, Tensor)
        return o, final

    def gradients(self, size: Any = None, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
        """Of every input, for the sum of o and of the final states, each times numbers that repeat."""
        leaves = [x.detach().to(dtype).requires_grad_() for x in self.tensors]
        others = [x for x in (self.gate.A_log, self.gate.dt_bias, self.state) if x is not None]
        others = [x.detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_() for x in others]
        gate, state = Gate(others[0], others[1], self.gate.lower_bound), others[2] if len(others) > 2 else None
        with cutting(size):
            backend = "chunk" if dtype == torch.float64 else "triton"
            o, final = kda(*leaves, gate, self.packing, state, backend=backend)  # pyright: ignore[reportCallIssue]
            assert isinstance(final, Tensor)
            torch.manual_seed(1)
            weights = [torch.randn(x.shape, device=x.device) for x in (o, final)]
            return torch.autograd.grad(
                [o, final], [*leaves, *others], [weights[0].to(o.dtype), weights[1].to(final.dtype)]
            )


def draw(work: Work, stateful: bool = False, K: int = 128, V: int = 128) -> Case:
    torch.manual_seed(0)
    N, H = sum(work.lengths), work.H
    q, k, z = (torch.randn(N, H, K, device="cuda") for _ in range(3))
    v, b = torch.randn(N, H, V, device="cuda"), torch.randn(N, H, device="cuda")
    if work.logit is not None:
        z = work.logit + 0.3 * z
        k[..., ::2] = 0  # channels that nothing overwrites, so that states are felt in the next segments
    gate = Gate(torch.randn(H, device="cuda") * 0.3, torch.randn(H, K, device="cuda"), -5.0)
    state = torch.randn(len(work.lengths), H, V, K, device="cuda") if stateful else None
    return Case([x.bfloat16() for x in (q, k, v, z, b)], gate, Packing.of(work.lengths, device="cuda"), state)


def distance(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def gate_failures() -> list[str]:
    """Cut may be off the float64 result by 0.5 %, or a quarter more than whole; and the same twice."""
    failures = []
    for work, size in GATE_WORKS:
        case = draw(work, stateful=True)
        exact, whole, cut, again = case.run(None, torch.float64), case.run(), case.run(size), case.run(size)
        errors = {}
        for name, x, y, z, twice in zip(("o", "final"), whole, cut, exact, again, strict=True):
            errors |= {f"{name} whole": distance(x, z), f"{name} cut": distance(y, z)}
            if not errors[f"{name} cut"] <= max(5e-3, 1.25 * errors[f"{name} whole"]):
                failures.append(f"gate: {work.name}: {name} cut is off by {errors[f'{name} cut']:.2e}")
            if not torch.equal(y, twice):
                failures.append(f"gate: {work.name}: {name} cut differs from run to run")
        print(" ", f"{work.name:<10}", *(f"{name} {x:.2e}" for name, x in errors.items()), flush=True)
    return failures + gradient_failures() + transition_failures() + pool_failures()


NAMES = ("dq", "dk", "dv", "dz", "db", "dA_log", "ddt_bias", "dstate")


def gradient_failures() -> list[str]:
    """Gradients of cut sequences may be off by 1 %, or a quarter more than those of whole ones."""
    failures = []
    for work, size in GATE_WORKS[:4]:
        if work.name == "shut gate":  # what reaches its logits is smaller than the rounding of operands, cut or not
            continue
        case = draw(work, stateful=True)
        exact, whole, cut = case.gradients(None, torch.float64), case.gradients(), case.gradients(size)
        errors = {
            name: (distance(x, z), distance(y, z)) for name, x, y, z in zip(NAMES, whole, cut, exact, strict=True)
        }
        print(" ", f"{work.name:<10}", *(f"{name} {x:.1e} {y:.1e}" for name, (x, y) in errors.items()), flush=True)
        failures += [
            f"gate: {work.name}: {name} cut is off by {y:.2e}, whole by {x:.2e}"
            for name, (x, y) in errors.items()
            if not y <= max(1e-2, 1.25 * x)
        ]
    return failures


def transition_failures() -> list[str]:
    case = draw(Work("", 4, (1, 500, 0, 1300), -8.0))
    _, *tensors = case.tensors
    exact = segment_transition(*(x.double() for x in tensors), case.gate, case.packing, backend="chunk")
    errors = [distance(x, y) for x, y in zip(segment_transition(*tensors, case.gate, case.packing), exact, strict=True)]
    print("  transition", *(f"{x:.2e}" for x in errors), flush=True)
    return [f"gate: segment_transition is off by {x:.2e}" for x in errors if not x <= 5e-3]


def pool_failures() -> list[str]:
    """States of the pool and checkpoints, cut and whole."""
    case = draw(Work("", 4, (700, 0, 3000), -8.0), stateful=True)
    slots, chunks = torch.tensor([5, 1, 3], device="cuda"), case.packing.chunks(64).spans.shape[0]
    checkpoints = torch.full((chunks,), -1, dtype=torch.int64, device="cuda")
    checkpoints[[4, 30]] = torch.tensor([7, 0], device="cuda")
    pools = []
    for size in (5, None):
        pool = torch.zeros(9, 2, 4, 128, 128, device="cuda")[:, 0]
        pool[slots] = case.state
        with cutting(size):
            kda(*case.tensors, case.gate, case.packing, PooledState(pool, slots, checkpoints), backend="triton")
        pools.append(pool)
    error = distance(*pools)
    print("  pool", f"{error:.2e}", flush=True)
    return [f"gate: pools differ by {error:.2e}"] if not error <= 5e-3 else []


def compile_failures() -> list[str]:
    case = draw(Work("", 4, (700,)))

    def call(*tensors: Tensor) -> Tensor:
        return kda(*tensors, case.gate, case.packing, backend="triton")[0]  # pyright: ignore[reportCallIssue]

    with cutting(3):
        compiled: Any = torch.compile(call, backend="eager", fullgraph=True)
        same = torch.equal(call(*case.tensors), compiled(*case.tensors))
    return [] if same else ["gate: compiled and plain call differ"]


def median_ms(call: Callable[[], Any], rep: int = 20) -> float:
    return float(triton.testing.do_bench(call, warmup=5, rep=rep, return_mode="median"))


PASSES = {"ring": (64, 4, 3, True), "twin": (64, 4, 3, False), "ring128": (128, 8, 2, True)}


def measure(work: Work, counts: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """A row for each number of segments; what does not depend on it stands in each."""
    case = draw(work)
    q, k, v, z, b = case.tensors
    gate, packing = case.gate, case.packing
    chunks, H, SMs = packing.chunks(64), work.H, kernels.multiprocessors(q.device)
    made = kernels.intra(q, k, z, b, gate.A_log, gate.dt_bias, gate.lower_bound, chunks.spans)
    final = v.new_empty(len(work.lengths), H, 128, 128, dtype=torch.float32)
    plan = plan_segments(work.lengths, H, SMs)
    fixed: dict[str, Any] = {"work": work.name, "planned": len(plan[0]) if plan else 1}
    fixed["whole"], fixed["auto"] = median_ms(lambda: case.run(None), 40), median_ms(lambda: case.run("auto"), 40)
    fixed["train w"], fixed["train a"] = median_ms(lambda: case.gradients()), median_ms(lambda: case.gradients("auto"))
    arguments = (q, k, z, b, gate.A_log, gate.dt_bias, gate.lower_bound, chunks.spans)
    fixed["intra"] = median_ms(lambda: kernels.intra(*arguments))
    serial = (made, v, packing.starts, packing.longest_first, chunks.first, None, final)
    fixed["serial"] = median_ms(lambda: kernels.state_pass(*serial))
    rows = []
    for count in counts or SEGMENTS[work.name]:
        size = ceil(chunks.spans.shape[0] / count)
        row = fixed | {"n": count} | measure_cut(work, size, made, v, packing, final)
        row["forward"] = median_ms(lambda size=size: case.run(size), 40)
        rows.append(row | {"train": median_ms(lambda size=size: case.gradients(size), 60)})
        print(" ", *(f"{n} {x:.3f}" if isinstance(x, float) else f"{n} {x}" for n, x in rows[-1].items()), flush=True)
    return rows


def measure_cut(
    work: Work, size: int, made: kernels.Intra, v: Tensor, packing: Packing, final: Tensor
) -> dict[str, float]:
    H, SMs = work.H, kernels.multiprocessors(v.device)
    with cutting(size):
        segments = segments_of(packing, H, SMs, 128, 128)
    sizes = plan_segments(work.lengths, H, SMs, size=size)
    assert segments is not None and sizes is not None
    whole = (packing.starts, packing.longest_first, packing.chunks(64).first)
    row = {"model": microseconds(sizes, H, SMs, 128, 128, Costs()) / 1000}
    states, transitions = launch.border_states(made, v, segments, None)
    tables = (segments.jobs_J6, segments.products_P2, None, None, states)
    row["segment"] = median_ms(lambda: launch.run_segments(made, v, *tables))
    row["fold"] = median_ms(lambda: launch.fold(states, transitions, segments.chains_Q3))
    indices = (segments.starts_G1, segments.order_G, segments.first_G)
    row |= measure_passes(lambda: kernels.state_pass(made, v, *indices, states, states))
    row["sum"] = median_ms(lambda: kernels.recurrence(list(segments), made, v, *whole, None, final))
    return row


def measure_passes(call: Callable[[], Any]) -> dict[str, float]:
    """The state pass over segments as it is chosen, and in other forms."""
    times, chosen = {"pass": median_ms(call)}, kernels.value_block
    for name, split in PASSES.items():
        kernels.value_block = lambda *_, split=split: kernels.Split(*split)
        times[name] = median_ms(call)
    kernels.value_block = chosen
    return times
