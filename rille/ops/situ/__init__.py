"""SiTU-GLU, the softly capped gated activation of every feed-forward part of K3, and SwiGLU, its limit without caps.

`reference.py` is the definition; `glu_kernels.py` are the kernels, launched by `launch.py`.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from rille.ops.settling import settle
from rille.ops.situ import reference

__all__ = ["choose_backend", "situ_glu", "swiglu"]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
SLOWLY = "the reference runs on a GPU, slowly"


def situ_glu(gate: Tensor, up: Tensor, cap_gate: float, cap_up: float, *, backend: str | None = None) -> Tensor:
    """[a tanh(gate/a) sigmoid(gate)] * [b tanh(up/b)] with a = cap_gate, b = cap_up (technical report equation 12).

    gate and up share shape and dtype, which the result has too; fp32 inside (float64 for float64). |result| <= a * b.
    backend: "triton" or "reference"; by default what `choose_backend` says.

    Raises ValueError for caps that are not positive, for operands that differ in shape or dtype, and for a backend that
    cannot run.
    """
    if cap_gate <= 0 or cap_up <= 0:
        raise ValueError(f"situ_glu: caps must be positive, got {cap_gate} and {cap_up}")
    _same("situ_glu", gate, up)
    if settle("situ_glu", backend, "reference", lambda: _obstacle(gate), gate, SLOWLY) == "reference":
        return reference.situ_glu(gate, up, cap_gate, cap_up)
    return _triton(gate, up, float(cap_gate), float(cap_up), True)


def swiglu(gate: Tensor, up: Tensor, *, backend: str | None = None) -> Tensor:
    """gate * sigmoid(gate) * up, the activation of Kimi Linear. Same shapes, dtypes and errors as `situ_glu`."""
    _same("swiglu", gate, up)
    if settle("swiglu", backend, "reference", lambda: _obstacle(gate), gate, SLOWLY) == "reference":
        return reference.swiglu(gate, up)
    return _triton(gate, up, 1.0, 1.0, False)


def choose_backend(gate: Tensor, up: Tensor) -> tuple[str, str]:
    """The backend for these operands and, in words, why."""
    reason = _obstacle(gate) if gate.is_cuda else f"the tensors are on {gate.device.type}"
    return ("triton", "CUDA tensors of a supported dtype") if reason is None else ("reference", reason)


def _triton(gate: Tensor, up: Tensor, cap_gate: float, cap_up: float, capped: bool) -> Tensor:
    from rille.ops.situ import launch

    if gate.ndim == 2:
        return launch.glu(launch.dense_rows(gate), launch.dense_rows(up), cap_gate, cap_up, capped)
    width = max(1, gate.shape[-1]) if gate.ndim else 1
    rows = (launch.dense_rows(x.reshape(x.numel() // width, width)) for x in (gate, up))
    return launch.glu(*rows, cap_gate, cap_up, capped).view(gate.shape)


def _obstacle(gate: Tensor) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.situ import launch

    if not gate.is_cuda and not launch.interpreting():
        return f"the tensors are on {gate.device.type}"
    if gate.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bf16, fp16 or fp32, not {gate.dtype}"
    return None


def _same(op: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{op}: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} "
            "must agree in shape and dtype"
        )
