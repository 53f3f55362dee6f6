"""Launches of the gradient's kernels, and the op that has it, registered with torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding

from rille.ops.embedding import run_kernels
from rille.ops.launching import INTERPRET, launch
from rille.ops.registering import op

CHUNK = 4 if INTERPRET else 64  # places of the sorted tokens, a program
AHEAD = 2 if INTERPRET else 8  # rows that are on the way together


def plan(D: int) -> dict[str, int]:
    """Columns of a program and its warps: 16 bytes of a bf16 row in each thread."""
    block = min(1024, 1 << max(5, (D - 1).bit_length()))
    return dict(BLOCK=block, num_warps=max(1, block // 256))


@op("rille::embed")
def embed(ids: Tensor, table: Tensor) -> Tensor:
    """[N, D]: rows of table [W, D]."""
    return embedding(ids, table)


@embed.register_fake
def _(ids, table):
    return table.new_empty(ids.shape[0], table.shape[1])


@op("rille::embed_backward")
def embed_backward(dy: Tensor, ids: Tensor, words: int) -> Tensor:
    """The table's gradient [words, D] in dy's dtype. dy [N, D] with dense rows, ids [N] of any integer dtype."""
    N, D = dy.shape
    table = torch.zeros(words, D, dtype=dy.dtype, device=dy.device)
    if N:
        # a stable sort: the order of a word's tokens, and with it every bit, is that of the batch
        sorted_ids, order = torch.sort(ids.to(torch.int32), stable=True)
        chunks = -(-N // CHUNK)
        starts = torch.searchsorted(sorted_ids, sorted_ids[::CHUNK].contiguous(), out_int32=True)
        partial = torch.empty(chunks, 2, D, dtype=torch.float32, device=dy.device)
        p = plan(D)
        constants = dict(D=D, CHUNK=CHUNK, AHEAD=AHEAD) | p
        programs = chunks * -(-D // p["BLOCK"])
        rows = dy, order, sorted_ids, table, partial, N, dy.stride(0)
        launch(run_kernels.sum_runs, programs, rows, **constants)
        launch(run_kernels.join_runs, programs, (partial, sorted_ids, starts, table, N), **constants)
    return table


@embed_backward.register_fake
def _(dy, ids, words):
    return dy.new_empty(words, dy.shape[1])


def save_embed(ctx, inputs, output) -> None:
    ids, table = inputs
    ctx.save_for_backward(ids)
    ctx.words = len(table)


def embed_gradient(ctx, dy):
    (ids,) = ctx.saved_tensors
    return None, embed_backward(dy if dy.stride(-1) == 1 else dy.contiguous(), ids, ctx.words)


embed.register_autograd(embed_gradient, setup_context=save_embed)
