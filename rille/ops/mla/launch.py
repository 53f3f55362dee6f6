"""Launches of the packed kernels, registered with torch so that compiled models see one op.

Suffixes: N packed tokens, H heads, K query and key channels, V value channels, T tiles.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.tools.tensor_descriptor import TensorDescriptor

from rille.ops import launching
from rille.ops.launching import launch
from rille.ops.mla import backward_kernels, forward_kernels
from rille.ops.mla.tiles import FORWARD, KEYS, QUERIES, Blocks, cover, heads_together, key_tiles, parts, query_tiles
from rille.ops.registering import op
from rille.packing import Packing

LOG2E = 1.4426950408889634
INTERPRET = bool(knobs.runtime.interpret)  # asked once: torch.compile cannot trace the question
WIDEST_KEY, WIDEST_VALUE = 192, 128
RINGS = True  # the forward kernel in Gluon, where it fits
KEY_RINGS = True  # the backward kernel that holds keys
PREPARED = 32  # rows of a program of `prepare_kernel`


def unsupported(q_NHK: Tensor, v_NHV: Tensor, scale: float) -> str:
    """Why the kernels cannot run, or an empty string."""
    if not (q_NHK.is_cuda or INTERPRET):
        return f"the tensors are on {q_NHK.device.type}"
    K, V = q_NHK.shape[2], v_NHV.shape[2]
    dtypes = (torch.bfloat16, torch.float16, *((torch.float32,) if INTERPRET else ()))
    if q_NHK.dtype not in dtypes:
        return f"the kernels take bf16 or fp16, not {q_NHK.dtype}"
    if not (0 < K <= WIDEST_KEY and 0 < V <= WIDEST_VALUE) or K % 8 or V % 8:
        return f"the kernels take multiples of 8 up to {WIDEST_KEY} and {WIDEST_VALUE} channels, not {K} and {V}"
    if not scale > 0:
        return f"the kernels take a positive scale, not {scale}"
    return ""


def attention(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, gate_NHV: Tensor | None, packing: Packing, scale: float,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """[N, H, V] in dtype, gated where a gate is given."""
    inputs = (q_NHK, k_NHK, v_NHV, gate_NHV)
    learns = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    own = query_tiles(packing, FORWARD.own)
    others = (query_tiles(packing, QUERIES.own), key_tiles(packing, KEYS.own)) if learns else (own, own)  # not read
    return forward_op(*inputs, own, *others, packing.longest, scale, dtype, learns)[0]


def described(x_NHC: Tensor, first: int, rows: int, width: int) -> TensorDescriptor:
    """Channels from `first` on as [H, N, channels], in blocks of `rows` tokens and `width` channels of one head."""
    x = x_NHC[..., first:]
    N, H, C = x.shape
    return TensorDescriptor(x, [H, N, C], [x.stride(1), x.stride(0), 1], [1, rows, width])


def fetchable(x_NHC: Tensor) -> Tensor:
    """x where the TMA unit can read it, else a copy: addresses and distances are multiples of 16 bytes."""
    unit = 16 // x_NHC.element_size()
    apart = all(stride > 0 and stride % unit == 0 for stride in x_NHC.stride()[:2])
    fits = x_NHC.stride(2) == 1 and apart and x_NHC.data_ptr() % 16 == 0
    return x_NHC if fits else x_NHC.clone(memory_format=torch.contiguous_format)


def operands(q: Tensor, k: Tensor, b: Blocks, of_queries: bool) -> list[Any]:
    """Descriptors of both parts of queries and keys; `own` rows for the side that a program holds."""
    KA, KB = parts(q.shape[2])
    q_rows, k_rows = (b.own, b.other) if of_queries else (b.other, b.own)
    pairs = [(q, q_rows), (k, k_rows)]
    return [described(x, at, rows, width) if width else None for x, rows in pairs for at, width in ((0, KA), (KA, KB))]


def options(q: Tensor, v: Tensor, b: Blocks, rows: int, columns: int) -> dict[str, Any]:
    KA, KB = parts(q.shape[2])
    constants = dict(ROWS=rows, COLUMNS=columns, KA=KA, KB=KB, VB=cover(v.shape[2]), UPCAST=INTERPRET)
    return constants | dict(num_warps=b.warps, num_stages=b.stages)


@op("rille::mla_forward")
def forward_op(
    q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, forward_tiles: Tensor, backward_tiles: Tensor,
    key_tiles: Tensor, longest: int, scale: float, dtype: torch.dtype, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The result [N, H, V] in dtype; with a gate and `keep` the output before it in fp32, else empty; lse [H, N]."""
    (N, H, K), V, b = q.shape, v.shape[2], FORWARD
    out = torch.empty(N, H, V, dtype=dtype, device=q.device)
    kept = torch.empty((N, H, V) if gate is not None and keep else 0, dtype=torch.float32, device=q.device)
    lse = torch.empty(H, N, dtype=torch.float32, device=q.device)
    if N and H:
        q, k, v = fetchable(q), fetchable(k), fetchable(v)
        gate = None if gate is None else channels_dense(gate)
        together = heads_together(H, longest, (K + V) * q.element_size())
        o, y = (out, None) if gate is None else (kept if keep else None, out)
        results = (gate, o, y, lse, forward_tiles, N, H, together, *((0, 0) if gate is None else gate.stride()[:2]))
        programs = forward_tiles.shape[0] * H
        if RINGS and not whole_widths(K, V):
            _by_rings(programs, q, k, v, results, scale)
        else:
            kernel: Any = forward_kernels.forward_kernel
            kernel[(programs,)](
                *operands(q, k, b, True), described(v, 0, b.other, cover(V)), *results, scale * LOG2E, V=V,
                **options(q, v, b, b.own, b.other),
            )  # fmt: skip
    return out, kept, lse


def whole_widths(K: int, V: int) -> str:
    """Why the Gluon form cannot run, or an empty string."""
    if INTERPRET:
        return "Gluon has no interpreter"
    if sum(parts(K)) != K or cover(V) != V:
        return f"the widths {K} and {V} would be padded"
    return ""


def _by_rings(programs: int, q: Tensor, k: Tensor, v: Tensor, results: tuple[Any, ...], scale: float) -> None:
    from rille.ops.mla import forward_gluon

    (KA, KB), V = parts(q.shape[2]), v.shape[2]
    blocks = [(x, at, rows, width) for x, rows in ((q, 64), (k, 128)) for at, width in ((0, KA), (KA, KB))]
    descriptors = [rows_described(*block) if block[3] else None for block in [*blocks, (v, 0, 128, V)]]
    heads = (q.stride(1), k.stride(1), v.stride(1))
    launch(
        forward_gluon.forward_rings_kernel, programs, (*descriptors, *results, *heads, scale * LOG2E), V=V, COLUMNS=128,
        KA=KA, KB=KB, STAGES=2, num_warps=4,
    )  # fmt: skip


def rows_described(x_NHC: Tensor, first: int, rows: int, width: int) -> Any:
    """Heads and channels, from `first` of the first head on, as one row of a token: [N, distance of heads * H]."""
    N, H, C = x_NHC.shape
    row, head, _ = x_NHC.stride()
    x = x_NHC[..., first:] if first else x_NHC
    return launching.described(True, x, N, (H - 1) * head + C - first, row, rows, width)


@forward_op.register_fake
def _(q, k, v, gate, forward_tiles, backward_tiles, key_tiles, longest, scale, dtype, keep):
    (N, H, _), V = q.shape, v.shape[2]
    kept = q.new_empty((N, H, V) if gate is not None and keep else 0, dtype=torch.float32)
    return q.new_empty(N, H, V, dtype=dtype), kept, q.new_empty(H, N, dtype=torch.float32)


def channels_dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@op("rille::mla_backward")
def backward_op(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, gate: Tensor | None, o: Tensor, lse: Tensor, backward_tiles: Tensor,
    key_tiles: Tensor, longest: int, scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and the gate (empty without), each in its tensor's dtype."""
    (N, H, K), V = q.shape, v.shape[2]
    dq, dk, dv = (torch.empty(N, H, C, dtype=q.dtype, device=q.device) for C in (K, K, V))
    d_gate = q.new_empty(0) if gate is None else torch.empty(N, H, V, dtype=gate.dtype, device=q.device)
    if N and H:
        q, k, v = fetchable(q), fetchable(k), fetchable(v)
        do, delta = prepare(d_out, gate, d_gate, o, q.dtype)
        together = heads_together(H, longest, 2 * (K + V) * q.element_size())
        _of_queries(q, k, v, do, lse, delta, dq, backward_tiles, together, scale)
        _of_keys(q, k, v, do, lse, delta, dk, dv, key_tiles, together, scale)
    return dq, dk, dv, d_gate


def prepare(d_out: Tensor, gate: Tensor | None, d_gate: Tensor, o: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradient of the attention's output in the operands' dtype, and its product with the output, fp32 [H, N]."""
    N, H, V = o.shape
    d_out, gate = channels_dense(d_out), None if gate is None else channels_dense(gate)
    do = torch.empty(N, H, V, dtype=dtype, device=o.device)
    delta = torch.empty(H, N, dtype=torch.float32, device=o.device)
    gate_row, gate_head = (0, 0) if gate is None else gate.stride()[:2]
    launch(
        backward_kernels.prepare_kernel, -(-N * H // PREPARED),
        (o, d_out, gate, None if gate is None else d_gate, do, delta, N, H, *d_out.stride()[:2], gate_row, gate_head),
        V=V, VB=cover(V), ROWS=PREPARED, num_warps=4,
    )  # fmt: skip
    return do, delta


def _of_queries(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor, tiles: Tensor, together: int,
    scale: float,
) -> None:  # fmt: skip
    (N, H, K), VB, b = q.shape, cover(v.shape[2]), QUERIES
    q_a, q_b, k_a, k_b = operands(q, k, b, True)
    kernel: Any = backward_kernels.query_kernel
    kernel[(tiles.shape[0] * H,)](
        q_a, q_b, described(do, 0, b.own, VB), k_a, k_b, described(v, 0, b.other, VB), lse, delta, dq, tiles, N, H,
        together, scale, scale * LOG2E, K=K, **options(q, v, b, b.own, b.other),
    )  # fmt: skip


def _of_keys(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor, tiles: Tensor,
    together: int, scale: float,
) -> None:  # fmt: skip
    (N, H, K), V, b = q.shape, v.shape[2], KEYS
    if KEY_RINGS and not whole_widths(K, V):
        _of_keys_by_rings(q, k, v, do, (lse, delta, dk, dv, tiles, N, H, together), scale)
        return
    q_a, q_b, k_a, k_b = operands(q, k, b, False)
    kernel: Any = backward_kernels.key_kernel
    kernel[(tiles.shape[0] * H,)](
        k_a, k_b, described(v, 0, b.own, cover(V)), q_a, q_b, described(do, 0, b.other, cover(V)), lse, delta, dk, dv,
        tiles, N, H, together, scale, scale * LOG2E, K=K, V=V, **options(q, v, b, b.other, b.own),
    )  # fmt: skip


def _of_keys_by_rings(q: Tensor, k: Tensor, v: Tensor, do: Tensor, results: tuple[Any, ...], scale: float) -> None:
    from rille.ops.mla import backward_gluon

    (KA, KB), V = parts(q.shape[2]), v.shape[2]
    halves = [rows_described(x, at, 64, width) if width else None for x in (k, q) for at, width in ((0, KA), (KA, KB))]
    k_a, k_b, q_a, q_b = halves
    descriptors = (k_a, k_b, rows_described(v, 0, 64, V), q_a, q_b, rows_described(do, 0, 64, V))
    heads = tuple(x.stride(1) for x in (k, v, q, do))
    given = (*descriptors, *results, *heads, scale, scale * LOG2E)
    launch(
        backward_gluon.key_rings_kernel, results[4].shape[0] * results[6], given, V=V, KA=KA, KB=KB, STAGES=3,
        num_warps=4,
    )  # fmt: skip


@backward_op.register_fake
def _(d_out, q, k, v, gate, o, lse, backward_tiles, key_tiles, longest, scale):
    d_gate = q.new_empty(0) if gate is None else gate.new_empty(gate.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_gate


def save(ctx, inputs, output) -> None:
    q, k, v, gate, _, backward_tiles, key_tiles, longest, scale, _, keep = inputs
    out, kept, lse = output
    assert gate is None or keep, "the output before the gate was not kept"
    ctx.longest, ctx.scale = longest, scale
    ctx.save_for_backward(q, k, v, gate, out if gate is None else kept, lse, backward_tiles, key_tiles)
    ctx.mark_non_differentiable(kept, lse)
    ctx.set_materialize_grads(False)


def gradient(ctx, d_out, _kept, _lse):
    q, k, v, gate, o, lse, backward_tiles, key_tiles = ctx.saved_tensors
    if d_out is None:
        return (None,) * 11
    found = backward_op(d_out, q, k, v, gate, o, lse, backward_tiles, key_tiles, ctx.longest, ctx.scale)
    dq, dk, dv, d_gate = found
    return dq, dk, dv, d_gate if gate is not None else None, *(None,) * 7


forward_op.register_autograd(gradient, setup_context=save)
