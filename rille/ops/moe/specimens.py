"""One launch of each kernel of the experts as the H200 would see it, for `rille.ops.ahead`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rille.ops.ahead import Specimen
from rille.ops.moe import alone_kernels, few_kernels, histogram_gluon, permute_kernels, product_kernels, router_kernels
from rille.ops.moe.few import COLUMNS, DOWN_ROWS, GLU_ROWS, LISTS, are_alone, step
from rille.ops.moe.few import TILE as FEW
from rille.ops.moe.permute import TILE, power_of_two
from rille.ops.moe.products import Tiles, plan
from rille.ops.moe.router import EXPERTS, TOKENS, WORDS

POINTERS = {
    "*fp32": "logits bias weights chosen cutoff edges d_weights d_logits partial along",
    "*i64": "ids load",
    "*i32": "histogram counts total ends expert_of_tile row_of_pair pair_of_row",
    "*bf16": "rows h d out",
    "i32": "N logits_row groups PAIRS BLOCKS TILES ROW_TILES x_row",
    "fp32": "scale",
}
TYPES = {name: kind for kind, names in POINTERS.items() for name in names.split()}
WHOLE = tuple(name for name in TYPES if name not in ("scale", "N", "groups", "PAIRS", "BLOCKS", "TILES", "ROW_TILES"))
GLU = dict(A=4.0, B=25.0, CAPPED=True, FAST=True)
SHAPES = {"nano": (256, 448, 256, 6), "k3": (3584, 3072, 112, 16)}  # L, F, E, A


def specimen(
    name: str, kernel: Any, constexprs: dict[str, Any], warps: int, stages: int = 3, /, *, wgmma: bool = False,
    **types: str,
) -> Specimen:  # fmt: skip
    known = TYPES | types
    signature = {name: known[name] for name in kernel.arg_names if name not in constexprs}
    return Specimen(
        f"moe_{name}",
        kernel,
        signature,
        constexprs,
        warps,
        stages,
        (*WHOLE, "x", "p", "q", "w13", "w2", "act", "y"),
        want_wgmma=wgmma,
    )


def table(rows: int, columns: int) -> str:
    return f"tensordesc<bf16[{rows}, {columns}]>"


def product(name: str, kernel: Any, t: Tiles, sizes: dict[str, Any], **blocks: tuple[int, int]) -> Specimen:
    constexprs = {key: value for key, value in sizes.items() if key in kernel.arg_names}
    types = {name: table(*block) for name, block in blocks.items()}
    made = specimen(name, kernel, constexprs, t.warps, t.stages, wgmma=True, **types)
    return replace(made, maxnreg=t.registers)


def products(size: str) -> list[Specimen]:
    (L, F, _, _), k = SHAPES[size], product_kernels
    p = plan(L, F)
    glu, down, back, dx = p.glu, p.down, p.backward, p.dx
    common = dict(F=F, L=L, BM=TILE, **GLU)
    found = [
        product(
            f"glu_product_{size}", k.glu_product, glu,
            common | dict(BF=glu.columns, BK=glu.step, GROUP=glu.group, PARTS=glu.parts),
            x=(TILE, glu.step), w13=(glu.columns, glu.step), act=(TILE, glu.columns // glu.parts),
        ),
        product(
            f"down_product_{size}", k.row_product, down,
            dict(O=L, I=F, BM=TILE, BO=down.columns, BK=down.step, GROUP=down.group, OUT_FIRST=True),
            x=(TILE, down.step), w=(down.columns, down.step), y=(TILE, down.columns),
        ),
        product(
            f"dx_product_{size}", k.row_product, dx,
            dict(O=L, I=2 * F, BM=TILE, BO=dx.columns, BK=dx.step, GROUP=dx.group, OUT_FIRST=False),
            x=(TILE, dx.step), w=(dx.step, dx.columns), y=(TILE, dx.columns),
        ),
        product(
            f"glu_backward_product_{size}", k.glu_backward_product, back,
            common | dict(BF=back.columns, BK=back.step, GROUP=back.group, PARTS=back.parts),
            x=(TILE, back.step), dy=(TILE, back.step), w13=(back.columns, back.step), w2=(back.step, back.columns),
            **dict.fromkeys(("d_gate", "d_up", "act"), (TILE, back.columns // back.parts)),
        ),
    ]  # fmt: skip
    for name, t, rows, columns in (("dw13", p.dw13, 2 * F, L), ("dw2", p.dw2, L, F)):
        sizes = dict(O=rows, I=columns, BO=t.rows, BI=t.columns, BK=t.step)
        blocks = dict(p=(t.step, t.rows), q=(t.step, t.columns))
        found.append(product(f"{name}_{size}", k.weight_product, t, sizes, **blocks))
    return found


def routes(size: str) -> list[Specimen]:
    L, F, E, A = SHAPES[size]
    E, block, choices = (896, 1024, 16) if size == "k3" else (E, 256, 8)
    router = dict(
        E=E, A=A, BINS=4000, BLOCK=block, CHOICES=choices, ROWS=max(1, 512 // block), RENORMALISE=True, SCORED=False,
        CHAINED=size == "nano", PAIRED=False,
    )  # fmt: skip
    paired = dict(BINS=0, ROWS=1, CHAINED=True, PAIRED=True, load=None, edges=None)
    back = dict(E=E, A=A, CHOICES=choices, ROWS=32, RENORMALISE=True)
    columns = min(1024, L)
    return [
        specimen(f"router_{size}", router_kernels.router_forward, router | dict(edges=None), 1),
        specimen(f"router_paired_{size}", router_kernels.router_forward, router | paired, 1),
        specimen(f"router_apart_{size}", router_kernels.router_forward, router | dict(BINS=0), 1),
        specimen(
            f"histogram_{size}", histogram_gluon.histogram_kernel,
            dict(E=E, BINS=4000, EXPERTS=EXPERTS, WORDS=WORDS, TOKENS=TOKENS, SCORED=False), 16,
        ),
        specimen(f"router_backward_{size}", router_kernels.router_backward, back, 4),
        specimen(f"count_{size}", permute_kernels.count_pairs, dict(E=E, BLOCK=block, SPAN=128), 8),
        specimen(f"sum_blocks_{size}", permute_kernels.sum_blocks, dict(E=E, SPAN=128, WIDE=16), 4),
        specimen(f"table_{size}", permute_kernels.table_of_tiles, dict(E=E, BLOCK=block, SPAN=16, TILE=TILE), 4),
        specimen(f"place_{size}", permute_kernels.place_pairs, dict(E=E, SPAN=128, TILE=TILE), 4),
        specimen(
            f"gather_{size}", permute_kernels.gather_rows,
            dict(D=L, A=A, TILE=TILE, ROWS=4096 // columns, COLUMNS=columns), 4, x="*bf16",
        ),
        specimen(
            f"combine_{size}", permute_kernels.combine_rows,
            dict(D=L, A=A, ROWS=2048 // min(512, L), COLUMNS=min(512, L), WEIGH=True), 4, out="*fp32",
        ),
        specimen(
            f"glu_backward_rows_{size}", product_kernels.glu_backward_rows,
            dict(F=F, TILE=TILE, ROWS=4, BLOCK=512) | GLU, 4,
        ),
    ]  # fmt: skip


def few(size: str) -> list[Specimen]:
    (L, F, _, A), k, a = SHAPES[size], few_kernels, alone_kernels
    common = dict(CHOICES=A, F=F, L=L, CHAINED=True)
    glu_alone = common | dict(ROWS=GLU_ROWS, BLOCK=power_of_two(L)) | GLU
    down_alone = common | dict(ROWS=DOWN_ROWS, BLOCK=power_of_two(F))
    glu, down = dict(CHOICES=A, F=F, L=L, BF=COLUMNS, BK=64) | GLU, dict(L=L, F=F, BL=COLUMNS)
    tile, alone, wide = dict(BM=FEW, CHAINED=True), dict(SPAN=128), 256 if L == 256 else 4096
    kernels = (
        ("glu_alone", a.glu_alone, glu_alone, 4, 3),
        ("down_alone", a.down_alone, down_alone, 4, 3),
        ("glu_few", k.glu_few, glu | tile | alone, 4, 4),
        ("down_few", k.down_few, down | tile | alone | dict(BK=step(F)), 4, 4),
        ("list_pairs", k.list_pairs, dict(SPAN=512, ROWS=LISTS, CHAINED=True), 4, 3),
        ("glu_listed", k.glu_listed, glu | tile, 4, 4),
        ("down_listed", k.down_listed, down | tile | dict(BK=64), 4, 4),
        ("combine_few", k.combine_few, dict(L=L, CHOICES=A, BLOCK=256, CHAINED=True), 2, 3),
        ("combine_norm_few", k.combine_norm_few, dict(L=L, CHOICES=A, BLOCK=wide, CHAINED=True), 8, 3),
    )
    return [
        specimen(f"{name}_{size}", kernel, constexprs, warps, stages, x="*bf16", w13="*bf16", w2="*bf16", act="*bf16",
                 y="*fp32", out="*bf16" if "norm" in name else "*fp32", gain="*bf16", eps="fp32", counts="*i32",
                 pairs="*i32", E="i32")
        for name, kernel, constexprs, warps, stages in kernels
        if "alone" not in name or are_alone(1, A, L, F)
    ]  # fmt: skip


def specimens() -> list[Specimen]:
    return [each for size in SHAPES for each in (*products(size), *routes(size), *few(size))]
