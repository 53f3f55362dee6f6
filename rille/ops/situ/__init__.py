"""SiTU-GLU, the softly capped gated activation of every feed-forward part of K3, and SwiGLU, its limit without caps."""

from torch import Tensor

from rille.ops.situ import reference


def situ_glu(gate: Tensor, up: Tensor, cap_gate: float, cap_up: float) -> Tensor:
    """[a tanh(gate/a) sigmoid(gate)] * [b tanh(up/b)] with a = cap_gate, b = cap_up (technical report equation 12).

    gate and up share shape and dtype, which the result has too; fp32 inside (float64 for float64). |result| <= a * b.

    Raises ValueError for caps that are not positive, and for operands that differ in shape or dtype.
    """
    if cap_gate <= 0 or cap_up <= 0:
        raise ValueError(f"situ_glu: caps must be positive, got {cap_gate} and {cap_up}")
    _same("situ_glu", gate, up)
    return reference.situ_glu(gate, up, cap_gate, cap_up)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """gate * sigmoid(gate) * up, the activation of Kimi Linear. Same shapes, dtypes and errors as `situ_glu`."""
    _same("swiglu", gate, up)
    return reference.swiglu(gate, up)


def _same(op: str, gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"{op}: gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} "
            "must agree in shape and dtype"
        )
