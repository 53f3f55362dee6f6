"""Newton-Schulz iteration on a batch of matrices: what Muon does to a momentum."""

from importlib.util import find_spec

import torch
from torch import Tensor

from rille.ops.newton_schulz import blocks, reference
from rille.ops.newton_schulz.reference import COEFFICIENTS

__all__ = ["BACKENDS", "COEFFICIENTS", "choose_backend", "newton_schulz", "normalised"]

BACKENDS = ("reference", "plain", "gram", "plain symmetric", "gram symmetric", "gram chain")
HAS_TRITON = find_spec("triton") is not None
# Which kernels fp16 matrices on a card take where they can: "chain", "symmetric", or "" for the library's alone.
KERNELS = "chain"
SMALLEST = 256  # a side of 128 is one tile: nothing to leave out
ASPECT = 1.5  # from this ratio of the sides on the Gram form is faster on an H200 (README); squares are slower in it
_FORMS = {"plain": blocks.plain, "gram": blocks.gram}
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def newton_schulz(
    m: Tensor, steps: int = 5, *, eps: float = 1e-7, dtype: torch.dtype | None = None, backend: str | None = None
) -> Tensor:
    """Each matrix of m [B, P, Q] with its singular values moved close to 1 and its singular vectors kept.

    X_0 = M / (||M||_F + eps), then `steps` times X' = a X + (b A + c A^2) X with A = X X^T (X^T X where P > Q) and
    `COEFFICIENTS` = (a, b, c). The norm is taken in fp32 (float64 for float64), everything else runs in `dtype`: fp32,
    float64, bf16 or fp16, by default m's (the reference: in fp32 or float64). The result has that dtype. A factor on M
    changes nothing while ||M||_F is far above eps; below it the result tends to zero, and of zeros it is zero. No
    gradient. backend: "reference", "plain" or "gram"; "plain symmetric" and "gram symmetric" compute half of the tiles
    of symmetric products by a kernel, "gram chain" all that lies between the long products by one launch; by default
    what `choose_backend` says.

    Source: Jordan 2024, Moonlight section 2.1. Raises ValueError for m that is not [B, P, Q] of a float dtype, for
    steps < 1, an unknown dtype or backend, and a backend that cannot run.
    """
    dtype = m.dtype if dtype is None else dtype
    if m.ndim != 3 or m.dtype not in DTYPES or dtype not in DTYPES or steps < 1:
        raise ValueError(
            f"newton_schulz: m {tuple(m.shape)} {m.dtype}, dtype {dtype}, steps {steps}; want [B, P, Q] of a float "
            "dtype and at least 1 step"
        )
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"newton_schulz: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    with torch.no_grad():
        if backend == "reference":
            tall = m.shape[1] > m.shape[2]
            wide_BPQ = (m.mT if tall else m).to(_wide(dtype))
            x_BPQ = reference.newton_schulz(wide_BPQ, steps, eps).to(dtype)
            return x_BPQ.mT if tall else x_BPQ
        x_BPQ = _scaled(m, eps, dtype)
        return _run(choose_backend(x_BPQ)[0] if backend is None else backend, x_BPQ, steps)


def normalised(x: Tensor, steps: int = 5) -> Tensor:
    """`newton_schulz` for x [B, P, Q] that is X_0 already, in the dtype of the products."""
    with torch.no_grad():
        return _run(choose_backend(x)[0], x, steps)


def choose_backend(x: Tensor) -> tuple[str, str]:
    """The form for X_0 of this shape, dtype and device and, in words, why. Kernels run as they were measured: fp16."""
    short, long = sorted(x.shape[1:])
    form, words = ("gram", "or more") if long >= ASPECT * short else ("plain", "at most")
    reason = f"the sides {short} and {long} differ by {ASPECT:g} times {words}"
    wanted = KERNELS and x.dtype == torch.float16 and (KERNELS != "symmetric" or short >= SMALLEST)
    if wanted and obstacle(f"{form} {KERNELS}", x) is None:
        return f"{form} {KERNELS}", reason
    return form, reason


def obstacle(backend: str, x_BPQ: Tensor) -> str | None:
    """Why a backend with kernels cannot run for X of this shape, dtype and device, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.launching import INTERPRET
    from rille.ops.newton_schulz.symmetric import CHAINED

    chain = backend.endswith("chain")
    if not x_BPQ.is_cuda and (chain or not INTERPRET):
        return f"the tensors are on {x_BPQ.device.type}"
    wanted = [torch.float16, torch.bfloat16] if chain else [torch.float16, torch.bfloat16, torch.float32]
    wanted = wanted if x_BPQ.is_cuda else [torch.float32]
    if x_BPQ.dtype not in wanted:
        return f"the kernel takes {' or '.join(map(str, wanted))}, not {x_BPQ.dtype}"
    if backend == "plain chain" or (chain and min(x_BPQ.shape[1:]) not in CHAINED):
        return f"it is the Gram form of matrices whose shorter side is {' or '.join(map(str, CHAINED))}"
    if chain and (INTERPRET or torch.cuda.get_device_capability(x_BPQ.device)[0] != 9):
        return "it is Gluon for Hopper: other cards and the interpreter do not know its instructions"
    return None


def _run(backend: str, x_BPQ: Tensor, steps: int) -> Tensor:
    form, _, kernels = backend.partition(" ")
    if not kernels:
        return _FORMS[form](x_BPQ, steps)
    reason = obstacle(backend, x_BPQ)
    if reason is not None:
        raise ValueError(f"newton_schulz: backend {backend!r} cannot run: {reason}")
    from rille.ops.newton_schulz import symmetric

    made = {"plain symmetric": symmetric.plain, "gram symmetric": symmetric.gram, "gram chain": symmetric.chained}
    return made[backend](x_BPQ, steps)


def _scaled(m_BPQ: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """M / (||M||_F + eps), without gaps, rounded once to `dtype`."""
    norm_B11 = torch.linalg.matrix_norm(m_BPQ, dtype=_wide(m_BPQ.dtype), keepdim=True)
    return (m_BPQ / (norm_B11 + eps)).to(dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
