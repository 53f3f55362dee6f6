"""One launch of each kernel of Muon's step as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.muon import launch, muon_kernels

TYPES = {
    "*fp32": "gradient momentum sums weight",
    "*fp16": "out direction",
    "i32": "gradient_gap momentum_gap weight_gap size parts",
    "fp32": "mu eps keep step",
}
KINDS = {name: kind for kind, names in TYPES.items() for name in names.split()}


def specimen(kernel: Any, **more: int) -> Specimen:
    signature: dict[str, Any] = {name: KINDS[name] for name in kernel.arg_names if name in KINDS}
    constexprs = launch.OPTIONS | more
    divisible = tuple(name for name in signature if KINDS[name] != "fp32" and name != "parts")
    return Specimen(f"muon_{kernel.__name__}", kernel, signature, constexprs, 4, divisible=divisible)


SPECIMENS = [
    specimen(muon_kernels.advance),
    specimen(muon_kernels.normalise, ALL_PARTS=8),
    specimen(muon_kernels.descend),
]
