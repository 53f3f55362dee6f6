"""Figures of rows of logits, literally.

    token = argmax l, or given, or drawn      log p = l[token] - log sum exp l      is_number = all l are finite

Drawn at heat t above 0 by u in [0, 1): the first token whose running sum of softmax(l / t) exceeds u, in float64; never
one without mass.
"""

import torch
from torch import Tensor


def drawn(wide: Tensor, heats: Tensor, numbers: Tensor) -> Tensor:
    """Tokens [N]; the likeliest where the heat is 0."""
    mass = torch.softmax(wide.double() / torch.where(heats > 0, heats, 1)[:, None], -1)
    running = mass.cumsum(-1)
    ranks = (running <= numbers[:, None] * running[:, -1:]).sum(-1)
    places = torch.arange(mass.shape[1], device=mass.device)
    ranks = torch.minimum(ranks, torch.where(mass > 0, places, 0).amax(-1))
    return torch.where(heats > 0, ranks, wide.argmax(-1))


def token_figures(
    logits: Tensor, tokens: Tensor | None, heats: Tensor | None, numbers: Tensor | None, least: float
) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if heats is not None and numbers is not None:
        tokens = drawn(wide, heats, numbers)
    tokens = wide.argmax(-1) if tokens is None else tokens
    logprobs = torch.log_softmax(wide, -1).gather(-1, tokens[:, None])[:, 0].clamp(min=least)
    is_number = torch.isfinite(wide).all(-1)
    return tokens, torch.stack([x.double() for x in (tokens, logprobs, is_number)])
