"""Launches that cost the host little.

Triton's own call binds names, describes every argument and writes the description out as the key of what it compiled:
for a Gluon kernel with eight descriptors more microseconds than the kernel runs. Here the key is a tuple of what a
compilation depends on: constants, options, and of each argument the type and whether 16 divides it. A known key goes
straight to the compiled kernel.

Descriptors of the TMA unit are made without views of the tensors, their layouts in shared memory once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from rille.ops.chains import is_chain

INTERPRET = bool(knobs.runtime.interpret)

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}
_watchers = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook


def launch(kernel: Any, programs: int | tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """`kernel[programs](*arguments, **constants)`. programs: of each axis of the grid. arguments: all that are no
    constants, in order; in the kernel's signature constants follow them. constants: those and options such as
    num_warps, hashable. Raises ValueError for a tensor on another card than the current one, on which kernels run and
    which may not reach its memory."""
    if INTERPRET:
        kernel[programs if isinstance(programs, tuple) else (programs,)](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    kinds, given = described_all(arguments, device)
    key = (id(kernel), device, *constants.items(), *kinds)
    found = _compiled.get(key)
    grid = (*programs, 1, 1)[:3] if isinstance(programs, tuple) else (programs, 1, 1)
    if found is None:
        compiled = kernel[grid](*arguments, **constants)
        _compiled[key] = compiled, tuple(constants.get(name) for name in kernel.arg_names[len(arguments) :])
        return
    compiled, values = found
    if _watchers[0].calls or _watchers[1].calls:
        compiled[grid](*arguments, *values)
        return
    # as `compiled[grid]`, which also describes the launch to nobody
    cuda: Any = driver.active
    stream = cuda.get_current_stream(device)
    compiled.run(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *given, *values)


def described_all(arguments: tuple[Any, ...], device: int = 0) -> tuple[list[Any], list[Any]]:
    """What the compiled code may take for granted about the arguments, and what it is given: of a tensor on a card the
    address, for of a tensor the launcher asks the driver each time whether its memory can be reached."""
    kinds, given = [], []
    for x in arguments:
        if isinstance(x, Tensor):
            at, card = x.data_ptr(), x.get_device()
            kinds += x.dtype, at % 16 == 0
            given.append(at if card >= 0 else x)
            if card != device and card >= 0:
                raise ValueError(
                    f"a kernel runs on cuda:{device}, the current device, and is given a tensor on cuda:{card}: make "
                    f"that one current, with torch.cuda.set_device({card})"
                )
        elif isinstance(x, int):
            kinds.append((x % 16 == 0, x == 1, -(2**31) <= x < 2**31))
            given.append(x)
        elif isinstance(x, tuple):
            inner, members = described_all(x, device)
            kinds.append(tuple(inner))
            given.append(tuple(members))
        else:
            kinds.append(type(x) if x is None or isinstance(x, float) else x.kind)  # that of a descriptor
            given.append(x)
    return kinds, given


def chained(x: Tensor, joins: bool = False) -> dict[str, Any]:
    """The constant, and the option, of a kernel that may begin before the one ahead of it has ended (`chains.py`), on
    x's card. joins: it waits for two streams, so that it only lets the next one begin."""
    if INTERPRET or not (is_chain() and takes_chains(x.device)):
        return dict(CHAINED=False)
    return dict(CHAINED=True) if joins else dict(CHAINED=True, launch_pdl=True)


@lru_cache
def takes_chains(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def rows_of(x: Tensor, height: int, width: int | None = None) -> TensorDescriptor:
    """[..., rows, columns] without gaps as one table, in blocks of height x width."""
    columns = x.shape[-1]
    return described(False, x, x.numel() // columns, columns, columns, height, width or columns)


def tiles_of(x: Tensor, height: int, width: int | None = None) -> Any:
    """`rows_of` for Gluon."""
    columns = x.shape[-1]
    return described(True, x, x.numel() // columns, columns, columns, height, width or columns)


def heads_of(x_NHV: Tensor, height: int, width: int) -> Any:
    """[N, H * V] for Gluon, tokens any distance apart."""
    N, H, V = x_NHV.shape
    return described(True, x_NHV, N, H * V, x_NHV.stride(0), height, width)


def described(gluon: bool, x: Tensor, rows: int, columns: int, stride: int, height: int, width: int) -> Any:
    """The address must be a multiple of 16 bytes, and so must be the stride. (The class's own constructor asks for that
    and more, which takes longer than everything else here.)"""
    kind, fixed = constant_parts(gluon, height, width, x.dtype)
    descriptor = kind.__new__(kind)
    descriptor.__dict__.update(fixed, base=x, shape=[rows, columns], strides=[stride, 1])
    return descriptor


@lru_cache
def constant_parts(gluon: bool, height: int, width: int, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """The class of a descriptor, and what does not depend on the tensor. Gluon wants the layout in shared memory
    spelled out."""
    fixed: dict[str, Any] = dict(block_shape=[height, width], padding="zero", kind=(gluon, height, width, dtype))
    if not gluon:
        return TensorDescriptor, fixed
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as Descriptor

    elements: dict[torch.dtype, Any] = {torch.float32: gl.float32, torch.bfloat16: gl.bfloat16}
    element = elements.get(dtype, gl.float16)
    return Descriptor, fixed | dict(layout=gl.NVMMASharedLayout.get_default_for([height, width], element))
