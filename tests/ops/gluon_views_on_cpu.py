"""What kernels need beside `gluon_on_cpu` that take shared memory in views of other shapes and types, and rows past the
last from the TMA."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops import gluon_on_cpu as base
from tests.ops.gluon_on_cpu import MACHINE, Kind, Shared, Table, Tile

PRODUCTS: list[tuple[Shared, Tensor]] = []  # operands of products that nobody has waited for


def converted(self: Tile, kind: Kind, bitcast: bool = False) -> Tile:
    return Tile(self.value.view(kind.torch) if bitcast else self.value.to(kind.torch))


def part(self: Shared, i: Any) -> Shared:
    """The same object each time: a barrier keeps what it waits for."""
    return self.__dict__.setdefault("parts", {}).setdefault(int(i), Shared(self.value[int(i)]))


def stretch(self: Shared, start: int, length: int, dim: int = 0) -> Shared:
    return Shared(self.value.narrow(dim, start, length))


def seen_as(self: Shared, kind: Kind, shape: Any, layout: Any) -> Shared:
    """The same bytes in their order; what another layout would make of what was stored before is not known here."""
    if (kind, list(shape)) == (self.dtype, self.shape):
        return self
    assert self.value.is_contiguous() and prod(shape) * kind.torch.itemsize <= self.value.nbytes
    at = self.value.storage_offset() * self.value.itemsize // kind.torch.itemsize
    strides = [prod(shape[n + 1 :]) for n in range(len(shape))]
    return Shared(torch.empty(0, dtype=kind.torch).set_(self.value.untyped_storage(), at, shape, strides))


def tma_in(table: Table, coordinates: Any, barrier: Shared, smem: Shared) -> None:
    """Zeros where there are no rows."""
    assert smem.shape == table.block_shape
    row, column = (int(base.plain(x)) for x in coordinates)
    rows = torch.arange(smem.shape[0])[:, None]
    pointer = table.pointer + ((row + rows) * table.stride + column + torch.arange(smem.shape[1]))
    there = (rows < table.rows - row).expand(smem.shape)
    smem.value.fill_(float("nan"))
    barrier.arrivals.append((smem, lambda: pointer.read(there, 0)))


def product_of(left: Shared, right: Shared, sums: Tile, *, use_acc: bool, is_async: bool) -> Tile:
    assert not use_acc and is_async
    PRODUCTS.extend((each, each.value.clone()) for each in (left, right))
    return Tile(left.value.float() @ right.value.float())


def product_wait(outstanding: int, deps: Any) -> Any:
    """The operands must have stayed as they were; NaN that nobody has written is an operand too."""
    assert outstanding == 0
    for operand, before in PRODUCTS:
        assert torch.equal(operand.value.nan_to_num(), before.nan_to_num()), "written while a product read it"
    PRODUCTS.clear()
    return deps if len(deps) > 1 else deps[0]


def scan(x: Tile, axis: int, combine: Any) -> Tile:
    rows = [Tile(row) for row in x.value.unbind(axis)]
    for n in range(1, len(rows)):
        rows[n] = combine(rows[n - 1], rows[n])
    return Tile(torch.stack([row.value for row in rows], axis))


def asm(text: str, constraints: str, inputs: list[Tile], kind: Kind, is_pure: bool, pack: int) -> Tile:
    known = {"ex2": torch.exp2, "rcp": torch.reciprocal, "rsqrt": torch.rsqrt}
    known |= {"cvt.rn.bf16x2": torch.Tensor.bfloat16, "0xffff0000": torch.Tensor.float}  # of a pair
    [function] = [known[name] for name in known if name in text]
    return Tile(function(inputs[0].value))


def copy_or_zero(smem: Shared, pointer: Any, mask: Any = None) -> None:
    """An asynchronous copy puts zeros where it is masked off."""
    base.async_copy(smem, pointer, mask)
    if mask is not None:
        away = ~mask.value.expand(smem.shape)

        def arrive() -> None:
            smem.value[away] = 0

        smem.value[away] = float("nan")
        MACHINE.groups[-1].append(arrive)


def kernels_of(patch: pytest.MonkeyPatch, *modules: Any) -> list[Any]:
    """As `gluon_on_cpu.kernels_of`. The kernels run only as long as the patches stay."""
    language, stand_ins = base.language, base.stand_ins

    def wider() -> Any:
        gl = language()
        gl.inline_asm_elementwise, gl.associative_scan = asm, scan
        gl.zeros = lambda shape, kind, layout: Tile(torch.zeros(shape, dtype=kind.torch))
        gl.max = lambda x, axis: Tile(x.value.amax(axis))
        gl.reshape, gl.DotOperandLayout = (lambda x, shape: x.reshape(shape)), base.Layout
        return gl

    def more() -> Any:
        found = stand_ins()
        hopper = found["triton.experimental.gluon.language.nvidia.hopper"].__dict__
        hopper |= dict(warpgroup_mma=product_of, warpgroup_mma_wait=product_wait)
        hopper["mma_v2"] = lambda left, right, sums: Tile(left.value.float() @ right.value.float() + sums.value)
        hopper["tma"].async_copy_global_to_shared = tma_in
        ampere: Any = found["triton.experimental.gluon.language.nvidia.ampere"]
        ampere.async_copy.async_copy_global_to_shared = copy_or_zero
        return found

    patch.setattr(base, "language", wider)
    patch.setattr(base, "stand_ins", more)
    patch.setattr(base.Layout, "warps_per_cta", None, raising=False)
    patch.setattr(Tile, "to", converted)
    patch.setattr(Tile, "__xor__", base.operator("__xor__"), raising=False)
    for name, method in (("index", part), ("slice", stretch), ("_reinterpret", seen_as)):
        patch.setattr(Shared, name, method, raising=False)
    patch.setattr(MACHINE, "eager", False)  # whatever the test before it wanted
    return base.kernels_of(*modules)
