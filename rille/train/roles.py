"""What each parameter of a model is to the optimiser, from the one parameter table. No torch.

`parameter_roles` is where model and optimiser meet: the table's kinds and row blocks as plain data. `groups_table`
shows it to people.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod

from rille.model.config import K3Config
from rille.model.names import Entry, parameter_table
from rille.optim.kinds import Kind, is_decayed, merged, update_of

STEPS = 5  # of Newton-Schulz


@dataclass(frozen=True)
class Role:
    """One parameter. blocks: heights of the row blocks that repeat down its rows; columns: of its matrices."""

    name: str
    kind: Kind
    count: int
    blocks: tuple[int, ...]
    columns: int

    @property
    def matrices(self) -> list[tuple[int, int, int]]:
        """(how many, rows, columns) of the linear maps that it holds."""
        repeats = self.count // (sum(self.blocks) * self.columns)
        return [(repeats, rows, self.columns) for rows in self.blocks]


def parameter_roles(c: K3Config) -> list[Role]:
    """One role a parameter, in the order of the table."""
    entries: dict[str, list[Entry]] = {}
    for entry in parameter_table(c):
        entries.setdefault(entry.parameter, []).append(entry)
    return [_role(name, some) for name, some in entries.items()]


def _role(name: str, entries: Sequence[Entry]) -> Role:
    blocks = tuple(height for entry in entries for height in entry.blocks)
    count = sum(entry.count for entry in entries)
    return Role(name, entries[0].kind, count, merged(blocks), prod(entries[0].shape[1:]))


def groups_table(name: str, c: K3Config) -> str:
    """Which update each parameter gets under `optim.rule` muon, and what Newton-Schulz costs."""
    roles = parameter_roles(c)
    updated = sorted(roles, key=lambda role: update_of(role.kind, "muon") == "adamw")  # stable: Muon's first
    rows = [("update", "decay", "parameter", "tensors", "maps of a tensor", "numbers")]
    for key, some in _alike(updated):
        update, decay, pattern, maps = key
        rows.append((update, decay, pattern, f"{len(some):,}", maps, f"{sum(role.count for role in some):,}"))
    note = "a router's bias takes no gradient: balancing sets it"
    return f"{name}, optim.rule muon\n\n{_aligned(rows)}\n{note}\n\n{_costs(roles)}"


def _alike(roles: Iterable[Role]) -> list[tuple[tuple[str, ...], list[Role]]]:
    """Roles that differ in the number of their layer only."""
    alike: dict[tuple[str, ...], list[Role]] = {}
    for role in roles:
        update = update_of(role.kind, "muon")
        maps = " + ".join(f"{n:,} of {p:,} x {q:,}" for n, p, q in role.matrices) if update == "muon" else ""
        pattern = re.sub(r"\.\d+\.", ".*.", role.name)
        alike.setdefault((update, "yes" if is_decayed(role.kind) else "no", pattern, maps), []).append(role)
    return list(alike.items())


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Of one matrix in the plain form: 4 P^2 Q + 2 P^3 a step, P the shorter side."""
    p, q = sorted((rows, columns))
    return STEPS * (4 * p * p * q + 2 * p**3)


def _costs(roles: Sequence[Role]) -> str:
    maps = [m for role in roles if update_of(role.kind, "muon") == "muon" for m in role.matrices]
    shape = lambda m: tuple(sorted(m[1:]))  # noqa: E731
    rows = [("Newton-Schulz in one batch", "maps", "GFLOP a step")]
    total = 0.0
    for (p, q), same in groupby(sorted(maps, key=shape), key=shape):
        count = sum(n for n, _, _ in same)
        flops = count * newton_schulz_flops(p, q) / 1e9
        rows.append((f"{p:,} x {q:,}", f"{count:,}", f"{flops:,.1f}"))
        total += flops
    rows.append(("all", f"{sum(n for n, _, _ in maps):,}", f"{total:,.1f}"))
    numbers = sum(n * p * q for n, p, q in maps)
    rest = sum(role.count for role in roles) - numbers
    state = (4 * numbers + 8 * rest) / 1e9
    return f"{_aligned(rows)}\n\nstate {state:,.3f} GB in fp32 (AdamW alone {8e-9 * (numbers + rest):,.3f} GB)"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(row[i][:1].isdigit() for row in rows[1:]) and " of " not in rows[1][i] for i in range(len(widths))]
    lines = [
        "  ".join(
            cell.rjust(w) if to_right else cell.ljust(w) for cell, w, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
