"""Why experts are unevenly loaded while a small model begins to learn: Quantile Balancing step by step.

    python benchmarks/train/balance.py [--lr 8e-3] [--rule adamw] [--steps 100] [--at 2 6 10 20 40 70 100] [--out DIR]

A bias is exact for the batch and the weights that made it, and is used for the next batch under the next weights. After
the steps `--at` of a `tiny` run the router is asked again with either of the two held back, and with the weights at
rest. Load violation is max load / mean load - 1 of the worst layer; scores are those of that layer.

    next step        what training sees: next batch, next weights, the bias from the batch before
    next batch       the same bias and next batch, the weights that made the bias
    next weights     the same bias and batch, the next weights
    neither          the batch and the weights that made the bias
    at rest          next weights, five more updates of the bias over other batches, then another batch
    spread, drift    standard deviation of a score over the tokens (mean of the experts); root mean square over the
                     experts of how far their mean scores moved in the step, their common movement taken out
    shift            the same movement in standard deviations of the expert's own score, of the expert with the largest
    common           share of the router's input (of its square) that all tokens have in common
"""

from __future__ import annotations

import argparse
import json
import tempfile
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rille.data.corpus import prepare_corpus
from rille.data.loader import Batch
from rille.model.balance import Counts, update_biases
from rille.model.model import K3
from rille.model.moe import LatentMoE
from rille.ops.moe import router_logits
from rille.recipes.pretrain import tiny
from rille.train import loop
from rille.train.config import TrainConfig
from rille.train.losses import next_token_loss
from rille.train.pretrain import set_up
from rille.train.readings import expert_loads

UPDATES_AT_REST = 5
COLUMNS = ("next step", "next batch", "next weights", "neither", "at rest", "spread", "drift", "shift", "common")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=8e-3)
    parser.add_argument("--rule", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--residual", choices=("attn_res", "standard"), default="attn_res")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--at", type=int, nargs="+", default=[2, 6, 10, 20, 40, 70, 100])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="write results as JSON into this folder")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = examine(settings(arguments, folder), set(arguments.at))
    if arguments.out:
        (arguments.out / "balance.json").write_text(
            json.dumps({**vars(arguments), "rows": rows}, default=str, indent=1)
        )


def settings(arguments: argparse.Namespace, folder: str) -> TrainConfig:
    """The run of `rille study quantile-balancing`, unless told otherwise."""
    plan = tiny()
    return replace(
        plan,
        out=folder,
        steps=arguments.steps,
        seed=arguments.seed,
        model=plan.model.replace(residual=arguments.residual),
        data=replace(plan.data, seed=arguments.seed, batch_tokens=arguments.batch_tokens),
        optim=replace(plan.optim, lr=arguments.lr, rule=arguments.rule),
    )


def examine(config: TrainConfig, at: set[int]) -> list[dict]:
    """Train, and look after the steps `at`; one row each."""
    run = set_up(config, prepare_corpus(config.data, Path(config.out) / "corpus"))
    chance = by_chance(config)
    print(f"by chance, with the right bias from one batch and independent tokens: {chance:.2f}")
    print("step    loss" + "".join(f"{name:>14}" for name in COLUMNS))
    rows = []
    while run.step < config.steps:
        batches = loop.next_batches(run)
        before = deepcopy(run.model) if run.step + 1 in at else None
        work = loop.forward_backward(run, batches)
        loop.reduce(run, work)
        loop.update(run, work)
        if before is not None:
            row = {"step": run.step, "loss": work.values["loss"], **look(run, before, batches[0])}
            rows.append(row)
            numbers = "".join(f"{row[name]:14.4g}" for name in COLUMNS)
            print(f"{row['step']:4}{row['loss']:8.3f}{numbers}", flush=True)
    return rows


def look(run: loop.Run, before: K3, batch: Batch) -> dict[str, float]:
    """One row: `before` is the model that the last step ran, and whose counts made the bias that it lacks."""
    further = deepcopy(run.loader)
    following = next(further)
    with torch.no_grad():
        for layer, bias_E in before.router_biases().items():
            bias_E.copy_(run.model.router_biases()[layer])
    now, _ = violations(run.model, following)
    worst = max(now, key=now.__getitem__)
    then_NE, common = scores(before, batch, worst)
    same_NE, _ = scores(run.model, batch, worst)
    moved_E = (same_NE - then_NE).mean(0)
    moved_E -= moved_E.mean()
    row = {
        "next step": now[worst],
        "next batch": max(violations(before, following)[0].values()),
        "next weights": max(violations(run.model, batch)[0].values()),
        "neither": max(violations(before, batch)[0].values()),
        "at rest": at_rest(run, further),
        "spread": float(then_NE.std(0).mean()),
        "drift": float(moved_E.square().mean().sqrt()),
        "shift": float((moved_E.abs() / then_NE.std(0)).max()),
        "common": common,
    }
    return row | {"layer": float(worst)}


@torch.no_grad()
def violations(model: K3, batch: Batch) -> tuple[dict[int, float], Counts]:
    """Load violation of each layer on a batch, and the counts."""
    counts = Counts()
    next_token_loss(model, batch, counts)
    loads = expert_loads(counts)
    return {layer: float(loads[f"load_violation/{layer}"]) for layer in counts.load}, counts


def at_rest(run: loop.Run, batches) -> float:
    """Violation after more updates of the bias alone, on a copy of the model."""
    model, config = deepcopy(run.model), run.config.model
    for _ in range(UPDATES_AT_REST):
        _, counts = violations(model, next(batches))
        update_biases(model.router_biases(), counts, config.active_experts, config.balance)
    return max(violations(model, next(batches))[0].values())


@torch.no_grad()
def scores(model: K3, batch: Batch, layer: int) -> tuple[Tensor, float]:
    """The router's scores [N, E] of a layer, and the common share of its input."""
    seen: list[Tensor] = []
    module = next(m for m in model.modules() if isinstance(m, LatentMoE) and m.layer == layer)
    hook = module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    next_token_loss(model, batch)
    hook.remove()
    common = seen[0].mean(0).square().sum() / seen[0].square().sum(1).mean()
    return torch.sigmoid(router_logits(seen[0], module.router)), float(common)


def by_chance(config: TrainConfig, trials: int = 2000) -> float:
    """Mean of the worst layer's violation if only the draw of the tokens were left, once for the bias and once for the
    load: two binomial deviations of each expert."""
    model = config.model
    tokens, share = config.data.batch_tokens, model.active_experts / model.num_experts
    layers = model.num_layers - model.dense_layers
    draws = torch.distributions.Binomial(tokens, torch.tensor(share)).sample((2, trials, layers * model.num_experts))
    return float(((draws[0] - draws[1]) / (tokens * share)).amax(1).mean())


if __name__ == "__main__":
    main()
