"""The two-phase kernels as the H200 would see them, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.attn_res import phase_kernels, phases

POINTERS = {
    "*bf16": "out partial update finished norm_gain running d_out beside d_partial",
    "*fp32": "w scores roots tops saved d_tops sums along",
    "i32": "N Q TILES",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()} | {"eps": "fp32"}


def specimen(name: str, kernel: Any, R: int, rows: dict[str, Any], **constants: Any) -> Specimen:
    types: dict[str, Any] = TYPES | dict.fromkeys(("sources", "grads"), ("*bf16",) * R)
    if kernel is phase_kernels.first_backward:
        types |= {"beside": ("*bf16",) * R}
    constants |= {k: v for k, v in rows.items() if k in kernel.arg_names}
    signature = {name: types[name] for name in kernel.arg_names if name not in constants}
    whole = tuple(name for name in types if name not in ("eps", "N", "Q", "TILES"))
    return Specimen(
        f"attn_res_{name}",
        kernel,
        signature,
        constants,
        rows["num_warps"],
        divisible=whole,
        maxnreg=rows.get("maxnreg"),
    )


def of_blocks(R: int, D: int) -> list[Specimen]:
    """The passes over finished blocks."""
    forward, backward, name = phases.forward_plan(R, D, 2), phases.backward_plan(R, D, 2), f"r{R}_d{D}"
    found = []
    if forward is not None:
        GROUP = max(1, phases.SUMS // R)
        found.append(specimen(f"first_forward_{name}", phase_kernels.first_forward, R, forward.rows, D=D, GROUP=GROUP))
        found.append(specimen(f"first_again_{name}", phase_kernels.first_again, R, forward.rows, D=D))
    if backward is not None:
        every = (1 << R) - 1
        kernel = phase_kernels.first_backward
        found.append(specimen(f"first_backward_{name}", kernel, R, backward.rows, D=D, BESIDE=every))
    return found


def of_site(D: int) -> list[Specimen]:
    forward, backward = (phases.site_plan(D, 2, way).rows for way in (False, True))
    kernels = phase_kernels.site_forward, phase_kernels.site_backward
    return [
        specimen(f"second_forward_d{D}", kernels[0], 1, forward, D=D, UPDATE=True, SAVE=True),
        specimen(f"second_backward_d{D}", kernels[1], 1, backward, D=D, BESIDE=True),
    ]


def of_weights(R: int, D: int) -> Specimen:
    tile = dict(BM=phases.TILE_TOKENS, BE=phases.TILE_COLUMNS, BQ=16, num_warps=4)
    return specimen(f"weight_sums_r{R}_d{D}", phase_kernels.weight_sums, R, tile, D=D, UPCAST=False)


SPECIMENS = [
    *(
        one
        for R, D in ((4, 2048), (4, 512), (2, 512), (2, 2048), (8, 2048), (2, 7168), (6, 7168))
        for one in of_blocks(R, D)
    ),
    *(one for D in (512, 2048, 7168) for one in of_site(D)),
    of_weights(4, 2048),
]
