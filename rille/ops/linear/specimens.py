"""One launch of the product of a few rows as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.linear import few_kernels
from rille.ops.linear.few import FEW, sizes, tile

NUMBERS = ("N", "C", "x_row", "onto_row")


def specimen(name: str, rows: int, C: int, D: int, onto: bool = False, normed: bool = False) -> Specimen:
    tiled = rows > FEW
    constexprs: dict[str, Any] = dict(tile(D) if tiled else sizes(rows, C, D), D=D, CHAINED=True)
    warps = constexprs.pop("num_warps")
    if not onto:
        constexprs["onto"] = None
    if not normed:
        constexprs |= {} if tiled else dict(gain=None)
    kernel: Any = few_kernels.tile_product if tiled else few_kernels.few_product
    kinds = dict.fromkeys(NUMBERS, "i32") | dict(eps="fp32") | (dict(x="*fp32") if normed else {})
    signature = {n: kinds.get(n, "*bf16") for n in kernel.arg_names if n not in constexprs}
    whole = ("x", "w", "y", "gain", "onto", "C", "x_row", "onto_row")
    return Specimen(f"linear_{name}", kernel, signature, constexprs, warps, divisible=whole)


SPECIMENS = [
    specimen("joint", 1, 2704, 512),
    specimen("square", 1, 512, 512),
    specimen("onto", 1, 512, 256, True),
    specimen("normed", 1, 512, 256, True, True),
    specimen("down", 4, 512, 896),
    specimen("head", 4, 32768, 512),
    specimen("wide", 1, 7168, 7168),
    specimen("tile_square", 64, 512, 512),
    specimen("tile_onto", 64, 512, 256, True),
    specimen("tile_up", 64, 512, 128),
]
