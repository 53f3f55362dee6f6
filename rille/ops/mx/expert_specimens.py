"""One launch of each kernel of the packed experts as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.mx import expert_gluon, expert_kernels, experts_launch

POINTERS = {
    "*bf16": "x act ordered",
    "*u8": "scales",
    "*i64": "ids",
    "*i32": "codes pair_of_row expert_of_tile row_of_pair scratch",
    "*fp32": "y",
    "i32": "x_row PAIRS TILES",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
WHOLE = tuple(name for name in TYPES if name not in ("PAIRS", "TILES"))
SHAPES = {"k3": (3584, 3072, 16), "nano": (256, 448, 6)}  # L, F, A
GLUON = expert_gluon.first_product, expert_gluon.second_product
GLU = dict(A=4.0, B=25.0, CAPPED=True)


def specimen(name: str, kernel: Any, warps: int = 4, /, **constexprs: Any) -> Specimen:
    signature = {name: TYPES[name] for name in kernel.arg_names if name not in constexprs}
    most = experts_launch.REGISTERS[constexprs["TILE"]] if kernel in GLUON else None
    return Specimen(f"mx_{name}", kernel, signature, constexprs, warps, divisible=WHOLE, maxnreg=most)


def specimens() -> list[Specimen]:
    found = []
    for size, (L, F, A) in SHAPES.items():
        for tile in (8, 32):
            sizes = dict(F=F, L=L, TILE=tile)
            first, second = GLUON
            found.append(specimen(f"first_{size}_n{tile}", first, ACTIVE=A, **sizes, **GLU))
            found.append(specimen(f"second_{size}_n{tile}", second, **sizes))
    L, F, A = SHAPES["k3"]
    sizes, blocks = dict(F=F, L=L, TILE=16), dict(ROWS=experts_launch.ROWS, STEP=experts_launch.STEP)
    first, second = expert_kernels.first_product, expert_kernels.second_product
    found.append(specimen("first_twin", first, ACTIVE=A, **sizes, **blocks, **GLU, FAST=True))
    found.append(specimen("second_twin", second, **sizes, **blocks))
    for pairs in (128, experts_launch.MOST_PAIRS):
        constexprs = experts_launch.placing(pairs) | dict(L=L, TILE=8, COLUMNS=1024)
        warps = constexprs.pop("num_warps")
        found.append(specimen(f"prepare_{pairs}", expert_kernels.prepare, warps, **constexprs))
    return found
