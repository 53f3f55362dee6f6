"""Per-Head Muon (report section 2.5; update and scale of Moonlight, section 2.2).

For each matrix W [P, Q] with gradient G, learning rate a, momentum mu and decay w:

    B = mu B + G        U = G + mu B  (Nesterov)        O = NewtonSchulz(U)
    W = W - a w W - a 0.2 sqrt(max(P, Q)) O

O has singular values near 1, so its entries have a root mean square near 1 / sqrt(max(P, Q)); with the factor it is
0.2, about that of AdamW's step: one learning rate serves both.

"Each matrix" is each linear map. A projection that holds several heads is cut into its heads, so that a head with a
small gradient moves as far as one with a large gradient; a stack of experts is cut into experts, and gate and up rows
into two maps. MLA's key and value up-projection holds two maps for each head, one that meets queries and one that
makes values: they are cut too. A query of MLA, with its part for the shared key, is one map. The row blocks come as
data (`groups.Named`). All maps of one shape go through Newton-Schulz in one batch, whatever layer they come from
(`ops/muon`).

What is no matrix takes AdamW (`kinds.py`), with the same learning rate.

Axes: B matrices of P rows and Q columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import sqrt

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rille.ops.muon import Matrices, muon_step
from rille.optim.config import OptimConfig
from rille.optim.groups import Named, decay_groups
from rille.optim.kinds import merged

UPDATE_RMS = 0.2  # Moonlight's: the root mean square of AdamW's step in practice
LARGEST_BATCH = 2**27  # numbers of the matrices that go through Newton-Schulz together: 0.5 GiB in fp32

# On a card 16 bits for the tensor cores. Not bf16: all values are below 4, and fp16 has three more bits for them.
INNER = {"cuda": torch.float16}


def muon(parameters: Iterable[Named], config: OptimConfig) -> Muon:
    """Muon for matrices and AdamW for the rest. Errors: see `decay_groups`; blocks that do not fill a matrix's rows."""
    return Muon(decay_groups(parameters, config.weight_decay, "muon"), config)


class Muon(torch.optim.Optimizer):
    """`update` of a group says which of the two rules its parameters follow. State: `momentum` of a matrix, AdamW's
    names for the rest, both in the dtype of the parameter."""

    def __init__(self, groups: list[dict], config: OptimConfig) -> None:
        defaults = dict(lr=config.lr, momentum=config.momentum, betas=config.betas, eps=config.eps)
        super().__init__(groups, defaults)
        for group in self.param_groups:
            if group["update"] == "muon":
                group["blocks"] = [_checked(*row) for row in zip(*_columns(group), strict=True)]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            if group["update"] == "muon":
                self._muon(group)
            else:
                self._adamw(group)

    def _muon(self, group: dict) -> None:
        pieces = (
            piece
            for p, blocks in zip(group["params"], group["blocks"], strict=True)
            if p.grad is not None
            for piece in matrices(p, p.grad, self._momentum(p), blocks)
        )
        keep = 1 - group["lr"] * group["weight_decay"]
        for batch in batches(pieces):
            first = batch[0].weight
            step = group["lr"] * UPDATE_RMS * sqrt(max(first.shape[1:]))
            muon_step(batch, group["momentum"], keep, step, dtype=INNER.get(first.device.type))

    def _momentum(self, p: nn.Parameter) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        return state["momentum"]

    def _adamw(self, group: dict) -> None:
        live = [p for p in group["params"] if p.grad is not None]
        for p in live:
            if not self.state[p]:
                zeros = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                self.state[p] |= {"step": torch.zeros((), device=p.device), **zeros}
        states = [self.state[p] for p in live]
        beta1, beta2 = group["betas"]
        adamw(
            live,
            [p.grad for p in live],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


def matrices(weight: Tensor, gradient: Tensor, momentum: Tensor, blocks: tuple[int, ...]) -> Iterator[Matrices]:
    """The maps of one parameter, at most LARGEST_BATCH numbers a piece."""
    cut = [cut_rows(x, blocks) for x in (weight, gradient, momentum)]
    for of_one_height in zip(*cut, strict=True):
        room = max(1, LARGEST_BATCH // of_one_height[0][0].numel())
        yield from map(Matrices, *(x_BPQ.split(room) for x_BPQ in of_one_height))


def cut_rows(x: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views [B, P, Q] of x [..., Q], one for each height P in `blocks`."""
    return x.reshape(-1, sum(blocks), x.shape[-1]).split(blocks, dim=1)


def batches(pieces: Iterable[Matrices]) -> Iterator[list[Matrices]]:
    """Pieces whose matrices have one shape, together up to LARGEST_BATCH numbers."""
    waiting: dict[tuple, list[Matrices]] = {}
    for piece in pieces:
        key = (piece.weight.shape[1:], piece.weight.dtype, piece.weight.device)
        batch = waiting.setdefault(key, [])
        if batch and sum(other.weight.numel() for other in (*batch, piece)) > LARGEST_BATCH:
            yield waiting.pop(key)
            batch = waiting.setdefault(key, [])
        batch.append(piece)
    yield from waiting.values()


def _columns(group: dict) -> tuple[list, list, list]:
    return group["param_names"], group["params"], group["blocks"]


def _checked(name: str, parameter: nn.Parameter, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The block heights, written out; ValueError where they do not fill the rows."""
    if parameter.ndim < 2 or not parameter.is_contiguous():
        raise ValueError(f"parameter {name!r} of shape {tuple(parameter.shape)}: Muon wants a contiguous matrix")
    rows = parameter.shape[:-1].numel()
    blocks = merged(blocks or (rows,))
    if rows % sum(blocks):
        raise ValueError(f"parameter {name!r}: blocks of {blocks} rows do not fill its {rows} rows")
    return blocks
