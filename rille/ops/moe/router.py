"""The router as ops for torch: the product that makes the logits, and what follows from them in one pass."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from rille.ops.launching import chained, launch
from rille.ops.moe import router_kernels
from rille.ops.moe.permute import INTERPRET, power_of_two
from rille.ops.registering import op

MOST_EXPERTS = 2048  # a row of scores in the registers of one warp
APART = True  # large batches count the histogram in a kernel of its own, where it was measured: on Hopper
PAIRED_ROWS = 256  # up to which a row has a program of its own
MANY = 2**22  # scores from which a batch is large
EXPERTS, WORDS, TOKENS = 16, 2048, 512  # of its program; two bins a word; tokens of a tile
MOST_TILES = 65_535 // TOKENS  # a count of 16 bits holds all tokens of a program


@op("rille::moe_router")
def router(
    logits: Tensor, bias: Tensor, top: int, scale: float, renormalise: bool, bins: int, scored: bool,
    loaded: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """ids int64, weights, their scores [N, A]; cutoff [N]; load int64 [E]; histogram int64 [E, bins]. Floats fp32.
    scored: logits are scores already, and the weights carry no gradient. loaded: whether the load is counted; else it
    is empty, and zeros for it need not be launched."""
    (N, E), device = logits.shape, logits.device
    ids, weights, chosen = (
        logits.new_empty(N, top, dtype=torch.int64),
        logits.new_empty(N, top),
        logits.new_empty(N, top),
    )
    cutoff = logits.new_empty(N)
    load = torch.zeros(E if loaded else 0, dtype=torch.int64, device=device)
    histogram = torch.zeros(E, bins, dtype=torch.int32, device=device)
    block = power_of_two(E)
    paired = not loaded and bins == 0 and N <= PAIRED_ROWS
    height = 1 if paired else max(1, 512 // block)
    apart = counted_apart(logits, bins)
    edges = torch.empty(2, dtype=torch.float32, device=device) if apart else None
    if N:
        counts = (load if loaded else None, histogram, edges)
        launch(
            router_kernels.router_forward, min(-(-N // height), router_programs(device)),
            (logits, bias, ids, weights, chosen, cutoff, *counts, N, logits.stride(0), scale),
            E=E, A=top, BINS=0 if apart else bins, BLOCK=block, CHOICES=power_of_two(top), ROWS=height,
            RENORMALISE=renormalise, SCORED=scored, PAIRED=paired, num_warps=1, **chained(logits),
        )  # fmt: skip
    if apart:
        from rille.ops.moe import histogram_gluon

        groups, shares = histogram_grid(N, E, torch.cuda.get_device_properties(device).multi_processor_count)
        launch(
            histogram_gluon.histogram_kernel, groups * shares,
            (logits, cutoff, edges, histogram, N, logits.stride(0), groups), E=E, BINS=bins, EXPERTS=EXPERTS,
            WORDS=WORDS, TOKENS=TOKENS, SCORED=scored, num_warps=16,
        )  # fmt: skip
    return ids, weights, chosen, cutoff, load, histogram.long()


def counted_apart(logits: Tensor, bins: int) -> bool:
    wanted = APART and not INTERPRET and logits.is_cuda and logits.numel() >= MANY and 0 < bins <= 2 * WORDS
    return wanted and torch.cuda.get_device_capability(logits.device) == (9, 0)


def histogram_grid(N: int, E: int, processors: int) -> tuple[int, int]:
    """Groups of experts, and the shares of the tokens that each group's programs take: a program a multiprocessor, more
    where a share would be more tokens than a count can hold."""
    groups, tiles = -(-E // EXPERTS), -(-N // TOKENS)
    return groups, max(1, processors // groups, -(-tiles // MOST_TILES))


@router.register_fake
def _(logits, bias, top, scale, renormalise, bins, scored, loaded=True):
    N, E = logits.shape
    pairs = [logits.new_empty((N, top), dtype=kind) for kind in (torch.int64, torch.float32, torch.float32)]
    counts = [logits.new_empty(shape, dtype=torch.int64) for shape in ((E if loaded else 0,), (E, bins))]
    return *pairs, logits.new_empty(N, dtype=torch.float32), *counts


@op("rille::moe_router_backward")
def router_backward(d_weights: Tensor, ids: Tensor, chosen: Tensor, E: int, scale: float, renormalise: bool) -> Tensor:
    """The gradient of the logits, fp32 [N, E]."""
    N, A = ids.shape
    d_logits = torch.zeros(N, E, dtype=torch.float32, device=ids.device)
    if N:
        launch(
            router_kernels.router_backward, -(-N // 32), (d_weights, ids, chosen, d_logits, N, scale),
            E=E, A=A, CHOICES=power_of_two(A), ROWS=32, RENORMALISE=renormalise, num_warps=4,
        )  # fmt: skip
    return d_logits


@router_backward.register_fake
def _(d_weights, ids, chosen, E, scale, renormalise):
    return d_weights.new_empty((ids.shape[0], E), dtype=torch.float32)


def save_router(ctx, inputs, output) -> None:
    logits, _, _, *ctx.settings, _, ctx.scored, _ = inputs
    ctx.experts = logits.shape[1]
    ids, _, chosen, *rest = output
    ctx.save_for_backward(ids, chosen)
    ctx.mark_non_differentiable(ids, chosen, *rest)
    ctx.set_materialize_grads(False)


def router_gradient(ctx, _, d_weights, *rest):
    if d_weights is None:
        return (None,) * 8
    assert not ctx.scored
    ids, chosen = ctx.saved_tensors
    d_logits = router_backward(d_weights.contiguous(), ids, chosen, ctx.experts, *ctx.settings)
    return d_logits, None, None, None, None, None, None, None


router.register_autograd(router_gradient, setup_context=save_router)


@cache
def router_programs(device: torch.device) -> int:
    if device.type != "cuda" or INTERPRET:
        return 3
    return 24 * torch.cuda.get_device_properties(device).multi_processor_count


def logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [N, D] W' [E, D] -> fp32 [N, E] from bf16 operands: the same products and sums as in fp32 throughout, on the
    tensor cores."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


class Logits(torch.autograd.Function):
    """`logits`. The gradient of the logits is rounded to bf16 for the two products of the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return logits(x, weight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d = grad_outputs[0].to(x.dtype)
        wants_x, wants_weight = ctx.needs_input_grad
        return d @ weight if wants_x else None, d.t() @ x if wants_weight else None
