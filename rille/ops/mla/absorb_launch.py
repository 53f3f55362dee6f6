"""Launches of `absorb_kernels.py`, registered with torch so that compiled models see one op each.

Suffixes as in `absorb.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rille.ops.launching import chained
from rille.ops.mla import absorb_kernels
from rille.ops.mla.cache import LatentCache
from rille.ops.mla.tiles import cover
from rille.ops.registering import op
from rille.packing import Packing

ROWS = 16  # of a tile: the least that the tensor cores take
COLUMNS = 32  # of a tile: many programs, each with few bytes to wait for


def store_rows(
    both_NC: Tensor, gain_R: Tensor, eps: float, cache: LatentCache, packing: Packing, first_NQ: Tensor | None,
    first_gain_Q: Tensor | None,
) -> Tensor | None:  # fmt: skip
    place = (cache.table.contiguous(), packing.positions, packing.sequence_of)
    first = None if first_NQ is None else dense_rows(first_NQ)
    found = store_op(dense_rows(both_NC), gain_R, first, first_gain_Q, cache.pool, *place, eps)
    return None if first is None else found


@op("rille::mla_store_rows", mutated=("pool",))
def store_op(
    both: Tensor, gain: Tensor, first: Tensor | None, first_gain: Tensor | None, pool: Tensor, table: Tensor,
    positions: Tensor, sequences: Tensor, eps: float,
) -> Tensor:  # fmt: skip
    """The query's latent [N, Q], normed (empty without)."""
    (N, C), R = both.shape, gain.shape[0]
    Q = 0 if first is None else first.shape[1]
    normed = both.new_empty(N, Q)
    wide = cover(max(R, Q))
    kernel: Any = absorb_kernels.store_kernel[(N, 1 if first is None else 2)]
    kernel(
        both, gain, first, first_gain, normed, pool, table, positions, sequences, both.stride(0),
        0 if first is None else first.stride(0), pool.stride(0), table.shape[1], eps, R=R, REST=C - R, Q=Q,
        PAGE=pool.shape[1], BLOCK=wide, TAIL=cover(max(1, C - R)), num_warps=max(1, min(4, wide // 256)),
        **chained(both),
    )  # fmt: skip
    return normed


@store_op.register_fake
def _(both, gain, first, first_gain, pool, table, positions, sequences, eps):
    return both.new_empty(both.shape[0], 0 if first is None else first.shape[1])


def dense_rows(x: Tensor) -> Tensor:
    """[N, ...] as it is where all but the first axis is dense, else a copy."""
    return x if x[0].is_contiguous() else x.contiguous()


@op("rille::mla_absorbed_queries")
def absorbed_queries(q: Tensor, key: Tensor) -> Tensor:
    """[N, H, R + shared]."""
    (N, H, width), (_, K, R) = q.shape, key.shape
    q = q if q.stride(-1) == 1 else q.contiguous()
    key = key if key.stride(-1) == 1 and key.stride(1) == R else key.contiguous()
    out = q.new_empty(N, H, R + width - K)
    grid = (-(-R // COLUMNS) + (width > K), H, -(-N // ROWS))
    kernel: Any = absorb_kernels.query_kernel[grid]
    kernel(
        q, key, out, N, q.stride(0), q.stride(1), key.stride(0), H, R=R, K=K, REST=width - K, BLOCK_K=cover(K),
        BR=COLUMNS, TAIL=cover(max(1, width - K)), BM=ROWS, num_warps=4, **chained(q),
    )  # fmt: skip
    return out


@absorbed_queries.register_fake
def _(q, key):
    return q.new_empty(*q.shape[:2], key.shape[2] + q.shape[2] - key.shape[1])


def value_step(R: int) -> int:
    """Latent channels that a program holds at once."""
    return min(256, cover(R))


@op("rille::mla_gated_values")
def gated_values(o: Tensor, value: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[N, H, V] in dtype."""
    (N, H, R), V = o.shape, value.shape[1]
    o = o.contiguous()
    value = value if value.stride(-1) == 1 and value.stride(1) == R else value.contiguous()
    if gate is not None and gate.stride(-1) != 1:
        gate = gate.contiguous()
    out = torch.empty(N, H, V, dtype=dtype, device=o.device)
    rows, heads = (0, 0) if gate is None else gate.stride()[:2]
    kernel: Any = absorb_kernels.value_kernel[(-(-V // COLUMNS), H, -(-N // ROWS))]
    kernel(
        o, value, gate, out, N, value.stride(0), rows, heads, H, R=R, V=V, BLOCK=value_step(R), BV=COLUMNS,
        BM=ROWS, num_warps=4, **chained(o),
    )  # fmt: skip
    return out


@gated_values.register_fake
def _(o, value, gate, dtype):
    return o.new_empty(*o.shape[:2], value.shape[1], dtype=dtype)
