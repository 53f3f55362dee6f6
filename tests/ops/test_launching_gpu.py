"""Launches of a card that know their kernel: the same results, watchers that are told, and memory that a card cannot
reach."""

from __future__ import annotations

import pytest
import torch

from rille.ops.attn_res import attn_res_site
from rille.ops.conv import PooledTail, short_conv
from rille.ops.norm import add_rms_norm, gated_rms_norm, rms_norm
from rille.ops.situ import situ_glu
from rille.packing import Packing

pytest.importorskip("triton")
pytestmark = pytest.mark.gpu
EPS = 1e-5


def draw(*shape: int, seed: int) -> torch.Tensor:
    numbers = torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda")
    return numbers.bfloat16()


def results(seed: int, backend: str) -> list[torch.Tensor]:
    """Of one launch of several kinds: few and many arguments, tuples of tensors, grids of two axes, in place."""
    x, y, gain = draw(70, 256, seed=seed), draw(70, 256, seed=seed + 1), draw(256, seed=seed + 2)
    heads = draw(70, 4, 64, seed=seed + 3)
    gates = draw(70, 300, seed=seed + 4)[:, 24:280].unflatten(-1, (4, 64))
    found = [rms_norm(x, gain, EPS, backend=backend), *add_rms_norm(x, y, gain, EPS, backend=backend)]
    found += [gated_rms_norm(heads, gates, gain[:64], EPS, backend=backend)]
    found += [situ_glu(x, y, 4.0, 25.0, backend=backend)]
    mixed = "triton" if backend == "triton" else "one_phase"
    found += attn_res_site([x, y, x + y], y, gain, gain, gain, EPS, backend=mixed)
    packing = Packing.of([30, 40], device="cuda")
    tail = PooledTail(draw(5, 3, 256, seed=seed + 5), torch.tensor([3, 1], device="cuda"))
    weight = draw(256, 4, seed=seed + 6).float()
    found += [short_conv(x, weight, packing, tail, backend=backend)[0], tail.pool]
    return found


@torch.no_grad()
def test_a_known_launch_computes_what_its_arguments_say() -> None:
    first = results(1, "triton")  # makes every kernel known
    for seed in (1, 50):
        again = results(seed, "triton")
        for n, (got, want) in enumerate(zip(again, results(seed, "reference"), strict=True)):
            error = (got.float() - want.float()).abs().max()
            assert error <= 2**-5 * want.float().abs().max(), f"result {n} of seed {seed}: {error}"
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) is (seed == 1)


@torch.no_grad()
def test_watchers_are_told_of_launches() -> None:
    from triton import knobs

    x, gain, names = draw(9, 256, seed=1), draw(256, seed=2), []

    def watch(metadata) -> None:
        names.append(metadata.get()["name"])

    rms_norm(x, gain, EPS)
    knobs.runtime.launch_enter_hook.add(watch)
    try:
        watched = rms_norm(x, gain, EPS)
    finally:
        knobs.runtime.launch_enter_hook.remove(watch)
    assert torch.equal(watched, rms_norm(x, gain, EPS)) and len(names) == 1 and "rms_forward" in names[0]


@torch.no_grad()
def test_memory_that_the_card_cannot_reach_is_refused() -> None:
    x, gain = draw(9, 256, seed=1), draw(256, seed=2)
    for _ in range(2):
        rms_norm(x, gain, EPS)
    with pytest.raises(ValueError, match="cpu tensor"):
        rms_norm(x, gain.cpu(), EPS)
    assert rms_norm(x, gain, EPS).isfinite().all()
