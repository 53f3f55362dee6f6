"""The expert product with the tokens grouped by expert: one matrix product an expert instead of one a token.

    order   = sort of the N*A (token, choice) pairs by expert              rows of one expert become neighbours
    h       = act(x[order] W1_e', x[order] W3_e')                          one product over each expert's rows
    y       = h W2_e'
    out_n   = sum over a of weight[n, a] * y[place of (n, a)]              a gather, in the fixed order of the choices

Nothing is scattered with addition, forward or backward: the gradient of x, too, is gathered back to [N, A, L] and
summed over A. So results repeat bit for bit.

On a GPU, in bf16, PyTorch's grouped product takes all experts at once and no size comes to the host; elsewhere it is a
call of `torch.mm` an expert, in the release's order.

Axes: N tokens, E experts, A active experts a token, L latent, F expert width, M = N*A sorted pairs, G = 2F gate and up
rows; in one product I inputs and O outputs.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def expert_glu(
    x_NL: Tensor,
    ids_NA: Tensor,
    weights_NA: Tensor,
    w13_EGL: Tensor,
    w2_ELF: Tensor,
    activation: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    wide = torch.promote_types(x_NL.dtype, torch.float32)
    order_M = torch.argsort(ids_NA.reshape(-1))  # as the release: where a row stands decides how a product rounds it
    experts_E = torch.arange(w13_EGL.shape[0], device=ids_NA.device)
    ends_E = torch.searchsorted(ids_NA.reshape(-1)[order_M], experts_E, right=True, out_int32=True)
    product = _AtOnce if at_once(x_NL, w13_EGL) else _OneByOne
    place_NA = torch.empty_like(order_M).scatter_(0, order_M, torch.arange(len(order_M), device=order_M.device))
    place_NA = place_NA.view(ids_NA.shape)
    x_ML = _Dispatch.apply(x_NL, order_M, place_NA)
    gate_MF, up_MF = product.apply(x_ML, w13_EGL, ends_E).chunk(2, dim=1)
    y_ML = product.apply(activation(gate_MF, up_MF), w2_ELF, ends_E)
    y_NAL = _Return.apply(y_ML, order_M, place_NA).to(wide)
    return (weights_NA.to(wide).unsqueeze(-1) * y_NAL).sum(1)


def at_once(x_NL: Tensor, w13_EGL: Tensor) -> bool:
    """Whether PyTorch's grouped product takes these: its rows must begin at multiples of 16 bytes."""
    _, G, L = w13_EGL.shape
    return x_NL.is_cuda and len(x_NL) > 0 and x_NL.dtype == torch.bfloat16 and L % 8 == 0 and G % 16 == 0


class _Dispatch(torch.autograd.Function):
    """x[N, L] -> the row of each sorted pair [M, L]; its gradient is gathered, not scattered."""

    @staticmethod
    def forward(ctx: Any, x_NL: Tensor, order_M: Tensor, place_NA: Tensor) -> Tensor:
        ctx.save_for_backward(place_NA)
        return x_NL.index_select(0, order_M // place_NA.shape[1])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad_ML,) = grad_outputs
        (place_NA,) = ctx.saved_tensors
        return _gather_pairs(grad_ML, place_NA).sum(1), None, None


class _Return(torch.autograd.Function):
    """Rows of the sorted pairs [M, L] -> their places [N, A, L]; the inverse permutation is the gradient."""

    @staticmethod
    def forward(ctx: Any, y_ML: Tensor, order_M: Tensor, place_NA: Tensor) -> Tensor:
        ctx.save_for_backward(order_M)
        return _gather_pairs(y_ML, place_NA)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (grad_NAL,) = grad_outputs
        (order_M,) = ctx.saved_tensors
        return grad_NAL.flatten(0, 1).index_select(0, order_M), None, None


class _OneByOne(torch.autograd.Function):
    """x[M, I] -> x W_e' [M, O], where expert e owns the rows of x from the end of the one before to ends[e]."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_MI, weight_EOI)
        ctx.spans = _spans(ends_E.tolist())
        y_MO = x_MI.new_empty(x_MI.shape[0], weight_EOI.shape[1])
        for expert, span in ctx.spans:
            torch.mm(x_MI[span], weight_EOI[expert].T, out=y_MO[span])
        return y_MO

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad_MO,) = grad_outputs
        x_MI, weight_EOI = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_x_MI = torch.empty_like(x_MI) if wants_x else None
        grad_weight_EOI = torch.zeros_like(weight_EOI) if wants_weight else None
        for expert, span in ctx.spans:
            if grad_x_MI is not None:
                torch.mm(grad_MO[span], weight_EOI[expert], out=grad_x_MI[span])
            if grad_weight_EOI is not None:
                torch.mm(grad_MO[span].T, x_MI[span], out=grad_weight_EOI[expert])
        return grad_x_MI, grad_weight_EOI, None


class _AtOnce(torch.autograd.Function):
    """The same by `torch._grouped_mm`. An expert without rows is zeroed: nothing says what a product of none is."""

    @staticmethod
    def forward(ctx: Any, x_MI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_MI, weight_EOI, ends_E)
        return _grouped(x_MI, weight_EOI.mT, ends_E)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_MO, (x_MI, weight_EOI, ends_E) = grad_outputs[0].contiguous(), ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        grad_x_MI = _grouped(grad_MO, weight_EOI, ends_E) if wants_x else None
        grad_weight_EOI = None
        if wants_weight:
            idle_E = ends_E.diff(prepend=ends_E.new_zeros(1)) == 0
            grad_weight_EOI = _grouped(grad_MO.T, x_MI, ends_E).masked_fill_(idle_E[:, None, None], 0)
        return grad_x_MI, grad_weight_EOI, None


def _grouped(a: Tensor, b: Tensor, ends_E: Tensor) -> Tensor:
    product: Any = torch._grouped_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(a, b, offs=ends_E)


def _gather_pairs(rows_ML: Tensor, place_NA: Tensor) -> Tensor:
    return rows_ML.index_select(0, place_NA.reshape(-1)).view(*place_NA.shape, rows_ML.shape[1])


def _spans(ends: list[int]) -> list[tuple[int, slice]]:
    """(expert, its slice of the sorted pairs) of every expert that has any."""
    starts = [0, *ends[:-1]]
    return [(e, slice(start, end)) for e, (start, end) in enumerate(zip(starts, ends, strict=True)) if end > start]
