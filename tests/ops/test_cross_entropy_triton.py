"""The kernel between the products against plain PyTorch in float64: losses, log-probabilities, gradients in place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rille.ops.cross_entropy import choose_backend, linear_cross_entropy

fused = pytest.importorskip("rille.ops.cross_entropy.fused", exc_type=ImportError)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [(1, 1, 1), (15, 3, 7), (5, 16, 1025), (7, 8, 2500)]  # N tokens, D width, W words


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several steps a row, the last of them not full."""
    monkeypatch.setattr(fused, "BLOCK", 1024)


def draw(N: int, D: int, W: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(N)
    x, head = (torch.randn(size, D, generator=g).to(DEVICE, dtype) for size in (N, W))
    targets = torch.randint(0, W, (N,), generator=g).to(DEVICE)
    targets[2::3] = -100
    return x, head, targets


def outcomes(backend: str, x: Tensor, head: Tensor, targets: Tensor, z_loss: float, chunk: int | None) -> list[Tensor]:
    if backend == "chunked":
        x, head = x.double(), head.double()
    x, head = x.detach().requires_grad_(), head.detach().requires_grad_()
    result = linear_cross_entropy(x, head, targets, chunk, z_loss, backend=backend)
    return [result.loss_sum, result.log_probs, *torch.autograd.grad(0.37 * result.loss_sum, (x, head))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [2, None])
def test_equals_plain_torch(size: tuple[int, int, int], z_loss: float, chunk: int | None) -> None:
    inputs = draw(*size)
    got, want = (outcomes(name, *inputs, z_loss, chunk) for name in ("triton", "chunked"))
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.isfinite().all()
        assert (a.double() - b).abs().max() <= 2e-5 * b.abs().max().clamp_min(1e-3)


@pytest.mark.parametrize("size", SIZES)
def test_the_gradient_of_bfloat16_replaces_fp32_logits(size: tuple[int, int, int]) -> None:
    """It is half as wide and lies where logits were; log-probabilities know nothing of bf16."""
    inputs = draw(*size, torch.bfloat16)
    got, want = (outcomes(name, *inputs, 0.1, 4) for name in ("triton", "chunked"))
    assert got[0].dtype == got[1].dtype == torch.float32 and got[2].dtype == got[3].dtype == torch.bfloat16
    assert ((got[1] - want[1]).abs() <= 1e-5 * (1 + want[1].abs())).all()
    for a, b in zip(got[2:], want[2:], strict=True):
        assert (a.double() - b).abs().max() <= 2**-6 * b.abs().max().clamp_min(1e-3)


def test_tokens_that_do_not_count() -> None:
    x, head, targets = draw(15, 3, 7)
    _, log_probs, dx, _ = outcomes("triton", x, head, targets, 0.1, 4)
    out = targets == -100
    assert not log_probs[out].any() and not dx[out].any() and (dx[~out].abs().amax(1) > 0).all()
    nothing = outcomes("triton", x, head, torch.full_like(targets, -100), 0.1, 4)
    assert not any(tensor.any() for tensor in nothing)


def test_what_does_not_count_is_not_read() -> None:
    x, head, targets = draw(15, 3, 7)
    sick = x.masked_fill((targets == -100)[:, None], torch.nan)
    loss, log_probs, dx, _ = outcomes("triton", sick, head, targets, 0.0, 4)
    want = outcomes("triton", x, head, targets, 0.0, 4)
    assert torch.equal(loss, want[0]) and torch.equal(log_probs, want[1]) and torch.equal(dx, want[2])


def test_large_and_missing_logits() -> None:
    logits = torch.full((2, 40), -torch.inf, device=DEVICE)
    logits[:, 3], logits[:, 20] = 1e4, 5e3
    targets = torch.tensor([3, 20], device=DEVICE)
    losses, log_probs = fused.score_logits(logits, targets, 0.0, True, torch.float32)
    assert log_probs.tolist() == [0.0, -5e3] and losses.tolist() == [0.0, 5e3]
    want = torch.zeros(2, 40, device=DEVICE)
    want[1, 3], want[1, 20] = 1.0, -1.0
    assert torch.equal(logits, want)


def test_no_gradient_and_no_tokens() -> None:
    x, head, targets = draw(15, 3, 7)
    want = outcomes("triton", x, head, targets, 0.1, 4)
    with torch.no_grad():
        result = linear_cross_entropy(x, head, targets, 4, 0.1, backend="triton")
    assert torch.equal(result.loss_sum, want[0]) and torch.equal(result.log_probs, want[1])
    assert not any(tensor.any() for tensor in outcomes("triton", x[:0], head, targets[:0], 0.0, None))


def test_chunks_fill_their_memory() -> None:
    assert fused.chunk_for(163_840) == 4096 and fused.chunk_for(32_768) == 8192
    assert fused.chunk_for(50_000_000) == 128 and fused.chunk_for(7) == 8192


def test_the_op_is_registered_whole() -> None:
    arguments = (torch.randn(3, 40, device=DEVICE), torch.tensor([1, -100, 39], device=DEVICE), 0.1, True)
    for dtype in (torch.bfloat16, torch.float32):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(fused.score_logits.registered, (*arguments, dtype), test_utils=checks)


def test_choice_and_refusal() -> None:
    x, head, targets = draw(4, 3, 7)
    name, reason = choose_backend(x, head)
    assert reason and name == ("triton" if DEVICE == "cuda" else "chunked")
    with pytest.raises(ValueError, match="unknown backend"):
        linear_cross_entropy(x, head, targets, backend="fast")
    with pytest.raises(ValueError, match="float64"):
        linear_cross_entropy(x.double(), head.double(), targets, backend="triton")
