"""Which parameters are decayed. The kind of each parameter comes as data: `optim` does not know the model.

Weight decay pulls matrices, experts and embeddings towards zero. Vectors are exempt (norm gains, biases, A_log,
dt_bias, short convolutions, queries of Attention Residuals): scales and offsets, which have no reason to shrink.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, get_args

from torch import nn

Kind = Literal["heads", "matrix", "vector", "expert", "embedding"]
Named = tuple[str, nn.Parameter, Kind]
KINDS: tuple[Kind, ...] = get_args(Kind)


def decay_groups(parameters: Iterable[Named], weight_decay: float) -> list[dict]:
    """Two parameter groups for a torch optimiser, "decayed" and "exempt", each with (name, parameter) pairs.

    Parameters that take no gradient (the router's bias) are left out. Raises ValueError for a kind that is none of
    KINDS, for a name or a parameter that comes twice (tied ones: pass them once), and where none takes a gradient.
    """
    decayed, exempt = [], []
    names: dict[str, int] = {}
    owners: dict[int, str] = {}
    for name, parameter, kind in parameters:
        if kind not in KINDS:
            raise ValueError(f"parameter {name!r} is of kind {kind!r}; the kinds are {', '.join(KINDS)}")
        if name in names or id(parameter) in owners:
            raise ValueError(
                f"parameter {name!r} comes twice (before as {owners.get(id(parameter), name)!r}); pass it once"
            )
        names[name], owners[id(parameter)] = id(parameter), name
        if parameter.requires_grad:
            (exempt if kind == "vector" else decayed).append((name, parameter))
    groups = [
        {"params": decayed, "weight_decay": weight_decay, "group": "decayed"},
        {"params": exempt, "weight_decay": 0.0, "group": "exempt"},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(f"none of {len(names)} parameters takes a gradient: there is nothing to optimise")
    return groups
