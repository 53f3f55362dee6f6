"""`gluon_views_on_cpu` with shared memory whose bytes lie as its layouts say, for kernels that look at one place in
several of them: linear layouts word by word, rows of 128 bf16 as two panels of 64. What swizzling does inside a panel
is the same in every view of it and left out."""

from __future__ import annotations

from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import gluon_on_cpu as base
from tests.ops import gluon_views_on_cpu as views
from tests.ops.gluon_on_cpu import KINDS, Kind, Shared, Table, Tile


class Linear(base.Layout):
    """bases: of each bit of an element's place, what it adds to its indices."""

    def __init__(self, bases: list[list[int]]) -> None:
        super().__init__()
        self.bases = tuple(map(tuple, bases))


class Placed(Shared):
    """The elements of `flat` at the places `at`."""

    def __init__(self, flat: Tensor, at: Tensor) -> None:
        self.flat, self.at, self.shape, self.dtype = flat, at, list(at.shape), KINDS[flat.dtype]
        self.parts: dict[int, Placed] = {}  # the same object each time: a barrier keeps what it waits for

    value = property(lambda self: self.flat[self.at])  # type: ignore[assignment]

    def put(self, value: Tensor | float) -> None:
        self.flat[self.at] = value

    def load(self, layout: Any) -> Tile:
        return Tile(self.value)

    def store(self, tile: Tile) -> None:
        assert self.shape == tile.shape and self.flat.dtype == tile.value.dtype, (self.shape, tile.shape)
        self.put(tile.value)

    def index(self, i: Any) -> Placed:
        return self.parts.setdefault(int(i), Placed(self.flat, self.at[int(i)]))

    def slice(self, start: int, length: int, dim: int = 0) -> Placed:
        return Placed(self.flat, self.at.narrow(dim, start, length))

    def permute(self, order: Any) -> Placed:
        return Placed(self.flat, self.at.permute(order))

    def _reinterpret(self, dtype: Kind, shape: Any, layout: Any) -> Placed:
        whole = self.flat.view(dtype.torch)
        first = int(self.at.min()) * self.flat.itemsize // dtype.torch.itemsize
        assert first + prod(shape) <= len(whole), "past the end of what was allocated"
        return Placed(whole, first + places(dtype.torch, shape, layout))


def places(dtype: torch.dtype, shape: Any, layout: Any) -> Tensor:
    shape = list(shape)
    if isinstance(layout, Linear):
        inner = linear_places(layout.bases)
        outer = shape[: len(shape) - inner.ndim]
        assert shape[len(outer) :] == list(inner.shape)
        return torch.arange(prod(outer)).reshape(*outer, *[1] * inner.ndim) * inner.numel() + inner
    if dtype == torch.bfloat16 and len(shape) == 2 and shape[1] == 128:
        return torch.arange(prod(shape)).reshape(2, shape[0], 64).transpose(0, 1).reshape(shape)
    return torch.arange(prod(shape)).reshape(shape)


@lru_cache
def linear_places(bases: tuple[tuple[int, ...], ...]) -> Tensor:
    indices = torch.zeros(2 ** len(bases), len(bases[0]), dtype=torch.long)
    for place in range(len(indices)):
        for bit, basis in enumerate(bases):
            if place >> bit & 1:
                indices[place] ^= torch.tensor(basis)
    found = torch.full((indices.amax(0) + 1).tolist(), -1)
    found[tuple(indices.T)] = torch.arange(len(indices))
    assert bool((found >= 0).all()), "two places of one element"
    return found


def allocate(kind: Kind, shape: Any, layout: Any, value: Tile | None = None) -> Placed:
    nothing = float("nan") if kind.torch.is_floating_point else 0
    return Placed(torch.full((prod(shape),), nothing, dtype=kind.torch), places(kind.torch, shape, layout))


def tma_in(table: Table, coordinates: Any, barrier: Shared, smem: Placed) -> None:
    """Zeros where there are no rows."""
    assert smem.shape == table.block_shape
    row, column = (int(base.plain(x)) for x in coordinates)
    rows = torch.arange(smem.shape[0])[:, None]
    pointer = table.pointer + ((row + rows) * table.stride + column + torch.arange(smem.shape[1]))
    there = (rows < table.rows - row).expand(smem.shape)
    smem.put(float("nan"))
    barrier.arrivals.append((smem, lambda: pointer.read(there, 0)))


def mbarrier_wait(barrier: Shared, phase: Any, pred: Any = True) -> None:
    assert pred and int(base.plain(phase)) == barrier.phases % 2
    assert barrier.expected == sum(smem.value.nbytes for smem, _ in barrier.arrivals) > 0
    for smem, content in barrier.arrivals:
        smem.put(content())
    barrier.arrivals, barrier.expected, barrier.phases = [], 0, barrier.phases + 1


def product_of(left: Shared, right: Shared, sums: Tile, *, use_acc: bool, is_async: bool) -> Tile:
    found = plain_product(left, right, sums, use_acc=False, is_async=is_async)
    return Tile(sums.value + found.value) if use_acc else found


def asm(text: str, constraints: str, inputs: list[Tile], kind: Kind, is_pure: bool, pack: int) -> Tile:
    """A sign may be part of it."""
    signed = [Tile(-inputs[0].value)] if "neg.f32" in text else inputs
    return signed[0] if text.startswith("neg.f32") else plain_asm(text, constraints, signed, kind, is_pure, pack)


plain_asm, plain_product = views.asm, views.product_of


def kernels_of(patch: pytest.MonkeyPatch, *modules: Any) -> list[Any]:
    """As `gluon_on_cpu.kernels_of`."""
    language, stand_ins = base.language, base.stand_ins

    def wider() -> Any:
        gl = language()
        gl.SharedLinearLayout, gl.allocate_shared_memory = Linear, allocate
        gl.NVMMASharedLayout = SimpleNamespace(get_default_for=lambda *_: base.Layout())
        return gl

    def more() -> Any:
        found = stand_ins()
        found["triton.experimental.gluon.language.nvidia.hopper"].__dict__["mbarrier"].wait = mbarrier_wait
        return found

    patch.setattr(base, "language", wider)
    patch.setattr(base, "stand_ins", more)
    for name, stand_in in (("tma_in", tma_in), ("product_of", product_of), ("asm", asm)):
        patch.setattr(views, name, stand_in)
    return views.kernels_of(patch, *modules)
