"""Gluon kernels run by Python, for tests: Triton's interpreter knows no Gluon.

`kernels_of(module)` executes a module's source again with a stand-in for the part of Gluon that kernels use whose
matrix products, if any, are of shared memory and waited for at once. Tiles are torch tensors whatever their layout,
shared memory starts as NaN, pointers are places in the storage of the tensors they came from. A program runs as one
thread: what it computes is tested, the order between its warps is not. An asynchronous copy arrives when it is waited
for, and reads then or (`eager`) when it is asked for; in between its target holds NaN. So do the TMA's, of which those
to memory must also be let go before their source is used again.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from rille.ops import barriers_gluon
from tests.ops.gluon_machine import MACHINE


class Kind:
    """A dtype, as the kernels look at it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.torch, self.primitive_bitwidth, self.element_ty = dtype, dtype.itemsize * 8, self


KINDS = {
    kind: Kind(kind)
    for kind in (torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int64, torch.bool, torch.float64)
}


class Layout:
    """Any layout: nothing here depends on it."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.layout = self


def plain(x: Any) -> Any:
    return x.value if isinstance(x, Tile) else x


class Tile:
    """A tensor in registers, or a scalar that the kernel has loaded."""

    def __init__(self, value: Tensor) -> None:
        self.value, self.type = value, Layout()

    shape = property(lambda self: list(self.value.shape))
    dtype = property(lambda self: KINDS[self.value.dtype])
    numel = property(lambda self: self.value.numel())

    def to(self, kind: Kind) -> Tile:
        return Tile(self.value.to(kind.torch))

    def reshape(self, shape: Any) -> Tile:
        return Tile(self.value.reshape(shape))

    def permute(self, order: Any) -> Tile:
        return Tile(self.value.permute(order))

    def __getitem__(self, index: Any) -> Tile:
        return Tile(self.value[index])

    def __bool__(self) -> bool:
        return bool(self.value)

    def __index__(self) -> int:
        return int(self.value)

    def __neg__(self) -> Tile:
        return Tile(-self.value)


def operator(name: str) -> Any:
    def apply(self: Tile, other: Any) -> Any:
        if isinstance(other, Pointer):
            return NotImplemented
        return Tile(
            getattr(self.value, name)(torch.as_tensor(plain(other)) if name.startswith("__r") else plain(other))
        )

    return apply


for _name in "add radd sub rsub mul rmul truediv rtruediv mod rmod lt le gt ge and rand floordiv rfloordiv".split():
    setattr(Tile, f"__{_name}__", operator(f"__{_name}__"))
Tile.__ne__ = operator("__ne__")  # type: ignore[assignment]
Tile.__eq__ = operator("__eq__")  # type: ignore[assignment]
Tile.__hash__ = object.__hash__

APART = 2**40
MEMORY: dict[int, Tensor] = {}


@dataclass(eq=False)
class Pointer:
    """Places in memory: number of a storage times APART, plus elements."""

    at: Tensor
    element_ty: Kind

    dtype = property(lambda self: self)
    shape = property(lambda self: list(self.at.shape))

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.at + torch.as_tensor(plain(other)).long(), self.element_ty)

    __radd__ = __add__

    def read(self, mask: Any, other: Any = None) -> Tensor:
        at, mask = torch.broadcast_tensors(self.at, torch.as_tensor(True if mask is None else plain(mask)))
        kind = self.element_ty.torch
        found = torch.full(at.shape, float("nan") if kind.is_floating_point else -(2**20), dtype=kind)
        if other is not None:
            found.fill_(other)
        for number in (at[mask] // APART).unique().tolist():
            here = mask & (at // APART == number)
            found[here] = MEMORY[number][at[here] % APART]
        return found

    def write(self, value: Tensor, mask: Any) -> None:
        true = torch.as_tensor(True if mask is None else plain(mask))
        at, value, mask = torch.broadcast_tensors(self.at, value, true)
        for number in (at[mask] // APART).unique().tolist():
            here = mask & (at // APART == number)
            assert MEMORY[number].dtype == value.dtype, (MEMORY[number].dtype, value.dtype)
            MEMORY[number][at[here] % APART] = value[here]


def pointer_to(x: Tensor) -> Pointer:
    size = x.untyped_storage().nbytes() // x.itemsize
    number = len(MEMORY) + 1
    MEMORY[number] = x.as_strided((size,), (1,), 0)
    return Pointer(torch.tensor(number * APART + x.storage_offset()), KINDS[x.dtype])


@dataclass(eq=False)
class Table:
    """A descriptor of the TMA unit: rows in memory, moved in blocks."""

    pointer: Pointer
    rows: int
    stride: int
    block_shape: list[int]
    layout = None

    @property
    def block_type(self) -> Any:
        size = self.block_shape[0] * self.block_shape[1] * self.pointer.element_ty.primitive_bitwidth // 8
        return types.SimpleNamespace(nbytes=size)

    def block(self, coordinates: Any) -> Pointer:
        row, column = (int(plain(x)) for x in coordinates)
        assert 0 <= row <= self.rows - self.block_shape[0], (row, self.rows)
        places = torch.arange(self.block_shape[0])[:, None] * self.stride + torch.arange(self.block_shape[1])
        return self.pointer + (row * self.stride + column + places)


def place(x: Any) -> Any:
    """What a kernel sees of an argument."""
    if hasattr(x, "block_shape"):
        return Table(pointer_to(x.base), x.shape[0], x.strides[0], x.block_shape)
    return pointer_to(x) if isinstance(x, Tensor) else x


class Shared:
    """Shared memory, or a view of it."""

    arrivals: list[Any]  # of a barrier: copies of its phase, whose bytes must be `expected`; phases that are over
    expected = phases = 0

    def __init__(self, value: Tensor) -> None:
        self.value, self.shape, self.dtype = value, list(value.shape), KINDS[value.dtype]

    def load(self, layout: Any) -> Tile:
        return Tile(self.value.clone())

    def store(self, tile: Tile) -> None:
        assert list(self.value.shape) == tile.shape, (self.shape, tile.shape)
        assert self.value.dtype == tile.value.dtype
        self.value.copy_(tile.value)

    def index(self, i: Any) -> Shared:
        return Shared(self.value[int(i)])

    def permute(self, order: Any) -> Shared:
        return Shared(self.value.permute(order))

    def _reinterpret(self, dtype: Any, shape: Any, layout: Any) -> Shared:
        assert list(shape) == self.shape
        return self


def allocate(kind: Kind, shape: Any, layout: Any, value: Tile | None = None) -> Shared:
    nothing = float("nan") if kind.torch.is_floating_point else 0
    found = Shared(torch.full(shape, nothing, dtype=kind.torch))
    if value is not None:
        found.store(value)
    return found


def async_copy(smem: Shared, pointer: Pointer, mask: Any = None) -> None:
    here = torch.as_tensor(True if mask is None else plain(mask)).expand(smem.shape)
    smem.value[here] = float("nan")
    read = pointer.read(here) if MACHINE.eager else None

    def arrive() -> None:
        smem.value[here] = (pointer.read(here) if read is None else read)[here]

    MACHINE.groups[-1].append(arrive)


def wait_group(outstanding: int) -> None:
    while len(MACHINE.groups) - 1 > outstanding:
        for arrive in MACHINE.groups.pop(0):
            arrive()


def tma_in(table: Table, coordinates: Any, barrier: Shared, smem: Shared, pred: Any = True) -> None:
    assert not MACHINE.leaving, "a copy into shared memory that may not have left yet"
    if pred:
        assert smem.shape == table.block_shape
        pointer = table.block(coordinates)
        smem.value.fill_(float("nan"))
        read = pointer.read(None) if MACHINE.eager else None
        barrier.arrivals.append((smem, lambda: pointer.read(None) if read is None else read))


def tma_out(table: Table, coordinates: Any, smem: Shared) -> None:
    pointer, sent = table.block(coordinates), smem.value.clone()

    def leave() -> None:
        assert torch.equal(sent, smem.value), "written before it left"
        pointer.write(sent, None)

    MACHINE.leaving.append(leave)


def tma_store_wait(outstanding: int) -> None:
    while len(MACHINE.leaving) > outstanding:
        MACHINE.leaving.pop(0)()


def mbarrier_init(barrier: Shared, count: int) -> None:
    barrier.arrivals, barrier.expected, barrier.phases = [], 0, 0
    MACHINE.barriers.append(barrier)


def mbarrier_invalidate(barrier: Shared) -> None:
    assert not barrier.arrivals and not barrier.expected, "given up before all has arrived"
    MACHINE.barriers.remove(barrier)


def mbarrier_expect(barrier: Shared, count: int, pred: Any = True) -> None:
    if pred:
        assert not barrier.expected
        barrier.expected = count


def mbarrier_wait(barrier: Shared, phase: Any, pred: Any = True) -> None:
    """Waits for the end of a phase of that parity; one that would never end fails."""
    if pred:
        assert int(plain(phase)) == barrier.phases % 2
        assert barrier.expected == sum(smem.value.nbytes for smem, _ in barrier.arrivals) > 0
        for smem, content in barrier.arrivals:
            smem.value.copy_(content())
        barrier.arrivals, barrier.expected, barrier.phases = [], 0, barrier.phases + 1


def unary(function: Any) -> Any:
    return lambda x: Tile(function(torch.as_tensor(plain(x))))


def asm(text: str, constraints: str, inputs: list[Tile], *_: Any) -> Tile:
    known = {"ex2": torch.exp2, "rcp": torch.reciprocal, "laneid": torch.clone, "bf16x2": torch.Tensor.bfloat16}
    return Tile(next(known[name] for name in known if name in text)(inputs[0].value).to(inputs[0].value.dtype))


def where(condition: Any, x: Any, y: Any) -> Any:
    if isinstance(x, Pointer):
        return Pointer(torch.where(condition.value, x.at, y.at), x.element_ty)
    return Tile(torch.where(torch.as_tensor(plain(condition)), torch.as_tensor(plain(x)), torch.as_tensor(plain(y))))


def warpgroup_mma(left: Shared, right: Shared, sums: Tile, *, use_acc: bool = True, is_async: bool = False) -> Tile:
    product = left.value.float() @ right.value.float()
    return Tile(sums.value + product if use_acc else product)


def both(function: Any) -> Any:
    return lambda x, y: Tile(function(torch.as_tensor(plain(x)), torch.as_tensor(plain(y))))


def fma(x: Any, y: Any, z: Any) -> Tile:
    return Tile((plain(x).double() * torch.as_tensor(plain(y)).double() + torch.as_tensor(plain(z)).double()).float())


def language() -> types.SimpleNamespace:
    gl = types.SimpleNamespace(
        constexpr=lambda x: x, float32=KINDS[torch.float32], bfloat16=KINDS[torch.bfloat16],
        int32=KINDS[torch.int32], int64=KINDS[torch.int64],
        program_id=lambda axis: Tile(torch.tensor(MACHINE.program[axis], dtype=torch.int32)),
        num_programs=lambda axis: Tile(torch.tensor(MACHINE.grid[axis], dtype=torch.int32)),
        num_warps=lambda: MACHINE.num_warps, thread_barrier=lambda: None, static_range=range,
        load=lambda pointer, mask=None, other=None: Tile(pointer.read(mask, other)),
        store=lambda pointer, value, mask=None: pointer.write(value.value, mask),
        arange=lambda start, end, layout: Tile(torch.arange(start, end, dtype=torch.int32)),
        full=lambda shape, value, kind, layout: Tile(torch.full(shape, plain(value), dtype=kind.torch)),
        allocate_shared_memory=allocate, inline_asm_elementwise=asm, where=where, fma=fma,
        convert_layout=lambda x, layout, assert_trivial=False: x,
        join=lambda x, y: Tile(torch.stack([x.value, y.value], -1)),
        split=lambda x: (Tile(x.value[..., 0]), Tile(x.value[..., 1])),
        sum=lambda x, axis: Tile(x.value.sum(axis)),
        broadcast=lambda x, y: tuple(map(Tile, torch.broadcast_tensors(x.value, y.value))),
        minimum=both(torch.minimum), maximum=both(torch.maximum),
        exp=unary(torch.exp), log=unary(torch.log), abs=unary(torch.abs), rsqrt=unary(torch.rsqrt),
    )  # fmt: skip
    for name in (
        "BlockedLayout", "SliceLayout", "SwizzledSharedLayout", "NVMMASharedLayout", "NVMMADistributedLayout",
        "DistributedLinearLayout",
    ):  # fmt: skip
        setattr(gl, name, Layout)
    return gl


def module(name: str, **names: Any) -> types.ModuleType:
    found = types.ModuleType(name)
    found.__dict__.update(names)
    return found


def stand_ins() -> dict[str, types.ModuleType]:
    gl = language()
    copies = module(
        "async_copy", async_copy_global_to_shared=async_copy, wait_group=wait_group,
        commit_group=lambda: MACHINE.groups.append([]),
    )  # fmt: skip
    barriers = dict(MBarrierLayout=Layout, init=mbarrier_init, expect=mbarrier_expect, wait=mbarrier_wait)
    barriers |= dict(invalidate=mbarrier_invalidate)
    tma = dict(async_copy_global_to_shared=tma_in, async_copy_shared_to_global=tma_out, store_wait=tma_store_wait)
    hopper: dict[str, Any] = dict(mbarrier=module("mbarrier", **barriers), tma=module("tma", **tma))
    hopper |= dict(fence_async_shared=lambda: None, warpgroup_mma=warpgroup_mma)
    hopper |= dict(warpgroup_mma_wait=lambda outstanding, deps: deps[0])
    root, same = "triton.experimental", lambda function: function
    gluon = module("gluon", jit=same, constexpr_function=same, language=gl)
    return {
        root: module(root, gluon=gluon), f"{root}.gluon": gluon,
        f"{root}.gluon.language.nvidia.ampere": module("ampere", async_copy=copies),
        f"{root}.gluon.language.nvidia.hopper": module("hopper", **hopper),
    }  # fmt: skip


def kernels_of(*real: types.ModuleType) -> list[types.ModuleType]:
    """The modules' sources executed with the stand-in; a later one sees the earlier ones, and all see how barriers are
    given up."""
    found, names = [], stand_ins()
    for each in (barriers_gluon, *real):
        copy = types.ModuleType(each.__name__)
        with mock.patch.dict(sys.modules, names):
            exec(compile(Path(str(each.__file__)).read_text(), str(each.__file__), "exec"), copy.__dict__)
        names[each.__name__] = copy
        found.append(copy)
    return found[1:]


class Kernel:
    """`kernel[grid](...)` of a function, one program after another; at most `programs` of them."""

    def __init__(self, function: Any, eager: bool = False, programs: int | None = None) -> None:
        self.function, self.eager, self.programs = function, eager, programs

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        grid = (*grid, 1) if self.programs is None else (min(self.programs, grid[0]), 1)

        def launch(*arguments: Any, num_warps: int, **names: Any) -> None:
            for option in ("maxnreg", "enable_fp_fusion"):
                names.pop(option, None)
            MEMORY.clear()
            values = [place(x) for x in arguments]
            MACHINE.grid, MACHINE.num_warps, MACHINE.eager = grid, num_warps, self.eager
            for program in product(range(grid[0]), range(grid[1])):
                MACHINE.begin(program)
                self.function(*values, **names)
                MACHINE.end()

        return launch
