"""What a decoding step tells of each row of logits, in two launches: the likeliest token, or one that was drawn, its
log-probability, and whether every logit is a number.

`reference.py` is the definition; `row_kernels.py` are the kernels, launched by `launch.py`.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from rille.ops.figures import reference
from rille.ops.settling import settle

__all__ = ["choose_backend", "token_figures"]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
SLOWLY = "the reference runs on a GPU, slowly"


@torch.no_grad()
def token_figures(
    logits: Tensor, tokens: Tensor | None = None, least: float = -torch.inf, *,
    drawn: tuple[Tensor, Tensor] | None = None, backend: str | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(tokens int64 [N], figures float64 [3, N]) of logits [N, W], W of at least 1.

    tokens: int64 [N] in [0, W), given back; by default the likeliest of each row, the lowest id of equal ones. drawn:
    temperatures and numbers in [0, 1), float64 [N]: rows whose temperature is above 0 are drawn from softmax(logits /
    temperature), in the order of the ids; the sums are float64, and only their last bits could tell backends apart.
    Figures:
    the token, its log-probability log softmax(logits) in fp32 (float64 for float64) but not below `least`, and 1 where
    all logits of the row are finite, else 0; the other two mean nothing then, though the token is in [0, W). No
    gradient, no wait for the device. backend: "triton" or "reference"; by default what `choose_backend` says.

    Raises ValueError for shapes that do not fit and a backend that cannot run.
    """
    if logits.ndim != 2 or logits.shape[1] == 0 or (tokens is not None and tokens.shape != logits.shape[:1]):
        given = "none" if tokens is None else tuple(tokens.shape)
        raise ValueError(f"token_figures: logits {tuple(logits.shape)} and tokens {given}; want [N, W] and [N]")
    if tokens is not None and drawn is not None:
        raise ValueError("token_figures: tokens are given or drawn, not both")
    heats, numbers = (None, None) if drawn is None else (x.contiguous() for x in drawn)
    if settle("token_figures", backend, "reference", lambda: _obstacle(logits), logits, SLOWLY) == "reference":
        return reference.token_figures(logits, tokens, heats, numbers, least)
    from rille.ops.figures import launch

    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    found, figures_3N = launch.token_figures(logits, tokens, heats, numbers, least)
    return found if tokens is None else tokens, figures_3N


def choose_backend(logits: Tensor) -> tuple[str, str]:
    """The backend for these logits and, in words, why."""
    reason = _obstacle(logits) if logits.is_cuda else f"the tensors are on {logits.device.type}"
    return ("triton", "CUDA tensors of a supported dtype") if reason is None else ("reference", reason)


def _obstacle(logits: Tensor) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.launching import INTERPRET

    if not logits.is_cuda and not INTERPRET:
        return f"the tensors are on {logits.device.type}"
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bf16, fp16 or fp32, not {logits.dtype}"
    return None
