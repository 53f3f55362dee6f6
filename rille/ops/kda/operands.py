"""What the launches of KDA kernels share: types of operands, layouts, and what the first kernel hands on.

Suffixes: N packed tokens, S sequences, M chunks, H heads, C = 64 rows of a chunk, K key channels, V value channels.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from rille.ops.launching import INTERPRET


class Intra(NamedTuple):
    """What chunks hand to the recurrence; rows of a tail without a token are zero."""

    t_DMHCC: Tensor  # T; with D = 2, then what its rounding to the type of operands took off
    a_MHCC: Tensor
    minus_w_MHCK: Tensor
    q_start_MHCK: Tensor  # q 2^G, normalised and scaled
    k_end_MHCK: Tensor  # beta k 2^(Gc-G), normalised
    decay_MHK: Tensor  # 2^Gc, fp32


def operand_type(x: Tensor) -> torch.dtype:
    return torch.float32 if INTERPRET and x.dtype == torch.float32 else torch.bfloat16


def types(dtype: torch.dtype) -> dict[str, Any]:
    return dict(OPERAND=tl.float32 if dtype == torch.float32 else tl.bfloat16, INTERPRET=INTERPRET)


@torch.compiler.assume_constant_result
@lru_cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def packed_heads(x: Tensor) -> Tensor:
    """Heads and channels of a token lie together; tokens may lie any distance apart."""
    inner = x.stride()[1:]
    return x if inner == ((x.shape[2], 1) if x.ndim == 3 else (1,)) else x.contiguous()


def dense_states(states_SHVK: Tensor) -> Tensor:
    """[V, K] of each head without gaps; sequences may lie any distance apart."""
    _, _, V, K = states_SHVK.shape
    return states_SHVK if states_SHVK.stride()[1:] == (V * K, K, 1) else states_SHVK.contiguous()


def packed_states(states: Tensor | None) -> Tensor | None:
    """States as the kernel reads them. A pool must lie right already: it is written in place."""
    if states is None:
        return None
    _, _, V, K = states.shape
    if states.stride()[1:] != (V * K, K, 1):
        raise ValueError(f"kda: states of strides {states.stride()} need [V, K] = {V, K} of each head without gaps")
    return states
