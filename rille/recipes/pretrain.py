"""Pretraining runs, one function each. A variant calls another one and replaces fields."""

from __future__ import annotations

from collections.abc import Callable

from rille.data.config import DataConfig
from rille.model.presets import preset
from rille.optim.config import OptimConfig
from rille.train.config import TrainConfig
from rille.train.guard import GuardConfig


def tiny() -> TrainConfig:
    """1.3 M parameters, every mechanism on: minutes on a laptop CPU."""
    return TrainConfig(model=preset("tiny"), out="runs/tiny", steps=300, optim=OptimConfig(lr=8e-3))


def nano() -> TrainConfig:
    """1.0 B parameters, 77 M active: hours on one GPU."""
    return _one_gpu("nano", batch_tokens=65_536, lr=2e-3)


def nano_160k() -> TrainConfig:
    """As nano with a vocabulary of 163,840, for comparisons."""
    return _one_gpu("nano-160k", batch_tokens=65_536, lr=2e-3)


def mini() -> TrainConfig:
    """3.1 B parameters, 295 M active: a day on one GPU."""
    return _one_gpu("mini", batch_tokens=32_768, lr=1e-3)


def _one_gpu(name: str, batch_tokens: int, lr: float) -> TrainConfig:
    """Steps of 131,072 tokens in bf16, matrices by Per-Head Muon."""
    model = preset(name)
    return TrainConfig(
        model=model,
        out=f"runs/{name}",
        steps=10_000,
        device="cuda",
        dtype="bfloat16",
        accumulate=131_072 // batch_tokens,
        eval_every=250,
        eval_tokens=262_144,
        checkpoint_every=1000,
        save_in_background=True,
        data=DataConfig(
            max_bytes=None,
            vocab_size=model.vocab_size,
            tokenizer_bytes=1_000_000_000,
            sequence_length=4096,
            batch_tokens=batch_tokens,
        ),
        guard=GuardConfig(spike=1.0),
        optim=OptimConfig(rule="muon", lr=lr, warmup_fraction=0.02),
    )


RECIPES: dict[str, Callable[[], TrainConfig]] = {"tiny": tiny, "nano": nano, "nano-160k": nano_160k, "mini": mini}
