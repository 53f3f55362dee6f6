"""KDA forward and backward: works, gates and times, for `benchmarks/ops/kda.py`.

The gate compares every gradient with the float64 blocked form; `check_beside_fla` ours and fla's with it on the same
bf16 inputs. Times are medians of `triton.testing.do_bench`, the L2 cache overwritten before each call; the inputs are
random. "extra GiB" is the peak above the inputs during one forward and backward call, gradients included.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import triton
from torch import Tensor

from rille.ops.kda import Gate, kda
from rille.ops.kda import backward as kernels
from rille.ops.kda.forward import forward, intra
from rille.packing import Packing

NAMES = ("o", "final", "dq", "dk", "dv", "dz", "db", "dA_log", "ddt_bias", "dstate")


@dataclass(frozen=True)
class Work:
    name: str
    H: int
    lengths: tuple[int, ...]
    K: int = 128
    V: int = 128
    batched: bool = False  # sequences of one length, which fla takes as a batch and not packed
    bound: float | None = -5.0


WORKS = [
    Work("H96 T8192", 96, (8192,)),
    Work("H16 B4 T4096", 16, (4096,) * 4, batched=True),
    Work("H96 8x1024", 96, (1024,) * 8),
    Work("H16 T8192", 16, (8192,)),
    Work("H16 T32768", 16, (32768,)),
    Work("H12 T65536", 12, (65536,)),
]
SOFTPLUS = Work("H96 T8192 softplus", 96, (8192,), bound=None)
GATE_WORKS = [
    Work("packed", 4, (1, 15, 16, 17, 63, 64, 65, 0, 1000)),
    Work("K64 V64", 4, (300, 200), 64, 64),
    Work("K128 V256", 4, (300, 200), 128, 256),
    Work("shut gate", 4, (1000,)),
    Work("mixed gate", 4, (1000,)),
    Work("open gate", 4, (4096,)),
    Work("large", 4, (1000,)),
    Work("softplus", 4, (1000, 1, 300), bound=None),
]
BESIDE_FLA = [  # where keys repeat, the rounding of T decides: the measure is what fla makes of the same inputs
    Work("random", 16, (1000,)),
    Work("packed", 16, (1, 15, 16, 17, 63, 64, 65, 1000)),
    Work("repeated keys", 16, (1000,)),
    Work("same key", 16, (1000,)),
    Work("shut gate", 16, (1000,)),
    Work("mixed gate", 16, (1000,)),
    Work("open gate", 16, (4096,)),
    Work("softplus", 16, (1000,), bound=None),
]
DRAWS = 48  # of each: a few tokens or channels hold most of a gradient's norm, and one draw says little


@dataclass
class Case:
    """Leaves q, k, v, z, b, A_log, dt_bias, state; the gradient of o; and that of the final states, for the gate."""

    leaves: list[Tensor]
    packing: Packing
    do: Tensor
    dfinal: Tensor | None
    batched: bool = False
    bound: float | None = -5.0

    @cached_property
    def cu_seqlens(self) -> Tensor | None:
        """The same tensor for each call: fla keeps what it derives from it."""
        return self.packing.starts.long() if self.packing.num_sequences > 1 and not self.batched else None

    def ours(self, backend: str = "triton", dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
        """o, final, and the gradients of the leaves."""
        leaves = self.leaves
        if dtype is not None:
            leaves = [x.detach().to(dtype).requires_grad_() for x in leaves]
        q, k, v, z, b, A_log, dt_bias, *state = leaves
        gate = Gate(A_log, dt_bias, self.bound)
        o, final = kda(q, k, v, z, b, gate, self.packing, state[0] if state else None, backend=backend)
        return self.differentiate(o, final, leaves)

    def fla(self) -> tuple[Tensor, ...]:
        from fla.ops.kda import chunk_kda

        sequences = self.packing.num_sequences if self.batched else 1
        q, k, v, z, b = (x.unflatten(0, (sequences, -1)) for x in self.leaves[:5])
        A_log, dt_bias, *state = self.leaves[5:]
        o, final = chunk_kda(
            q, k, v, z, b, initial_state=state[0] if state else None, output_final_state=self.dfinal is not None,
            use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            safe_gate=self.bound is not None, lower_bound=self.bound, A_log=A_log, dt_bias=dt_bias.flatten(),
            state_v_first=True, cu_seqlens=self.cu_seqlens,
        )  # fmt: skip
        return self.differentiate(o.flatten(0, 1), final, self.leaves)

    def differentiate(self, o: Tensor, final: Tensor | None, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        if self.dfinal is None or final is None:
            return torch.autograd.grad(o, leaves, self.do.to(o.dtype))
        gradients = torch.autograd.grad((o, final), leaves, (self.do.to(o.dtype), self.dfinal.to(final.dtype)))
        return o.detach(), final.detach(), *gradients


def draw(work: Work, stateful: bool = False, seed: int = 0) -> Case:
    torch.manual_seed(seed)
    states: list[Tensor] = []
    N, S, H, K, V = sum(work.lengths), len(work.lengths), work.H, work.K, work.V
    q, k, z = (torch.randn(N, H, K, device="cuda") for _ in range(3))
    v, b, do = (torch.randn(N, H, *size, device="cuda") for size in ((V,), (), (V,)))
    if work.name in ("repeated keys", "same key"):
        k = k[:1] + (0.05 if work.name == "repeated keys" else 0) * k
        z, b = torch.full_like(z, -12.0), torch.full_like(b, 9.0)
    z = {"shut gate": torch.full_like(z, 12.0), "open gate": torch.full_like(z, -8.0)}.get(work.name, z)
    if work.name in ("mixed gate", "large"):
        z = torch.where(torch.rand(N, 1, 1, device="cuda") < 0.5, 12.0, -12.0).expand_as(z).contiguous()
        do = do * (1e6 if work.name == "large" else 1)
    parameters = [torch.randn(H, device="cuda") * 0.3, torch.randn(H, K, device="cuda")]
    if stateful:
        states.append(torch.randn(S, H, V, K, device="cuda"))
    leaves = [*(x.bfloat16() for x in (q, k, v, z, b)), *parameters, *states]
    dfinal = torch.randn(S, H, V, K, device="cuda") if stateful else None
    packing = Packing.of(work.lengths, device="cuda")
    return Case([x.requires_grad_() for x in leaves], packing, do.bfloat16(), dfinal, work.batched, work.bound)


def distance(got: Tensor, expected: Tensor, size: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / size.double().norm().clamp_min(1e-30)).item()


def sizes_of(exact: tuple[Tensor, ...], case: Case) -> list[Tensor]:
    """What each gradient's error is measured against: the gradient; for the two that sum over tokens, the sum of the
    terms' sizes, since terms that cancel leave an error of the terms' own size."""
    sizes, dz_NHK = list(exact), exact[5]
    x_NHK = case.leaves[3].detach().double() + case.leaves[6].detach().double()
    if case.bound is None:
        x_NHK = torch.nn.functional.softplus(x_NHK) / x_NHK.sigmoid()
    sizes[7], sizes[8] = (dz_NHK * x_NHK).abs().sum((0, 2)), dz_NHK.abs().sum(0)
    return sizes


def check_gradients(works: list[Work]) -> tuple[list[dict[str, Any]], list[str]]:
    """Errors against float64, at most 2 %."""
    started, rows, failures = time.time(), [], []
    for work in works:
        case = draw(work, stateful=True)
        exact, ours = case.ours("chunk", torch.float64), case.ours()
        sizes = sizes_of(exact, case)
        row = {name: distance(x, y, z) for name, x, y, z in zip(NAMES, ours, exact, sizes, strict=True)}
        rows.append({"case": work.name, **row})
        failures += [
            f"gate: {work.name}: {name} is off by {x:.2e}, at most 2e-2" for name, x in row.items() if not x <= 2e-2
        ]
        print(f"  {work.name:<14}", *(f"{name} {x:.1e}" for name, x in row.items()), flush=True)
        again = case.ours()
        if not all(torch.equal(x, y) for x, y in zip(ours, again, strict=True)):
            failures.append(f"gate: {work.name}: two runs differ")
        print(f"  {time.time() - started:.0f} s", flush=True)
    return rows, failures


def check_beside_fla(work: Work, with_fla: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Errors of ours and of fla against float64, each result measured against itself, root mean square over the draws:
    ours at most one rounding to bf16 (2^-8), or a tenth more than fla's. Without fla nothing is judged. Beside that,
    and not judged: the draws one by one (`paired`), since a single one may hold most of a sum of squares."""
    rows, failures, started = [], [], time.time()
    errors = [errors_of_draw(work, seed, with_fla) for seed in range(DRAWS)]
    for name, *draws in zip(NAMES, *errors, strict=True):
        row: dict[str, Any] = {"case": work.name, "gradient": name}
        for who in draws[0]:
            row[who] = (sum(draw[who] ** 2 for draw in draws) / DRAWS) ** 0.5
            row[f"{who} draws"] = [round(draw[who], 6) for draw in draws]
        if with_fla:
            row |= paired([draw["ours"] for draw in draws], [draw["fla"] for draw in draws])
        rows.append(row)
        if with_fla and not row["ours"] <= max(2**-8, 1.1 * row["fla"]):
            failures.append(f"beside fla: {work.name}: {name} is off by {row['ours']:.2e}, fla {row['fla']:.2e}")
    worse = [row["gradient"] for row in rows if with_fla and row["ours"] > row["fla"]]
    surely = [row["gradient"] for row in rows if with_fla and row["ratio from"] > 1]
    print(work.name, *map(pair, rows), "| above fla:", *(worse or ["none"]), end=" ")
    print("| by the ratio of draws, with its interval:", *(surely or ["none"]), flush=True)
    print(f"{time.time() - started:.0f} s", flush=True)
    return rows, failures


def errors_of_draw(work: Work, seed: int, with_fla: bool) -> list[dict[str, float]]:
    """For each result the error of ours, and of fla."""
    case = draw(work, stateful=True, seed=seed)
    exact = case.ours("chunk", torch.float64)
    results = {"ours": case.ours()} | ({"fla": case.fla()} if with_fla else {})
    return [{who: distance(got[i], exact[i], exact[i]) for who, got in results.items()} for i in range(len(NAMES))]


def paired(ours: list[float], fla: list[float]) -> dict[str, float]:
    """Both made from the same inputs draw by draw: the median of ours / fla, and the geometric mean with the interval
    in which it lies with 95 %, 1.96 standard errors of the logarithms either way. An error that is measured against a
    gradient of nearly zero is large in both, and its ratio is like any other."""
    logs = (torch.tensor(ours, dtype=torch.float64) / torch.tensor(fla, dtype=torch.float64)).log()
    mean, half = logs.mean(), 1.96 * logs.std() / len(ours) ** 0.5
    found = {"median ratio": logs.quantile(0.5), "mean ratio": mean, "ratio from": mean - half, "ratio to": mean + half}
    return {name: x.exp().item() for name, x in found.items()}


def pair(row: dict[str, Any]) -> str:
    text = f"{row['gradient']} {row['ours']:.1e}"
    if "fla" in row:
        text += f"|{row['fla']:.1e} {row['mean ratio']:.2f} ({row['ratio from']:.2f} to {row['ratio to']:.2f})"
    return text


def median_ms(call: Callable[[], Any], rep: int = 60) -> float:
    return float(triton.testing.do_bench(call, warmup=15, rep=rep, return_mode="median"))


def extra_gib(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def inputs_of(case: Case) -> kernels.Inputs:
    chunks = case.packing.chunks(64)
    indices = (chunks.spans, case.packing.starts, case.packing.longest_first, chunks.first)
    leaves = [x.detach() for x in case.leaves]
    return kernels.Inputs._make([*leaves[:7], case.bound, *indices, None])


def measure_stages(case: Case, variants: bool) -> dict[str, float]:
    inputs = inputs_of(case)
    gate = Gate(inputs.A_log, inputs.dt_bias_HK, case.bound)
    arguments = (*inputs[:2], *inputs[3:8], inputs.spans_M2)
    with torch.no_grad():
        made = intra(*arguments, digits=2)  # as where gradients are wanted
        times = {"forward": median_ms(lambda: forward(*inputs[:5], gate, case.packing))}
        times["first"] = median_ms(lambda: intra(*arguments))
        times["first 2"] = median_ms(lambda: intra(*arguments, digits=2))
        prepared = kernels.prepare(inputs, digits=2)
        u, states = kernels.states(inputs, prepared, made.t_DMHCC)
        back = (made.t_DMHCC, made.a_MHCC, case.do, None)
        dv, dstates, _ = kernels.reverse(inputs, prepared, *back)
        last = (case.do, dv, None, u, states, dstates, prepared.totals_MH4K, prepared.norms_MH4C)
        times["prepare"] = median_ms(lambda: kernels.prepare(inputs, digits=2))
        times["states"] = median_ms(lambda: kernels.states(inputs, prepared, made.t_DMHCC))
        times["reverse"] = median_ms(lambda: kernels.reverse(inputs, prepared, *back))
        times["local"] = median_ms(lambda: kernels.local(inputs, *last))
        if variants:
            times |= measure_blocks("states", lambda: kernels.states(inputs, prepared, made.t_DMHCC))
            times |= measure_blocks("reverse", lambda: kernels.reverse(inputs, prepared, *back))
    return times


BLOCKS = {"64": (64, 4), "128": (128, 8)}  # value channels a program, warps


def measure_blocks(stage: str, call: Callable[[], Any]) -> dict[str, float]:
    """A pass over the chunks for each way to split V."""
    times: dict[str, float] = {}
    chosen = kernels.value_block
    for name, block in BLOCKS.items():
        kernels.value_block = lambda *_, block=block: block
        try:
            times[f"{stage[:3]} {name}"] = median_ms(call, rep=30)
        except triton.OutOfResources:
            times[f"{stage[:3]} {name}"] = float("nan")
    kernels.value_block = chosen
    return times


def floor_bytes(work: Work) -> int:
    """q k v z do in, o dq dk dv dz out, each once, and q k v z once more for the second half of the work."""
    return 2 * work.H * sum(work.lengths) * ((2 * 3 + 3) * work.K + (2 + 3) * work.V)
