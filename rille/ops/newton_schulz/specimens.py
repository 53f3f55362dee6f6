"""Symmetric products as the H200 would see them, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.newton_schulz import chain_gluon, symmetric, symmetric_kernels


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


def chain(tiles: int, steps: int, dtype: str = "fp16") -> Specimen:
    signature: dict = {"a_ptr": f"*{dtype}", "t_ptr": f"*{dtype}"} | dict.fromkeys("abc", "fp32")
    constants = {"STEPS": steps, "TILES": tiles}
    name = f"chain_{128 * tiles}_{steps}_{dtype}"
    options: dict[str, Any] = {"num_warps": 8, "divisible": ("a_ptr", "t_ptr"), "want_wgmma": True}
    if tiles == 2 and steps == 2:
        reason = "236 of 4239 instructions move addresses and the matrix that forms; two warps fewer would be slower"
        options |= {"max_spill_bytes": 768, "reason": reason}
    return Specimen(name, chain_gluon.transform, signature, constants, **options)


SPECIMENS += [chain(2, 2), chain(2, 1), chain(1, 2), chain(2, 2, "bf16")]
