"""Gradients of the KDA kernels: the forward op of `forward.py` gets the backward op of `backward.py`.

Importing this module registers both with autograd; `kda` then differentiates by itself, also under torch.compile, which
sees two opaque ops with known result shapes.

What lives between them: the inputs, T in two digits and A, [M, H, 64, 64] each, half of a tensor [N, H, 128] in bf16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rille.ops.kda.arguments import End, Gate
from rille.ops.kda.backward import Cut, Inputs, backward
from rille.ops.kda.forward import forward, forward_from_states
from rille.ops.kda.segments import Segments
from rille.ops.registering import op
from rille.packing import Packing


def kda_backward(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    A_log: Tensor,
    dt_bias_HK: Tensor,
    lower_bound: float | None,
    spans_M2: Tensor,
    starts: Tensor,
    order_S: Tensor,
    first_S: Tensor,
    initial_SHVK: Tensor | None,
    t_DMHCC: Tensor,
    a_MHCC: Tensor,
    do_NHV: Tensor,
    dfinal_SHVK: Tensor | None,
    cut: list[Tensor],
) -> list[Tensor]:
    """Gradients of q, k, v, z, b, A_log, dt_bias and, where there are initial states, of those. cut: states and
    transitions at the borders of segments, and the fields of `Segments`; or none."""
    tokens, gate = (q_NHK, k_NHK, v_NHV, z_NHK, b_NH), (A_log, dt_bias_HK, lower_bound)
    inputs = Inputs(*tokens, *gate, spans_M2, starts, order_S, first_S, initial_SHVK)
    found = backward(inputs, t_DMHCC, a_MHCC, do_NHV, dfinal_SHVK, cut_of(cut))
    return [x for x in found if x is not None]


def cut_of(tensors: list[Tensor]) -> Cut | None:
    return Cut(tensors[0], tensors[1], Segments(*tensors[2:])) if tensors else None


kda_backward_op = op("rille::kda_backward")(kda_backward)


@kda_backward_op.register_fake
def _(*inputs):
    tokens, (A_log, dt_bias_HK), initial_SHVK = inputs[:5], inputs[5:7], inputs[12]
    rows = [x.new_empty(x.shape) for x in tokens]
    others = (A_log, dt_bias_HK) if initial_SHVK is None else (A_log, dt_bias_HK, initial_SHVK)
    return rows + [x.new_empty(x.shape, dtype=torch.float32) for x in others]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.lower_bound = [*inputs[:7], *inputs[8:13]], inputs[7]
    _, _, t_DMHCC, a_MHCC, *borders = output
    ctx.mark_non_differentiable(t_DMHCC, a_MHCC, *borders)
    ctx.set_materialize_grads(False)
    ctx.tables = len(inputs[13])
    cut = (*borders, *inputs[13]) if inputs[13] else ()
    ctx.save_for_backward(*tensors, t_DMHCC, a_MHCC, *cut)


def gradients(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    inputs, squares, cut = saved[:12], saved[12:14], list(saved[14:])
    do_NHV, dfinal_SHVK = grads[:2]
    if do_NHV is None:
        do_NHV = torch.zeros_like(inputs[2])
    found = kda_backward_op(*inputs[:7], ctx.lower_bound, *inputs[7:], *squares, do_NHV, dfinal_SHVK, cut)
    parameters = [g.to(x.dtype) for g, x in zip(found[5:7], inputs[5:7], strict=True)]
    dinitial_SHVK = found[7].to(inputs[-1].dtype) if inputs[-1] is not None else None
    return (*found[:5], *parameters, None, None, None, None, None, dinitial_SHVK, [None] * ctx.tables, None)


torch.library.register_autograd("rille::kda_forward", gradients, setup_context=setup_context)


class Eager(torch.autograd.Function):
    """The op without the dispatcher, for calls that no compiler sees."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = forward_from_states(*inputs)
        setup_context(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        return *gradients(ctx, *grads)[:-2], None, None


def differentiable(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    initial_SHVK: Tensor | None,
    ends: Sequence[End],
) -> tuple[Tensor, Tensor, None]:
    """`kda` by the kernels, differentiable in every tensor; where gradients are wanted no states are kept on the way.
    Raises ValueError for a lower bound below -5."""
    assert not ends, "`kda` refuses them"
    through = None if torch.compiler.is_compiling() else Eager.apply
    result = forward(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, initial_SHVK, through)
    assert result.final_SHVK is not None, "only a pool keeps the final states"
    return result.o_NHV, result.final_SHVK, None
