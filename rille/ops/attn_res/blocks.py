"""The two-phase form: all sites of a block of layers score the finished blocks in one pass, each then adds its own sum.

`two_phase.py` is it in plain PyTorch, `phases.py` runs the kernels, `form.py` weighs it against one phase.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from rille.ops.attn_res import two_phase
from rille.ops.attn_res.form import choose_form
from rille.ops.norm import reference as norm_reference

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
BACKENDS = ("triton", "reference")


@dataclass(frozen=True, eq=False)
class ScoredBlocks:
    """What the Q sites of a block of layers need of the finished blocks: `scored_site` reads it.

    blocks: the finished blocks [N, D]; give these to what follows, so that the parts of their gradients are added up
    inside the kernels. mixtures: of each site its mixture of them, [N, D] in their dtype. tops: fp32 [N, 2] of each
    site, the largest score and the sum of exponentials. weights: fp32 [Q, D], query times gain. The rest is for the
    backend that made it.
    """

    blocks: tuple[Tensor, ...]
    mixtures: tuple[Tensor, ...]
    tops: tuple[Tensor, ...]
    weights: tuple[Tensor, ...]
    eps: float
    kept: Any = None
    plain: two_phase.FinishedBlocks | None = None


def score_blocks(
    blocks: Sequence[Tensor], queries: Sequence[Tensor], gains: Sequence[Tensor], eps: float, *,
    backend: str | None = None,
) -> ScoredBlocks:  # fmt: skip
    """Phase 1: the finished blocks, R >= 1 tensors [N, D], under the queries and gains [D] of Q >= 1 sites.

    backend: "triton" or "reference", by default the kernels for CUDA tensors. Raises ValueError where that cannot run,
    see `choose_phases`, and for shapes that do not agree. Attention Residuals paper, algorithm 1.
    """
    _check(blocks, queries, gains)
    if backend is None:
        backend = "triton" if blocks[0].is_cuda else "reference"
    wide = torch.promote_types(blocks[0].dtype, torch.float32)
    w_QD = torch.stack(tuple(queries)).to(wide) * torch.stack(tuple(gains)).to(wide)
    if backend == "reference":
        plain = two_phase.first_phase(blocks, w_QD, torch.ones_like(w_QD), eps)
        return ScoredBlocks(tuple(blocks), (), (), w_QD.unbind(), eps, plain=plain)
    if backend != "triton":
        raise ValueError(f"attn_res: unknown backend {backend!r} of two phases; there are {', '.join(BACKENDS)}")
    training = torch.is_grad_enabled()
    if reason := obstacle(blocks, training):
        raise ValueError(f"attn_res: two phases cannot run: {reason}")
    from rille.ops.attn_res import phases

    rows = [block.contiguous() for block in blocks]
    Q, holder = len(w_QD), []
    if training:
        found = phases.FirstPhase.apply(holder, eps, w_QD, *rows)
        parts = found[2 * Q :], found[:Q], found[Q : 2 * Q]
    else:
        out_QND, _, _, tops_QN2 = phases.first_forward(rows, w_QD, eps)
        parts = tuple(rows), out_QND.unbind(), tops_QN2.unbind()
    return ScoredBlocks(*parts, w_QD.unbind(), eps, kept=holder[0] if holder else None)


def scored_site(
    scored: ScoredBlocks, site: int, partial: Tensor, update: Tensor | None, norm_gain: Tensor
) -> tuple[Tensor, Tensor]:
    """Phase 2 of one site: add the update to the running sum, mix it with the finished blocks, norm.

    partial [N, D] and update [N, D] or None as the last source and update of `attn_res_site`, norm_gain [D]. Returns
    (input of the sub-layer [N, D], running sum [N, D]); give the next site this running sum.
    """
    of_blocks = scored.blocks[0]
    if partial.shape != of_blocks.shape or partial.dtype != of_blocks.dtype:
        raise ValueError(
            f"attn_res: running sum {tuple(partial.shape)} {partial.dtype} beside finished blocks "
            f"{tuple(of_blocks.shape)} {of_blocks.dtype}"
        )
    if update is not None:
        update = update.to(partial.dtype).contiguous()
    if scored.plain is not None:
        running = partial if update is None else partial + update
        w_D = scored.weights[site]
        mixed = two_phase.second_phase(scored.plain, site, running, w_D, torch.ones_like(w_D), scored.eps)
        return norm_reference.rms_norm(mixed.to(partial.dtype), norm_gain, scored.eps), running
    from rille.ops.attn_res import phases

    given = scored.mixtures[site], scored.tops[site], scored.weights[site], norm_gain.contiguous(), partial.contiguous()
    if torch.is_grad_enabled():
        if scored.kept is None:
            raise RuntimeError("attn_res: the blocks were scored without gradients, a site needs them")
        return phases.Site.apply(scored.kept, site, scored.eps, *given, update)
    finished, tops, w_D, gain_D, rows = given
    x, running, _ = phases.site_forward(rows, update, finished, tops, w_D, gain_D, scored.eps, False)
    return x, partial if update is None else running


def choose_phases(blocks: Sequence[Tensor], sites: int) -> tuple[str, str]:
    """Which of "one_phase" and "two_phase" for so many sites over these finished blocks and, in words, why."""
    training = torch.is_grad_enabled()
    if not blocks[0].is_cuda:
        return "one_phase", f"the tensors are on {blocks[0].device.type}"
    if reason := obstacle(blocks, training):
        return "one_phase", reason
    if torch.compiler.is_compiling():
        return "one_phase", "two phases share what torch.compile cannot trace"
    return choose_form(len(blocks), sites, blocks[0].numel() * blocks[0].element_size(), training)


def obstacle(blocks: Sequence[Tensor], training: bool) -> str | None:
    """Why the kernels cannot run, or None."""
    first = blocks[0]
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.attn_res import phases

    if not first.is_cuda and not phases.interpreting():
        return f"the tensors are on {first.device.type}"
    if first.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bf16, fp16 or fp32, not {first.dtype}"
    return phases.obstacle(len(blocks), first.shape[1], first.element_size(), training)


def _check(blocks: Sequence[Tensor], queries: Sequence[Tensor], gains: Sequence[Tensor]) -> None:
    kinds = {(tuple(block.shape), block.dtype) for block in blocks}
    if len(kinds) != 1 or blocks[0].ndim != 2:
        raise ValueError(
            f"attn_res: finished blocks must share one [N, D] and one dtype, got {sorted(map(str, kinds))}"
        )
    width = blocks[0].shape[1:]
    if not queries or len(queries) != len(gains) or any(x.shape != width for x in (*queries, *gains)):
        raise ValueError(
            f"attn_res: {len(queries)} queries and {len(gains)} gains for blocks of width {tuple(width)}: "
            f"{[tuple(x.shape) for x in (*queries, *gains)]}"
        )
