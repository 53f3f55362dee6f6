"""Rows of a table by id, and the gradient of the table.

`reference.py` defines the gradient, `run_kernels.py` computes it on a card.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from rille.ops.embedding.step import step_tokens
from rille.ops.settling import settle

__all__ = ["choose_backend", "embed", "step_tokens"]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question


def embed(ids: Tensor, table: Tensor, *, backend: str | None = None) -> Tensor:
    """table[ids]: ids [N] of an integer dtype in [0, W), table [W, D]; result [N, D].

    Differentiable in the table. With the kernels the gradient is summed in fp32 and rounded once, has the same bits
    every time, and asks the device for no number. backend: "triton" or "torch"; by default what `choose_backend` says.

    Raises ValueError for shapes, and for a backend that cannot run. An id outside [0, W) raises IndexError on the CPU
    and stops a GPU.
    """
    if ids.ndim != 1 or table.ndim != 2:
        raise ValueError(f"embed: ids {tuple(ids.shape)} and table {tuple(table.shape)}; want [N] and [W, D]")
    learns = torch.is_grad_enabled() and table.requires_grad  # else nothing of this op is wanted
    said = "PyTorch's own gradient runs on a GPU"
    if settle("embed", backend, "torch", lambda: _obstacle(table), table, said) == "torch" or not learns:
        return functional.embedding(ids, table)
    from rille.ops.embedding import launch

    return launch.embed(ids, table)


def choose_backend(table: Tensor) -> tuple[str, str]:
    """The backend for this table and, in words, why."""
    reason = _obstacle(table) if table.is_cuda else f"the table is on {table.device.type}"
    return ("triton", "a CUDA table of a supported dtype") if reason is None else ("torch", reason)


def _obstacle(table: Tensor) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.embedding import launch

    if not table.is_cuda and not launch.INTERPRET:
        return f"the table is on {table.device.type}"
    if table.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bf16, fp16 or fp32, not {table.dtype}"
    return None
