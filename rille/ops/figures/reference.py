"""Figures of rows of logits, literally.

token = argmax l (or given)      log p = l[token] - log sum exp l      is_number = all l are finite
"""

import torch
from torch import Tensor


def token_figures(logits: Tensor, tokens: Tensor | None, least: float) -> tuple[Tensor, Tensor]:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    tokens = wide.argmax(-1) if tokens is None else tokens
    logprobs = torch.log_softmax(wide, -1).gather(-1, tokens[:, None])[:, 0].clamp(min=least)
    is_number = torch.isfinite(wide).all(-1)
    return tokens, torch.stack([x.double() for x in (tokens, logprobs, is_number)])
