"""How much of the card a step uses: MFU = FLOPs that the model needs / (seconds * peak of the card).

The FLOPs are those of `model/plan.py`, forward and backward, without anything recomputed; attention counts the rows
that each token of a packed sequence sees. The peak is the vendor's for dense bf16.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Sequence

import torch

from rille.model.config import K3Config
from rille.model.plan import fixed_flops, forward_flops

# TFLOP/s of dense bf16 by what the device's name holds; the first that fits counts. Source: the vendor's data sheets.
PEAKS = {"GB200": 2500.0, "B200": 2250.0, "H200": 989.4, "H100": 989.4, "H20": 148.0, "A100": 312.0, "L40S": 362.0}


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s of the device, None where they are not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * peak for key, peak in PEAKS.items() if key in name), None)


class StepFlops:
    """FLOPs of training steps of one model."""

    def __init__(self, c: K3Config):
        self.fixed = fixed_flops(c)
        self.pairs = forward_flops(c, 2_000_001) - self.fixed  # of 1,000,001 rows that a token sees

    def __call__(self, lengths: Sequence[int]) -> float:
        """Forward and backward over sequences of these lengths."""
        rows = sum(n * (n + 1) / 2 for n in lengths)
        return 3 * (self.fixed * sum(lengths) + self.pairs / 1_000_001 * rows)


def peak_memory(device: torch.device) -> float:
    """GiB that the run has held at most: of the device's memory, or of the process where that is the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
