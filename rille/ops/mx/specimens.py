"""One launch of each MX kernel as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.mx import stream, stream_kernels

TYPES = {"w": "*bf16", "out": "*bf16", "codes": "*u8", "scales": "*u8", "N_GROUPS": "i32"}


def specimen(name: str, kernel: Any, fp8: bool) -> Specimen:
    constexprs = dict(GROUPS=stream.GROUPS, FP8=fp8)
    signature = {name: TYPES[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen(f"mx_{name}_{'e4m3' if fp8 else 'e2m1'}", kernel, signature, constexprs, 4, divisible=tuple(TYPES))


KERNELS = {"fake_quantise": stream_kernels.fake_quantise, "quantise": stream_kernels.quantise}
KERNELS["dequantise"] = stream_kernels.dequantise
SPECIMENS = [specimen(name, kernel, fp8) for name, kernel in KERNELS.items() for fp8 in (False, True)]
