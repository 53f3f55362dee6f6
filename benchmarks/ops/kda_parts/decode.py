"""KDA decode and verify: works, gate and times, for `benchmarks/ops/kda.py`.

The gate compares the Gluon kernels with the slow twin (fp32 inputs, then bf16), verify with single steps bit for bit,
and a CUDA graph with eager calls. Times are of CUDA graphs that hold one launch for each of several layers with pools
of their own, more than the L2 cache holds, so that every state comes from memory as in a model; a time is a graph's
median over its launches. The floor counts states, tails and inputs in and out once, weights once, at the speed of
a device copy measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rille.ops.kda import DecodeLayer, Pools, Projected, Remembered, decode_launch
from rille.ops.kda.arguments import Gate
from rille.ops.kda.decode import kda_commit, kda_decode, kda_verify
from rille.ops.kda.decode_launch import Spread

HEADS, CACHE = 96, 256 * 2**20
DECODE_SPREADS = [Spread(8, 4, 128), Spread(8, 8), Spread(4, 4), Spread(4, 8)]


def make_layer(H: int, K: int, V: int, W: int = 4, bound: float | None = -5.0) -> DecodeLayer:
    gate = Gate(torch.randn(H, device="cuda") * 0.2, torch.randn(H, K, device="cuda"), bound)
    conv = torch.randn(2 * H * K + H * V, W, device="cuda") * 0.5
    return DecodeLayer(conv, gate, torch.rand(V, device="cuda") + 0.5, 1e-5)


def make_inputs(layer: DecodeLayer, *lead: int, dtype: torch.dtype) -> Projected:
    (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    widths = (layer.conv_weight.shape[0], H * K, H, H * V)
    return Projected(*(torch.randn(*lead, n, device="cuda").to(dtype) for n in widths))


def make_pools(layer: DecodeLayer, slots: int, dtype: torch.dtype, tokens: int = 0) -> Pools:
    (H, K), V, (C, W) = layer.gate.dt_bias.shape, layer.norm_weight.shape[0], layer.conv_weight.shape
    states = torch.randn(slots, H, V, K, device="cuda") * 0.3
    tails = torch.randn(slots, W - 1, C, device="cuda").to(dtype)
    past = Remembered.new(slots, tokens, layer, dtype) if tokens else None
    if past is not None:
        for x in (past.qkv, past.z, past.u):
            x.normal_()
    return Pools(states, tails, past)


def copy_of(pools: Pools) -> Pools:
    past = pools.past and Remembered(pools.past.qkv.clone(), pools.past.z.clone(), pools.past.u.clone())
    return Pools(pools.states.clone(), pools.tails.clone(), past)


def at(inputs: Projected, t: int) -> Projected:
    return Projected(inputs.qkv[:, t], inputs.z[:, t], inputs.b[:, t], inputs.gate[:, t])


def distance(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).norm() / expected.double().norm()).item()


GATE_CASES = {
    "K128 V128": dict(H=3, K=128, V=128),
    "K64 V64": dict(H=3, K=64, V=64),
    "K128 V256": dict(H=3, K=128, V=256),
    "softplus": dict(H=3, K=128, V=128, bound=None),
    "W2": dict(H=3, K=128, V=128, W=2),
    "W1": dict(H=3, K=128, V=128, W=1),
}


def check_case(name: str, sizes: dict[str, Any], dtype: torch.dtype, backend: str) -> list[tuple[str, float, float]]:
    """(what, error, limit) of decode, verify and commit against the slow twin."""
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    layer, B, T = make_layer(**sizes), 5, 8
    ours = make_pools(layer, 9, dtype, T)
    exact, stepped = copy_of(ours), copy_of(ours)
    slots = torch.tensor([7, 0, -1, 3, 8], device="cuda")
    rows, counts = [], [[8, 0, 3, 1, 5], [2, 8, 1, 0, 8]]
    inputs = make_inputs(layer, B, dtype=dtype)
    y, want = (kda_decode(inputs, layer, p, slots, backend=n) for p, n in ((ours, backend), (exact, "reference")))
    kda_decode(inputs, layer, stepped, slots, backend=backend)
    rows.append((f"{name} decode y", distance(y, want), limit))
    rows.append((f"{name} decode S", distance(ours.states, exact.states), limit))
    accepted = torch.zeros(B, dtype=torch.int32, device="cuda")
    apart = 0.0
    for count in counts:
        drafts = make_inputs(layer, B, T, dtype=dtype)
        y = kda_verify(drafts, layer, ours, slots, accepted, backend=backend)
        want = kda_verify(drafts, layer, exact, slots, accepted, backend="reference")
        rows.append((f"{name} verify y", distance(y, want), limit))
        accepted = torch.tensor(count, dtype=torch.int32, device="cuda")
        for t in range(T):
            going = torch.where(accepted > t, slots, -1)
            y_t = kda_decode(at(drafts, t), layer, stepped, going, backend=backend)
            used = (accepted > t) & (slots >= 0)
            apart = max(apart, (y[:, t][used].float() - y_t[used].float()).abs().max().item() if used.any() else 0.0)
    kda_commit(layer, ours, slots, accepted, backend=backend)
    kda_commit(layer, exact, slots, accepted, backend="reference")
    rows.append((f"{name} commit S", distance(ours.states, exact.states), limit))
    rows.append((f"{name} tails", (ours.tails - exact.tails).abs().max().item() if ours.tails.numel() else 0.0, 0.0))
    rows.append((f"{name} verify - steps, y", apart, 0.0))
    rows.append((f"{name} verify - steps, S", (ours.states - stepped.states).abs().max().item(), 0.0))
    return rows


def check_graph() -> tuple[str, float, float]:
    """A graph that is captured once and replayed with other slots and inputs, against eager calls."""
    layer, dtype = make_layer(4, 128, 128), torch.bfloat16
    graphed = make_pools(layer, 6, dtype)
    eager, slots = copy_of(graphed), torch.full((4,), -1, device="cuda")
    inputs = make_inputs(layer, 4, dtype=dtype)
    kda_decode(inputs, layer, graphed, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = kda_decode(inputs, layer, graphed, slots)
    apart = 0.0
    for now in ([5, 1, 0, 2], [3, -1, 4, 0]):
        slots.copy_(torch.tensor(now))
        for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate):
            x.normal_()
        graph.replay()
        apart = max(apart, (y - kda_decode(inputs, layer, eager, slots)).abs().max().item())
    return "graph - eager", max(apart, (graphed.states - eager.states).abs().max().item()), 0.0


def check_shapes(cases: tuple[str, ...]) -> list[tuple[str, float, float]]:
    """Shapes by name."""
    return reported([row for name in cases for row in check_case(name, GATE_CASES[name], torch.float32, "gluon")])


def check_kinds() -> list[tuple[str, float, float]]:
    """A graph, activations in bf16, more work than programs run at once, the Triton twin."""
    rows, small, many = [check_graph()], dict(H=3, K=128, V=128), dict(H=300, K=128, V=128)
    rows += check_case("bf16", small, torch.bfloat16, "gluon")
    rows += check_case("bf16 V256", dict(H=3, K=128, V=256), torch.bfloat16, "gluon")  # with room for the next state
    rows += check_case("many heads", many, torch.float32, "gluon")
    rows += check_case("bf16 many heads", many, torch.bfloat16, "gluon")
    rows += check_case("bf16 softplus", many | dict(bound=None), torch.bfloat16, "gluon")
    rows += check_case("twin", small, torch.float32, "triton")
    return reported(rows)


def reported(rows: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    for what, error, limit in rows:
        print(f"  {'ok  ' if error <= limit else 'FAIL'} {what:<28} {error:.2e} (at most {limit:.0e})", flush=True)
    return rows


def graph_us(launches: list[Callable[[], Any]], repeat: int = 20) -> float:
    """Microseconds of one launch: median time of a graph of all launches, over their number."""
    for launch in launches:
        launch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    times = []
    for _ in range(repeat + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times[3:])[repeat // 2] * 1e3 / len(launches)


def copy_speed() -> float:
    """Bytes read and written a microsecond by a device copy of 1 GiB."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * 2**30 / (triton.testing.do_bench(lambda: target.copy_(source), return_mode="median") * 1e3)


def layers_for(B: int) -> int:
    """Pools enough to flush the L2 cache between two visits of one, and launches enough to time."""
    one = B * HEADS * 128 * 128 * 4
    return max(4, min(16, 2**33 // one), min(48, CACHE // one))


def step_bytes(B: int, tokens: int, replayed: int) -> int:
    """States and tails in and out, inputs in, outputs out, weights once; a verify also keeps inputs and writes, and
    rereads k, z and u of what was accepted."""
    C, W, token = 3 * HEADS * 128, 4, 2 * HEADS * (3 * 128 + 128 + 1)
    kept, replay = HEADS * 128 * (2 * 4 + 4), HEADS * 128 * (2 * 2 + 4)
    weights = 4 * (C * W + HEADS * 128 + 128)
    sequence = 2 * 4 * HEADS * 128 * 128 + 2 * 2 * (W - 1) * C + tokens * (token + 2 * 2 * HEADS * 128)
    if tokens > 1 and not replayed:
        sequence -= 4 * HEADS * 128 * 128  # nothing is committed, no state is stored
    return weights + B * (sequence + replayed * replay + tokens * kept * (tokens > 1))


class Bench:
    """Layers with pools of their own for batches of B rows."""

    def __init__(self, B: int, tokens: int = 0, count: int | None = None) -> None:
        self.B, self.tokens, count = B, tokens, count or layers_for(B)
        self.layers = [make_layer(HEADS, 128, 128) for _ in range(count)]
        self.pools = [make_pools(layer, B, torch.bfloat16, tokens) for layer in self.layers]
        lead = (B, tokens) if tokens else (B,)
        self.inputs = [make_inputs(layer, *lead, dtype=torch.bfloat16) for layer in self.layers]
        self.slots = torch.randperm(B, device="cuda")

    def decode(self, spread: Spread | None = None, backend: str = "gluon") -> float:
        with_spread(spread)
        calls = zip(self.inputs, self.layers, self.pools, strict=True)
        time_us = graph_us([lambda c=c: kda_decode(*c, self.slots, backend=backend) for c in calls])
        with_spread(None)
        return time_us

    def verify(self, accepted: int) -> float:
        count = torch.full((self.B,), accepted, dtype=torch.int32, device="cuda")
        calls = zip(self.inputs, self.layers, self.pools, strict=True)
        return graph_us([lambda c=c: kda_verify(*c, self.slots, count, backend="gluon") for c in calls])

    def fla(self) -> float:
        from fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd

        B, calls = self.B, []
        for layer, pools, inputs in zip(self.layers, self.pools, self.inputs, strict=True):
            q, k, v = (x.unflatten(-1, (HEADS, 128))[:, None].contiguous() for x in inputs.qkv.chunk(3, -1))
            z, b = inputs.z.view(B, 1, HEADS, 128), inputs.b.view(B, 1, HEADS)
            options = dict(
                A_log=layer.gate.A_log, dt_bias=layer.gate.dt_bias.flatten(), initial_state=pools.states,
                inplace_final_state=True, state_v_first=True, use_qk_l2norm_in_kernel=True, use_gate_in_kernel=True,
                use_beta_sigmoid_in_kernel=True, lower_bound=-5.0,
            )  # fmt: skip
            calls.append(lambda a=(q, k, v, z, b), o=options: fused_recurrent_kda_fwd(*a, **o))
        return graph_us(calls)


CHOSEN: Any = decode_launch.decode_spread


def with_spread(spread: Spread | None) -> None:
    decode_launch.decode_spread = CHOSEN if spread is None else lambda *sizes: spread


SECTIONS = ("between", "tokens", "convolve", "state", "replay", "drafts", "outputs")


def measure_sections(bench: Bench, accepted: int) -> dict[str, Any]:
    """Mean cycles of the first warp in each section of an item of verify (`SECTIONS` in `verify_gluon.py`; "tokens" and
    "state" are waiting), and of all of a program's items; GHz: those over the launch's time without clocks."""
    count = torch.full((bench.B,), accepted, dtype=torch.int32, device="cuda")
    us, items = bench.verify(accepted), bench.B * HEADS
    a_multiprocessor = decode_launch.verify_spread(128, 128).programs
    programs = min(items, a_multiprocessor * torch.cuda.get_device_properties(0).multi_processor_count)
    stamps = torch.zeros(items, len(SECTIONS), dtype=torch.int32, device="cuda")
    for calls in list(zip(bench.inputs, bench.layers, bench.pools, strict=True))[:2]:
        decode_launch.CLOCKS = stamps  # of the last call
        kda_verify(*calls, bench.slots, count, backend="gluon")
    decode_launch.CLOCKS = None
    ticks = stamps.long().cpu()
    before = torch.roll(ticks[:, -1], programs)
    before[:programs] = ticks[:programs, 0]
    apart = (ticks - torch.cat([before[:, None], ticks[:, :-1]], 1)) % 2**32
    each = [apart[program::programs].sum().item() for program in range(programs)]
    row: dict[str, Any] = {"work": f"verify B{bench.B} {accepted}+{bench.tokens}"}
    row |= dict(zip(SECTIONS, apart.double().mean(0).tolist(), strict=True))
    return row | {"all": sum(each) / programs, "longest": max(each), "GHz": max(each) / us / 1e3}


def label(spread: Spread) -> str:
    register_limit = f"r{spread.maxnreg}" if spread.maxnreg else ""
    return f"w{spread.num_warps}l{spread.lanes}{register_limit}"


def measure_decode(sizes: list[int], speed: float, quick: bool) -> list[dict[str, Any]]:
    rows = []
    for B in sizes:
        bench = Bench(B)
        row: dict[str, Any] = {"work": f"decode B{B}", "floor": step_bytes(B, 1, 0) / speed, "ours": bench.decode()}
        row["of floor"] = row["floor"] / row["ours"]
        if not quick:
            row |= {label(s): bench.decode(s) for s in DECODE_SPREADS}
            row["triton"] = bench.decode(backend="triton")
        print(" ", row, flush=True)
        rows.append(row)
        del bench
        torch.cuda.empty_cache()
    return rows


VERIFY_WORKS = ((32, 8), (1, 8), (32, 4), (128, 4))  # sequences, tokens of each


def measure_verify(
    speed: float, decode: dict[str, float], works: tuple[tuple[int, int], ...] = VERIFY_WORKS
) -> list[dict[str, Any]]:
    rows = []
    for B, tokens in works:
        bench = Bench(B, tokens)
        for accepted in (tokens, tokens // 2, 0):
            floor = step_bytes(B, tokens, accepted) / speed
            row: dict[str, Any] = {"work": f"verify B{B} {accepted}+{tokens}", "floor": floor}
            row["ours"] = bench.verify(accepted)
            row["of floor"] = floor / row["ours"]
            row["steps"] = row["ours"] / decode[f"decode B{B}"]
            print(" ", row, flush=True)
            rows.append(row)
        del bench
        torch.cuda.empty_cache()
    return rows
