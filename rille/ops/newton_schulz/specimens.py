"""Symmetric products as the H200 would see them, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.newton_schulz import symmetric, symmetric_kernels


def specimen(name: str, tiles: int, tall: bool, added: bool, dtype: str = "fp16") -> Specimen:
    kernel = symmetric_kernels.symmetric_product
    pointers = ("left", "right", "added", "out")
    signature: dict = {key: f"*{dtype}" for key in pointers if added or key != "added"}
    signature |= {"P": "i32", "K": "i32"} | dict.fromkeys(("scale", "share", "diagonal"), "fp32")
    constants: dict = {} if added else {"added": None}
    constants |= {"TALL": tall, "HAS_ADDED": added, "EVEN": True, "TILES": tiles}
    constants |= {"BLOCK": symmetric.BLOCK, "DEPTH": symmetric.DEPTH}
    divisible = (*pointers, "P", "K")
    options: dict[str, Any] = {**symmetric.OPTIONS, "divisible": divisible, "want_wgmma": True}
    return Specimen(f"symmetric_{name}", kernel, signature, constants, **options)


SPECIMENS = [
    specimen("256_rows", 2, False, False),
    specimen("256_columns", 2, True, False),
    specimen("256_added", 2, False, True),
    specimen("512_added_bf16", 4, False, True, "bf16"),
]
