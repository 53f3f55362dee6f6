"""One launch of each kernel of the norms as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.norm import launch, rms_kernels

POINTERS = {
    "*bf16": "x residual weight y total dy d_total dx o gate d_o d_gate",
    "*fp32": "rstd partial",
    "i32": "N x_row residual_row dy_row o_row gate_row gate_token gate_head",
    "fp32": "eps",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}


def specimen(kernel: Any, name: str, D: int, absent: str = "", **flags: int) -> Specimen:
    p = launch.plan(D)
    constexprs: dict[str, Any] = dict(D=D, BLOCK=p.BLOCK, ROWS=p.ROWS) | flags | dict.fromkeys(absent.split())
    signature: dict[str, Any] = {name: TYPES[name] for name in kernel.arg_names if name not in constexprs}
    whole = tuple(name for name in TYPES if name not in ("eps", "N"))
    most = p.registers if "backward" in name else None
    return Specimen(f"norm_{name}_d{D}", kernel, signature, constexprs, p.warps, divisible=whole, maxnreg=most)


SPECIMENS = [
    *(
        specimen(rms_kernels.rms_forward, "forward_add", D, ADD=True, WEIGHT=True, CHAINED=D < 1024)
        for D in (512, 7168)
    ),
    specimen(rms_kernels.rms_forward, "forward", 7168, "residual", ADD=False, WEIGHT=True, CHAINED=False),
    *(specimen(rms_kernels.rms_backward, "backward_add", D, ADD=True, WEIGHT=True) for D in (512, 7168)),
    specimen(rms_kernels.rms_backward, "backward", 7168, "d_total", ADD=False, WEIGHT=True),
    specimen(rms_kernels.gated_forward, "gated_forward", 128, HEADS=96),
    specimen(rms_kernels.gated_backward, "gated_backward", 128),
]
