"""One launch of each KDA kernel as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.experimental.gluon import language as gl

from rille.ops.ahead import Specimen
from rille.ops.kda.forward import tile_options
from rille.ops.kda.intra import intra_kernel
from rille.ops.kda.intra_gluon import intra_tile_kernel
from rille.ops.kda.intra_softplus_gluon import intra_softplus_kernel
from rille.ops.kda.state_pass import state_pass_kernel
from rille.ops.kda.state_pass_gluon import state_pass_ring_kernel

POINTERS = {
    "*bf16": "q_ptr k_ptr v_ptr z_ptr b_ptr o_ptr anchors_ptr t_ptr a_ptr w_ptr q_out_ptr k_out_ptr",
    "*fp32": "A_log_ptr dt_bias_ptr decay_ptr initial_ptr final_ptr saved_ptr",
    "*i32": "spans_ptr starts_ptr order_ptr",
    "*i64": "first_ptr slots_ptr saved_slots_ptr",
    "i32": "q_stride k_stride v_stride z_stride b_stride initial_stride final_stride saved_stride",
    "fp32": "lower_bound scale",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
WHOLE = tuple(name for name, kind in TYPES.items() if kind != "fp32")


def descriptor(columns: int) -> str:
    """Type of a host-made descriptor over [rows, columns] in blocks of 64 rows."""
    return f"tensordesc<bf16[64, {columns}]>"


def specimen(name: str, kernel: Any, constexprs: dict[str, Any], num_warps: int, **limits: Any) -> Specimen:
    columns: dict[str, int] = {"t_desc": 64, "a_desc": 64}
    columns |= dict.fromkeys(("w_desc", "q_desc", "k_desc"), constexprs["K"])
    types = TYPES | {name: descriptor(count) for name, count in columns.items()}
    signature = {name: types[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen(name, kernel, signature, constexprs, num_warps, divisible=WHOLE, **limits)


def intra(
    name: str, K: int = 128, bounded: bool = True, solved: bool = False, digits: int = 1, **limits: Any
) -> Specimen:
    constexprs = dict(H=96, K=K, BOUNDED=bounded, OPERAND=tl.bfloat16, INTERPRET=False, SOLVED=solved, DIGITS=digits)
    return specimen(f"kda_intra_{name}", intra_kernel, constexprs, 4, want_wgmma=True, **limits)


def tiles(name: str, K: int = 128, bounded: bool = True, digits: int = 1, **limits: Any) -> Specimen:
    """The first kernel in Gluon, with the options of a launch."""
    blocks = {name: [64, K] for name in ("q_desc", "k_desc", "z_desc", "w_desc")}
    blocks |= {"t_desc": [64, 64], "a_desc": [64, 64]}
    types = TYPES | {name: ring_descriptor(block, "bf16") for name, block in blocks.items()}
    options = tile_options(K, bounded)
    constexprs = dict(H=96, K=K, DIGITS=digits, num_warps=options["num_warps"])
    kernel: Any = intra_tile_kernel if bounded else intra_softplus_kernel
    signature = {name: types[name] for name in kernel.arg_names if name not in constexprs}
    limits |= dict(want_wgmma=True, maxnreg=options["maxnreg"])
    return Specimen(
        f"kda_intra_tile_{name}", kernel, signature, constexprs, options["num_warps"], divisible=WHOLE, **limits
    )


def state_pass(name: str, BV: int, K: int = 128, V: int = 128, absent: str = "", rows: str = "bf16") -> Specimen:
    stages = 3 if BV == 64 and rows == "bf16" else 2
    shape = dict(H=96, K=K, V=V, BV=BV, OPERAND=tl.bfloat16, INTERPRET=False, STAGES=stages)
    constexprs = shape | dict.fromkeys(absent.split())
    made = specimen(f"kda_state_pass_{name}", state_pass_kernel, constexprs, BV // 16, want_wgmma=True)
    return replace(made, signature={**made.signature} | dict.fromkeys(("v_ptr", "o_ptr"), f"*{rows}"))


def ring(name: str, BV: int, K: int = 128, V: int = 128, absent: str = "") -> Specimen:
    """The Gluon state pass: its descriptors spell out the layout in shared memory."""
    tiles = {name: [64, K] for name in ("w_desc", "q_desc", "k_desc")} | {"t_desc": [64, 64], "a_desc": [64, 64]}
    tiles |= {"v_desc": [64, BV], "o_desc": [64, BV], "decay_desc": [1, K]}
    shape = dict(H=96, K=K, V=V, BV=BV, STAGES=3 if BV == 64 else 2, num_warps=BV // 16)
    constexprs = shape | dict.fromkeys(absent.split())
    types = TYPES | {
        name: ring_descriptor(tile, "fp32" if name == "decay_desc" else "bf16") for name, tile in tiles.items()
    }
    kernel: Any = state_pass_ring_kernel
    signature = {name: types[name] for name in kernel.arg_names if name not in constexprs}
    name = f"kda_state_pass_ring_{name}"
    return Specimen(name, kernel, signature, constexprs, BV // 16, divisible=WHOLE, want_wgmma=True)


def ring_descriptor(tile: list[int], dtype: str) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(tile, gl.float32 if dtype == "fp32" else gl.bfloat16)
    return f"tensordesc<{dtype}{tile},{layout!r}>"


SPILL: dict[str, Any] = {
    "max_spill_bytes": 3072,
    "reason": "whole tiles [64, 128] of q, k and z pass through the registers of one warp group",
}
STARTS: dict[str, Any] = {
    "max_spill_bytes": 144,  # Triton 3.7; with 3.6 it is 112
    "reason": "what the last product takes of the first panel waits in registers until the second is done",
}
EXPONENTS: dict[str, Any] = {
    "max_spill_bytes": 128,
    "reason": "the exponents of q's rows wait in registers while L is made; four warps hold twice the sums",
}
SPECIMENS = [
    intra("k128", **SPILL),
    intra("k64", K=64, **SPILL),
    intra("solved", solved=True, **SPILL),
    intra("softplus", bounded=False, **SPILL),
    intra("gradients", digits=2, **SPILL),
    tiles("k128", **STARTS),
    tiles("k64", K=64),
    tiles("gradients", digits=2, **STARTS),
    tiles("k64_gradients", K=64, digits=2),
    tiles("softplus", bounded=False, **EXPONENTS),
    tiles("softplus_gradients", bounded=False, digits=2, **EXPONENTS),
    tiles("softplus_k64", K=64, bounded=False, **EXPONENTS | {"max_spill_bytes": 160}),  # Triton 3.7; 3.6: 128
    state_pass("v128", 128, absent="initial_ptr slots_ptr saved_ptr saved_slots_ptr"),
    state_pass("v64", 64, absent="slots_ptr saved_ptr saved_slots_ptr"),
    state_pass("fp32", 64, rows="fp32"),
    state_pass("pool", 128),
    state_pass("k64", 64, K=64, V=64, absent="slots_ptr saved_ptr saved_slots_ptr"),
    state_pass("v256", 128, V=256),
    ring("v128", 128, absent="initial_ptr slots_ptr saved_ptr saved_slots_ptr"),
    ring("v64", 64, absent="slots_ptr saved_ptr saved_slots_ptr"),
    ring("pool", 128),
    ring("k64", 64, K=64, V=64, absent="slots_ptr saved_ptr saved_slots_ptr"),
    ring("v256", 128, V=256),
]
