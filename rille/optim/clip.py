"""Clipping by the norm of the whole gradient: g = g * min(1, limit / |g|), |g| over all parameters together."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


@torch.no_grad()
def clip_gradients(parameters: Iterable[torch.nn.Parameter], limit: float) -> Tensor:
    """Scale all gradients in place so that their common norm is at most `limit`; return the norm before that.

    The norm is an fp32 (float64 for float64 gradients) scalar on the gradients' device: nothing waits for the device.
    Parameters without a gradient are passed over. A norm that is not finite makes every gradient not finite: look at
    the returned value before the next step is trusted. Raises ValueError if there is no gradient at all.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if not gradients:
        raise ValueError("no parameter has a gradient; call backward() first")
    wide = [torch.promote_types(torch.float32, gradient.dtype) for gradient in gradients]
    norms = [torch.linalg.vector_norm(gradient, dtype=dtype) for gradient, dtype in zip(gradients, wide, strict=True)]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    scale = (limit / norm).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
    return norm
