"""Launches of the experts' products, in plain Triton or by torch's grouped product with the activation apart.

Rows lie as `permute.py` puts them. Axes: E experts, L latent, F expert width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rille.ops.launching import described, launch, rows_of
from rille.ops.moe import product_kernels
from rille.ops.moe.permute import INTERPRET, TILE, Places
from rille.ops.situ import launch as situ

WIDE = 1024  # from this latent and this expert width on the tensor cores are the limit


class Glu(NamedTuple):
    """The activation: caps of the gate and the up part, and whether they count (else SwiGLU)."""

    cap_gate: float
    cap_up: float
    capped: bool

    def constants(self) -> dict[str, Any]:
        return dict(A=self.cap_gate, B=self.cap_up, CAPPED=self.capped, FAST=not INTERPRET)


@dataclass(frozen=True)
class Tiles:
    """One product's launch: columns of a tile, step of the sum, warps, stages of the pipeline, tiles of rows that sweep
    the columns together. For weight products `rows` is the other side of the tile. parts: the activation is done in
    so many parts of a tile, for want of registers. registers: the most a
    thread may have, so that two programs fit a processor."""

    columns: int
    step: int
    warps: int
    stages: int
    group: int = 8
    rows: int = 128
    parts: int = 1
    registers: int | None = None

    def options(self) -> dict[str, Any]:
        limit = {} if self.registers is None else {"maxnreg": self.registers}
        return dict(num_warps=self.warps, num_stages=self.stages) | limit


@dataclass(frozen=True)
class Plan:
    glu: Tiles
    down: Tiles
    backward: Tiles
    dx: Tiles
    dw13: Tiles
    dw2: Tiles


@cache
def plan(L: int, F: int) -> Plan:
    """Tiles by shape. Narrow experts are bound by bytes and latency: two programs a processor. Wide ones are bound by
    the tensor cores: tiles of 128 x 256."""
    if INTERPRET:
        small = Tiles(16, 16, 4, 1, 2, 16)
        return Plan(
            replace(small, columns=64, parts=4), small, replace(small, columns=32, parts=2), small, small, small
        )
    if L >= WIDE and F >= WIDE:
        wide = Tiles(256, 64, 8, 3)
        return Plan(Tiles(128, 64, 8, 4, parts=4), wide, Tiles(64, 64, 8, 3, parts=2), wide, wide, wide)
    step_L, step_F = divisor(L), divisor(2 * F)
    return Plan(
        glu=Tiles(64, 64, 8, 3, parts=2),
        down=Tiles(128, 64, 8, 3),
        backward=Tiles(64, step_L, 8, 2, parts=4, registers=128),
        dx=Tiles(256, step_F, 8, 3),
        dw13=Tiles(256, 64, 8, 3),
        dw2=Tiles(128, 64, 8, 3),
    )


def divisor(length: int) -> int:
    """The step of a sum over rows of weights, which must not reach into the next expert."""
    return next(step for step in (64, 32, 16) if length % step == 0)


def glu_product(rows: Tensor, w13: Tensor, places: Places, glu: Glu, t: Tiles) -> Tensor:
    """act [rows, F]."""
    _, double, L = w13.shape
    F, tiles = double // 2, len(places.expert_of_tile)
    act = rows.new_empty(len(rows), F)
    if tiles:
        tables = (
            rows_of(rows, TILE, t.step),
            rows_of(w13, t.columns, t.step),
            rows_of(act, TILE, t.columns // t.parts),
        )
        launch(
            product_kernels.glu_product, tiles * -(-F // t.columns), (*tables, places.expert_of_tile, tiles),
            F=F, L=L, BM=TILE, BF=t.columns, BK=t.step, GROUP=t.group, PARTS=t.parts,
            **glu.constants(), **t.options(),
        )  # fmt: skip
    return act


def row_product(rows: Tensor, w: Tensor, places: Places, out_first: bool, t: Tiles) -> Tensor:
    """rows [rows, I] times the expert's w, [O, I] where out_first, else [I, O]: [rows, O]."""
    tiles = len(places.expert_of_tile)
    O, I = w.shape[1:] if out_first else (w.shape[2], w.shape[1])  # noqa: E741
    y = rows.new_empty(len(rows), O)
    if tiles:
        w_block = (t.columns, t.step) if out_first else (t.step, t.columns)
        tables = (rows_of(rows, TILE, t.step), rows_of(w, *w_block), rows_of(y, TILE, t.columns))
        launch(
            product_kernels.row_product, tiles * -(-O // t.columns), (*tables, places.expert_of_tile, tiles),
            O=O, I=I, BM=TILE, BO=t.columns, BK=t.step, GROUP=t.group, OUT_FIRST=out_first,
            **t.options(),
        )  # fmt: skip
    return y


def glu_backward_product(
    rows: Tensor, dy: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, places: Places, glu: Glu, t: Tiles
) -> tuple[Tensor, Tensor, Tensor]:
    """d_h [rows, 2F], weighted act [rows, F], <act, d> of each row in fp32."""
    _, double, L = w13.shape
    F, tiles = double // 2, len(places.expert_of_tile)
    d_h, act = rows.new_empty(len(rows), double), rows.new_empty(len(rows), F)
    partial = torch.empty(len(rows), -(-F // t.columns), dtype=torch.float32, device=rows.device)
    if tiles:
        read = rows_of(rows, TILE, t.step), rows_of(dy, TILE, t.step)
        read += rows_of(w13, t.columns, t.step), rows_of(w2, t.step, t.columns)
        halves = [described(False, x, len(rows), F, double, TILE, t.columns // t.parts) for x in (d_h, d_h[:, F:])]
        written = (*halves, rows_of(act, TILE, t.columns // t.parts), partial)
        launch(
            product_kernels.glu_backward_product, tiles * partial.shape[1],
            (*read, *written, weights, places.pair_of_row, places.expert_of_tile, tiles),
            F=F, L=L, BM=TILE, BF=t.columns, BK=t.step, GROUP=t.group, PARTS=t.parts, **glu.constants(),
            **t.options(),
        )  # fmt: skip
    return d_h, act, partial.sum(1)


def weight_product(p: Tensor, q: Tensor, E: int, places: Places, t: Tiles) -> Tensor:
    """[E, O, I]: over each expert's rows, p [rows, O]' q [rows, I]. Zeros for an expert without rows."""
    O, I = p.shape[1], q.shape[1]  # noqa: E741
    out = p.new_empty(E, O, I)
    if not len(p):
        return out.zero_()
    tiles = -(-O // t.rows) * -(-I // t.columns)
    tables = (rows_of(p, t.step, t.rows), rows_of(q, t.step, t.columns))
    launch(
        product_kernels.weight_product, E * tiles, (*tables, out, places.ends), O=O, I=I, BO=t.rows, BI=t.columns,
        BK=t.step, **t.options(),
    )  # fmt: skip
    return out


def glu_backward_rows(h: Tensor, d: Tensor, weights: Tensor, places: Places, glu: Glu) -> Tensor:
    """In place: the pre-activation h [rows, 2F] becomes d_h, d [rows, F] the weighted act. Returns <act, d> of rows."""
    F, height = d.shape[1], 4
    along = torch.empty(len(d), dtype=torch.float32, device=d.device)
    if len(d):
        launch(
            product_kernels.glu_backward_rows, len(d) // height,
            (h, d, along, weights, places.pair_of_row, places.expert_of_tile), F=F, TILE=TILE, ROWS=height, BLOCK=512,
            **glu.constants(), num_warps=4,
        )  # fmt: skip
    return along


def grouped(a: Tensor, b: Tensor, places: Places) -> Tensor:
    product: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(a, b, offs=places.ends)


def library_forward(rows: Tensor, w13: Tensor, w2: Tensor, places: Places, glu: Glu) -> Tensor:
    h = grouped(rows, w13.transpose(1, 2), places)
    F = w2.shape[2]
    act = situ.glu(h[:, :F], h[:, F:], *glu)
    return grouped(act, w2.transpose(1, 2), places)


def library_backward(
    rows: Tensor, dy: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, places: Places, glu: Glu
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients: of the rows, of each row's weight, of w13, of w2."""
    h, d = grouped(rows, w13.transpose(1, 2), places), grouped(dy, w2, places)
    along = glu_backward_rows(h, d, weights, places, glu)
    return grouped(h, w13, places), along, grouped(h.t(), rows, places), grouped(dy.t(), d, places)


def fused_forward(rows: Tensor, w13: Tensor, w2: Tensor, places: Places, glu: Glu) -> Tensor:
    p = plan(w13.shape[2], w2.shape[2])
    return row_product(glu_product(rows, w13, places, glu, p.glu), w2, places, True, p.down)


def fused_backward(
    rows: Tensor, dy: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, places: Places, glu: Glu
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients: of the rows, of each row's weight, of w13, of w2."""
    E, p = len(w13), plan(w13.shape[2], w2.shape[2])
    d_h, act, along = glu_backward_product(rows, dy, w13, w2, weights, places, glu, p.backward)
    dx_rows = row_product(d_h, w13, places, False, p.dx)
    return dx_rows, along, weight_product(d_h, rows, E, places, p.dw13), weight_product(dy, act, E, places, p.dw2)
