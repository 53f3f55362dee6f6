"""One launch of each kernel of a site as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.attn_res import mix, mix_kernels

POINTERS = {"*bf16": "update query gain norm_gain out running d_out d_running", "*fp32": "stats partial", "i32": "N"}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()} | {"eps": "fp32"}


def specimen(name: str, kernel: Any, R: int, D: int, warps: int, constexprs: dict[str, Any], **limits: Any) -> Specimen:
    types: dict[str, Any] = TYPES | dict.fromkeys(("sources", "grads"), ("*bf16",) * R)
    absent = dict.fromkeys("update norm_gain d_running".split())
    absent = {k: v for k, v in absent.items() if k in kernel.arg_names and not constexprs[FLAGS[k]]}
    signature = {name: types[name] for name in kernel.arg_names if name not in constexprs | absent}
    whole = tuple(name for name in types if name not in ("eps", "N"))
    return Specimen(f"attn_res_{name}", kernel, signature, constexprs | absent, warps, divisible=whole, **limits)


FLAGS = {"update": "UPDATE", "norm_gain": "NORM", "d_running": "RUNNING"}


def forward(R: int, D: int, fused: bool = False) -> Specimen:
    p, name = mix.plan(R, D, 2), f"forward_r{R}_d{D}{'_site' if fused else ''}"
    sizes: dict[str, Any] = dict(D=D, BLOCK=p.BLOCK, STEP=p.STEP, GROUP=p.GROUP, LANES=32 * p.forward_warps, VEC=p.VEC)
    flags = dict(UPDATE=fused, NORM=fused, STATS=True)
    return specimen(name, mix_kernels.mix_forward, R, D, p.forward_warps, sizes | flags)


def backward(R: int, D: int, fused: bool = False, **limits: Any) -> Specimen:
    p, name = mix.plan(R, D, 2), f"backward_r{R}_d{D}{'_site' if fused else ''}"
    sizes: dict[str, Any] = dict(D=D, BLOCK=p.BLOCK, HELD=p.HELD, LANES=32 * p.backward_warps, VEC=p.VEC)
    flags = dict(NORM=fused, RUNNING=fused)
    return specimen(name, mix_kernels.mix_backward, R, D, p.backward_warps, sizes | flags, **limits)


WIDE = dict(max_spill_bytes=2048, reason="three fp32 rows beside the gradient: both sums of weight gradients and h")
SHAPES = [(9, 7168), (4, 2048), (5, 512)]
SPECIMENS = [
    *(forward(R, D, fused) for R, D in SHAPES for fused in (False, True)),
    *(backward(R, D) for R, D in SHAPES),
    *(backward(R, D, True, **(WIDE if D > 4096 else {})) for R, D in SHAPES),
]
