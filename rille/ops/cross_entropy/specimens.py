"""The kernel between the products as the H200 would see it (163,840 words), for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.cross_entropy import fused, score_kernels
from rille.ops.cross_entropy.reference import IGNORED

TYPES = {
    "logits": "*fp32", "dlogits": "*bf16", "targets": "*i64", "losses": "*fp32", "log_probs": "*fp32",
    "W": "i32", "logits_row": "i32", "dlogits_row": "i32", "z_loss": "fp32",
}  # fmt: skip


def specimen(name: str, gradient: bool) -> Specimen:
    constexprs: dict[str, Any] = dict(
        IGNORED=IGNORED, BLOCK=fused.BLOCK, LANES=32 * fused.WARPS, VEC=4, GRADIENT=gradient
    )
    whole = tuple(name for name in TYPES if name != "z_loss")
    return Specimen(name, score_kernels.score, dict(TYPES), constexprs, fused.WARPS, divisible=whole)


SPECIMENS = [specimen("cross_entropy_score", True), specimen("cross_entropy_score_no_gradient", False)]
