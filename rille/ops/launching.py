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
from triton.tools.tensor_descriptor import TensorDescriptor

from rille.ops.chains import is_chain

INTERPRET = bool(knobs.runtime.interpret)

_compiled: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], **constants: Any) -> None:
    """`kernel[(programs,)](*arguments, **constants)`. arguments: all that are no constants, in order; in the kernel's
    signature constants follow them. constants: those and options such as num_warps, hashable."""
    if INTERPRET:
        kernel[(programs,)](*arguments, **constants)
        return
    device = torch.cuda.current_device()
    key = (id(kernel), device, tuple(constants.items()), *[kind(x) for x in arguments])
    found = _compiled.get(key)
    if found is None:
        compiled = kernel[(programs,)](*arguments, **constants)
        _compiled[key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])
        return
    compiled, values = found
    compiled[(programs, 1, 1)](*arguments, *values)


def chained(x: Tensor, joins: bool = False) -> dict[str, Any]:
    """The constant, and the option, of a kernel that may begin before the one ahead of it has ended (`chains.py`), on
    x's card. joins: it waits for two streams, so that it only lets the next one begin."""
    if INTERPRET or not (is_chain() and takes_chains(x.device)):
        return dict(CHAINED=False)
    return dict(CHAINED=True) if joins else dict(CHAINED=True, launch_pdl=True)


@lru_cache
def takes_chains(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def kind(x: Any) -> Any:
    """What the compiled code may take for granted about an argument."""
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, int):
        return x % 16 == 0, x == 1, -(2**31) <= x < 2**31
    if isinstance(x, float) or x is None:
        return type(x)
    return x.kind  # a descriptor


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

    element: Any = gl.float32 if dtype == torch.float32 else gl.bfloat16
    return Descriptor, fixed | dict(layout=gl.NVMMASharedLayout.get_default_for([height, width], element))
