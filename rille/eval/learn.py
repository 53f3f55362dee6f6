"""Train a small model from scratch on one recall task: how many updates until it has it, and at which lengths it holds.

    loss = mean of -log p over the asked symbols only; fresh examples in every update, other ones in every test

Setting after Kimi Linear, figure 4: two layers, two heads, standard residuals, dense feed-forward parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from rille.eval.config import LearnConfig
from rille.eval.recall import lines, packed, row, score
from rille.eval.recall_tasks import Example, RecallTask, recall_task
from rille.eval.result import Result, bar, show
from rille.model.config import K3Config
from rille.model.context import Context
from rille.model.model import K3, new_model
from rille.ops.cross_entropy import linear_cross_entropy
from rille.optim.adamw import set_learning_rate
from rille.optim.clip import clip_gradients
from rille.optim.config import OptimConfig
from rille.optim.rules import optimizer
from rille.optim.schedules import learning_rate
from rille.packing import Packing
from rille.serve.generate import check_device
from rille.train.pretrain import named_parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TRAINING, TEST = 0, 1  # which examples


def learn(config: LearnConfig) -> list[dict]:
    """Train, test, show, and give the rows: one for each length of a test.

    Raises ValueError for sizes that do not fit the task.
    """
    check_device(config.device)
    task = recall_task(config.task, config.symbols, config.stacks)
    for length in (config.length, *config.lengths):
        task.make(length, np.random.default_rng(0))  # says what does not fit before any work
    model = new_model(sizes(config), device=config.device, seed=config.seed)
    with bar(f"{config.task}, {config.mixer}", config.steps) as tell:
        history = train(model, task, config, tell)
    reached = next((step for step, right in history if right >= config.enough), None)
    rows = [
        row(task, n, [score(model, examples(task, n, config.samples, (config.seed, TEST, n)))]) for n in config.lengths
    ]
    told = f"{config.enough:.0%} of unseen examples of length {config.length}"
    remark = f"{told}: after {reached:,} updates" if reached else f"{told}: not within {config.steps:,} updates"
    draw = [lambda axes: course(axes, history, config.enough), lambda axes: lines(axes, rows)]
    name = f"learn-{config.task}-{config.mixer}"
    title = f"{config.task}, {config.mixer}, {config.layers} layers, {config.heads} heads of {config.head_dim}"
    show(Result(name, title, config, rows, draw, (remark,), {"course": history}), config.out)
    return rows


def sizes(config: LearnConfig) -> K3Config:
    """The model: only the mixers differ from run to run."""
    width, last = config.heads * config.head_dim, config.layers - 1
    return K3Config(
        vocab_size=config.symbols,
        hidden_size=width,
        num_layers=config.layers,
        mla_layers={"kda": (), "mla": tuple(range(config.layers)), "hybrid": (last,)}[config.mixer],
        kda_heads=config.heads,
        kda_head_dim=config.head_dim,
        mla_heads=config.heads,
        q_rank=None,
        kv_rank=width,
        key_dim=config.head_dim,
        shared_key_dim=0,
        value_dim=config.head_dim,
        dense_layers=config.layers,
        dense_width=2 * width,
        num_experts=1,
        active_experts=1,
        shared_experts=0,
        expert_width=1,
        latent_width=None,
        residual="standard",
    )


def train(model: K3, task: RecallTask, config: LearnConfig, tell: Callable[[int], None]) -> list[tuple[int, float]]:
    """Train until enough is right; gives (updates, share right of unseen examples) of every test."""
    settings = OptimConfig(lr=config.lr, weight_decay=0.1, schedule="cosine")
    follow = optimizer(named_parameters(model), settings)
    test = examples(task, config.length, config.samples, (config.seed, TEST, config.length))
    history: list[tuple[int, float]] = []
    for step in range(config.steps):
        loss = answers_loss(model, examples(task, config.length, config.batch, (config.seed, TRAINING, step)))
        loss.backward()
        clip_gradients(model.parameters(), settings.clip)
        set_learning_rate(follow, learning_rate(step, config.steps, settings))
        follow.step()
        follow.zero_grad()
        model.prepare()
        tell(1)
        if (step + 1) % config.eval_every == 0 or step + 1 == config.steps:
            found = score(model, test)
            history.append((step + 1, found.right / found.asked))
            if history[-1][1] >= config.enough:
                break
    return history


def examples(task: RecallTask, length: int, count: int, seed: tuple[int, ...]) -> list[Example]:
    draw = np.random.default_rng(seed)
    return [task.make(length, draw) for _ in range(count)]


def answers_loss(model: K3, batch: list[Example]) -> Tensor:
    """Mean -log p of what is asked for, a scalar with gradients."""
    tokens, rows, wanted = (x.to(model.device) for x in packed(batch))
    packing = Packing.of([len(example.symbols) for example in batch], device=model.device)
    hidden_ND = model(tokens, Context(packing))
    return linear_cross_entropy(hidden_ND[rows], model.head_weight, wanted).loss_sum / len(wanted)


def course(axes: Axes, history: list[tuple[int, float]], enough: float) -> None:
    axes.plot([step for step, _ in history], [right for _, right in history], color="#0b6e8f")
    axes.axhline(enough, color="#c8553d", lw=1, ls="--")
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("update", fontsize=8)
    axes.set_ylabel("right, of unseen examples", fontsize=8)
