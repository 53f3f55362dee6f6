"""Clipping by the norm of the whole gradient: g = g * min(1, limit / |g|), |g| over all parameters together.

Gradients of one dtype are normed and scaled together, in a few launches for all of them and not two for each. Scaling
takes the product that PyTorch's own gradient scaler uses: fp32 inside and rounded once, where `_foreach_mul_` of 16-bit
gradients by an fp32 factor falls back to one launch for each.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients in place so that their common norm is at most `limit`; return the norm before that.

    The norm is an fp32 (float64 for float64 gradients) scalar on the gradients' device: nothing waits for the device.
    Parameters without a gradient are passed over. A norm of NaN makes every gradient NaN; an infinite one leaves zeros,
    and NaN where a gradient was infinite: look at the returned value before the next step is trusted. Raises ValueError
    if there is no gradient at all.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient; call backward() first")
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(gradient.dtype, []).append(gradient)
    norm = torch.linalg.vector_norm(torch.stack([x for dtype, group in alike.items() for x in _norms(group, dtype)]))
    scale = (limit / norm).clamp(max=1.0)
    for group in alike.values():
        _scale(group, scale)
    return norm


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The norm of each, in fp32 or float64."""
    return list(torch._foreach_norm(gradients, 2, torch.promote_types(torch.float32, dtype)))  # pyright: ignore[reportPrivateImportUsage, reportCallIssue]


def _scale(gradients: list[Tensor], scale: Tensor) -> None:
    if gradients[0].dtype == torch.float64:
        torch._foreach_mul_(gradients, scale)  # pyright: ignore[reportPrivateImportUsage]
    else:
        ignored = torch.zeros((), device=scale.device)  # becomes 1 where a gradient is not finite; the norm says it
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, ignored, scale.float())  # pyright: ignore[reportPrivateImportUsage]
