"""One chunk of logits to losses, log-probabilities and its own gradient, in Triton.

    top = max x     total = sum exp(x - top)     lse = top + log total     log p = x[target] - top - log total
    loss = z lse^2 - log p                       dx = (1 + 2 z lse) exp(x - top) / total - onehot(target)

A program has one row and reads it twice: once for top and total, which every thread keeps for itself by online softmax
until the end, once for the gradient, which takes the place of the logits. Where it is narrower than they are (fp32 to
bf16) its rows keep their distance: column w comes to lie where half of column w/2 was, which this program has read by
then. Rows that do not count are not read.

Suffixes: B block of the words, L threads along a row, W words.
"""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """One multiplication and one instruction, a last bit worse than tl.exp near 1."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def score(
    logits, dlogits, targets, losses, log_probs, W, logits_row, dlogits_row, z_loss,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, GRADIENT: tl.constexpr,
):  # fmt: skip
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    dtype: tl.constexpr = dlogits.dtype.element_ty
    target = tl.load(targets + row)
    logits += row * logits_row
    dlogits += row * dlogits_row
    if target != IGNORED:
        # Read before the barriers of the reductions: the gradient will overwrite it.
        picked = tl.load(logits + target).to(tl.float32)
        top, total = top_and_total(logits, W, BLOCK, LANES, VEC)
        lse = top + tl.log(total)
        log_prob = picked - top - tl.log(total)
        tl.store(log_probs + row, log_prob)
        tl.store(losses + row, z_loss * lse * lse - log_prob)
        if GRADIENT:
            scale = (1.0 + 2.0 * z_loss * lse) / total
            for first in range(0, W, BLOCK):
                w_B = first + tl.arange(0, BLOCK)
                x_B = tl.load(logits + w_B, mask=w_B < W, other=float("-inf")).to(tl.float32)
                if dlogits.dtype != logits.dtype:
                    tl.debug_barrier()
                dx_B = exp(x_B - top) * scale - (w_B == target).to(tl.float32)
                tl.store(dlogits + w_B, dx_B.to(dtype), mask=w_B < W)
    else:
        tl.store(log_probs + row, 0.0)
        tl.store(losses + row, 0.0)
        if GRADIENT:
            for first in range(0, W, BLOCK):
                w_B = first + tl.arange(0, BLOCK)
                tl.store(dlogits + w_B, tl.zeros([BLOCK], dtype), mask=w_B < W)


@triton.jit
def top_and_total(logits, W, BLOCK: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """max x and sum exp(x - max x) of a row."""
    repeats: tl.constexpr = BLOCK // (LANES * VEC)
    top_L = tl.full([LANES], -1.0e30, tl.float32)  # finite: a thread without words must not subtract infinities
    total_L = tl.zeros([LANES], tl.float32)
    for first in range(0, W, BLOCK):
        w_B = first + tl.arange(0, BLOCK)
        x_B = tl.load(logits + w_B, mask=w_B < W, other=float("-inf")).to(tl.float32)
        x = tl.reshape(x_B, [repeats, LANES, VEC])
        new_L = tl.maximum(top_L, tl.max(tl.max(x, 2), 0))
        e = exp(x - new_L[None, :, None])
        total_L = total_L * exp(top_L - new_L) + tl.sum(tl.sum(e, 2), 0)
        top_L = new_L
    top = tl.max(top_L, 0)
    return top, tl.sum(total_L * exp(top_L - top), 0)
