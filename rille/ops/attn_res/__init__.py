"""Attention Residuals: a learned softmax over finished blocks and the running sum instead of a residual connection.

`reference.py` is the definition, `one_phase.py` the form that trains in plain PyTorch, `mix.py` runs the kernels of a
site. The two-phase form, in which the sites of a block of layers share a pass over the finished blocks, is in
`blocks.py`.
"""

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from rille.ops.attn_res import one_phase, reference
from rille.ops.attn_res.blocks import ScoredBlocks, choose_phases, score_blocks, scored_site
from rille.ops.norm import reference as norm_reference
from rille.ops.settling import warn_once

__all__ = [
    "ScoredBlocks",
    "attn_res",
    "attn_res_handed",
    "attn_res_site",
    "attn_res_weights",
    "choose_backend",
    "choose_phases",
    "score_blocks",
    "scored_site",
]

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
BACKENDS = ("triton", "one_phase", "reference")

SHORT = 512  # tokens; see choose_backend


def attn_res(
    sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float, *, backend: str | None = None
) -> Tensor:
    """The mixture that a sub-layer reads: softmax over the sources of <RMSNorm(source) * gain, query>, of raw sources.

    sources: R >= 1 tensors [N, D] of one shape and dtype (finished blocks first, the running sum last); query [D] and
    gain [D] of any float dtype. Result [N, D] in the sources' dtype, computed in fp32 (float64 for float64). No
    temperature. backend: "triton", "one_phase" or "reference"; by default what `choose_backend` says. The gradient is
    deterministic. Technical report equations 8 to 10.

    Raises ValueError for no sources, shapes and dtypes that differ, and a backend that cannot run.
    """
    _check(sources, query, gain)
    name = _settle(backend, sources)
    if name == "triton":
        return _triton(sources, None, query, gain, None, eps)[0]
    form = reference if name == "reference" else one_phase
    return form.attn_res(sources, query, gain, eps)


def attn_res_site(
    sources: Sequence[Tensor],
    update: Tensor | None,
    query: Tensor,
    gain: Tensor,
    norm_gain: Tensor,
    eps: float,
    *,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """A whole site: add to the running sum, mix, norm. Returns (input of the sub-layer [N, D], running sum [N, D]).

    The running sum is the last source plus `update` [N, D], rounded to the sources' dtype; without an update the last
    source itself is returned. The mixture is `attn_res` of the sources with that sum in the last place, rounded, then
    `rms_norm` with gain norm_gain [D] and the same eps. The kernel does it in one pass and writes no mixture. Other
    arguments and errors as in `attn_res`.
    """
    _check_site(sources, update, query, gain, norm_gain)
    return _site(_settle(backend, sources), sources, update, query, gain, norm_gain, eps)


def attn_res_handed(
    sources: Sequence[Tensor],
    update: Tensor | None,
    query: Tensor,
    gain: Tensor,
    norm_gain: Tensor,
    eps: float,
    *,
    backend: str | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """`attn_res_site` that hands its sources on: (input of the sub-layer, the sources with the running sum last).

    Give the next site these sources, not the old ones: then the parts of a source's gradient are added up inside the
    kernels as it comes back through the sites, and not by a pass over memory for each. Values are those of
    `attn_res_site`, and so are arguments and errors.
    """
    _check_site(sources, update, query, gain, norm_gain)
    name = _settle(backend, sources)
    if name == "triton" and torch.is_grad_enabled():
        from rille.ops.attn_res import mix

        rows = [source.contiguous() for source in sources]
        update = None if update is None else update.to(rows[0].dtype).contiguous()
        weights = (query.contiguous(), gain.contiguous(), norm_gain.contiguous())
        x, *handed = mix.Handed.apply(eps, update, *weights, *rows)
        return x, handed
    x, running = _site(name, sources, update, query, gain, norm_gain, eps)
    return x, [*sources[:-1], running]


def attn_res_weights(sources: Sequence[Tensor], query: Tensor, gain: Tensor, eps: float) -> Tensor:
    """The softmax weights [N, R] of `attn_res` in fp32 (float64 for float64), one row of them sums to 1."""
    _check(sources, query, gain)
    return reference.attn_res_weights(sources, query, gain, eps)


def choose_backend(sources: Sequence[Tensor]) -> tuple[str, str]:
    """The backend for these sources and, in words, why."""
    reason = _obstacle(sources) if sources[0].is_cuda else f"the tensors are on {sources[0].device.type}"
    if reason is None:
        return "triton", "CUDA tensors of a supported shape"
    # Short evaluations add in the release's order. It costs as much there; for 4,096 tokens it takes 6.3 ms, not 0.8.
    short = not torch.is_grad_enabled() and len(sources[0]) <= SHORT
    return "reference" if short else "one_phase", reason


def _site(
    name: str,
    sources: Sequence[Tensor],
    update: Tensor | None,
    query: Tensor,
    gain: Tensor,
    norm_gain: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """`attn_res_site` by the backend of that name."""
    if name == "triton":
        x, running = _triton(sources, update, query, gain, norm_gain, eps)
        return x, sources[-1] if update is None else running
    running = sources[-1] if update is None else sources[-1] + update
    mixed = attn_res([*sources[:-1], running], query, gain, eps, backend=name)
    return norm_reference.rms_norm(mixed, norm_gain, eps), running


def _triton(
    sources: Sequence[Tensor],
    update: Tensor | None,
    query: Tensor,
    gain: Tensor,
    norm_gain: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:
    from rille.ops.attn_res import mix

    leaves = (*sources, update, query, gain, norm_gain)
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
    rows = [source.contiguous() for source in sources]
    update = None if update is None else update.to(rows[0].dtype).contiguous()
    norm_gain = None if norm_gain is None else norm_gain.contiguous()
    return mix.mix(rows, update, query.contiguous(), gain.contiguous(), norm_gain, eps, save)[:2]


def _obstacle(sources: Sequence[Tensor]) -> str | None:
    """Why the kernels cannot run, or None."""
    if not HAS_TRITON:
        return "triton is not installed"
    from rille.ops.attn_res import mix

    if not sources[0].is_cuda and not mix.interpreting():
        return f"the tensors are on {sources[0].device.type}"
    if sources[0].dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bf16, fp16 or fp32, not {sources[0].dtype}"
    if len(sources) > mix.MOST_SOURCES:
        return f"the kernels take at most {mix.MOST_SOURCES} sources, here are {len(sources)}"
    if sources[0].shape[1] > mix.WIDEST:
        return f"the kernels take rows of at most {mix.WIDEST}, these have {sources[0].shape[1]}"
    return None


def _settle(backend: str | None, sources: Sequence[Tensor]) -> str:
    if backend is None:
        name, reason = choose_backend(sources)
        if name != "triton" and sources[0].is_cuda:
            warn_once(f"attn_res: backend {name!r} runs on a GPU, slowly: {reason}")
        return name
    if backend not in BACKENDS:
        raise ValueError(f"attn_res: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    reason = _obstacle(sources) if backend == "triton" else None
    if reason is not None:
        raise ValueError(f"attn_res: backend {backend!r} cannot run: {reason}")
    return backend


def _check(sources: Sequence[Tensor], query: Tensor, gain: Tensor) -> None:
    if not sources:
        raise ValueError("attn_res: no sources; a site mixes at least the running sum")
    kinds = {(source.shape, source.dtype) for source in sources}
    if len(kinds) > 1 or sources[0].ndim != 2:
        kinds = {(tuple(shape), dtype) for shape, dtype in kinds}
        raise ValueError(f"attn_res: sources must share one shape [N, D] and one dtype, got {sorted(map(str, kinds))}")
    width = sources[0].shape[1:]
    if query.shape != width or gain.shape != width:
        raise ValueError(
            f"attn_res: query {tuple(query.shape)} and gain {tuple(gain.shape)} for sources of width {tuple(width)}"
        )


def _check_site(
    sources: Sequence[Tensor], update: Tensor | None, query: Tensor, gain: Tensor, norm_gain: Tensor
) -> None:
    _check(sources, query, gain)
    if norm_gain.shape != query.shape or (update is not None and update.shape != sources[0].shape):
        raise ValueError(
            f"attn_res_site: norm_gain {tuple(norm_gain.shape)} and update "
            f"{None if update is None else tuple(update.shape)} for sources {tuple(sources[0].shape)}"
        )
