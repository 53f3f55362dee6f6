"""The training loop: six calls a step.

    g = (1 / targets) sum over batches of d loss / d x        loss: sums of -log p(target), see `losses.py`
    x = optimiser(x, clip(g)),   then each router's bias from the step's loads (Quantile Balancing)

`pretrain.py` sets a run up; whatever may be swapped is a field of `Run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isfinite
from time import perf_counter

import torch
from torch import Tensor

from rille.data.loader import Batch, Loader
from rille.data.mixed_loader import MixedLoader
from rille.model.balance import Counts, load_violation, update_biases
from rille.model.mla import MLA
from rille.model.model import K3
from rille.optim.adamw import set_learning_rate
from rille.optim.clip import clip_gradients
from rille.optim.qk_clip import qk_clip
from rille.optim.schedules import learning_rate
from rille.text.tokenizer import Tokenizer
from rille.train.checkpoint import save_checkpoint
from rille.train.config import TrainConfig
from rille.train.losses import all_losses, mean_loss, weighted
from rille.train.metrics import Logger
from rille.train.stopping import Diverged, Interrupted, Stop


@dataclass(eq=False)
class Run:
    """A run between two steps. `step` counts finished updates."""

    config: TrainConfig
    model: K3
    optimizer: torch.optim.Optimizer
    loader: Loader | MixedLoader
    held_out: Callable[[], Sequence[Batch]]
    tokenizer: Tokenizer
    loggers: Sequence[Logger] = ()
    stop: Stop = field(default_factory=Stop)
    step: int = 0


@dataclass(eq=False)
class Work:
    """What one step has computed so far. loss: the sum over targets, after `reduce` the mean.

    mtp_loss, mtp_targets: the same of all MTP layers together.
    """

    started: float
    loss: Tensor
    targets: int
    counts: Counts
    mtp_loss: Tensor
    mtp_targets: int = 0
    learning_rate: float = 0.0
    gradient_norm: float = 0.0


def train(run: Run) -> None:
    """Advance a run to its last step.

    Raises Interrupted after the step in which a signal came, with a checkpoint saved, and Diverged for a loss or
    gradient that is not finite, before it reaches the weights.
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
    return [next(run.loader) for _ in range(run.config.accumulate)]


def forward_backward(run: Run, batches: list[Batch]) -> Work:
    """Gradients of the summed loss, added up over the batches."""
    counts = Counts(attention=run.config.optim.qk_clip is not None)
    none = torch.zeros((), device=run.model.device)
    work = Work(perf_counter(), none.clone(), 0, counts, none.clone())
    for batch in batches:
        next_token, *further = losses = all_losses(run.model, batch, work.counts)
        weighted(losses, run.config.mtp_weight).backward()
        work.loss += next_token.loss_sum.detach()
        work.targets += int(next_token.count)
        for loss in further:
            work.mtp_loss += loss.loss_sum.detach()
            work.mtp_targets += int(loss.count)
    return work


def reduce(run: Run, work: Work) -> None:
    """Sums become means over all targets of the step. (Sums over devices belong here too: there is one.)"""
    work.loss /= work.targets
    work.mtp_loss /= max(work.mtp_targets, 1)
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad /= work.targets


def update(run: Run, work: Work) -> None:
    """Clip, set the learning rate, step, limit attention logits, balance the experts."""
    config, balance = run.config, run.config.model.balance
    work.gradient_norm = float(clip_gradients(run.model.parameters(), config.optim.clip))
    check_finite(run, work)
    work.learning_rate = learning_rate(run.step, config.steps, config.optim)
    set_learning_rate(run.optimizer, work.learning_rate)
    run.optimizer.step()
    run.optimizer.zero_grad()
    if config.optim.qk_clip is not None:
        clip_logits(run.model, work.counts, config.optim.qk_clip)
    update_biases(run.model.router_biases(), work.counts, config.model.active_experts, balance)
    run.model.prepare()
    run.step += 1


def clip_logits(model: K3, counts: Counts, threshold: float) -> None:
    """QK-clip in every MLA layer that ran, from the largest logits of the step's forward passes."""
    for layer in model.modules():
        if isinstance(layer, MLA) and layer.layer in counts.largest:
            qk_clip(layer.query, layer.kv_up, counts.largest[layer.layer], layer.key_dim, threshold)


def check_finite(run: Run, work: Work) -> None:
    if not (isfinite(float(work.loss)) and isfinite(work.gradient_norm)):
        raise Diverged(
            f"step {run.step + 1}: loss {float(work.loss)}, gradient norm {work.gradient_norm}; the weights were not "
            f"touched, earlier checkpoints are whole. Lower optim.lr (now {run.config.optim.lr}) or optim.clip"
        )


def log(run: Run, work: Work) -> None:
    """Give the numbers of the step to every logger."""
    values = {
        "loss": float(work.loss),
        "tokens_per_second": work.targets / (perf_counter() - work.started),
        "learning_rate": work.learning_rate,
        "gradient_norm": work.gradient_norm,
        "expert_load_violation": max((load_violation(load_E) for load_E in work.counts.load.values()), default=0.0),
    }
    if work.mtp_targets:
        values["mtp_loss"] = float(work.mtp_loss)
    if work.counts.largest:
        values["largest_attention_logit"] = max(float(largest_H.max()) for largest_H in work.counts.largest.values())
    if run.step % run.config.eval_every == 0 or run.step == run.config.steps:
        values["held_out_loss"] = mean_loss(run.model, run.held_out())
    for logger in run.loggers:
        logger.log(run.step, values)


def checkpoint(run: Run) -> None:
    """Save every so often, at the end, and when a signal asks for the end."""
    last = run.step == run.config.steps
    if last or run.stop.signal is not None or run.step % run.config.checkpoint_every == 0:
        save_checkpoint(run)
    if run.stop.signal is not None and not last:
        raise Interrupted(run.step, run.stop)
