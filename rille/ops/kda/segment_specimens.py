"""One launch of each kernel of `segment_pass.py` as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from rille.ops.ahead import Specimen
from rille.ops.kda.segment_pass import fold_kernel, reverse_segment_kernel, segment_kernel
from rille.ops.kda.specimens import descriptor

POINTERS = {
    "*bf16": "v_ptr do_ptr",
    "*fp32": "decay_ptr initial_ptr dfinal_ptr states_ptr dstates_ptr transitions_ptr",
    "*i32": "jobs_ptr products_ptr chains_ptr",
    "*i64": "slots_ptr",
    "i32": "local_programs v_stride do_stride initial_stride",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
WHOLE = tuple(TYPES)


def specimen(name: str, kernel: Any, constexprs: dict[str, Any], num_warps: int, **limits: Any) -> Specimen:
    tiles = {"t_desc": 64, "a_desc": 64}
    tiles |= dict.fromkeys(("w_desc", "k_desc", "q_desc", "k_start_desc", "k_end_desc"), constexprs["K"])
    types = TYPES | {tile: descriptor(columns) for tile, columns in tiles.items()}
    signature: Any = {argument: types[argument] for argument in kernel.arg_names if argument not in constexprs}
    return Specimen(name, kernel, signature, constexprs, num_warps, divisible=WHOLE, **limits)


def segment(name: str, K: int = 128, V: int = 128, absent: str = "") -> Specimen:
    shape = dict(H=16, K=K, V=V, BV=64, OPERAND=tl.bfloat16, INTERPRET=False, STAGES=3)
    return specimen(f"kda_segment_{name}", segment_kernel, shape | dict.fromkeys(absent.split()), 4, want_wgmma=True)


def reverse(name: str, K: int = 128, V: int = 128, absent: str = "") -> Specimen:
    shape = dict(H=16, K=K, V=V, BV=64, OPERAND=tl.bfloat16, INTERPRET=False, STAGES=3) | dict.fromkeys(absent.split())
    return specimen(f"kda_segment_reverse_{name}", reverse_segment_kernel, shape, 4, want_wgmma=True)


def fold(name: str, K: int = 128, V: int = 128, back: bool = False) -> Specimen:
    return specimen(f"kda_segment_fold_{name}", fold_kernel, dict(H=16, K=K, V=V, BV=16, BACK=back), 8)


SPECIMENS = [
    segment("k128", absent="initial_ptr slots_ptr"),
    segment("pool"),
    segment("k64", K=64, V=64, absent="slots_ptr"),
    segment("v256", V=256, absent="slots_ptr"),
    reverse("k128"),
    reverse("k64", K=64, V=64, absent="dfinal_ptr"),
    fold("k128"),
    fold("back", back=True),
    fold("k64", K=64, V=64),
    fold("v256", V=256),
]
