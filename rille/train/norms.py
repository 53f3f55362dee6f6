"""Norms of gradients and of updates by the kind of parameter (`optim/kinds.py`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor


def norms_by_kind(tensors: Sequence[Tensor], kinds: Sequence[str]) -> dict[str, Tensor]:
    """The norm of all tensors of a kind together, an fp32 scalar on their device."""
    if not tensors:
        return {}
    norms = torch._foreach_norm(list(tensors), 2, dtype=torch.float32)  # pyright: ignore[reportPrivateImportUsage]
    groups: dict[str, list[Tensor]] = {}
    for norm, kind in zip(norms, kinds, strict=True):
        groups.setdefault(kind, []).append(norm)
    return {kind: torch.linalg.vector_norm(torch.stack(group)) for kind, group in groups.items()}


def gradient_norms(model: torch.nn.Module, kinds: Mapping[str, str]) -> dict[str, Tensor]:
    """`gradient_norm/expert` and so on, of the parameters that have a gradient."""
    named = [(p.grad, kinds[name]) for name, p in model.named_parameters() if p.grad is not None]
    return _labelled("gradient_norm", norms_by_kind([g for g, _ in named], [kind for _, kind in named]))


class Updates:
    """How far weights move in one step: made before it, asked after it."""

    def __init__(self, weights: Mapping[str, Tensor], kinds: Mapping[str, str]):
        self.weights = {name: w for name, w in weights.items() if w.requires_grad}
        self.before = [w.detach().clone() for w in self.weights.values()]
        self.kinds = [kinds[name] for name in self.weights]

    @torch.no_grad()
    def norms(self) -> dict[str, Tensor]:
        """`update_norm/expert` and so on. Ends the object: its memory is used up."""
        torch._foreach_sub_(self.before, list(self.weights.values()))  # pyright: ignore[reportPrivateImportUsage]
        return _labelled("update_norm", norms_by_kind(self.before, self.kinds))


def _labelled(what: str, norms: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{what}/{kind}": norm for kind, norm in norms.items()}
