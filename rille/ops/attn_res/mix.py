"""Launches of the kernels of one site, registered with torch so that compiled models see one op.

`mix` is differentiable in the sources, the update, query, gain and the norm's gain. Saved for the backward pass: the
sources, which the model holds anyway, and two numbers a token and source.

Suffixes: N tokens, D width, C columns of stats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from rille.ops.attn_res import mix_kernels, wide_kernels
from rille.ops.launching import chained, launch
from rille.ops.registering import op

# Most sources of one site, for each number of them is a kernel of its own; widest row that fits one program.
MOST_SOURCES, WIDEST = 16, 8192
# Registers of a thread that sources may fill: forward, while a group is summed and the next one arrives; backward.
FORWARD_REGISTERS, BACKWARD_REGISTERS = 64, 32
# Rows are few where a processor has at most so many elements: programs of 4096 each would leave half of its places for
# programs empty.
FEW_ELEMENTS = 32768
# Rows of at least so many elements run backward through `wide_kernels`.
WIDE = 4096
# Rows that `in_ring` takes run forward through `ring_gluon.py`: 0.284 ms and not 0.352 (9 sources, 8,192 x 7,168).
RING = True
# Bytes of shared memory that its ring may fill, beside what sums across threads need; its most sources; its warps.
RING_BYTES, RING_SOURCES, RING_WARPS, RING_GROUP = 225 * 1024, 9, 8, 3


@dataclass(frozen=True)
class Plan:
    """How programs cover rows. VEC elements of BLOCK make one load. Registers are limited so that
    `forward_programs` and `programs` run on a processor at once; the latter share the rows backward.

    Forward: STEP rows one after another, sources in groups of GROUP; `few`: see `is_few`. Backward: sources in groups
    of `backward_group`, or one at a time in a loop (`loops`).
    """

    BLOCK: int
    VEC: int
    STEP: int
    GROUP: int
    forward_warps: int
    forward_programs: int
    backward_group: int
    backward_warps: int
    programs: int
    loops: bool
    few: bool = False


def is_few(N: int, D: int, device: torch.device) -> bool:
    """Rows too few to fill a card with programs of several rows: each has its own, with all its sources in one group
    where they fit. 64 rows of 512 took 9.0 us in 8 programs of 8 rows, and one row 2.2."""
    return FEW_ELEMENTS * processors(device) > N * D


def in_ring(sources: Sequence[Tensor], *others: Tensor | None) -> bool:
    """Whether the kernel with a ring can run and has work: wide rows, several for each processor, sources that fit the
    registers of one program, and all that it reads in bf16."""
    (N, D), R = sources[0].shape, len(sources)
    fits = WIDE < D <= WIDEST and D % 8 == 0 and R <= RING_SOURCES and 4 * processors(sources[0].device) <= N
    return fits and all(x.dtype == torch.bfloat16 for x in (*sources, *others) if x is not None)


def ring_sizes(D: int) -> dict[str, int]:
    BLOCK = 1 << (D - 1).bit_length()
    return dict(D=D, BLOCK=BLOCK, SLOTS=RING_BYTES // (2 * BLOCK), GROUP=RING_GROUP, num_warps=RING_WARPS)


@cache
def plan(R: int, D: int, itemsize: int, normed: bool, few: bool = False) -> Plan:
    """Sizes found by compiling for sm_90: 16 elements a thread forward and 8 backward need 128 registers or fewer. The
    widest rows of a mixture without norm have 32 forward and one source a group: the faster of two forms measured."""
    VEC = 16 // itemsize
    BLOCK = max(32 * VEC, 1 << (D - 1).bit_length())
    STEP = 1 if few else max(1, 4096 // BLOCK)
    alone = BLOCK > WIDE and itemsize == 2 and not normed and not few
    forward_warps = min(8, BLOCK // (32 * VEC)) if alone else min(16, max(1, BLOCK // 512))
    if few and R * registers_of_a_source(BLOCK, forward_warps, itemsize) > FORWARD_REGISTERS:
        forward_warps = min(16, BLOCK // (32 * VEC))
    GROUP = 1 if alone else group_of(R, registers_of_a_source(BLOCK, forward_warps, itemsize), FORWARD_REGISTERS)
    backward_warps = min(16, max(1, BLOCK // 256))
    backward_group = group_of(R, registers_of_a_source(BLOCK, backward_warps, itemsize), BACKWARD_REGISTERS)
    return Plan(
        BLOCK, VEC, STEP, GROUP, forward_warps, max(1, 16 // forward_warps), backward_group, backward_warps,
        max(1, 16 // backward_warps), R > 1 and BLOCK >= WIDE, few,
    )  # fmt: skip


def group_of(R: int, registers: int, most: int) -> int:
    """Sources of a group, whose registers stand beside those of the next one; all where they fit."""
    if R * registers <= most:
        return R
    count = max(1, most // (2 * registers))
    return -(-R // -(-R // count))  # groups of nearly one size


def registers_of_a_source(BLOCK: int, warps: int, itemsize: int) -> int:
    return max(1, BLOCK * itemsize // (4 * 32 * warps))


def registers_of_a_thread(warps: int, programs: int) -> int:
    """With which so many programs run on a processor at once."""
    return min(255, 65536 // (32 * warps * programs) // 8 * 8)


def interpreting() -> bool:
    return bool(knobs.runtime.interpret)


@cache
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@op("rille::attn_res_mix")
def mix(
    sources: Sequence[Tensor], update: Tensor | None, query: Tensor, gain: Tensor, norm_gain: Tensor | None, eps: float,
    save: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The mixture [N, D], after the norm where norm_gain is given; the last source + update (empty without); what the
    backward pass needs of each token, fp32 [N, C] (empty without save). All contiguous."""
    (N, D), R = sources[0].shape, len(sources)
    out = sources[0].new_empty(N, D)
    running = out.new_empty((N, D) if update is not None else 0)
    stats = out.new_empty((N, columns(R, norm_gain)) if save else 0, dtype=torch.float32)
    arguments = (tuple(sources), update, query, gain, norm_gain, out, running, stats, N, eps)
    flags: dict[str, Any] = dict(UPDATE=update is not None, NORM=norm_gain is not None, STATS=save)
    if RING and not interpreting() and in_ring(sources, update, query, gain, norm_gain):
        from rille.ops.attn_res import ring_gluon

        launch(ring_gluon.mix_ring, processors(out.device), arguments, **flags, **ring_sizes(D))
    elif N:
        p = plan(R, D, out.element_size(), norm_gain is not None, is_few(N, D, out.device))
        flags |= dict(D=D, BLOCK=p.BLOCK, LANES=32 * p.forward_warps, VEC=p.VEC, num_warps=p.forward_warps)
        flags |= dict(maxnreg=registers_of_a_thread(p.forward_warps, p.forward_programs))
        flags |= dict(STEP=p.STEP, GROUP=p.GROUP, FEW=p.few) | (chained(out) if p.few else {})
        launch(mix_kernels.mix_forward, -(-N // p.STEP), arguments, **flags)
    return out, running, stats


@mix.register_fake
def _(sources, update, query, gain, norm_gain, eps, save):
    first = sources[0]
    running = torch.empty_like(first) if update is not None else first.new_empty(0)
    shape = (first.shape[0], columns(len(sources), norm_gain)) if save else (0,)
    return torch.empty_like(first), running, first.new_empty(shape, dtype=torch.float32)


def columns(R: int, norm_gain: Tensor | None) -> int:
    return 2 * R + (norm_gain is not None)


@op("rille::attn_res_mix_backward")
def mix_backward(
    d_out: Tensor, beside: Sequence[Tensor], which: int, sources: Sequence[Tensor], query: Tensor, gain: Tensor,
    norm_gain: Tensor | None, stats: Tensor, eps: float,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """The gradients of the sources, and fp32 [2 or 1, D]: those of query * gain and of the norm's gain. beside: what
    other readers add to the gradients of those sources whose bits are set in `which`, in order."""
    (N, D), R = sources[0].shape, len(sources)
    normed = norm_gain is not None
    p = plan(R, D, d_out.element_size(), normed)
    programs = min(N, p.programs * processors(d_out.device))
    grads = [torch.empty_like(source) for source in sources]
    partial = torch.empty(programs, 1 + normed, D, dtype=torch.float32, device=d_out.device)
    if N:
        given = iter(beside)
        added = tuple(next(given) if which >> j & 1 else grads[j] for j in range(R))
        arguments = (tuple(sources), tuple(grads), added, d_out, query, gain, norm_gain, stats, partial, N, eps)
        flags: dict[str, Any] = dict(NORM=normed, BESIDE=which)
        flags |= dict(D=D, BLOCK=p.BLOCK, LANES=32 * p.backward_warps, VEC=p.VEC, num_warps=p.backward_warps)
        flags |= dict(maxnreg=registers_of_a_thread(p.backward_warps, p.programs))
        if p.loops:
            kernel = wide_kernels.wide_site_backward if normed else wide_kernels.wide_backward
            launch(kernel, programs, arguments, **flags)
        else:
            launch(mix_kernels.mix_backward, programs, arguments, GROUP=p.backward_group, **flags)
    return grads, partial.sum(0)


@mix_backward.register_fake
def _(d_out, beside, which, sources, query, gain, norm_gain, stats, eps):
    D = d_out.shape[1]
    shape = (1 + (norm_gain is not None), D)
    return [torch.empty_like(source) for source in sources], d_out.new_empty(shape, dtype=torch.float32)


def save_for_backward(ctx, inputs, output) -> None:
    sources, update, query, gain, norm_gain, ctx.eps, _ = inputs
    _, running, stats = output
    if update is not None:
        sources = [*sources[:-1], running]
    ctx.save_for_backward(query, gain, norm_gain, stats, *sources)
    ctx.updates = update is not None
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)


def gradient(ctx, d_out, d_running, _):
    query, gain, norm_gain, stats, *sources = ctx.saved_tensors
    beside = [None] * (len(sources) - 1) + [d_running if ctx.updates else None]
    grads, *rest = all_gradients(ctx.eps, d_out, beside, sources, query, gain, norm_gain, stats)
    return grads, grads[-1] if ctx.updates else None, *rest, None, None


def all_gradients(
    eps: float, d_out: Tensor | None, beside: Sequence[Tensor | None], sources: Sequence[Tensor], query: Tensor,
    gain: Tensor, norm_gain: Tensor | None, stats: Tensor,
) -> tuple[list[Tensor], Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of the sources, each with what is beside it, of query, gain and the norm's gain."""
    if stats.numel() == 0 and len(sources[0]):
        raise RuntimeError("attn_res: the forward pass saved nothing for a backward pass")
    d_out = torch.zeros_like(sources[0]) if d_out is None else d_out.contiguous()
    given = [x.contiguous() for x in beside if x is not None]
    which = sum(1 << j for j, x in enumerate(beside) if x is not None)
    grads, sums = mix_backward(d_out, given, which, sources, query, gain, norm_gain, stats, eps)
    d_query, d_gain = (sums[0] * gain).to(query.dtype), (sums[0] * query).to(gain.dtype)
    return grads, d_query, d_gain, None if norm_gain is None else sums[1].to(norm_gain.dtype)


mix.register_autograd(gradient, setup_context=save_for_backward)


class Handed(torch.autograd.Function):
    """`mix` with update and norm optional, whose sources are handed on: the next site reads them from here.

    So a source's gradient comes back along the sites, one after another, and each site's kernel adds its own part.
    Where all sites read one tensor, autograd adds the parts up, with two reads and a write more for every one.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        eps, update, query, gain, norm_gain, *sources = arguments
        out, running, stats = mix(sources, update, query, gain, norm_gain, eps, True)
        ctx.eps, ctx.updates = eps, update is not None
        last = running if ctx.updates else sources[-1].view_as(sources[-1])
        ctx.save_for_backward(query, gain, norm_gain, stats, *sources[:-1], running if ctx.updates else sources[-1])
        ctx.set_materialize_grads(False)
        return out, *(source.view_as(source) for source in sources[:-1]), last

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor | None) -> tuple[Tensor | None, ...]:
        query, gain, norm_gain, stats, *sources = ctx.saved_tensors
        d_out, *beside = grad_outputs
        grads, *rest = all_gradients(ctx.eps, d_out, beside, sources, query, gain, norm_gain, stats)
        return None, grads[-1] if ctx.updates else None, *rest, *grads
