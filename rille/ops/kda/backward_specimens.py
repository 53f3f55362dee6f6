"""One launch of each KDA backward kernel as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

import triton.language as tl

from rille.ops.ahead import Specimen
from rille.ops.kda.backward_kernels import prepare_kernel, reverse_kernel, states_kernel
from rille.ops.kda.backward_local import local_kernel
from rille.ops.kda.backward_local_gluon import local_tile_kernel
from rille.ops.kda.backward_prepare_gluon import prepare_tile_kernel
from rille.ops.kda.backward_softplus_gluon import softplus_tile_kernel

POINTERS = {
    "*bf16": "q_ptr k_ptr v_ptr z_ptr b_ptr do_ptr dv_ptr identity_ptr ones_ptr q_out_ptr "
    "k_start_ptr k_end_ptr u_ptr states_ptr dstates_ptr dq_ptr dk_ptr dz_ptr db_ptr",
    "*fp32": "A_log_ptr dt_bias_ptr decay_ptr totals_ptr norms_ptr dbias_ptr drate_ptr initial_ptr dfinal_ptr "
    "dinitial_ptr",
    "*i32": "spans_ptr starts_ptr order_ptr",
    "*i64": "first_ptr",
    "i32": "q_stride k_stride v_stride z_stride o_stride do_stride b_stride tiles",
    "fp32": "lower_bound scale",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
WHOLE = tuple(name for name, kind in TYPES.items() if kind != "fp32")


def specimen(name: str, kernel: Any, constexprs: dict[str, Any], num_warps: int, **limits: Any) -> Specimen:
    K, BV = constexprs["K"], constexprs.get("BV")
    shapes = dict(t=(64, 64), a=(64, 64), q=(64, K), k_start=(64, K), k_end=(64, K))
    shapes |= dict(u=(64, BV), states=(BV, K), dstates=(BV, K))
    types: dict[str, Any] = TYPES | {
        f"{of}_desc": f"tensordesc<bf16[{rows}, {width}]>" for of, (rows, width) in shapes.items()
    }
    signature: dict[str, Any] = {name: types[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen(f"kda_backward_{name}", kernel, signature, constexprs, num_warps, divisible=WHOLE, **limits)


def prepare(name: str, bounded: bool = True) -> Specimen:
    constexprs = dict(H=96, K=128, BOUNDED=bounded, OPERAND=tl.bfloat16, INTERPRET=False, DIGITS=2)
    return specimen(f"prepare_{name}", prepare_kernel, constexprs, 8)


def prepare_tile() -> Specimen:
    kernel: Any = prepare_tile_kernel
    constexprs = dict(H=96, DIGITS=2, num_warps=8)
    signature: dict[str, Any] = {name: TYPES[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen("kda_backward_prepare_tile", kernel, signature, constexprs, 8, divisible=WHOLE, maxnreg=80)


def a_pass(name: str, kernel: Any, BV: int, absent: str = "") -> Specimen:
    shape = dict(H=96, K=128, V=128, BV=BV, OPERAND=tl.bfloat16, INTERPRET=False, DIGITS=2, STAGES=2)
    return specimen(name, kernel, shape | dict.fromkeys(absent.split()), BV // 16, want_wgmma=True)


def local(name: str, K: int = 128, V: int = 128, bounded: bool = True, **limits: Any) -> Specimen:
    num_warps = K // 16
    constexprs = dict(H=96, K=K, V=V, BV=min(V, 128), BOUNDED=bounded, OPERAND=tl.bfloat16, INTERPRET=False)
    return specimen(f"local_{name}", local_kernel, constexprs, num_warps, want_wgmma=True, **limits)


def local_tile(name: str, kernel: Any, spills: int) -> Specimen:
    constexprs = dict(H=96, num_warps=8)
    signature: dict[str, Any] = {name: TYPES[name] for name in kernel.arg_names if name not in constexprs}
    limits: dict[str, Any] = dict(max_spill_bytes=spills, reason=SPILL["reason"])
    return Specimen(f"kda_backward_{name}", kernel, signature, constexprs, 8, divisible=WHOLE, **limits)


SPILL: dict[str, Any] = dict(max_spill_bytes=800, reason="two halves and what they exchange")
DIRECT: dict[str, Any] = dict(max_spill_bytes=2700, reason="both halves at once; right, not fast")
SPECIMENS = [
    prepare_tile(),
    prepare("k128"),
    prepare("softplus", bounded=False),
    a_pass("states_v128", states_kernel, 128, absent="initial_ptr"),
    a_pass("states_v64", states_kernel, 64, absent="initial_ptr"),
    a_pass("reverse_v128", reverse_kernel, 128, absent="dfinal_ptr dinitial_ptr"),
    a_pass("reverse_v64", reverse_kernel, 64),
    local_tile("local_tile", local_tile_kernel, 320),  # Triton 3.7; 3.6: 160
    local_tile("softplus_tile", softplus_tile_kernel, 140),
    local("k128", **SPILL),
    local("v64", V=64, **SPILL),
    local("k64", K=64, V=64, **SPILL),
    local("v256", V=256, **SPILL),
    local("softplus", bounded=False, **DIRECT),
    local("softplus_v64", V=64, bounded=False, **DIRECT),
    local("softplus_k64", K=64, V=64, bounded=False, **DIRECT),
    local("softplus_v256", V=256, bounded=False, **DIRECT),
]
