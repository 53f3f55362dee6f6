"""One launch of each kernel of the embeddings' gradient as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.embedding import launch, run_kernels, step_kernels

TYPES = {
    "dy": "*bf16", "order": "*i64", "ids": "*i32", "table": "*bf16", "partial": "*fp32", "starts": "*i32", "N": "i32",
    "dy_row": "i32",
}  # fmt: skip


def specimen(kernel: Any, D: int) -> Specimen:
    constexprs = dict(D=D, CHUNK=launch.CHUNK, AHEAD=launch.AHEAD) | launch.plan(D)
    warps = constexprs.pop("num_warps")
    signature = {name: TYPES[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen(f"embedding_{kernel.__name__}_d{D}", kernel, signature, constexprs, warps, divisible=tuple(TYPES))


def step(T: int) -> Specimen:
    kernel: Any = step_kernels.step_kernel
    constexprs = dict(T=T, BLOCK=max(2, 1 << (T - 1).bit_length()))
    signature = {n: "*i32" if n == "history" else "*i64" for n in kernel.arg_names if n not in constexprs}
    return Specimen(f"embedding_step_t{T}", kernel, signature, constexprs, 1)


SPECIMENS = [step(1), step(5)]
SPECIMENS += [
    specimen(kernel, D) for D in (512, 2048, 7168) for kernel in (run_kernels.sum_runs, run_kernels.join_runs)
]
