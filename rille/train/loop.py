"""The training loop: six calls a step.

    g = (1 / targets) sum over batches of d loss / d x        loss: sums of -log p(target), see `losses.py`
    x = optimiser(x, clip(g)),   then each router's bias from the step's loads (Quantile Balancing)

The host runs ahead of the device and waits for it once a step, for the numbers that decide whether the update is made
and that go to the loggers. `pretrain.py` sets a run up; whatever may be swapped is a field of `Run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from rille.data.loader import Batch
from rille.model.balance import Counts, update_biases
from rille.model.mla import MLA
from rille.model.model import K3
from rille.optim.adamw import set_learning_rate
from rille.optim.clip import clip_gradients
from rille.optim.qk_clip import qk_clip
from rille.optim.schedules import learning_rate
from rille.train.checkpoint import save_checkpoint, snapshot, weights
from rille.train.inspection import as_numbers, inspect
from rille.train.losses import all_losses, count_targets, domain_sums, domain_targets, mean_losses, weighted
from rille.train.norms import Updates, gradient_norms
from rille.train.readings import expert_loads, fetch
from rille.train.run import Run
from rille.train.speed import peak_flops, peak_memory
from rille.train.stopping import Diverged, Interrupted


@dataclass(eq=False)
class Work:
    """What one step has computed so far. loss: the sum over targets, after `reduce` the mean.

    mtp_loss, mtp_targets: the same of all MTP layers together. by_domain, domain_targets: [domains]. values: what the
    loggers get, known when the device has been waited for.
    """

    started: float
    loss: Tensor
    counts: Counts
    mtp_loss: Tensor
    mtp_targets: Tensor
    by_domain: Tensor
    domain_targets: np.ndarray
    targets: int = 0
    learning_rate: float = 0.0
    flops: float = 0.0
    updates: Updates | None = None
    values: dict[str, float] = field(default_factory=dict)


def train(run: Run) -> None:
    """Advance a run to its last step.

    Raises Interrupted after the step in which a signal came or its time was over, with a checkpoint saved, and Diverged
    when more steps than `guard.limit` had a loss or gradient that must not reach the weights.
    """
    while run.step < run.config.steps:
        batches = next_batches(run)
        work = forward_backward(run, batches)
        reduce(run, work)
        update(run, work)
        log(run, work)
        checkpoint(run)


def next_batches(run: Run) -> list[Batch]:
    """The batches of one step."""
    run.loader.go_to(run.step)
    return [next(run.loader) for _ in range(run.loader.stage.accumulate)]


def forward_backward(run: Run, batches: list[Batch]) -> Work:
    """Gradients of the summed loss, added up over the batches."""
    work = new_work(run)
    for batch in batches:
        next_token, *further = losses = all_losses(run.model, batch, work.counts)
        weighted(losses, run.config.mtp_weight).backward()
        work.loss += next_token.loss_sum.detach()
        work.targets += count_targets(batch)
        work.flops += run.flops(batch.lengths)
        for loss in further:
            work.mtp_loss += loss.loss_sum.detach()
            work.mtp_targets += loss.count
        if run.domains:
            work.by_domain += domain_sums(next_token.log_probs, batch, len(run.domains))
            work.domain_targets += domain_targets(batch, len(run.domains))
    return work


def new_work(run: Run) -> Work:
    """Nothing computed yet."""
    domains, device = len(run.domains), run.model.device
    none, none_G = torch.zeros((), device=device), torch.zeros(domains, device=device)
    counts = Counts(attention=run.config.optim.qk_clip is not None)
    return Work(perf_counter(), none, counts, none.clone(), none.clone(), none_G, np.zeros(domains, dtype=np.int64))


def reduce(run: Run, work: Work) -> None:
    """Sums become means over all targets of the step. (Sums over devices belong here too: there is one.)"""
    work.loss /= work.targets
    work.mtp_loss /= work.mtp_targets.clamp(min=1)
    gradients = [parameter.grad for parameter in run.model.parameters() if parameter.grad is not None]
    torch._foreach_div_(gradients, work.targets)  # pyright: ignore[reportPrivateImportUsage]


def update(run: Run, work: Work) -> None:
    """Clip, look whether the step can be trusted, then make it or pass it over."""
    config = run.config
    by_kind = gradient_norms(run.model, run.kinds)
    norm = clip_gradients(run.model.parameters(), config.optim.clip)
    work.values = measured(run, work, {"gradient_norm": norm} | by_kind)
    work.learning_rate = learning_rate(run.step, config.steps, config.optim)
    fault = run.guard.fault(run.step + 1, work.values["loss"], work.values["gradient_norm"])
    if fault is None:
        move(run, work)
    else:
        skip(run, fault)
    run.step += 1


def move(run: Run, work: Work) -> None:
    """The optimiser's step, and what follows from it."""
    config, balance = run.config, run.config.model.balance
    set_learning_rate(run.optimizer, work.learning_rate)
    if is_measured(run, run.step + 1):
        work.updates = Updates(weights(run), run.kinds)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if config.optim.qk_clip is not None:
        clip_logits(run.model, work.counts, config.optim.qk_clip)
    update_biases(run.model.router_biases(), work.counts, config.model.active_experts, balance)
    run.model.prepare()
    if run.average is not None:
        run.average.update(weights(run), run.step + 1 - run.guard.total)


def clip_logits(model: K3, counts: Counts, threshold: float) -> None:
    """QK-clip in every MLA layer that ran, from the largest logits of the step's forward passes."""
    for layer in model.modules():
        if isinstance(layer, MLA) and layer.layer in counts.largest:
            qk_clip(layer.query, layer.kv_up, counts.largest[layer.layer], layer.key_dim, threshold)


def measured(run: Run, work: Work, norms: Mapping[str, Tensor]) -> dict[str, float]:
    """The numbers of a step. Here the host waits for the device."""
    wanted = {"loss": work.loss, **norms}
    if run.model.mtp is not None:
        wanted["mtp_loss"] = work.mtp_loss
    if work.counts.largest:
        wanted["largest_attention_logit"] = torch.stack([x_H.max() for x_H in work.counts.largest.values()]).max()
    seen = [number for number, count in enumerate(work.domain_targets.tolist()) if count]
    wanted |= {f"loss/{run.domains[n]}": work.by_domain[n] / int(work.domain_targets[n]) for n in seen}
    return fetch(wanted | expert_loads(work.counts))


def skip(run: Run, fault: str) -> None:
    """Leave everything as it was; raise Diverged where that has happened too often."""
    run.optimizer.zero_grad()
    if run.guard.exhausted:
        count, window = len(run.guard.skips), run.guard.config.window
        raise Diverged(
            f"step {run.step + 1}: {fault}; {count} of the last {window} steps could not be used and did not touch the "
            f"weights, earlier checkpoints are whole. Lower optim.lr (now {run.config.optim.lr}) or optim.clip"
        )
    print(f"step {run.step + 1} is passed over: {fault}")


def log(run: Run, work: Work) -> None:
    """Give the numbers of the step to every logger."""
    seconds = perf_counter() - work.started
    values = work.values | {"learning_rate": work.learning_rate, "tokens_per_second": work.targets / seconds}
    values["targets"] = float(work.targets)
    values["skipped_steps"] = float(run.guard.total)
    values["memory_gib"] = peak_memory(run.model.device)
    if (peak := peak_flops(run.model.device)) is not None:
        values["mfu"] = work.flops / (seconds * peak)
    values |= {f"epochs/{name}": count for name, count in run.loader.epochs().items()}
    if is_measured(run, run.step):
        values |= look(run, work)
    for logger in run.loggers:
        logger.log(run.step, values)


def is_measured(run: Run, step: int) -> bool:
    """Whether the held-out loss is measured after this step."""
    return step % run.config.eval_every == 0 or step == run.config.steps


def look(run: Run, work: Work) -> dict[str, float]:
    """Held-out losses, how far the weights moved, and what goes on inside the model."""
    batches = run.held_out()
    loss, by_domain = mean_losses(run.model, batches, run.domains)
    values = {"held_out_loss": loss} | {f"held_out_loss/{name}": value for name, value in by_domain.items()}
    if work.updates is not None:
        values |= fetch(work.updates.norms())
    if run.average is not None:
        with run.average.worn_by(run.model):
            values["held_out_loss_ema"] = mean_losses(run.model, batches)[0]
    seen = inspect(run.model, batches[0], work.counts)
    if run.inspections is not None:
        run.inspections.add(run.step, seen)
    return values | as_numbers(seen)


def checkpoint(run: Run) -> None:
    """Save every so often, at the end, and when a signal or the clock asks for the end.

    A wish that comes after the question is obeyed if there is a checkpoint of this step, else after the next one.
    """
    last, stops = run.step == run.config.steps, run.stop.wanted
    saves = last or stops or run.step % run.config.checkpoint_every == 0
    run.saver.check()
    if saves and run.config.save_in_background and not (last or stops):
        run.saver.start(snapshot(run))
    elif saves:
        run.saver.wait()
        save_checkpoint(run)
    if saves and not last and run.stop.wanted:
        run.saver.wait()  # what says that it is saved has seen it written
        raise Interrupted(run.step, run.stop)
