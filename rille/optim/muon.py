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
data (`groups.Named`). All maps of one shape, or of its transpose, go through Newton-Schulz in one batch, whatever
layer they come from.

What is no matrix takes AdamW (`kinds.py`), with the same learning rate.

Axes: B matrices of P rows and Q columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import sqrt
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from rille.ops.newton_schulz import newton_schulz
from rille.optim.config import OptimConfig
from rille.optim.groups import Named, decay_groups
from rille.optim.kinds import merged

UPDATE_RMS = 0.2  # Moonlight's: the root mean square of AdamW's step in practice
LARGEST_BATCH = 2**27  # numbers of the matrices that go through Newton-Schulz together: 0.5 GiB in fp32

# On a card 16 bits for the tensor cores. Not bf16: all values are below 4, and fp16 has three more bits for them.
INNER = {"cuda": torch.float16}


class Piece(NamedTuple):
    """Matrices [B, P, Q] of one parameter, P <= Q: views of its weight, gradient and momentum."""

    weight: Tensor
    gradient: Tensor
    momentum: Tensor


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
        live = [(p, blocks) for p, blocks in zip(group["params"], group["blocks"], strict=True) if p.grad is not None]
        if not live:
            return
        weights, gradients = [p for p, _ in live], [p.grad for p, _ in live]
        momenta = [self._momentum(p) for p in weights]
        torch._foreach_mul_(momenta, group["momentum"])  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_add_(momenta, gradients)  # pyright: ignore[reportPrivateImportUsage]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])  # pyright: ignore[reportPrivateImportUsage]
        pieces = (
            piece
            for (p, blocks), gradient, momentum in zip(live, gradients, momenta, strict=True)
            for piece in matrices(p, gradient, momentum, blocks)
        )
        for batch in batches(pieces):
            move(batch, group["lr"], group["momentum"])

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


def matrices(weight: Tensor, gradient: Tensor, momentum: Tensor, blocks: tuple[int, ...]) -> Iterator[Piece]:
    """The maps of one parameter, at most LARGEST_BATCH numbers a piece."""
    cut = [cut_rows(x, blocks) for x in (weight, gradient, momentum)]
    for of_one_height in zip(*cut, strict=True):
        flat = [x_BPQ.mT if x_BPQ.shape[1] > x_BPQ.shape[2] else x_BPQ for x_BPQ in of_one_height]
        room = max(1, LARGEST_BATCH // flat[0][0].numel())
        yield from map(Piece, *(x_BPQ.split(room) for x_BPQ in flat))


def cut_rows(x: Tensor, blocks: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Views [B, P, Q] of x [..., Q], one for each height P in `blocks`."""
    return x.reshape(-1, sum(blocks), x.shape[-1]).split(blocks, dim=1)


def batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Pieces whose matrices have one shape, together up to LARGEST_BATCH numbers."""
    waiting: dict[tuple, list[Piece]] = {}
    for piece in pieces:
        key = (piece.weight.shape[1:], piece.weight.dtype, piece.weight.device)
        batch = waiting.setdefault(key, [])
        if batch and sum(other.weight.numel() for other in (*batch, piece)) > LARGEST_BATCH:
            yield waiting.pop(key)
            batch = waiting.setdefault(key, [])
        batch.append(piece)
    yield from waiting.values()


def move(batch: list[Piece], lr: float, momentum: float) -> None:
    """Nesterov, Newton-Schulz, and the step of a batch's weights, in place."""
    sizes = [len(piece.weight) for piece in batch]
    u_BPQ = batch[0].gradient.new_empty(sum(sizes), *batch[0].gradient.shape[1:])
    for piece, part in zip(batch, u_BPQ.split(sizes), strict=True):
        torch.add(piece.gradient, piece.momentum, alpha=momentum, out=part)
    o_BPQ = newton_schulz(u_BPQ, dtype=INNER.get(u_BPQ.device.type))
    step = lr * UPDATE_RMS * sqrt(u_BPQ.shape[2])
    for piece, o in zip(batch, o_BPQ.split(sizes), strict=True):
        piece.weight.sub_(o, alpha=step)


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
