"""The chunked head and loss against plain PyTorch in float64; it must never hold all logits or count -100."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rille.ops.cross_entropy import CrossEntropy, linear_cross_entropy, reference

SIZES = [(1, 1, 1), (15, 3, 7), (63, 16, 65), (130, 5, 33)]  # N tokens, D width, W words
CHUNKS = [1, 16, 64, 1000]


def draw(N: int, D: int, W: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """x, head and targets, a third of them not counted (if there are more than two)."""
    generator = torch.Generator().manual_seed(N)
    x, head = (torch.randn(size, D, generator=generator, dtype=torch.float64).to(dtype) for size in (N, W))
    targets = torch.randint(0, W, (N,), generator=generator)
    targets[2::3] = -100
    return x, head, targets


def chunked(x: Tensor, head: Tensor, targets: Tensor, z_loss: float, chunk: int) -> tuple[Tensor, ...]:
    result = linear_cross_entropy(x, head, targets, chunk=chunk, z_loss=z_loss)
    assert isinstance(result, CrossEntropy)
    return result.loss_sum, result.count, result.log_probs


def with_gradients(function, x: Tensor, head: Tensor, targets: Tensor, *rest) -> list[Tensor]:
    x, head = x.detach().requires_grad_(), head.detach().requires_grad_()
    loss, count, log_probs = function(x, head, targets, *rest)
    return [loss, count, log_probs, *torch.autograd.grad(0.37 * loss, (x, head))]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_reference_is_plain_torch(size: tuple[int, int, int], z_loss: float) -> None:
    def plain(x: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, counted = x @ head.T, targets != -100
        loss = F.cross_entropy(logits, targets, reduction="sum") + z_loss * logits[counted].logsumexp(1).square().sum()
        return loss, counted.sum(), -F.cross_entropy(logits, targets, reduction="none")

    want = with_gradients(plain, *draw(*size))
    for a, b in zip(with_gradients(reference.linear_cross_entropy, *draw(*size), z_loss), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("z_loss", [0.0, 0.1])
def test_chunked_equals_the_reference(size: tuple[int, int, int], chunk: int, z_loss: float) -> None:
    inputs = draw(*size)
    want = with_gradients(reference.linear_cross_entropy, *inputs, z_loss)
    for a, b in zip(with_gradients(chunked, *inputs, z_loss, chunk), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_gradcheck() -> None:
    x, head, targets = draw(7, 3, 5)
    loss = lambda x, head: linear_cross_entropy(x, head, targets, chunk=3, z_loss=0.1).loss_sum  # noqa: E731
    assert torch.autograd.gradcheck(loss, (x.requires_grad_(), head.requires_grad_()))


def test_fp32_error() -> None:
    """D products and W terms, each with a relative error of eps, on logits of size ~ D^0.5."""
    N, D, W = 130, 64, 257
    x, head, targets = draw(N, D, W)
    exact = with_gradients(chunked, x, head, targets, 1e-4, 64)
    got = with_gradients(chunked, x.float(), head.float(), targets, 1e-4, 64)
    assert got[2].dtype == torch.float32
    assert ((got[2] - exact[2]).abs() <= 2**-23 * D * D**0.5).all()
    for a, b in zip(got[3:], exact[3:], strict=True):
        assert ((a - b).abs() <= 2**-23 * (D + W) * b.abs().amax()).all()


def test_bfloat16_operands_make_fp32_logits() -> None:
    """Log-probabilities lose nothing to the operands' dtype; gradients are rounded on the way and once at the end."""
    x, head, targets = draw(130, 64, 257, torch.bfloat16)
    exact = with_gradients(chunked, x.double(), head.double(), targets, 0.0, 64)
    loss, _, log_probs, dx, dhead = with_gradients(chunked, x, head, targets, 0.0, 64)
    assert loss.dtype == log_probs.dtype == torch.float32
    assert ((log_probs - exact[2]).abs() <= 2**-23 * 64 * 8).all()
    for got, want in ((dx, exact[3]), (dhead, exact[4])):
        assert got.dtype == torch.bfloat16
        assert ((got - want).abs() <= 2 * 2**-8 * want.abs().amax()).all()


def test_tokens_that_do_not_count() -> None:
    x, head, targets = draw(63, 16, 65)
    loss, count, log_probs, dx, dhead = with_gradients(chunked, x, head, targets, 0.1, 16)
    out = targets == -100
    assert int(count) == int((~out).sum()) == 42
    assert torch.equal(log_probs[out], torch.zeros(21, dtype=torch.float64))
    assert torch.equal(dx[out], torch.zeros(21, 16, dtype=torch.float64)) and (dx[~out].abs().amax(1) > 0).all()
    kept = with_gradients(chunked, x[~out], head, targets[~out], 0.1, 16)
    torch.testing.assert_close(loss, kept[0], rtol=1e-13, atol=0)
    torch.testing.assert_close(dhead, kept[4], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("tokens", [0, 4])
def test_nothing_counts(tokens: int) -> None:
    x, head, _ = draw(tokens, 3, 5)
    targets = torch.full((tokens,), -100)
    loss, count, log_probs, dx, dhead = with_gradients(chunked, x, head, targets, 0.1, 3)
    assert loss.item() == 0 and count.item() == 0 and not log_probs.any()
    assert not dx.any() and not dhead.any()


def test_large_logits_do_not_overflow() -> None:
    x, head = torch.full((2, 1), 1e4), torch.tensor([[1.0], [0.5], [-1.0]])
    result = with_gradients(chunked, x, head, torch.tensor([0, 2]), 0.0, 1)
    assert result[2].tolist() == [0.0, -2e4]
    assert all(torch.isfinite(tensor).all() for tensor in result)


def test_only_the_sum_is_differentiable() -> None:
    x, head, targets = draw(15, 3, 7)
    result = linear_cross_entropy(x.requires_grad_(), head.requires_grad_(), targets)
    assert result.loss_sum.requires_grad and not result.log_probs.requires_grad and not result.count.requires_grad


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_factor_of_the_loss_keeps_its_fp32(device: str) -> None:
    """0.9 would be 0.898 in the dtype of x."""
    x, head, targets = (tensor.to(device) for tensor in draw(63, 16, 65, torch.bfloat16))
    loss = linear_cross_entropy(x.requires_grad_(), head, targets).loss_sum
    (whole,) = torch.autograd.grad(loss, x, retain_graph=True)
    (scaled,) = torch.autograd.grad(0.9 * loss, x)
    assert scaled.dtype == torch.bfloat16 and torch.equal(scaled, (whole.float() * 0.9).bfloat16())


def test_one_side_frozen() -> None:
    x, head, targets = draw(63, 16, 65)
    *_, dx, dhead = with_gradients(chunked, x, head, targets, 0.0, 16)
    for wanted, gradient in ((0, dx), (1, dhead)):
        leaves = [x.detach().requires_grad_(wanted == 0), head.detach().requires_grad_(wanted == 1)]
        linear_cross_entropy(*leaves, targets, chunk=16).loss_sum.mul(0.37).backward()
        torch.testing.assert_close(leaves[wanted].grad, gradient, rtol=1e-13, atol=1e-14)
        assert leaves[1 - wanted].grad is None


def test_all_logits_never_exist() -> None:
    """The largest float tensor that any operation returns is a chunk of logits (or x, or the head), not N * W."""
    N, D, W, chunk = 512, 8, 300, 16
    x, head, targets = draw(N, D, W)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            tensors = [t for t in torch.utils._pytree.tree_leaves(out) if isinstance(t, Tensor)]
            sizes.extend(t.numel() for t in tensors if t.is_floating_point())
            return out

    with Sizes():
        linear_cross_entropy(x.requires_grad_(), head.requires_grad_(), targets, chunk=chunk).loss_sum.backward()
    assert max(sizes) == max(chunk * W, N * D, W * D)


def test_user_mistakes() -> None:
    x, head, targets = draw(15, 3, 7)
    targets[4] = 7
    with pytest.raises(ValueError, match=r"1 targets outside \[0, 7\), the first is 7"):
        linear_cross_entropy(x, head, targets)
    targets[4] = -1
    with pytest.raises(ValueError, match="the first is -1"):
        linear_cross_entropy(x, head, targets)
    with pytest.raises(ValueError, match=r"\(15, 3\).*\(7, 2\)"):
        linear_cross_entropy(x, head[:, :2], targets)
    with pytest.raises(ValueError, match="float32"):
        linear_cross_entropy(x, head.float(), targets)
    with pytest.raises(ValueError, match="chunk 0"):
        linear_cross_entropy(x, head, targets, chunk=0)
