"""One launch of each kernel of the gated activations as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.situ import glu_kernels, launch

POINTERS = {"*bf16": "dy gate up out d_gate d_up", "i32": "N_COLUMNS dy_row gate_row up_row"}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}


def specimen(name: str, kernel: Any, capped: bool) -> Specimen:
    signature: dict[str, Any] = {name: TYPES[name] for name in kernel.arg_names if name in TYPES}
    constexprs: dict[str, Any] = dict(A=4.0, B=25.0, CAPPED=capped, BLOCK=launch.BLOCK, FAST=True)
    constexprs |= dict(CHAINED=True) if "forward" in name else {}
    return Specimen(name, kernel, signature, constexprs, 4, divisible=tuple(TYPES))


SPECIMENS = [
    specimen("situ_forward", glu_kernels.glu_forward, True),
    specimen("situ_backward", glu_kernels.glu_backward, True),
    specimen("swiglu_forward", glu_kernels.glu_forward, False),
    specimen("swiglu_backward", glu_kernels.glu_backward, False),
]
