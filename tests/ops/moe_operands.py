"""Experts on a card for tests of their kernels."""

from __future__ import annotations

from functools import partial

import torch

from rille.ops.moe import ExpertOperands
from rille.ops.situ import situ_glu

SITU = partial(situ_glu, cap_gate=4.0, cap_up=25.0)


def operands(size: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, ExpertOperands]:
    """x, ids, weights and experts of N tokens, E experts, A active, L latent, F expert width, in bf16."""
    N, E, A, L, F = size
    draw = torch.Generator("cuda").manual_seed(sum(size))
    normal = partial(torch.randn, generator=draw, device="cuda")
    ids = torch.rand(N, E, generator=draw, device="cuda").argsort(1)[:, :A].contiguous()
    w13, w2 = normal(E, 2 * F, L) * L**-0.5, normal(E, L, F) * F**-0.5
    return normal(N, L).bfloat16(), ids, normal(N, A).abs() + 0.1, ExpertOperands(w13.bfloat16(), w2.bfloat16(), SITU)
