"""x W' as PyTorch has it, and for a few rows on a GPU kernels of ours: while text is generated a product is one read
of its weights, and what counts is how soon it begins and ends.

`few_kernels.py` are the kernels, launched by `few.py`; `torch.nn.functional.linear` is the twin.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from rille.ops.chains import is_chain
from rille.ops.norm import rms_norm

__all__ = ["is_few", "linear", "linear_onto", "normed_linear_onto", "norms_on_its_way", "wide_linear"]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
BACKENDS = ("triton", "torch")
# Rows, of them so many of a sum of so much, that meet the weights one by one, of all others one; in tiles, of results
# and sums so wide, where `tiles_pay`. Beyond them the library's kernels are as quick.
MOST_ROWS, WIDE = 4, 2048
TILED_ROWS, TILED_RESULT, TILED_SUM = 128, 1024, 512


def linear(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """x [..., D] times weight [C, D] transposed: [..., C] in x's dtype, which both share. Sums are fp32 (float64 for
    float64). Differentiable. backend: "triton" (x [N, D], no gradient) or "torch"; by default a kernel where
    `is_few`.

    Raises ValueError for a backend that cannot run, RuntimeError for shapes that do not fit.
    """
    if not _by_kernel("linear", backend, x, weight):
        return functional.linear(x, weight)
    from rille.ops.linear import few

    return few.linear(x, weight, None, x.dtype)


def linear_onto(x: Tensor, weight: Tensor, onto: Tensor, *, backend: str | None = None) -> Tensor:
    """onto [N, C] + x W', which may take the memory of `onto`. Without gradients on a GPU the sum is rounded once; else
    the product is rounded first, as in the official model. Otherwise as `linear`."""
    if _by_kernel("linear_onto", backend, x, weight, onto):
        from rille.ops.linear import few

        return few.linear(x, weight, onto, x.dtype)
    if not x.is_cuda or torch.is_grad_enabled():
        return functional.linear(x, weight) + onto
    return onto.addmm_(x, weight.t())


def normed_linear_onto(
    x: Tensor, gain: Tensor, eps: float, weight: Tensor, onto: Tensor, *, backend: str | None = None
) -> Tensor:
    """`linear_onto` of rms_norm(x, gain, eps), where x [N, D] is rounded to the weight's dtype first. backend as there:
    the kernel norms on its way, up to `MOST_ROWS` rows."""
    if _by_kernel("normed_linear_onto", backend, x, weight, onto, gain, normed=True):
        from rille.ops.linear import few

        return few.linear(x, weight, onto, weight.dtype, gain.contiguous(), eps)
    return linear_onto(rms_norm(x.to(weight.dtype), gain, eps), weight, onto, backend=backend)


def norms_on_its_way(x: Tensor, weight: Tensor, gain: Tensor) -> bool:
    """Whether `normed_linear_onto` is one launch for an x of this shape and device."""
    return x.is_cuda and not _obstacle(x, weight, gain, normed=True)


def wide_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x W' in fp32 from 16-bit operands where `is_few`: [N, C]."""
    from rille.ops.linear import few

    return few.linear(x, weight, None, torch.float32)


def is_few(x: Tensor, weight: Tensor, *others: Tensor) -> bool:
    """Whether a kernel runs by default: x [N, D] has few rows, on a GPU, and nothing is differentiated."""
    return x.is_cuda and (len(x) <= MOST_ROWS or tiles_pay()) and not _obstacle(x, weight, *others)


def tiles_pay() -> bool:
    """Tiles lose to the library's kernels unless they begin before the kernel ahead has ended."""
    return is_chain()


def _obstacle(x: Tensor, weight: Tensor, *others: Tensor, normed: bool = False) -> str:
    """Why the kernels cannot run, or an empty string."""
    if not HAS_TRITON:
        return "triton is not installed"
    if torch.compiler.is_compiling():
        return "a compiled model calls the library"
    from rille.ops.launching import INTERPRET

    if not x.is_cuda and not INTERPRET:
        return f"the tensors are on {x.device.type}"
    if x.ndim != 2 or weight.ndim != 2 or not takes(x.shape[0], x.shape[1], len(weight)):
        return f"the kernels do not take {tuple(x.shape)} times {tuple(weight.shape)}"
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, weight, *others)):
        return "the kernels have no gradient"
    known, x_dtype = (torch.bfloat16, torch.float16, torch.float32), torch.float32 if normed else weight.dtype
    if (
        weight.dtype not in known
        or x.dtype not in (weight.dtype, x_dtype)
        or any(t.dtype != weight.dtype for t in others)
    ):
        return f"the kernels take bf16, fp16 or fp32 alike, not {x.dtype} and {weight.dtype}"
    if normed and (len(x) > MOST_ROWS or x.shape[1] > WIDE):
        return f"the kernels norm up to {MOST_ROWS} rows of up to {WIDE} on their way, not {tuple(x.shape)}"
    if weight.shape[1] != x.shape[1] or not weight.is_contiguous() or x.stride(1) != 1:
        return f"the kernels take x [N, D] with dense rows and dense weights [C, D], not {x.shape} and {weight.shape}"
    return ""


def takes(N: int, D: int, C: int) -> bool:
    """Whether a kernel has x [N, D] and weights [C, D]."""
    if N <= MOST_ROWS:
        return N > 0 and (N == 1 or D <= WIDE)
    return N <= TILED_ROWS and D <= TILED_SUM and C <= TILED_RESULT


def _by_kernel(op: str, backend: str | None, x: Tensor, *others: Tensor, normed: bool = False) -> bool:
    if backend is None:
        few = x.is_cuda and (len(x) <= MOST_ROWS or tiles_pay())
        return few and not _obstacle(x, *others, normed=normed)
    if backend not in BACKENDS:
        raise ValueError(f"{op}: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    if backend == "triton" and (reason := _obstacle(x, *others, normed=normed)):
        raise ValueError(f"{op}: backend 'triton' cannot run: {reason}")
    return backend == "triton"
