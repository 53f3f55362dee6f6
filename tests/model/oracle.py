"""The tiny official checkpoint in tests/fixtures and what the official model computed on it."""

from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from rille.model.checkpoint import load_model
from rille.model.model import K3

ORACLE = Path(__file__).parents[1] / "fixtures" / "oracle"
LOGITS_BOUND, TRACE_BOUND = 2e-4, 1e-4


@cache
def model(dtype: torch.dtype = torch.float32) -> K3:
    return load_model(ORACLE, dtype=dtype, device="cpu")


@cache
def text() -> dict[str, torch.Tensor]:
    return load_file(ORACLE / "text_io.safetensors")


@cache
def trace() -> dict[str, torch.Tensor]:
    return load_file(ORACLE / "trace.safetensors")


def tokens() -> torch.Tensor:
    return text()["input_ids"][0].long()
