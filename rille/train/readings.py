"""Numbers on their way from the device to the loggers: many of them, one wait. Axes: L layers, E experts."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rille.model.balance import Counts


def fetch(wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars by name as floats, in one copy from the device."""
    if not wanted:
        return {}
    values = torch.stack([value.detach().double() for value in wanted.values()]).tolist()
    return dict(zip(wanted, values, strict=True))


def expert_loads(counts: Counts) -> dict[str, Tensor]:
    """Of each MoE layer: max load / mean load - 1 (0 is a perfect balance) and the number of experts without a token.

    `load_violation/3` and `dead_experts/3` are those of layer 3; `expert_load_violation` is the worst layer's.
    """
    if not counts.load:
        return {}
    load_LE = torch.stack(list(counts.load.values())).double()
    violation_L = load_LE.amax(1) / load_LE.mean(1) - 1
    dead_L = (load_LE == 0).sum(1)
    by_layer = {f"load_violation/{layer}": violation_L[row] for row, layer in enumerate(counts.load)}
    dead = {f"dead_experts/{layer}": dead_L[row] for row, layer in enumerate(counts.load)}
    return {"expert_load_violation": violation_L.max(), **by_layer, **dead}
