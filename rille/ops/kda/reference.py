"""Kimi Delta Attention, literally: the recurrence that every other form must agree with. `kda` below is the definition.

For each head, with a state S [K, V] that starts at S_0, and for each token in turn:

    q <- q / sqrt(sum q^2 + 1e-6) * K^-0.5      k <- k / sqrt(sum k^2 + 1e-6)      beta = sigmoid(b)
    alpha = exp(g),  g = lower_bound * sigmoid(exp(A_log) * (z + dt_bias))         (softplus gate: see `log_decay`)

    S <- diag(alpha) S              forget, each key channel at its own rate
    u  = v - S^T k                  what the state does not yet know of v
    S <- S + beta k u^T             write it
    o  = S^T q                      read the updated state

Source: Kimi K3 report section 2.1.1, Eq. 1, 2 and 5 (without the scale of q, which the released model has); Kimi Linear
report, arXiv 2510.26692. The state is stored value-first, [V, K], as in the released cache: a transposed state has the
same norm and gives silently wrong text. The order of the operations in fp32 is the released model's, bit for bit on a
CPU when q, k and v lie in memory as the convolution leaves them: a deep model amplifies every rounding that differs.

Suffixes: N packed tokens, S sequences, A sequences still active, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rille.packing import Packing

if TYPE_CHECKING:
    from rille.ops.kda.arguments import Gate


def kda(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    initial_SHVK: Tensor | None,
    places: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """One token after another, all sequences at once; float64 throughout if an input is float64, else fp32. Third: the
    states [P, H, V, K] at places on the way, each a sequence and after how many of its tokens; None without any."""
    dtype = compute_dtype(q_NHK, k_NHK, v_NHV, z_NHK, b_NH)
    q_NHK, k_NHK = normalised_queries(q_NHK, dtype), normalised(k_NHK, dtype)
    alpha_NHK, beta_NH = log_decay(z_NHK, gate, dtype).exp(), b_NH.to(dtype).sigmoid()
    state_SHKV = initial_state(initial_SHVK, packing, k_NHK, v_NHV, dtype).mT

    rows, outputs, kept = [], [], {}
    for step in range(packing.longest):
        active_A = torch.tensor([s for s, n in enumerate(packing.lengths) if n > step], device=v_NHV.device)
        row_A = packing.starts[active_A].long() + step
        k_AHK, beta_AH1 = k_NHK[row_A], beta_NH[row_A][..., None]
        state_AHKV = state_SHKV[active_A] * alpha_NHK[row_A][..., None]
        u_AHV = v_NHV[row_A].to(dtype) - (state_AHKV * k_AHK[..., None]).sum(-2)
        state_AHKV = state_AHKV + torch.einsum("ahk,ahv->ahkv", beta_AH1 * k_AHK, u_AHV)
        outputs.append(torch.einsum("ahkv,ahk->ahv", state_AHKV, q_NHK[row_A]))
        rows.append(row_A)
        state_SHKV = state_SHKV.index_copy(0, active_A, state_AHKV)
        kept |= {place: state_SHKV[place[0]].clone() for place in places if place[1] == step + 1}
    if not rows:
        return v_NHV.clone(), state_SHKV.mT.clone(), None
    o_NHV = torch.empty_like(v_NHV, dtype=dtype)  # in memory as v is: sums over a head go with the layout
    o_NHV[torch.cat(rows)] = torch.cat(outputs)
    kept_PHVK = torch.stack([kept[place] for place in places]).mT if places else None
    return o_NHV.to(v_NHV.dtype), state_SHKV.mT.contiguous(), kept_PHVK


def compute_dtype(*inputs: Tensor) -> torch.dtype:
    """float64 if an input is float64, else fp32: decays, norms and states lose too much in anything shorter."""
    return reduce(torch.promote_types, (x.dtype for x in inputs), torch.float32)


def initial_state(
    initial_SHVK: Tensor | None, packing: Packing, k_NHK: Tensor, v_NHV: Tensor, dtype: torch.dtype
) -> Tensor:
    """The given states, or zeros."""
    if initial_SHVK is not None:
        return initial_SHVK.to(dtype)
    (_, H, K), V = k_NHK.shape, v_NHV.shape[2]
    return torch.zeros(packing.num_sequences, H, V, K, dtype=dtype, device=k_NHK.device)


def normalised(x_NHK: Tensor, dtype: torch.dtype) -> Tensor:
    """x / sqrt(sum_K x^2 + 1e-6): the epsilon stands inside the root, so a zero key stays zero."""
    x_NHK = x_NHK.to(dtype)
    return x_NHK / (x_NHK.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def normalised_queries(q_NHK: Tensor, dtype: torch.dtype) -> Tensor:
    """Normalised like keys, then scaled by K^-0.5."""
    return normalised(q_NHK, dtype) * q_NHK.shape[-1] ** -0.5


def log_decay(z_NHK: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """g [N, H, K], natural log of the decay: bounded below (K3) or -exp(A_log) softplus(z + dt_bias) (Kimi Linear)."""
    rate_H1 = gate.A_log[: z_NHK.shape[1], None].to(dtype).exp()
    x_NHK = z_NHK.to(dtype) + gate.dt_bias.to(dtype)
    if gate.lower_bound is None:
        return -rate_H1 * F.softplus(x_NHK)
    return gate.lower_bound * (rate_H1 * x_NHK).sigmoid()
