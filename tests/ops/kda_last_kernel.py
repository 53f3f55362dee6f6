"""Inputs of the last kernel of the KDA backward, for tests of its Gluon forms against their Triton twins; and what each
form must hold on a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rille.ops.kda import backward as kernels
from rille.ops.kda.backward import Gradients, Inputs, local, prepare, reverse, states
from rille.ops.kda.forward import INTERPRET, intra
from rille.packing import Packing

H, WIDTH = 2, 128
DEVICE = "cpu" if INTERPRET else "cuda"
LENGTHS: tuple[int, ...] = (17, 70) if INTERPRET else (1, 15, 16, 17, 0, 63, 64, 65, 300)
Last = tuple[Any, ...]


def logits(gate: str, z: Tensor, shut: float) -> Tensor:
    """Of the gate, from normal z; shut: where nearly nothing passes, and a gradient still does."""
    token = torch.arange(z.shape[0])[:, None, None]
    if gate == "resets":
        return torch.where(token % 11 == 5, shut, -3.0).expand_as(z)
    if gate == "shut or open":
        return torch.where(z[:, :, :1] < 0, -12.0, 12.0).expand_as(z)
    return {"shut": torch.full_like(z, shut), "open": torch.full_like(z, -8.0)}.get(gate, 3 * z)


def draw(bound: float | None, gate: str, dtype: torch.dtype, size: float = 1.0) -> tuple[Inputs, Last]:
    """Inputs that bf16 holds exactly, and what the kernels before the last one make of them, rounded alike."""
    generator, N = torch.Generator().manual_seed(0), sum(LENGTHS)
    z, q, k, v, do = (torch.randn(N, H, WIDTH, generator=generator) for _ in range(5))
    b = torch.randn(N, H, generator=generator)
    tokens = [x.bfloat16().to(DEVICE, dtype) for x in (q, k, v, logits(gate, z, 40.0 if bound is None else 12.0), b)]
    gates = [
        x.to(DEVICE) for x in (0.3 * torch.randn(H, generator=generator), torch.randn(H, WIDTH, generator=generator))
    ]
    packing = Packing.of(LENGTHS, device=DEVICE)
    indices = (packing.chunks(64).spans, packing.starts, packing.longest_first, packing.chunks(64).first)
    inputs = Inputs._make([*tokens, *gates, bound, *indices, None])
    made = intra(*inputs[:2], *inputs[3:8], inputs.spans_M2, digits=2)
    prepared, do = prepare(inputs, digits=2), (size * do).bfloat16().to(DEVICE, dtype)
    u, before = states(inputs, prepared, made.t_DMHCC)
    dv, after, _ = reverse(inputs, prepared, made.t_DMHCC, made.a_MHCC, do, None)
    dv, u, before, after = (x.bfloat16().to(dtype) for x in (dv, u, before, after))
    return inputs, (do, dv, None, u, before, after, prepared.totals_MH4K, prepared.norms_MH4C)


@contextmanager
def launching(*expected: Any, tiled: bool = True) -> Iterator[None]:
    """Inside this context these kernels of the backward pass are launched and no others: a kernel that is compared with
    itself would agree. tiled: the Gluon forms where they can run, as a card takes them by itself."""
    seen, launch = [], kernels.launch

    def noted(kernel: Any, *arguments: Any, **options: Any) -> None:
        seen.append(kernel)
        launch(kernel, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        for name in ("TILED", "TILED_PREPARE", "SOFTPLUS_TILED"):
            patch.setattr(kernels, name, tiled)
        patch.setattr(kernels, "launch", noted)
        yield
    assert seen == list(expected)


def in_bf16(inputs: Inputs, last: Last) -> tuple[Inputs, Last]:
    tiles = [x if x is None else x.bfloat16() for x in last[:6]]
    return Inputs._make([*(x.bfloat16() for x in inputs[:5]), *inputs[5:]]), (*tiles, *last[6:])


def assert_repeats_and_keeps_nan(got: Gradients, inputs: Inputs, last: Last) -> None:
    """A second run gives the same bits, and NaN in one sequence stays there."""
    again = local(inputs, *last)
    assert all(torch.equal(x, y) for x, y in zip(got[:7], again[:7], strict=True))
    start = sum(LENGTHS[:6])
    rows: list[Tensor] = [x.clone() for x in (*inputs[:5], *last[:2])]
    for x in rows:
        x[start : start + LENGTHS[6]] = torch.nan
    spoilt = local(Inputs._make([*rows[:5], *inputs[5:]]), *rows[5:], *last[2:])
    for x, y in zip((*spoilt[:2], *spoilt[3:5]), (*got[:2], *got[3:5]), strict=True):
        assert torch.equal(x[:start], y[:start])
        assert torch.equal(x[start + LENGTHS[6] :], y[start + LENGTHS[6] :])
