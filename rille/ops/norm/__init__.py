"""RMS normalisation of the residual stream, alone and after an addition, and the gated form that closes KDA.

`reference.py` is the definition; `rms_kernels.py` are the kernels, launched by `launch.py`.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from rille.ops.norm import reference
from rille.ops.settling import settle

__all__ = ["add_rms_norm", "choose_backend", "gated_rms_norm", "rms_norm"]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
SLOWLY = "the reference runs on a GPU, slowly"


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, backend: str | None = None) -> Tensor:
    """Root-mean-square norm over the last axis, times a gain.

    x [..., D] of any float dtype, weight [D] or None; the result has the dtype and shape of x. The mean and the scaling
    are fp32 (float64 for float64 input); the normed value is rounded to x's dtype before the gain, cast to the same
    dtype, multiplies it, as the released model does. eps is added to the mean of squares, inside the root. backend:
    "triton" or "reference"; by default what `choose_backend` says. The gradient is deterministic.

    Raises ValueError when the gain's length is not D, and for a backend that cannot run.
    """
    _check_gain("rms_norm", x, weight)
    if settle("rms_norm", backend, "reference", lambda: _obstacle(x), x, SLOWLY) == "reference":
        return reference.rms_norm(x, weight, eps)
    from rille.ops.norm import launch

    y = launch.rms_norm(_rows(x), None, _contiguous(weight), eps)[0]
    return y if x.ndim == 2 else y.view(x.shape)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass: the sum is rounded to the common dtype before it is normed.

    x and residual [..., D] of one shape and dtype. Otherwise as `rms_norm`.
    """
    _check_gain("add_rms_norm", x, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype:
        raise ValueError(
            f"add_rms_norm: x {tuple(x.shape)} {x.dtype} and residual {tuple(residual.shape)} {residual.dtype} differ"
        )
    if settle("add_rms_norm", backend, "reference", lambda: _obstacle(x), x, SLOWLY) == "reference":
        total = x + residual
        return reference.rms_norm(total, weight, eps), total
    from rille.ops.norm import launch

    y, total, _ = launch.rms_norm(_rows(x), _rows(residual), _contiguous(weight), eps)
    return y.view(x.shape), total.view(x.shape)


def gated_rms_norm(
    o: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """RMS norm over each head's V channels, times the gain, times sigmoid(gate): the output stage of KDA.

    o [N, H, V] and gate [N, H, V] (raw, before the sigmoid), weight [V] shared by all heads. Everything is fp32
    (float64 if an input is) and rounded once, to `dtype`, by default the gate's. Technical report section 2.1.1,
    released model code. backend as in `rms_norm`.

    Raises ValueError when the shapes do not agree, and for a backend that cannot run.
    """
    dtype = gate.dtype if dtype is None else dtype
    if o.shape != gate.shape:
        raise ValueError(f"gated_rms_norm: o {tuple(o.shape)} and gate {tuple(gate.shape)} differ in shape")
    if weight.shape != o.shape[-1:]:
        raise ValueError(f"gated_rms_norm: gain of shape {tuple(weight.shape)} for {o.shape[-1]} value channels")
    if settle("gated_rms_norm", backend, "reference", lambda: _obstacle(o, gate), o, SLOWLY) == "reference":
        return reference.gated_rms_norm(o, gate, weight, eps, dtype)
    from rille.ops.norm import launch

    heads = gate if gate.ndim == 3 and gate.stride(2) == 1 else _rows(gate)[:, None]
    return launch.gated_rms_norm(_rows(o), heads, weight.contiguous(), eps, dtype)[0].view(o.shape)


def choose_backend(*tensors: Tensor) -> tuple[str, str]:
    """The backend for these inputs [..., D] and, in words, why."""
    if not tensors[0].is_cuda:
        return "reference", f"the tensors are on {tensors[0].device.type}"
    reason = _obstacle(*tensors)
    return ("triton", "CUDA tensors of a supported shape") if reason is None else ("reference", reason)


def _obstacle(*tensors: Tensor) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.norm import launch

    for x in tensors:
        if not x.is_cuda and not launch.interpreting():
            return f"the tensors are on {x.device.type}"
        if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"the kernels take bf16, fp16 or fp32, not {x.dtype}"
        if not 1 <= x.shape[-1] <= launch.WIDEST:
            return f"the kernels take rows of 1 to {launch.WIDEST} elements, these have {x.shape[-1]}"
    return None


def _rows(x: Tensor) -> Tensor:
    """[rows, D] with dense rows, without a copy where the rows lie at one distance."""
    from rille.ops.norm import launch

    return launch.dense_rows(x if x.ndim == 2 else x.reshape(-1, x.shape[-1]))


def _contiguous(weight: Tensor | None) -> Tensor | None:
    return None if weight is None else weight.contiguous()


def _check_gain(op: str, x: Tensor, weight: Tensor | None) -> None:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"{op}: gain of shape {tuple(weight.shape)} for a last axis of {x.shape[-1]}")
