"""What Attention Residuals cost a training step: one model with plain residuals and with both forms of the mixtures.

    PYTHONPATH=. python3 benchmarks/train/residual.py [--work nano|wide] [--rounds 7] [--micro N]
        [--tokens FILE] [--out FOLDER]

One process, one set of weights and optimiser states: the sites are changed between steps, which alternate (plain, one
phase, two phases, the chosen form; and again), so that clocks, memory and routing are the same for all. "nano": the
preset, 131,072 tokens. "wide": 24 layers of width 2048 built like K3 (three KDA layers to one MLA, experts 7/8 as wide
as the latent, which is half the width, two shared experts), in 4 Attention-Residual blocks, 32,768 tokens; with 16
heads and 8 of 16 experts a token it computes less than K3 would at that width, so that the residuals weigh more.
Without --tokens the ids are drawn, rare ones rarely. A step is that of `step.py` with AdamW; medians in ms. "more" is
the median over the rounds of a step's time beside the plain step of the round; "host" is when Python had given all work
to the device; peak memory is in GiB.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from step import SEQUENCE, Stepper

from rille.model.attn_res import Plain
from rille.model.block import share_mixtures
from rille.model.config import K3Config
from rille.model.model import K3
from rille.model.presets import preset
from rille.ops.attn_res.form import Form
from rille.optim.config import OptimConfig

FORMS: dict[str, Form | None] = {"plain": None, "one phase": "one_phase", "two phases": "two_phase", "chosen": "auto"}
WIDE = preset("nano").replace(
    hidden_size=2048,
    num_layers=24,
    mla_layers=tuple(range(3, 24, 4)),
    kda_heads=16,
    mla_heads=16,
    q_rank=512,
    kv_rank=512,
    dense_width=9216,
    num_experts=16,
    active_experts=8,
    expert_width=896,
    latent_width=1024,
    block_layers=6,
)
WORKS: dict[str, tuple[K3Config, int]] = {"nano": (preset("nano"), 131_072), "wide": (WIDE, 32_768)}


class Residuals:
    """A model whose sites can be changed."""

    def __init__(self, model: K3) -> None:
        self.model, self.blocks, self.output = model, list(model.blocks()), model.output_mix
        self.sites = [(block.attn_mix, block.ffn_mix, block.opens_block) for block in self.blocks]

    def use(self, form: Form | None) -> None:
        """Plain residuals, or the mixtures in one form."""
        self.model.output_mix = self.output if form else Plain()
        for block, sites in zip(self.blocks, self.sites, strict=True):
            block.attn_mix, block.ffn_mix, block.opens_block = sites if form else (Plain(), Plain(), False)
        share_mixtures(self.blocks, self.model.output_mix, form or "auto")


def drawn(vocabulary: int, count: int) -> np.ndarray:
    """Ids whose frequency falls as one over their rank."""
    uniform = np.random.default_rng(0).random(count)
    return np.minimum(vocabulary - 1, np.exp(uniform * np.log(vocabulary)).astype(np.int64))


def one_step(stepper: Stepper) -> tuple[float, float, float]:
    """Milliseconds of a step, and until Python was through; the loss."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    loss = stepper.step()
    host = time.perf_counter() - started
    torch.cuda.synchronize()
    return (time.perf_counter() - started) * 1e3, host * 1e3, float(loss)


def measure(work: str, micro: int | None, tokens: np.ndarray | None, rounds: int) -> dict[str, Any]:
    config, usual = WORKS[work]
    micro = micro or usual
    if tokens is None:
        tokens = drawn(config.vocab_size, 4 * micro + 1)
    stepper = Stepper(config, tokens, micro, OptimConfig(rule="adamw", lr=1e-3))
    residuals = Residuals(stepper.model)
    times: dict[str, list[float]] = {name: [] for name in FORMS}
    hosts: dict[str, list[float]] = {name: [] for name in FORMS}
    peaks, losses = {}, []
    for turn in range(rounds + 2):  # the first two compile and fill the allocator
        for name, form in FORMS.items():
            residuals.use(form)
            torch.cuda.reset_peak_memory_stats()
            ms, host, loss = one_step(stepper)
            losses.append(loss)
            print(f"  {work} {name:<10} {ms:9.1f} ms, host {host:9.1f} ms, loss {loss:.3f}", flush=True)
            if turn >= 2:
                times[name].append(ms)
                hosts[name].append(host)
                peaks[name] = torch.cuda.max_memory_allocated() / 2**30
    more = {name: median([a / b - 1 for a, b in zip(ms, times["plain"], strict=True)]) for name, ms in times.items()}
    row: dict[str, Any] = {"work": work, "micro": micro, "sequence": SEQUENCE, "losses": [losses[0], losses[-1]]}
    row |= {"ms": times, "host ms": {name: median(ms) for name, ms in hosts.items()}, "more": more, "peak GiB": peaks}
    return row | {"device": torch.cuda.get_device_name(), "torch": torch.__version__}


def median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def show(row: dict[str, Any]) -> None:
    print(f"\n{row['work']}, {row['micro']:,} tokens a step, losses {row['losses'][0]:.3f} ... {row['losses'][1]:.3f}")
    for name in FORMS:
        ms, host, peak = median(row["ms"][name]), row["host ms"][name], row["peak GiB"][name]
        print(f"  {name:<10} {ms:8.1f} ms  {row['more'][name]:+7.2%}   host {host:7.1f} ms   peak {peak:6.1f} GiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", choices=tuple(WORKS), default="nano")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro", type=int, help=f"tokens of a step, a multiple of {SEQUENCE}; by default the work's")
    parser.add_argument("--tokens", type=Path, help="ids of real text, one flat array")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    row = measure(options.work, options.micro, np.load(options.tokens) if options.tokens else None, options.rounds)
    show(row)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"residual-{options.work}.json").write_text(json.dumps(row, indent=1))


if __name__ == "__main__":
    main()
