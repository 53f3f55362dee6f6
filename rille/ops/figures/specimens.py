"""One launch of each kernel of the figures as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.figures import launch, row_kernels

KINDS = {
    "*bf16": "logits", "*fp32": "tops sums", "*i32": "places", "*i64": "tokens found",
    "*fp64": "figures heats numbers masses", "i32": "row W N PARTS", "fp32": "least",
}  # fmt: skip
TYPES = {name: kind for kind, names in KINDS.items() for name in names.split()}
DIVISIBLE = ("logits", "tops", "sums", "places", "found", "figures", "row", "W")


def specimen(name: str, kernel: Any, warps: int, **constexprs: Any) -> Specimen:
    constexprs["CHAINED"] = True
    signature = {n: TYPES[n] for n in kernel.arg_names if n not in constexprs}
    return Specimen(f"figures_{name}", kernel, signature, constexprs, warps, divisible=DIVISIBLE)


SPECIMENS = [
    specimen("part", row_kernels.part_kernel, 4, BLOCK=launch.BLOCK, heats=None, masses=None),
    specimen("part_drawn", row_kernels.part_kernel, 4, BLOCK=launch.BLOCK),
    specimen(
        "row",
        row_kernels.row_kernel,
        1,
        BLOCK=16,
        PART=launch.BLOCK,
        tokens=None,
        heats=None,
        numbers=None,
        masses=None,
    ),
    specimen("row_drawn", row_kernels.row_kernel, 4, BLOCK=128, PART=launch.BLOCK, tokens=None),
]
