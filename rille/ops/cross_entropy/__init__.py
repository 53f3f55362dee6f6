"""The language-model head and its cross-entropy in one op that never holds the logits of all tokens."""

from dataclasses import dataclass

from torch import Tensor

from rille.ops.cross_entropy import chunked
from rille.ops.cross_entropy.reference import IGNORED


@dataclass(frozen=True, eq=False)
class CrossEntropy:
    """Sums, not means: a step divides by the count of all its micro-batches and ranks."""

    loss_sum: Tensor  # scalar fp32 (float64 for float64), nats; the only field with a gradient
    count: Tensor  # scalar int64: tokens whose target is not -100
    log_probs: Tensor  # [N] of loss_sum's dtype: log p(target), 0 where the target is -100; without the z-loss


def linear_cross_entropy(
    x: Tensor, head: Tensor, targets: Tensor, chunk: int = 1024, z_loss: float = 0.0
) -> CrossEntropy:
    """Sum over tokens of -log softmax(head x)[target] + z_loss * logsumexp(head x)^2.

    x [N, D] (after the final norm) and head [W, D] of one float dtype, targets [N] int64 in [0, W), or -100 for tokens
    that do not count. `chunk` tokens of logits exist at a time (chunk * W fp32 numbers). Differentiable in x and head
    through loss_sum; the gradients are made in the forward pass, when x or head wants one: under `torch.no_grad()` one
    product of three is left.

    Raises ValueError for shapes and dtypes that do not agree, chunk < 1, and on the CPU for a target outside [0, W).
    """
    if x.shape[1:] != head.shape[1:] or targets.shape != x.shape[:1] or x.dtype != head.dtype:
        raise ValueError(
            f"linear_cross_entropy: x {tuple(x.shape)} {x.dtype}, head {tuple(head.shape)} {head.dtype}, targets "
            f"{tuple(targets.shape)}; want [N, D], [W, D] of one dtype, [N]"
        )
    if chunk < 1:
        raise ValueError(f"linear_cross_entropy: chunk {chunk}, want at least 1 token")
    if targets.device.type == "cpu":  # elsewhere the gather asserts on the device; looking would stall it
        _check_targets(targets, head.shape[0])
    loss_sum, log_probs = chunked.linear_cross_entropy(x, head, targets, z_loss, chunk)
    return CrossEntropy(loss_sum, (targets != IGNORED).sum(), log_probs)


def _check_targets(targets: Tensor, words: int) -> None:
    wrong = targets[((targets < 0) & (targets != IGNORED)) | (targets >= words)]
    if len(wrong):
        raise ValueError(
            f"linear_cross_entropy: {len(wrong)} targets outside [0, {words}), the first is {int(wrong[0])}; "
            f"use {IGNORED} for tokens that do not count"
        )
