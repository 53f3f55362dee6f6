"""One launch of each kernel around absorbed attention as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.mla import absorb_kernels
from rille.ops.mla.absorb_launch import COLUMNS, ROWS, value_step
from rille.ops.mla.tiles import cover

KINDS = {"table": "*i64", "positions": "*i64", "sequences": "*i64", "o": "*fp32", "eps": "fp32"}
NUMBERS = "both_row first_row page_stride max_pages N H q_row q_head key_head value_head gate_row gate_head".split()
SHAPES = {"nano": (256, 256), "k3": (512, 1536)}  # latent channels, those of the query


def specimen(name: str, kernel: Any, constexprs: dict[str, Any], warps: int = 4) -> Specimen:
    kinds = KINDS | dict.fromkeys(NUMBERS, "i32")
    signature = {n: kinds.get(n, "*bf16") for n in kernel.arg_names if n not in constexprs}
    whole = tuple(n for n in signature if n not in ("N", "H", "max_pages", "eps"))
    return Specimen(f"mla_{name}", kernel, signature, constexprs, warps, divisible=whole)


def of(size: str) -> list[Specimen]:
    (R, Q), k = SHAPES[size], absorb_kernels
    wide = cover(max(R, Q))
    return [
        specimen(
            f"store_rows_{size}", k.store_kernel, dict(R=R, REST=64, Q=Q, PAGE=64, BLOCK=wide, TAIL=64, CHAINED=True),
            max(1, min(4, wide // 256)),
        ),
        specimen(
            f"absorbed_queries_{size}", k.query_kernel,
            dict(R=R, K=128, REST=64, BLOCK_K=128, BR=COLUMNS, TAIL=64, BM=ROWS, CHAINED=True),
        ),
        specimen(
            f"gated_values_{size}", k.value_kernel,
            dict(R=R, V=128, BLOCK=value_step(R), BV=COLUMNS, BM=ROWS, CHAINED=True),
        ),
    ]  # fmt: skip


SPECIMENS = [each for size in SHAPES for each in of(size)]
