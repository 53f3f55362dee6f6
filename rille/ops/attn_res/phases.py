"""Two phases for all sites of a block of layers: launches of `phase_kernels.py`, and what autograd keeps.

Nothing of size N * D is kept for the backward pass but sources and running sums, which a plain residual stream keeps
too. What the sites read, one mixture of the finished blocks each, is made once more when the first site's gradient is
asked for, and each site then puts the gradient of its mixture where the mixture was.

Suffixes: N tokens, D width, Q sites, R finished blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rille.ops.attn_res import phase_kernels
from rille.ops.attn_res.mix import WIDEST, interpreting, processors, registers_of_a_thread

# Most sums over a row that share a reduction across threads.
SUMS = 8
# Tile of `weight_sums`: tokens, columns; its programs share the tokens so that about so many run.
TILE_TOKENS, TILE_COLUMNS, TILE_PROGRAMS = 64, 128, 512


class Plan(NamedTuple):
    """How a program covers a row: VEC elements of BLOCK a load, so many warps, so many programs on a processor."""

    BLOCK: int
    VEC: int
    warps: int
    programs: int

    @property
    def rows(self) -> dict[str, Any]:
        limit = registers_of_a_thread(self.warps, self.programs)
        return dict(BLOCK=self.BLOCK, LANES=32 * self.warps, VEC=self.VEC, num_warps=self.warps, maxnreg=limit)


@cache
def plan(D: int, itemsize: int, whole: float, numbers: int, orders: tuple[int, ...] = (16, 8)) -> Plan | None:
    """A program holds `whole` fp32 rows (a row of sources counts itemsize / 4) and, in every thread, so many numbers.
    None where registers are too few.

    The first of `orders`, elements a thread, with which at most 16 warps cover a row and twelve of them or more run on
    a processor; else the last, with what it needs. Many elements spread what a thread does for each site of a row, and
    few fit rows with many sources.
    """
    VEC = 16 // itemsize
    BLOCK = max(32 * VEC, 1 << (D - 1).bit_length())
    found = None
    for elements in orders:
        warps = min(16, max(1, BLOCK // (32 * max(VEC, elements))))
        needed = BLOCK / (32 * warps) * whole + numbers
        programs = min(max(1, 16 // warps), int(65536 / (32 * warps * needed)))
        if needed <= 255 and programs:
            found = Plan(BLOCK, VEC, warps, programs)
            if programs * warps >= min(12, 16 // warps * warps):
                break
    return found


def forward_plan(R: int, D: int, itemsize: int) -> Plan | None:
    """The sources, one site's weights and mixture."""
    return plan(D, itemsize, R * itemsize / 4 + 2, 24 + 2 * R)


def backward_plan(R: int, D: int, itemsize: int) -> Plan | None:
    """The sources and their gradients, one site's weights and gradient."""
    return plan(D, itemsize, R * (1 + itemsize / 4) + 2, 24 + 4 * R)


def site_plan(D: int, itemsize: int, backward: bool) -> Plan:
    found = plan(D, itemsize, 5, 32, (8, 16)) if backward else plan(D, itemsize, 3, 32)
    assert found is not None, "rows of at most WIDEST fit"
    return found


def obstacle(R: int, D: int, itemsize: int, backward: bool) -> str | None:
    """Why finished blocks of this number and width cannot be scored together, or None."""
    if D > WIDEST:
        return f"the kernels take rows of at most {WIDEST}, these have {D}"
    if forward_plan(R, D, itemsize) is None or (backward and backward_plan(R, D, itemsize) is None):
        return f"{R} finished blocks of width {D} do not fit the registers of one program"
    return None


def first_forward(blocks: Sequence[Tensor], w: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mixtures of the finished blocks [Q, N, D], scores [N, R, Q], 1 / rms of the blocks [N, R], m and l [Q, N, 2]."""
    (N, D), R, Q = blocks[0].shape, len(blocks), len(w)
    new = {"dtype": torch.float32, "device": w.device}
    out = blocks[0].new_empty(Q, N, D)
    scores, roots, tops = torch.empty(N, R, Q, **new), torch.empty(N, R, **new), torch.empty(Q, N, 2, **new)
    p = forward_plan(R, D, out.element_size())
    assert p is not None, "asked before"
    if N:
        launch: Any = phase_kernels.first_forward[(N,)]
        launch(tuple(blocks), w, out, scores, roots, tops, N, Q, eps, D=D, GROUP=max(1, SUMS // R), **p.rows)
    return out, scores, roots, tops


def first_again(blocks: Sequence[Tensor], scores: Tensor, tops: Tensor) -> Tensor:
    """The mixtures of `first_forward`, from its scores."""
    (N, D), R, Q = blocks[0].shape, len(blocks), len(tops)
    out = blocks[0].new_empty(Q, N, D)
    p = forward_plan(R, D, out.element_size())
    assert p is not None, "asked before"
    if N:
        launch: Any = phase_kernels.first_again[(N,)]
        limit = registers_of_a_thread(p.warps, p.programs)
        launch(tuple(blocks), out, scores, tops, N, Q, D=D, BLOCK=p.BLOCK, num_warps=p.warps, maxnreg=limit)
    return out


def first_backward(
    blocks: Sequence[Tensor], beside: Sequence[Tensor | None], d_out: Tensor, d_tops: Tensor, w: Tensor, scores: Tensor,
    roots: Tensor, tops: Tensor, eps: float,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradients of the blocks, with what is beside them, and of w fp32 [Q, D]."""
    (N, D), R, Q = blocks[0].shape, len(blocks), len(w)
    grads = [torch.empty_like(block) for block in blocks]
    along = torch.empty_like(scores)
    p = backward_plan(R, D, d_out.element_size())
    assert p is not None, "asked before"
    if not N:
        return grads, torch.zeros_like(w)
    which = sum(1 << j for j, x in enumerate(beside) if x is not None)
    added = tuple(grad if x is None else x.contiguous() for x, grad in zip(beside, grads, strict=True))
    launch: Any = phase_kernels.first_backward[(N,)]
    saved = (w, scores, roots, tops, along)
    flags = dict(D=D, BESIDE=which)
    launch(tuple(blocks), tuple(grads), added, d_out, d_tops, *saved, N, Q, eps, **flags, **p.rows)
    # The interpreter's bf16 products are wrong.
    upcast = interpreting() or d_out.dtype != torch.bfloat16
    columns = -(-D // TILE_COLUMNS)
    tiles = -(-N // TILE_TOKENS)
    each = -(-tiles // max(1, TILE_PROGRAMS // columns))
    sums = torch.empty(-(-tiles // each), Q, D, dtype=torch.float32, device=w.device)
    sizes = dict(D=D, BM=TILE_TOKENS, BE=TILE_COLUMNS, BQ=max(16, 1 << (Q - 1).bit_length()), UPCAST=upcast)
    launch = phase_kernels.weight_sums[(columns, len(sums))]
    launch(tuple(blocks), along, sums, N, Q, each, **sizes, num_warps=4)
    return grads, sums.sum(0)


def site_forward(
    partial: Tensor, update: Tensor | None, finished: Tensor, tops: Tensor, w: Tensor, norm_gain: Tensor, eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sub-layer's input [N, D], the running sum (empty without update), fp32 [N, 5] (empty without save)."""
    N, D = partial.shape
    out = torch.empty_like(partial)
    running = torch.empty_like(out) if update is not None else out.new_empty(0)
    saved = torch.empty(N if save else 0, 5, dtype=torch.float32, device=out.device)
    if N:
        launch: Any = phase_kernels.site_forward[(N,)]
        arguments = (partial, update, finished, tops, w, norm_gain, out, running, saved, N, eps)
        rows = site_plan(D, out.element_size(), False).rows
        launch(*arguments, D=D, UPDATE=update is not None, SAVE=save, **rows)
    return out, running, saved


def site_backward(
    d_out: Tensor, beside: Tensor | None, partial: Tensor, finished: Tensor, w: Tensor, norm_gain: Tensor,
    saved: Tensor, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the running sum and, fp32 [N, 2], of the finished blocks' tops; the one of the finished blocks'
    mixture takes its place. fp32 [2, D]: gradients of w and of the norm's gain."""
    N, D = partial.shape
    p = site_plan(D, d_out.element_size(), True)
    programs = min(N, p.programs * processors(d_out.device))
    d_partial = torch.empty_like(partial)
    d_tops = torch.empty(N, 2, dtype=torch.float32, device=d_out.device)
    sums = torch.empty(programs, 2, D, dtype=torch.float32, device=d_out.device)
    if N:
        launch: Any = phase_kernels.site_backward[(programs,)]
        arguments = (partial, finished, d_out, beside, w, norm_gain, saved, d_partial, d_tops, sums, N, eps)
        launch(*arguments, D=D, BESIDE=beside is not None, **p.rows)
    return d_partial, d_tops, sums.sum(0)


class Mixtures:
    """What all sites of a block share for their gradients: the mixtures again, of which each gives way to its own
    gradient. No tensor here has a history, so nothing refers back to the graph."""

    def __init__(self, blocks: Sequence[Tensor], scores: Tensor, tops: Tensor) -> None:
        self.blocks, self.scores, self.tops = blocks, scores, tops
        self.buffer: Tensor | None = None
        self.given: set[int] = set()

    def of(self, site: int) -> Tensor:
        """The site's mixture [N, D], to be overwritten. A site that asks twice asks for another backward pass."""
        if self.buffer is None or site in self.given:
            self.buffer, self.given = first_again(self.blocks, self.scores, self.tops), set()
        self.given.add(site)
        return self.buffer[site]

    def gradients(self, found: Sequence[Tensor | None]) -> Tensor:
        """What came back for the mixtures, [Q, N, D], where it lies already as far as possible."""
        buffer = self.buffer
        if buffer is None:
            buffer = self.blocks[0].new_empty(len(found), *self.blocks[0].shape)
        for there, gradient in zip(buffer, found, strict=True):
            if gradient is None:
                there.zero_()
            elif gradient.data_ptr() != there.data_ptr():
                there.copy_(gradient)
        self.buffer, self.given = None, set()
        return buffer


class FirstPhase(torch.autograd.Function):
    """(mixtures' holder, eps, w [Q, D], blocks) -> Q mixtures of the finished blocks, Q tops [N, 2], the blocks again.

    Give the next phase the blocks that come back, as with `mix.Handed`. What comes back for tops [N, 2] is the gradient
    of log-sum-exp and, in the second column, <gradient of the mixture, mixture>: see `phase_kernels`.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        holder, eps, w, *blocks = arguments
        out, scores, roots, tops = first_forward(blocks, w, eps)
        holder.append(Mixtures([block.detach() for block in blocks], scores, tops))
        ctx.mixtures, ctx.eps = holder[-1], eps
        ctx.save_for_backward(w, scores, roots, tops, *blocks)
        ctx.set_materialize_grads(False)
        return *out.unbind(), *tops.unbind(), *(block.view_as(block) for block in blocks)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        w, scores, roots, tops, *blocks = ctx.saved_tensors
        Q = len(w)
        d_out = ctx.mixtures.gradients(grad_outputs[:Q])
        d_tops = torch.stack([tops.new_zeros(tops.shape[1:]) if x is None else x for x in grad_outputs[Q : 2 * Q]])
        grads, dw = first_backward(blocks, grad_outputs[2 * Q :], d_out, d_tops, w, scores, roots, tops, ctx.eps)
        return None, None, dw, *grads


class Site(torch.autograd.Function):
    """(mixtures, site's number, eps, mixture, tops, w [D], norm_gain, partial, update or None) -> (input of the
    sub-layer, running sum). The mixture is not kept."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        ctx.mixtures, ctx.site, ctx.eps, finished, tops, w, norm_gain, partial, update = arguments
        out, running, saved = site_forward(partial, update, finished, tops, w, norm_gain, ctx.eps, True)
        ctx.updates = update is not None
        ctx.save_for_backward(w, norm_gain, saved, running if ctx.updates else partial)
        ctx.set_materialize_grads(False)
        return out, running if ctx.updates else partial.view_as(partial)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        w, norm_gain, saved, partial = ctx.saved_tensors
        d_out, beside = grad_outputs
        d_out = torch.zeros_like(partial) if d_out is None else d_out.contiguous()
        beside = None if beside is None else beside.contiguous()
        mixture = ctx.mixtures.of(ctx.site)
        d_partial, d_tops, sums = site_backward(d_out, beside, partial, mixture, w, norm_gain, saved, ctx.eps)
        d_norm = sums[1].to(norm_gain.dtype)
        return None, None, None, mixture, d_tops, sums[0], d_norm, d_partial, d_partial if ctx.updates else None
