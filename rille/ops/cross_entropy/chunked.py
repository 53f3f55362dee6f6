"""Head and loss together, a chunk of tokens at a time, with the gradients made in the forward pass.

The logits of all tokens would be the largest tensor of a step (N * W). A chunk's logits give everything at once:

    top = max logits     total = sum exp(logits - top)     lse = top + log total
    d loss / d logits    = (1 + 2 z lse) exp(logits - top) / total - onehot(target)          0 where not counted
    d x = dlogits head                    d head += dlogits' x

so they are overwritten by their gradient, multiplied into dx and dhead, and dropped. Three products, none repeated in
the backward pass, which only scales by the gradient of the loss (one number).

The logits are accumulated and kept in fp32 (float64 for float64): operands of lower precision are widened for that
product. dlogits is rounded to the operands' dtype for the other two, and dhead is summed over the chunks in fp32.

Axes: N tokens, D width, W words, C tokens of a chunk.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rille.ops.cross_entropy.reference import IGNORED


@dataclass(frozen=True)
class Form:
    """What a chunk is made of. operand(head, wide): the head as `logits` wants it. logits(x, operand) [C, W] wide.
    score(logits, targets, z, dtype): losses and log-probabilities [C], and the logits' gradient in dtype, or None
    without one; it may take the place of the logits. add_product(sum, a, b): sum += a b."""

    operand: Callable[[Tensor, torch.dtype], Tensor]
    logits: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[Tensor, Tensor, float, torch.dtype | None], tuple[Tensor, Tensor, Tensor | None]]
    add_product: Callable[[Tensor, Tensor, Tensor], None]


def linear_cross_entropy(
    x_ND: Tensor, head_WD: Tensor, targets_N: Tensor, z_loss: float, chunk: int, form: Form
) -> tuple[Tensor, Tensor]:
    """(loss sum, log-probabilities [N]); only the sum carries a gradient."""
    return _LinearCrossEntropy.apply(x_ND, head_WD, targets_N, z_loss, chunk, form)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, head_WD: Tensor, targets_N: Tensor, z_loss: float, chunk: int, form: Form
    ) -> tuple[Tensor, Tensor]:
        wants_x, wants_head = ctx.needs_input_grad[:2]
        wide = torch.promote_types(x_ND.dtype, torch.float32)
        operand_WD = form.operand(head_WD, wide)
        grad_x_ND = torch.empty_like(x_ND) if wants_x else None
        grad_head_WD = torch.zeros(head_WD.shape, dtype=wide, device=head_WD.device) if wants_head else None
        log_probs_N = torch.empty(len(x_ND), dtype=wide, device=x_ND.device)
        loss = log_probs_N.new_zeros(())
        for start in range(0, len(x_ND), chunk):
            rows = slice(start, start + chunk)
            logits_CW = form.logits(x_ND[rows], operand_WD)
            dtype = x_ND.dtype if wants_x or wants_head else None
            losses_C, log_probs_N[rows], dlogits_CW = form.score(logits_CW, targets_N[rows], z_loss, dtype)
            loss += losses_C.sum()
            if grad_x_ND is not None and dlogits_CW is not None:
                torch.mm(dlogits_CW, head_WD, out=grad_x_ND[rows])
            if grad_head_WD is not None and dlogits_CW is not None:
                form.add_product(grad_head_WD, dlogits_CW.T, x_ND[rows])
            del logits_CW, dlogits_CW  # before the next chunk asks for its own
        ctx.gradients = (grad_x_ND, grad_head_WD, head_WD.dtype)
        ctx.mark_non_differentiable(log_probs_N)
        return loss, log_probs_N

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        grad_x_ND, grad_head_WD, head_dtype = ctx.gradients
        grad_loss = grad_outputs[0]
        return (
            None if grad_x_ND is None else _scaled(grad_x_ND, grad_loss, grad_x_ND.dtype),
            None if grad_head_WD is None else _scaled(grad_head_WD, grad_loss, head_dtype),
            None,
            None,
            None,
            None,
        )


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a number that is wide, rounded once. A GPU would round a factor without axes to the dtype of x first."""
    return torch.mul(x, factor.expand_as(x), out=torch.empty_like(x, dtype=dtype))


def _operand(head_WD: Tensor, wide: torch.dtype) -> Tensor:
    return head_WD.to(wide)


def _logits(x_CD: Tensor, head_WD: Tensor) -> Tensor:
    return x_CD.to(head_WD.dtype) @ head_WD.T


def _score(
    logits_CW: Tensor, targets_C: Tensor, z_loss: float, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Overwrites the logits with the gradient of the losses' sum."""
    counted_C = targets_C != IGNORED
    target_C1 = targets_C.where(counted_C, 0).unsqueeze(1)
    top_C1 = logits_CW.amax(1, keepdim=True)
    picked_C1 = logits_CW.gather(1, target_C1) - top_C1
    total_C1 = logits_CW.sub_(top_C1).exp_().sum(1, keepdim=True)
    log_probs_C = (picked_C1 - total_C1.log()).squeeze(1).where(counted_C, 0)
    lse_C1 = top_C1 + total_C1.log()
    logits_CW.mul_(((1 + 2 * z_loss * lse_C1) / total_C1).where(counted_C.unsqueeze(1), 0))
    logits_CW.scatter_add_(1, target_C1, -counted_C.to(logits_CW.dtype).unsqueeze(1))
    losses_C = (z_loss * lse_C1.squeeze(1).square()).where(counted_C, 0) - log_probs_C
    return losses_C, log_probs_C, None if dtype is None else logits_CW.to(dtype)


def _add_product(sum_WD: Tensor, a_WC: Tensor, b_CD: Tensor) -> None:
    """sum += a b, in one pass where the dtypes agree."""
    if sum_WD.dtype == a_WC.dtype:
        sum_WD.addmm_(a_WC, b_CD)
    else:
        sum_WD += a_WC @ b_CD


PLAIN = Form(_operand, _logits, _score, _add_product)
