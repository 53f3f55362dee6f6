"""A whole training step on one GPU: tokens/s, MFU, peak memory, and where the time goes.

    python benchmarks/train/step.py --tokens tokens.npy [--preset nano] [--rule adamw] [--out FOLDER]

tokens.npy: ids of real text, one flat array; `--bytes-per-token` says how much text they stand for. A step is one
micro-batch of `--micro` tokens in sequences of 4,096: forward, backward, clip, update and balancing, in bf16 with fp32
masters. The gate comes first: the loss and gradient norm of a small batch, kernels in bf16 against the references in
fp32. The split by kind comes from one more step under the profiler. MFU counts the FLOPs of `rille plan` (forward three
times, nothing for recomputation) against 989 TFLOP/s, the dense bf16 peak of an H200.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from rille.data.loader import Batch
from rille.model.balance import Counts, load_violation, update_biases
from rille.model.config import K3Config
from rille.model.model import K3, new_model
from rille.model.plan import training_flops
from rille.model.presets import preset
from rille.optim.clip import clip_gradients
from rille.optim.config import OptimConfig
from rille.optim.groups import Named
from rille.optim.rules import optimizer
from rille.train.losses import next_token_loss
from rille.train.roles import parameter_roles

PEAK = 989e12
SEQUENCE = 4096
KINDS = (  # the first pattern that a kernel's name matches says its kind
    ("experts", r"moe|expert|route|grouped|permut|combine|^glu_.*product|weight_product|row_product|gather_rows"),
    ("KDA", r"kda|intra|state_pass|segment|local_kernel|prepare|reverse|states_kernel|chunk_"),
    ("AttnRes", r"^mix_|attn_res|site|^first_|^weight_sums"),
    ("attention", r"flash|fmha|cudnn|attention|sdpa|mla|rings_kernel|key_kernel|query_kernel|softmax"),
    ("head", r"cross_entropy|^score|online|nll"),
    ("norms, SiTU", r"^rms_|^glu_|situ|gated"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|matmul|cublas|splitK"),
    ("optimiser", r"multi_tensor|adam|foreach|newton"),
    ("convolution", r"conv|^forward$|^backward$"),
    ("copies", r"[Mm]emcpy|[Mm]emset|copy|Cat"),
    ("elementwise", r"elementwise|reduce|index|gather|scatter|sort|scan|radix|triton_"),
)


class Stepper:
    """A model, its optimiser and endless batches; `step` is one update."""

    def __init__(self, config: K3Config, tokens: np.ndarray, micro: int, optim: OptimConfig) -> None:
        self.model = new_model(config, dtype=torch.bfloat16, device="cuda", seed=0)
        roles = {role.name: role for role in parameter_roles(config)}
        named = [Named(n, p, roles[n].kind, roles[n].blocks) for n, p in self.model.named_parameters()]
        self.optimizer, self.optim = optimizer(named, optim), optim
        self.batches = batches(tokens, micro)
        self.counts = Counts()

    def step(self) -> torch.Tensor:
        """One update; the mean loss, still on the device."""
        batch, self.counts = next(self.batches), Counts()
        result = next_token_loss(self.model, batch, self.counts)
        (result.loss_sum / len(batch.tokens)).backward()
        clip_gradients(self.model.parameters(), self.optim.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        c = self.model.config
        update_biases(self.model.router_biases(), self.counts, c.active_experts, c.balance)
        self.model.prepare()
        return result.loss_sum.detach() / len(batch.tokens)


def batches(tokens: np.ndarray, micro: int) -> Iterator[Batch]:
    """Sequences of SEQUENCE tokens, `micro` tokens together, round and round."""
    lengths, at = (SEQUENCE,) * (micro // SEQUENCE), 0
    while True:
        if at + micro + 1 > len(tokens):
            at = 0
        ids = torch.from_numpy(tokens[at : at + micro + 1].astype(np.int64))
        yield Batch(ids[:-1], ids[1:], lengths)
        at += micro


def gate(config: K3Config, tokens: np.ndarray) -> dict[str, float]:
    """Loss and gradient norm of two sequences: bf16 with kernels against fp32 on the CPU's references, 16 experts."""
    started = time.perf_counter()
    config = config.replace(num_experts=16)
    batch = next(batches(tokens, SEQUENCE))
    batch = Batch(batch.tokens[:256], batch.targets[:256], (100, 156))
    fast = new_model(config, dtype=torch.bfloat16, device="cuda", seed=0)
    slow = K3(config, dtype=torch.float32, device="cpu")
    slow.load_state_dict({name: value.float().cpu() for name, value in fast.state_dict().items()})
    results = {name: loss_and_norm(model, batch) for name, model in (("kernels", fast), ("reference", slow))}
    (loss, norm), (true_loss, true_norm) = results["kernels"], results["reference"]
    if abs(loss - true_loss) > 0.01 * true_loss or abs(norm - true_norm) > 0.05 * true_norm:
        raise SystemExit(f"gate: loss {loss:.4f} and {true_loss:.4f}, gradient norm {norm:.4f} and {true_norm:.4f}")
    seconds = time.perf_counter() - started
    return {"loss": loss, "reference_loss": true_loss, "norm": norm, "reference_norm": true_norm, "seconds": seconds}


def loss_and_norm(model: K3, batch: Batch) -> tuple[float, float]:
    result = next_token_loss(model, batch, Counts())
    (result.loss_sum / len(batch.tokens)).backward()
    norm = clip_gradients(model.parameters(), 1e9)
    return float(result.loss_sum.detach()) / len(batch.tokens), float(norm)


def timed(stepper: Stepper, steps: int) -> tuple[list[float], list[float]]:
    """Seconds and losses of each step, the device waited for after each."""
    seconds, losses = [], []
    for _ in range(steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss = stepper.step()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        losses.append(float(loss))
    return seconds, losses


def split(stepper: Stepper) -> tuple[dict[str, float], list[tuple[str, float, int]], float]:
    """Milliseconds by kind, the longest kernels (name, ms, calls), and the ms in which the device did nothing."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        stepper.step()
        torch.cuda.synchronize()
    spans, totals, calls = [], defaultdict(float), defaultdict(int)
    for event in profiler.events() or []:
        if event.device_type == DeviceType.CUDA:
            spans.append((event.time_range.start, event.time_range.end))
            totals[event.name] += event.time_range.elapsed_us() / 1e3
            calls[event.name] += 1
    kinds: dict[str, float] = defaultdict(float)
    for name, ms in totals.items():
        kinds[next((kind for kind, pattern in KINDS if re.search(pattern, name)), "other")] += ms
    longest = sorted(totals.items(), key=lambda item: -item[1])[:40]
    return dict(kinds), [(name, ms, calls[name]) for name, ms in longest], idle(spans)


def idle(spans: list[tuple[float, float]]) -> float:
    """Milliseconds between the first and the last kernel that none covers."""
    gap, end = 0.0, min(start for start, _ in spans)
    for start, stop in sorted(spans):
        gap, end = gap + max(0.0, start - end), max(end, stop)
    return gap / 1e3


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    config = preset(arguments.preset).replace(residual=arguments.residual)
    tokens = np.load(arguments.tokens, mmap_mode="r")
    checked = {} if arguments.no_gate else gate(config, tokens)
    stepper = Stepper(config, tokens, arguments.micro, OptimConfig(rule=arguments.rule, lr=1e-3))
    timed(stepper, 2)
    torch.cuda.reset_peak_memory_stats()
    seconds, losses = timed(stepper, arguments.steps)
    median = sorted(seconds)[len(seconds) // 2]
    rate, peak = arguments.micro / median, torch.cuda.max_memory_allocated() / 2**30
    kinds, longest, waiting = split(stepper)
    return {
        "preset": arguments.preset,
        "rule": arguments.rule,
        "residual": arguments.residual,
        "micro": arguments.micro,
        "seconds": seconds,
        "losses": losses,
        "tokens_per_second": rate,
        "bytes_per_second": rate * arguments.bytes_per_token,
        "mfu": rate * training_flops(config, SEQUENCE) / PEAK,
        "peak_gib": peak,
        "idle_ms": waiting,
        "largest_load": [1 + load_violation(load) for load in stepper.counts.load.values()],
        "kinds_ms": kinds,
        "longest": longest,
        "gate": checked,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def show(result: dict[str, Any]) -> None:
    median = sorted(result["seconds"])[len(result["seconds"]) // 2]
    print(f"\n{result['preset']}, {result['rule']}, {result['residual']}: {result['tokens_per_second']:,.0f} tokens/s,")
    print(f"  {median * 1e3:,.0f} ms a step of {result['micro']:,}, MFU {result['mfu']:.1%} of 989 TFLOP/s,")
    print(f"  peak {result['peak_gib']:.1f} GiB, {result['bytes_per_second'] / 1e6:,.2f} MB of text a second")
    print(f"  losses {result['losses'][0]:.3f} ... {result['losses'][-1]:.3f}; idle {result['idle_ms']:.0f} ms")
    if gate := result["gate"]:
        print(f"  gate: loss {gate['loss']:.4f}, {gate['reference_loss']:.4f} in fp32; {gate['seconds']:.1f} s;")
        print(f"    gradient norm {gate['norm']:.4f}, {gate['reference_norm']:.4f} in fp32")
    loads = ", ".join(f"{load:.1f}" for load in result["largest_load"])
    print(f"  most tokens of an expert, in shares of the mean, layer by layer: {loads}")
    for kind, ms in sorted(result["kinds_ms"].items(), key=lambda item: -item[1]):
        print(f"  {kind:16} {ms:9.1f} ms")
    for name, ms, calls in result["longest"][:24]:
        print(f"    {ms:8.2f} ms {calls:6d} x  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tokens", type=Path, required=True)
    parser.add_argument("--bytes-per-token", type=float, default=0.0)
    parser.add_argument("--preset", default="nano")
    parser.add_argument("--rule", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--residual", choices=("attn_res", "standard"), default="attn_res")
    parser.add_argument("--micro", type=int, default=131_072)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--no-gate", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    result = measure(arguments)
    show(result)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        name = f"step-{arguments.preset}-{arguments.rule}-{arguments.residual}.json"
        (arguments.out / name).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
