"""The tokens of a step that was recorded, from what the host wrote and what the step before drew.

Suffixes: S rows, T tokens of a row, M rows that can be drawn.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HAS_TRITON = find_spec("triton") is not None


def step_tokens(
    tokens_ST: Tensor, sources_S: Tensor, drawn_M: Tensor, positions_S: Tensor, history_S: Tensor,
    places_N: Tensor | None = None, *, backend: str | None = None,
) -> Tensor:  # fmt: skip
    """Ids int64 [S T]: those of tokens, but the first of a row with a source (0 or more) is what `drawn` has there.

    All int64 and dense but history_S, int32 [S], which is overwritten by positions_S; places_N [S T], where given, by
    the position of every token. Nothing waits for the device. backend: "triton" or "torch"; by default the kernel on a
    GPU. Raises ValueError for another one.
    """
    if backend not in (None, "triton", "torch"):
        raise ValueError(f"step_tokens: unknown backend {backend!r}; there are triton, torch")
    if backend == "triton" or (backend is None and tokens_ST.is_cuda and HAS_TRITON):
        return _by_kernel(tokens_ST, sources_S, drawn_M, positions_S, history_S, places_N)
    history_S.copy_(positions_S)
    if places_N is not None:
        places_N.copy_((positions_S[:, None] + torch.arange(tokens_ST.shape[1], device=places_N.device)).flatten())
    first_S = torch.where(sources_S < 0, tokens_ST[:, 0], drawn_M[sources_S.clamp(min=0)])
    return torch.cat([first_S[:, None], tokens_ST[:, 1:]], dim=1).flatten()


def _by_kernel(
    tokens: Tensor, sources: Tensor, drawn: Tensor, positions: Tensor, history: Tensor, places: Tensor | None
) -> Tensor:
    from rille.ops.embedding import step_kernels

    S, T = tokens.shape
    ids = tokens.new_empty(S * T)
    kernel: Any = step_kernels.step_kernel[(S,)]
    kernel(
        tokens, sources, drawn, positions, ids, history, places, T=T, BLOCK=max(2, 1 << (T - 1).bit_length()),
        num_warps=1,
    )  # fmt: skip
    return ids
