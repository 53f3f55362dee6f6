"""Clipping by the norm of the whole gradient: g = g * min(1, limit / |g|), |g| over all parameters together.

Gradients of one dtype are normed together, in a few launches for all of them. Scaling is one launch for each:
PyTorch's product of many tensors takes 16-bit gradients with an fp32 factor one by one too, and its gradient scaler's
has no bf16 on a GPU.
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
    for gradient in gradients:  # expanded: a GPU rounds a factor without axes to the gradient's 16 bits, a CPU does not
        gradient.mul_(scale.expand_as(gradient))
    return norm


def _norms(gradients: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The norm of each, in fp32 or float64."""
    return list(torch._foreach_norm(gradients, 2, torch.promote_types(torch.float32, dtype)))  # pyright: ignore[reportPrivateImportUsage, reportCallIssue]
