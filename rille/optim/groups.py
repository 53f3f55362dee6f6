"""Parameter groups of a torch optimiser. What each parameter is comes as data: `optim` does not know the model."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

from rille.optim.kinds import KINDS, Kind, is_decayed, update_of


class Named(NamedTuple):
    """A parameter and what it is.

    blocks: heights of the row blocks that repeat down its rows, each one linear map: (128,) cuts [96 * 128, D] into 96
    of [128, D]; (128, 64) alternates. () is one map of all rows. Leading axes of a stack count as rows.
    """

    name: str
    parameter: nn.Parameter
    kind: Kind
    blocks: tuple[int, ...] = ()


def decay_groups(parameters: Iterable[Named], weight_decay: float, rule: str = "adamw") -> list[dict]:
    """Up to four groups of (name, parameter) pairs: by `update` ("adamw", `rule`), each "decayed" or "exempt".

    A group has `group`, `update`, `weight_decay` and, beside `params`, `blocks`. Parameters that take no gradient (the
    router's bias) are left out. Raises ValueError for a kind that is none of KINDS, for a name or a parameter that
    comes twice (tied ones: pass them once), and where none takes a gradient.
    """
    rows = [Named(*row) for row in parameters]
    check_table(rows)
    groups: dict[tuple[str, bool], dict] = {}
    for update in dict.fromkeys((rule, "adamw")):
        for decayed in (True, False):
            name, decay = ("decayed", weight_decay) if decayed else ("exempt", 0.0)
            groups[update, decayed] = {"params": [], "blocks": [], "weight_decay": decay, "group": name}
            groups[update, decayed]["update"] = update
    for name, parameter, kind, blocks in rows:
        if parameter.requires_grad:
            group = groups[update_of(kind, rule), is_decayed(kind)]
            group["params"].append((name, parameter))
            group["blocks"].append(blocks)
    full = [group for group in groups.values() if group["params"]]
    if not full:
        raise ValueError(f"none of {len(rows)} parameters takes a gradient: there is nothing to optimise")
    return full


def check_table(rows: list[Named]) -> None:
    """Raise ValueError for an unknown kind, and for a name or a parameter that comes twice."""
    names: set[str] = set()
    owners: dict[int, str] = {}
    for name, parameter, kind, _ in rows:
        if kind not in KINDS:
            raise ValueError(f"parameter {name!r} is of kind {kind!r}; the kinds are {', '.join(KINDS)}")
        if name in names or id(parameter) in owners:
            raise ValueError(
                f"parameter {name!r} comes twice (before as {owners.get(id(parameter), name)!r}); pass it once"
            )
        names.add(name)
        owners[id(parameter)] = name
