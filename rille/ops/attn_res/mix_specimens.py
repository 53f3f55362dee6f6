"""One launch of each kernel of a site as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.attn_res import mix, mix_kernels, ring_gluon, wide_kernels

POINTERS = {"*bf16": "update query gain norm_gain out running d_out", "*fp32": "stats partial", "i32": "N"}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()} | {"eps": "fp32"}


def specimen(name: str, kernel: Any, R: int, D: int, warps: int, constexprs: dict[str, Any], **limits: Any) -> Specimen:
    types: dict[str, Any] = TYPES | dict.fromkeys(("sources", "grads", "beside"), ("*bf16",) * R)
    absent = dict.fromkeys("update norm_gain".split())
    absent = {k: v for k, v in absent.items() if k in kernel.arg_names and not constexprs[FLAGS[k]]}
    signature = {name: types[name] for name in kernel.arg_names if name not in constexprs | absent}
    whole = tuple(name for name in types if name not in ("eps", "N"))
    return Specimen(f"attn_res_{name}", kernel, signature, constexprs | absent, warps, divisible=whole, **limits)


FLAGS = {"update": "UPDATE", "norm_gain": "NORM"}


def forward(R: int, D: int, fused: bool = False, few: bool = False) -> Specimen:
    p, name = mix.plan(R, D, 2, fused, few), f"forward_r{R}_d{D}{'_site' if fused else ''}{'_few' if few else ''}"
    sizes: dict[str, Any] = dict(D=D, BLOCK=p.BLOCK, LANES=32 * p.forward_warps, VEC=p.VEC)
    sizes |= dict(STEP=p.STEP, GROUP=p.GROUP, FEW=few, CHAINED=few)
    kernel = mix_kernels.mix_forward
    flags = dict(UPDATE=fused, NORM=fused, STATS=not few)
    most = mix.registers_of_a_thread(p.forward_warps, p.forward_programs)
    return specimen(name, kernel, R, D, p.forward_warps, sizes | flags, maxnreg=most)


def backward(R: int, D: int, fused: bool = False) -> Specimen:
    p, name = mix.plan(R, D, 2, fused), f"backward_r{R}_d{D}{'_site' if fused else ''}"
    sizes: dict[str, Any] = dict(D=D, BLOCK=p.BLOCK, LANES=32 * p.backward_warps, VEC=p.VEC)
    sizes |= {} if p.loops else dict(GROUP=p.backward_group)
    looped = wide_kernels.wide_site_backward if fused else wide_kernels.wide_backward
    kernel = looped if p.loops else mix_kernels.mix_backward
    sizes |= dict(NORM=fused, BESIDE=(1 << R) - 1 if fused else 0)
    limits: dict[str, Any] = dict(maxnreg=mix.registers_of_a_thread(p.backward_warps, p.programs))
    if fused:
        limits |= dict(max_spill_bytes=96, reason="one running sum more than registers hold in narrow rows")
    return specimen(name, kernel, R, D, p.backward_warps, sizes, **limits)


def ring(R: int, fused: bool) -> Specimen:
    name = f"ring_r{R}_d7168{'_site' if fused else ''}"
    flags = dict(UPDATE=fused, NORM=fused, STATS=True)
    return specimen(name, ring_gluon.mix_ring, R, 7168, mix.RING_WARPS, mix.ring_sizes(7168) | flags)


SHAPES = [(9, 7168), (5, 7168), (9, 4096), (4, 2048), (5, 512)]
SPECIMENS = [make(R, D, fused) for R, D in SHAPES for fused in (False, True) for make in (forward, backward)]
SPECIMENS += [forward(R, D, fused, True) for R, D in SHAPES for fused in (False, True)]
SPECIMENS += [ring(R, fused) for R in (2, 5, 9) for fused in (False, True)]
