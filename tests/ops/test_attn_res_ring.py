"""The Gluon kernel of wide rows, run by Python on a CPU, against the definition: rows that programs share unevenly,
rings that turn at any source, copies that read late and early."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from rille.ops.attn_res import attn_res, attn_res_site, mix, ring_gluon
from rille.ops.norm import rms_norm
from tests.ops import gluon_on_cpu

EPS = 1e-6
NANS = 0x7FC07FC0  # a word of two bf16


def extended_language(language: Any) -> Any:
    """What this kernel uses beyond the stand-in: words of two bf16, and sums of many tensors at once."""
    gl, Tile = language(), gluon_on_cpu.Tile

    def joined(text: str, constraints: str, inputs: list[Any], **_: Any) -> Any:
        assert text == "cvt.rn.bf16x2.f32 $0, $2, $1;"
        low, high = (x.value.bfloat16().contiguous().view(torch.int16).int() for x in inputs)
        return Tile((high << 16) | (low & 0xFFFF))

    def reduce(tensors: Any, axis: int, combine: Any) -> Any:
        rows = [tuple(Tile(x.value[i]) for x in tensors) for i in range(tensors[0].shape[0])]
        total = rows[0]
        for row in rows[1:]:
            total = combine(*total, *row)
        return total

    gl.zeros = lambda shape, kind, layout: Tile(torch.zeros(shape, dtype=kind.torch))
    gl.reshape, gl.reduce, gl.inline_asm_elementwise = lambda x, shape: x.reshape(shape), reduce, joined
    gl.pointer_type = lambda kind: kind
    return gl


def copy_of_words(smem: Any, pointer: Any, mask: Any) -> None:
    here = mask.value.expand(smem.shape)
    smem.value[here] = NANS
    read = pointer.read(here) if gluon_on_cpu.MACHINE.eager else None

    def arrive() -> None:
        smem.value[here] = (pointer.read(here) if read is None else read)[here]

    gluon_on_cpu.MACHINE.groups[-1].append(arrive)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Any:
    Tile, plain_to, place = gluon_on_cpu.Tile, gluon_on_cpu.Tile.to, gluon_on_cpu.place

    def to(self: Any, kind: Any, bitcast: bool = False) -> Any:
        return Tile(self.value.contiguous().view(kind.torch)) if bitcast else plain_to(self, kind)

    monkeypatch.setattr(Tile, "to", to)
    monkeypatch.setattr(Tile, "__lshift__", gluon_on_cpu.operator("__lshift__"), raising=False)
    # Tensors are given as words.
    monkeypatch.setattr(gluon_on_cpu.Pointer, "to", lambda self, kind, bitcast: self, raising=False)
    monkeypatch.setattr(gluon_on_cpu, "place", lambda x: tuple(map(place, x)) if isinstance(x, tuple) else place(x))
    monkeypatch.setattr(gluon_on_cpu, "async_copy", copy_of_words)
    monkeypatch.setattr(gluon_on_cpu, "language", partial(extended_language, gluon_on_cpu.language))
    return gluon_on_cpu.kernels_of(ring_gluon)[0].mix_ring


def words(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.view(torch.int32)


def distance(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("R", "N", "D", "site", "programs", "slots"),
    [(9, 7, 504, False, 3, 14), (9, 8, 504, True, 2, 10), (1, 5, 256, False, 2, 4), (3, 11, 264, True, 4, 7)],
)
def test_equals_the_definition(kernel, eager, R, N, D, site, programs, slots) -> None:
    g = torch.Generator().manual_seed(R)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g).bfloat16()

    sources = [new(N, D) * 2**j for j in range(R)]
    update, query, gain, norm_gain = new(N, D), new(D) / 8, new(D), new(D)
    out, running, stats = new(N, D), new(N, D), torch.empty(N, 2 * R + site)
    given = (tuple(map(words, sources)), words(update) if site else None, words(query), words(gain))
    results = (words(norm_gain) if site else None, words(out), words(running), stats, N, EPS)
    sizes = dict(D=D, BLOCK=1 << (D - 1).bit_length(), SLOTS=slots, GROUP=3, UPDATE=site, NORM=site, STATS=True)
    gluon_on_cpu.Kernel(partial(kernel, num_warps=1), eager)[(programs,)](*given, *results, **sizes, num_warps=1)

    if site:
        sources[-1] = (sources[-1].float() + update.float()).bfloat16()
        assert torch.equal(running, sources[-1])
    exact = [source.double() for source in sources]
    h = attn_res(exact, query.double(), gain.double(), EPS, backend="reference")
    roots = torch.stack([torch.rsqrt(v.square().mean(1) + EPS) for v in exact], 1)
    dots = torch.stack([v @ (query.double() * gain.double()) for v in exact], 1)
    assert distance(stats[:, :R], dots) < 1e-6 and distance(stats[:, R : 2 * R], roots) < 1e-6
    if site:  # the norm's own rounding: a few values land on the other side
        assert distance(stats[:, -1], torch.rsqrt(h.bfloat16().double().square().mean(1) + EPS)) < 1e-4
        assert distance(out, rms_norm(h.bfloat16(), norm_gain, EPS)) < 1e-3
    else:
        assert distance(out, h) < 2**-8


@pytest.mark.gpu
@pytest.mark.parametrize(("R", "N", "D"), [(9, 531, 7168), (2, 1100, 4104)])
def test_is_what_runs_on_a_gpu_and_its_gradients_are_right(R, N, D) -> None:
    g = torch.Generator().manual_seed(R)
    drawn = [torch.randn(shape, generator=g).bfloat16() for shape in ((R, N, D), (N, D), (D,), (D,), (D,), (N, D))]
    drawn[2] /= D**0.5

    def run(cast: torch.dtype, backend: str) -> list[Tensor]:
        stack, *others, d_out = (x.to("cuda", cast) for x in drawn)
        leaves = [x.detach().requires_grad_() for x in (*stack, *others)]
        out, running = attn_res_site(leaves[:R], *leaves[R:], EPS, backend=backend)
        return [out, running, *torch.autograd.grad((out, running), leaves, (d_out, d_out))]

    with torch.no_grad():
        rows = torch.zeros(N, D, dtype=torch.bfloat16, device="cuda")
        assert mix.RING and mix.in_ring([rows] * R, rows)
    got, want = run(torch.bfloat16, "triton"), run(torch.float64, "reference")
    for a, b in zip(got, want, strict=True):
        assert distance(a, b) < 1.2e-2
    again = run(torch.bfloat16, "triton")
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
