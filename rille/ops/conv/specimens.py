"""One launch of each kernel of the convolution as the H200 would see it (K3: 3 x 96 x 128 channels), for
`rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.conv import kernels, launch

POINTERS = {
    "*bf16": "x y dy dx tails final d_tails d_final",
    "*fp32": "weight partial",
    "*i32": "starts",
    "*i64": "sequence_of slots",
    "i32": "N x_row dy_row tail_slot final_slot",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}


def specimen(name: str, kernel: Any, **constexprs: Any) -> Specimen:
    constexprs = dict(C=3 * 96 * 128, W=4) | constexprs
    signature = {name: TYPES[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen(f"conv_{name}", kernel, signature, constexprs, 4, divisible=tuple(TYPES))


def forward(name: str, **constexprs: Any) -> Specimen:
    blocks = dict(ROWS=launch.FORWARD_ROWS, CHANNELS=launch.CHANNELS, FAST=True)
    return specimen(f"forward_{name}", kernels.forward, **(blocks | constexprs))


def backward(name: str, **constexprs: Any) -> Specimen:
    blocks = dict(ROWS=launch.BACKWARD_ROWS, CHANNELS=launch.BACKWARD_CHANNELS, FAST=True)
    return specimen(f"backward_{name}", kernels.backward, **(blocks | constexprs))


ALL: dict[str, Any] = dict(HAS_TAIL=True, HAS_FINAL=True, CHANNELS=launch.CHANNELS, FAST=True)
SPECIMENS = [
    forward("no_tail", HAS_TAIL=False, POOLED=False),
    forward("tail", HAS_TAIL=True, POOLED=False),
    forward("pool", HAS_TAIL=True, POOLED=True),
    specimen("move_tails", kernels.move_tails, HAS_TAIL=True, POOLED=True, CHANNELS=launch.CHANNELS),
    backward("no_tail", HAS_TAIL=False),
    backward("tail", HAS_TAIL=True),
    specimen("tail_gradient", kernels.tail_gradient, **ALL),
]
