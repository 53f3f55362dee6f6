"""Launches of the latent kernels, registered with torch so that compiled models see one op.

Sequences with few new tokens are split along their cached rows, longer ones (a chunk of a prompt) are not: they have
tiles enough. What fixes a sequence's bits is `Plan`, which depends on the heads, the cache's room and the bound on new
tokens, never on how many sequences there are or how long the others are.

Suffixes: N packed tokens, S sequences, H heads, R cached row width, V value columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from rille.ops.mla import decode_kernels
from rille.ops.mla.cache import LatentCache
from rille.ops.mla.classes import SHORT, WHOLE_SEQUENCE, classes
from rille.ops.mla.launch import INTERPRET, LOG2E, rows_described
from rille.ops.mla.tiles import cover
from rille.ops.registering import op
from rille.packing import Packing

MOST_SPLITS = 64
WIDEST_VALUE, WIDEST_REST = 512, 256
PARTS, STREAM = True, True  # the kernels in Gluon for many and for few queries, where they fit
BLOCK, TAIL = 64, 16  # cached rows of a step, and of a step over the last rows


class Plan(NamedTuple):
    """Rows (tokens times heads) of a tile, cached rows of a split, whether the cached rows are on the left, warps."""

    ROWS: int
    SPLIT: int
    FEW: bool
    warps: int
    stages: int = 2


def plan(H: int, tokens: int, room: int, scaled: bool) -> Plan:
    """tokens: the most new ones of a sequence; room: cached rows that a sequence can have."""
    few = H * tokens <= 32 and not scaled  # rows on the left come from shared memory, which holds no widened fp8
    ROWS, warps = (cover(H * tokens), 4) if few else (64, 8)
    if tokens > SHORT:
        return Plan(ROWS, WHOLE_SEQUENCE, few, warps)
    least = -(-room // MOST_SPLITS)
    return Plan(ROWS, max(2048 if few else 4096, 1 << (least - 1).bit_length()), few, warps)


def unsupported(q_NHR: Tensor, cache: LatentCache, value_width: int, scale: float) -> str:
    """Why the kernels cannot run, or an empty string."""
    pool, R = cache.pool, cache.pool.shape[2]
    if not (q_NHR.is_cuda or INTERPRET):
        return f"the tensors are on {q_NHR.device.type}"
    wide = (torch.bfloat16, torch.float16, *((torch.float32,) if INTERPRET else ()))
    if q_NHR.dtype not in wide or pool.dtype not in (q_NHR.dtype, torch.float8_e4m3fn):
        return f"the kernels take bf16 or fp16 queries and rows alike, or rows in e4m3, not {q_NHR.dtype}, {pool.dtype}"
    rest, most = R - value_width, f"{WIDEST_VALUE} + {WIDEST_REST}"
    if value_width % 16 or rest % 16 or value_width > WIDEST_VALUE or rest > WIDEST_REST:
        return f"the kernels take multiples of 16 up to {most} channels, not {value_width} + {rest}"
    if pool.stride()[1:] != (R, 1):
        return f"the kernels read pages without gaps, not strides {pool.stride()}"
    if not scale > 0:
        return f"the kernels take a positive scale, not {scale}"
    return ""


def latent_attention(q_NHR: Tensor, cache: LatentCache, packing: Packing, scale: float, value_width: int) -> Tensor:
    H, room = q_NHR.shape[1], cache.table.shape[1] * cache.page_rows
    tokens, members, plans = [], [], []
    for most, sequences in classes(packing):
        tokens.append(most)
        members.append(sequences)
        plans.extend(int(number) for number in plan(H, most, room, cache.scales is not None))
    batch = (packing.starts, packing.history, members, tokens, plans)
    return latent_op(q_NHR, cache.pool, cache.scales, cache.table, *batch, value_width, scale)


@op("rille::latent_attention")
def latent_op(
    q: Tensor, pool: Tensor, scales: Tensor | None, table: Tensor, starts: Tensor, history: Tensor,
    members: list[Tensor], tokens: list[int], plans: list[int], value_width: int, scale: float,
) -> Tensor:  # fmt: skip
    """[N, H, value_width]. members, tokens: sequences of each class, and the most new tokens that one has; plans: the
    numbers of a `Plan` for each class."""
    out = torch.empty(*q.shape[:2], value_width, dtype=torch.float32, device=q.device)
    for sequences, most, first in zip(members, tokens, range(0, len(plans), len(Plan._fields)), strict=True):
        rows, split, few, *launched = plans[first : first + len(Plan._fields)]
        p = Plan(rows, split, bool(few), *launched)
        _one_class(q.contiguous(), pool, scales, table, starts, history, sequences, out, most, scale, p)
    return out


@latent_op.register_fake
def _(q, pool, scales, table, starts, history, members, tokens, plans, value_width, scale):
    return q.new_empty(*q.shape[:2], value_width, dtype=torch.float32)


def _one_class(
    q: Tensor, pool: Tensor, scales: Tensor | None, table: Tensor, starts: Tensor, history: Tensor, members: Tensor,
    out: Tensor, tokens: int, scale: float, p: Plan,
) -> None:  # fmt: skip
    """The rows of out [N, H, V] that belong to the members, each with up to `tokens` new tokens."""
    (N, H, R), V, (pages, page_rows, _) = q.shape, out.shape[2], pool.shape
    ROWS, SPLIT, FEW, warps, stages = p
    splits = -(-table.shape[1] * page_rows // SPLIT)
    tiles, most_rows, count = -(-H * tokens // ROWS), H * tokens, members.shape[0]
    if not (N and H and splits):
        return
    o, lse = out, None
    if splits > 1:
        o = torch.empty(count, splits, most_rows, V, dtype=torch.float32, device=q.device)
        lse = torch.empty(count, splits, most_rows, dtype=torch.float32, device=q.device)
    A, B = cover(V), cover(R - V) if R > V else 0
    bounds = (table.shape[1], H, tiles, splits, most_rows, scale * LOG2E)
    lists = (table.contiguous(), starts, history, members, o, lse)
    grid = (tiles * splits, count)
    if STREAM and FEW and tiles == 1 and not without_gluon(pool, V):
        _by_stream(q.view(N * H, R), pool, lists, bounds, V, SPLIT)
    elif PARTS and not FEW and not without_gluon(pool, V):
        _in_parts(grid, q.view(N * H, R), pool, lists, bounds, V, SPLIT)
    else:
        whole = page_rows % BLOCK == 0 and fetchable(pool)
        blocks = [(q.view(1, N * H, R), ROWS, True), (pool, BLOCK, whole)]
        descriptors = [
            described(x, first, width, rows, cover(width)) if wanted and width else None
            for x, rows, wanted in blocks
            for first, width in ((0, V), (V, R - V))
        ]
        strides = (0, 0) if scales is None else scales.expand(pages, page_rows).stride()
        launch: Any = decode_kernels.latent_kernel[grid]
        launch(
            *descriptors, pool, scales, *lists, pool.stride(0), *strides, *bounds, VALUE=V, R=R, A=A, B=B,
            PAGE=page_rows, ROWS=ROWS, BLOCK=BLOCK, TAIL=TAIL, SPLIT=SPLIT, WHOLE=whole, FEW=FEW,
            UPCAST=INTERPRET, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if lse is not None:
        merge: Any = decode_kernels.merge_kernel[(most_rows, count)]
        merge(o, lse, starts, history, members, out, H, splits, most_rows, VALUE=V, A=A, SPLIT=SPLIT, num_warps=4)


def without_gluon(pool: Tensor, V: int) -> str:
    """Why the Gluon forms cannot run, or an empty string."""
    page_rows, R = pool.shape[1:]
    if INTERPRET:
        return "Gluon has no interpreter"
    if pool.element_size() != 2 or V not in (256, 512) or R - V not in (16, 32, 64):
        return f"rows of {R} {pool.dtype} with {V} values do not fit its tiles"
    if page_rows % BLOCK or pool.stride(0) % R or not fetchable(pool):
        return f"pages of {page_rows} rows, {pool.stride(0)} elements apart, are no table of rows in blocks of {BLOCK}"
    return ""


def _by_stream(
    q: Tensor, pool: Tensor, lists: tuple[Any, ...], bounds: tuple[Any, ...], V: int, SPLIT: int
) -> None:  # fmt: skip
    from rille.ops.mla import decode_stream

    max_pages, H, _, splits, most_rows, scale2 = bounds
    Q, members = cover(most_rows), lists[3].shape[0]
    programs = min(splits * members, torch.cuda.get_device_properties(q.device).multi_processor_count)
    step = pool.stride(0) // pool.shape[2]
    kernel: Any = decode_stream.latent_stream_kernel
    kernel[(programs,)](
        *_tables(q, pool, V, V, Q), *lists, step, max_pages, H, members, splits, most_rows, scale2, VALUE=V,
        PAGE=pool.shape[1], SPLIT=SPLIT, Q=Q, CHAINED=False, num_warps=4,
    )  # fmt: skip


def _tables(q: Tensor, pool: Tensor, V: int, part: int, queries: int) -> list[Any]:
    """Descriptors of queries [N * H, R] and of the pool as a table of rows: `part` of the value channels, the rest."""
    (pages, page_rows, R), step = pool.shape, pool.stride(0) // pool.shape[2]
    rows = pool.as_strided(((pages - 1) * step + page_rows, R), (R, 1))
    return [
        rows_described(x[:, None], first, height, width)
        for x, height in ((q, queries), (rows, BLOCK))
        for first, width in ((0, part), (V, R - V))
    ]


def _in_parts(
    grid: tuple[int, int], q: Tensor, pool: Tensor, lists: tuple[Any, ...], bounds: tuple[Any, ...], V: int, SPLIT: int
) -> None:
    from rille.ops.mla import decode_parts

    kernel: Any = decode_parts.latent_parts_kernel
    kernel[grid](
        *_tables(q, pool, V, V // 4, 64), *lists, pool.stride(0) // pool.shape[2], *bounds, VALUE=V,
        PAGE=pool.shape[1], SPLIT=SPLIT, num_warps=4,
    )  # fmt: skip


def fetchable(pool: Tensor) -> bool:
    """Whether the TMA unit can read pages: addresses and distances are multiples of 16 bytes."""
    return pool.stride(0) * pool.element_size() % 16 == 0 and pool.data_ptr() % 16 == 0


def described(x: Tensor, first: int, channels: int, rows: int, width: int) -> TensorDescriptor:
    """Some channels of [pages, rows, R], in blocks of `rows` rows of one page."""
    part = x[..., first : first + channels]
    return TensorDescriptor(part, list(part.shape), list(part.stride()), [1, rows, width])
