"""The histogram of balancing counted in shared memory, on a GPU: count by count that of the router's own kernel."""

from __future__ import annotations

import pytest
import torch

router = pytest.importorskip("rille.ops.moe.router", exc_type=ImportError)
pytestmark = pytest.mark.gpu


def both(logits: torch.Tensor, bias: torch.Tensor, bins: int, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    found = []
    for apart in (True, False):
        monkeypatch.setattr(router, "APART", apart)
        monkeypatch.setattr(router, "MANY", 1)
        assert router.counted_apart(logits, bins) == apart
        found.append(router.router(logits, bias, 2, 1.0, True, bins, False)[-1])
    return found


@pytest.mark.parametrize(
    "size", [(1, 2, 8), (513, 16, 4096), (3000, 40, 1001), (140_000, 256, 4000), (5000, 896, 4000)]
)
def test_counts_are_the_routers(size: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    N, E, bins = size
    generator = torch.Generator("cuda").manual_seed(sum(size))
    logits = torch.randn(N, E, generator=generator, device="cuda")
    bias = 0.3 * torch.randn(E, generator=generator, device="cuda")
    got, want = both(logits, bias, bins, monkeypatch)
    assert torch.equal(got, want) and int(got.sum()) == N * E
    cuts = (0, N // 3, N // 3 + N // 2, N)
    parts = [both(logits[a:b], bias, bins, monkeypatch)[0] for a, b in zip(cuts, cuts[1:], strict=False) if b > a]
    assert torch.equal(torch.stack(parts).sum(0), got), "any sharding of the tokens counts the same"


def test_one_bin_takes_more_than_16_bits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens all alike, a program with nearly as many as a count holds; their rows begin anywhere."""
    grid = router.histogram_grid
    monkeypatch.setattr(router, "histogram_grid", lambda N, E, _: grid(N, E, 1))
    logits = torch.zeros(1_200_000, 257, device="cuda")[:, 1:17]
    got, want = both(logits, torch.zeros(16, device="cuda"), 4000, monkeypatch)
    assert torch.equal(got, want) and int(got.max()) == 1_200_000


def test_logits_that_are_no_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2000, 16, device="cuda")
    logits[5, 3], logits[6, 4], logits[7, 5] = torch.nan, torch.inf, -torch.inf
    got, want = both(logits, torch.zeros(16, device="cuda"), 4000, monkeypatch)
    assert torch.equal(got, want)
