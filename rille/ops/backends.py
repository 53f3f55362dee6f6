"""Which form of every operation a model's layers get on a device, and why: what each op's `choose_backend` says.

The choice depends on shapes, dtype, device and whether gradients are wanted, so each op is asked with empty tensors of
the model's shapes. Nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rille.ops import attn_res, conv, cross_entropy, embedding, mla, moe, norm, situ
from rille.ops import kda as kda_op
from rille.ops.kda import Gate, decode
from rille.packing import Packing

TOKENS = 256  # of the batch that is asked about: longer than any op's limit for short ones
PAGE_ROWS = 64  # of the latent cache that is asked about


class Choice(NamedTuple):
    """`backend` is what `op` takes, `reason` why, in words."""

    op: str
    backend: str
    reason: str


class Sizes(Protocol):
    """What a model's config tells about its ops."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def kda_heads(self) -> int: ...
    @property
    def kda_head_dim(self) -> int: ...
    @property
    def conv_width(self) -> int: ...
    @property
    def decay_lower_bound(self) -> float | None: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def expert_io(self) -> int: ...
    @property
    def expert_width(self) -> int: ...
    @property
    def activation(self) -> str: ...
    @property
    def gate_cap(self) -> float: ...
    @property
    def up_cap(self) -> float: ...
    @property
    def mla_heads(self) -> int: ...
    @property
    def query_dim(self) -> int: ...
    @property
    def value_dim(self) -> int: ...
    @property
    def cache_dim(self) -> int: ...
    @property
    def kv_rank(self) -> int: ...
    @property
    def attends_depth(self) -> bool: ...
    @property
    def dtype(self) -> str: ...


def report(config: Sizes, device: torch.device | str) -> list[Choice]:
    """What every op of a model with this config takes on that device, in its own dtype. The device must exist."""
    dtype = getattr(torch, config.dtype)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return [*of_kda(config, empty, torch.device(device)), *of_mla(config, empty), *of_the_rest(config, empty)]


def of_kda(c: Sizes, empty: Callable[..., Tensor], device: torch.device) -> Iterator[Choice]:
    H, K = c.kda_heads, c.kda_head_dim
    weight_CW = torch.empty(3 * H * K, c.conv_width, device=device)
    qkv_NC, rows = empty(TOKENS, 3 * H * K), empty(TOKENS, H, K)
    yield Choice("short_conv", *conv.choose_backend(qkv_NC, weight_CW))
    gate = Gate(torch.empty(H, device=device), torch.empty(H, K, device=device), c.decay_lower_bound)
    packing, b_NH = Packing.of([TOKENS], device=device), empty(TOKENS, H)
    with torch.no_grad():
        yield Choice("kda", *kda_op.choose_backend(rows, rows, rows, rows, b_NH, gate, packing))
    with torch.enable_grad():
        learns = rows.clone().requires_grad_()
        yield Choice("kda training", *kda_op.choose_backend(learns, learns, learns, learns, b_NH, gate, packing))
    layer = decode.DecodeLayer(weight_CW, gate, torch.empty(K, device=device), 1e-5)
    name, reason = decode.choose_backend(qkv_NC[:1], layer)
    yield Choice("kda decode", name if name != "reference" else "composed", reason)


def of_mla(c: Sizes, empty: Callable[..., Tensor]) -> Iterator[Choice]:
    H, scale = c.mla_heads, c.query_dim**-0.5
    q, v = empty(TOKENS, H, c.query_dim), empty(TOKENS, H, c.value_dim)
    packing = Packing.of([TOKENS], device=q.device)
    yield Choice("mla", *mla.choose_backend(q, v, packing, scale, torch.promote_types(q.dtype, torch.float32)))
    cache = mla.LatentCache(empty(1, PAGE_ROWS, c.cache_dim), torch.zeros(1, 1, dtype=torch.int64, device=q.device))
    latents = empty(1, H, c.cache_dim)
    yield Choice("mla decode", *mla.choose_latent_backend(latents, cache, c.kv_rank, scale))


def of_the_rest(c: Sizes, empty: Callable[..., Tensor]) -> Iterator[Choice]:
    x_ND, x_NF = empty(TOKENS, c.hidden_size), empty(TOKENS, c.expert_width)
    yield Choice("embed", *embedding.choose_backend(x_ND))
    if c.attends_depth:
        yield Choice("attn_res", *attn_res.choose_backend([x_ND, x_ND]))
    yield Choice("rms_norm", *norm.choose_backend(x_ND))
    yield Choice("situ_glu", *situ.choose_backend(x_NF, x_NF))
    yield from of_experts(c, empty)
    yield Choice("cross_entropy", *cross_entropy.choose_backend(x_ND, x_ND))


def of_experts(c: Sizes, empty: Callable[..., Tensor]) -> Iterator[Choice]:
    L, F = c.expert_io, c.expert_width
    glu = situ.swiglu if c.activation == "swiglu" else partial(situ.situ_glu, cap_gate=c.gate_cap, cap_up=c.up_cap)
    logits_NE = empty(TOKENS, c.num_experts).float()
    yield Choice("moe router", *moe.choose_router_backend(logits_NE, logits_NE[0]))
    operands = moe.ExpertOperands(empty(1, 2 * F, L), empty(1, L, F), glu)
    yield Choice("moe", *moe.choose_backend(empty(TOKENS, L), operands))
