"""Newton-Schulz with every symmetric product computed by half of its tiles (`symmetric_kernels.py`).

All of the P x P matrices of both forms are polynomials of A = X X^T: symmetric, and they commute, so their products are
symmetric too. Only what has the long side, B X and T X, is not.

Axes: B matrices of P rows and Q columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rille.ops.launching import INTERPRET, launch
from rille.ops.newton_schulz import blocks, chain_gluon, symmetric_kernels
from rille.ops.newton_schulz.blocks import RUN
from rille.ops.newton_schulz.reference import COEFFICIENTS

BLOCK, DEPTH = 128, 64
CHAINED = (128, 256)
OPTIONS = {"num_warps": 8, "num_stages": 3, "maxnreg": 128}  # 96 KB and half of the registers: two programs a processor


def product(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    scale: float = 1.0,
    share: float = 0.0,
    diagonal: float = 0.0,
    tall: bool = False,
) -> Tensor:
    """scale L R^T + share C + diagonal I, known to be symmetric, of [B, P, K]; of [B, K, P], where `tall`, L^T R."""
    B, P, K = (left.shape[0], *(left.shape[:0:-1] if tall else left.shape[1:]))
    left, right = left.contiguous(), right.contiguous()
    out = left.new_empty(B, P, P)
    block = 32 if INTERPRET else BLOCK  # small matrices shall have tiles too
    depth = 16 if INTERPRET else DEPTH
    tiles = -(-P // block)
    arguments = left, right, added, out, P, K, scale, share, diagonal
    constants = {"TALL": tall, "HAS_ADDED": added is not None, "EVEN": not (P % block or K % depth), "TILES": tiles}
    if B:
        programs = B * tiles * (tiles + 1) // 2
        options = constants | {"BLOCK": block, "DEPTH": depth} | OPTIONS
        launch(symmetric_kernels.symmetric_product, programs, arguments, **options)
    return out


def twin(
    left: Tensor,
    right: Tensor,
    added: Tensor | None = None,
    scale: float = 1.0,
    share: float = 0.0,
    diagonal: float = 0.0,
    tall: bool = False,
) -> Tensor:
    """`product` in PyTorch: the upper half, mirrored by elements."""
    full = scale * (left.mT @ right if tall else left @ right.mT)
    full = full if added is None else full + share * added
    full.diagonal(dim1=1, dim2=2).add_(diagonal)
    return full.triu() + full.triu(1).mT


def plain(x_BPQ: Tensor, steps: int) -> Tensor:
    """As `blocks.plain`."""
    a, b, c = COEFFICIENTS
    tall = x_BPQ.shape[1] > x_BPQ.shape[2]
    for _ in range(steps):
        a_BPP = product(x_BPQ, x_BPQ, tall=tall)
        b_BPP = product(a_BPP, a_BPP, a_BPP, c, b)
        x_BPQ = torch.baddbmm(x_BPQ, *((x_BPQ, b_BPP) if tall else (b_BPP, x_BPQ)), beta=a)
    return x_BPQ


def gram(x_BPQ: Tensor, steps: int) -> Tensor:
    """As `blocks.gram`."""
    run, tall = RUN[x_BPQ.dtype], x_BPQ.shape[1] > x_BPQ.shape[2]
    for done in range(0, steps, run):
        t_BPP = _transform(product(x_BPQ, x_BPQ, tall=tall), min(run, steps - done))
        x_BPQ = x_BPQ @ t_BPP if tall else t_BPP @ x_BPQ
    return x_BPQ


def chained(x_BPQ: Tensor, steps: int) -> Tensor:
    """As `blocks.gram`, for shorter sides of `CHAINED` and 16 bits: what lies between the products with X is one launch
    (`chain_gluon.py`)."""
    run, tall = RUN[x_BPQ.dtype], x_BPQ.shape[1] > x_BPQ.shape[2]
    for done in range(0, steps, run):
        t_BPP = chain(blocks.square(x_BPQ), min(run, steps - done))
        x_BPQ = x_BPQ @ t_BPP if tall else t_BPP @ x_BPQ
    return x_BPQ


def chain(a_BPP: Tensor, steps: int) -> Tensor:
    """As `blocks.transform`, of 1 or 2 steps."""
    t_BPP = torch.empty_like(a_BPP)
    if len(a_BPP):
        options = {"STEPS": steps, "TILES": a_BPP.shape[1] // 128, "num_warps": 8}
        launch(chain_gluon.transform, len(a_BPP), (a_BPP, t_BPP, *COEFFICIENTS), **options)
    return t_BPP


def _transform(a_BPP: Tensor, steps: int) -> Tensor:
    a, b, c = COEFFICIENTS
    t_BPP = None
    for step in range(steps):
        b_BPP = product(a_BPP, a_BPP, a_BPP, c, b, a)
        t_BPP = b_BPP if t_BPP is None else product(b_BPP, t_BPP)
        if step + 1 < steps:
            a_BPP = product(product(b_BPP, a_BPP), b_BPP)
    assert t_BPP is not None
    return t_BPP
