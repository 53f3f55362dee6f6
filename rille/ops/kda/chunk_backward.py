"""The gradient of the blocked form, written out: what the backward kernels do, in plain PyTorch.

`chunk.py` has the forward equations. With dO, dS' the gradients of a chunk's output and of the state after it, from the
last chunk to the first:

    dU = A^T dO + E dS'          dV = T^T dU          dS = Q^T dO + diag(2^Gc) dS' - (k 2^G)^T dV
    with Q = q 2^G, E = b k 2^(Gc-G)

and then, for every chunk by itself,

    dA = tril(dO U^T) b                dAk = -strict_tril(dV U^T) b      gradients of A and L before b multiplies them
    dQ = dO S^T                        dE  = b U dS'^T                   dKg = -dV S^T, gradient of k 2^G
    dq = sum_j dA_ij k_j 2^(Gi-Gj)  + 2^G dQ
    dk = sum_j dAk_ij k_j 2^(Gi-Gj) + 2^G dKg  =: dk_row
       + sum_i (dA_ij q_i + dAk_ij k_i) 2^(Gi-Gj) + 2^(Gc-G) dE  =: dk_col
    dG = q dq + k (dk_row - dk_col);   dg_i = sum_{j>=i} dG_j + sum_j E_j dE_j + 2^Gc sum_V S dS'

A token's read of its own write, dA_ii, decays by nothing: it is in q dq as in k dk_col and has no part in dG. So it is
left out of the sums until dG is formed. Under a shut gate it is e^5 times what remains, and a difference of two rounded
numbers would be all error.

Neither the gradient of T nor its path through the inverse appears. Differentiating (I + L) U = V - k 2^G S as an
equation gives that path at once: (I + L)^-T dU is the gradient of the right side, so it is dV, and L receives -dV U^T.

Scaling q of one token scales its output; scaling its k or b acts like a change of its v. That gives sums without any
gradient of q or k. U is what the state did not yet know of v:

    sum_K q dq = sum_V o dO         sum_K k dk = sum_V dV (2 U - V)         beta dbeta = sum_V dV U

The kernel takes the last from the second, (sum_K k dk + sum_V dV V) / 2: there U, which is rounded, is not needed.

Suffixes as in `chunk.py`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rille.ops.kda.arguments import Gate
from rille.ops.kda.chunk import (
    HALF,
    AnchoredHalves,
    Decays,
    Halves,
    NestedHalves,
    Schedule,
    across_border,
    check_lower_bound,
    pair_products,
    schedule_chunks,
    state_pass,
    within_chunks,
)
from rille.ops.kda.reference import compute_dtype, initial_state, normalised_queries
from rille.packing import Packing


class Gradients(NamedTuple):
    """Of a scalar with respect to each input of `kda`, in the type of the arithmetic."""

    q_NHK: Tensor
    k_NHK: Tensor
    v_NHV: Tensor
    z_NHK: Tensor
    b_NH: Tensor
    A_log: Tensor
    dt_bias_HK: Tensor
    initial_SHVK: Tensor


@torch.no_grad()
def kda_backward(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    initial_SHVK: Tensor | None,
    do_NHV: Tensor,
    dfinal_SHVK: Tensor,
) -> Gradients:
    """Gradients of sum(o do) + sum(final dfinal). Raises ValueError if 16 |lower_bound| > 80."""
    check_lower_bound(gate)
    dtype = compute_dtype(q_NHK, k_NHK, v_NHV, z_NHK, b_NH)
    state_SHVK = initial_state(initial_SHVK, packing, k_NHK, v_NHV, dtype)
    if packing.num_tokens == 0:
        inputs = (q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate.A_log, gate.dt_bias)
        return Gradients._make([*(torch.zeros_like(x, dtype=dtype) for x in inputs), dfinal_SHVK.to(dtype)])
    schedule = schedule_chunks(packing)
    k_MHCK, beta_MHC1, decay, halves, t_MHCC = within_chunks(k_NHK, z_NHK, b_NH, gate, schedule, dtype)
    q_MHCK = schedule.gather(normalised_queries(q_NHK, dtype))
    v_MHCV, do_MHCV = schedule.gather(v_NHV.to(dtype)), schedule.gather(do_NHV.to(dtype))
    a_MHCC = pair_products(q_MHCK, k_MHCK, halves, decay).tril() * beta_MHC1.mT
    k_start_MHCK, k_end_MHCK = k_MHCK * decay.from_start_MHCK, beta_MHC1 * k_MHCK * decay.to_end_MHCK
    q_start_MHCK = q_MHCK * decay.from_start_MHCK
    u_MHCV, states_MHVK, _ = state_pass(
        t_MHCC @ k_start_MHCK, t_MHCC @ v_MHCV, k_end_MHCK, decay.whole_MH1K, state_SHVK, schedule
    )
    operands = (a_MHCC, t_MHCC, q_start_MHCK, k_start_MHCK, k_end_MHCK, decay.whole_MH1K, do_MHCV)
    dv_MHCV, dstates_MHVK, dinitial_SHVK = reverse_pass(*operands, dfinal_SHVK.to(dtype), schedule)

    da_MHCC = (do_MHCV @ u_MHCV.mT).tril() * beta_MHC1.mT
    own_MHC1 = da_MHCC.diagonal(dim1=-2, dim2=-1)[..., None]
    da_MHCC = da_MHCC.tril(-1)
    dak_MHCC = -(dv_MHCV @ u_MHCV.mT).tril(-1) * beta_MHC1.mT
    dq_MHCK, dk_row_MHCK, dk_col_MHCK = pair_gradients(da_MHCC, dak_MHCC, q_MHCK, k_MHCK, halves, decay)
    end_MHCK = beta_MHC1 * decay.to_end_MHCK * (u_MHCV @ dstates_MHVK)
    dq_MHCK += decay.from_start_MHCK * (do_MHCV @ states_MHVK)
    dk_row_MHCK -= decay.from_start_MHCK * (dv_MHCV @ states_MHVK)
    dk_col_MHCK += end_MHCK
    dG_MHCK = q_MHCK * dq_MHCK + k_MHCK * (dk_row_MHCK - dk_col_MHCK)
    dq_MHCK += own_MHC1 * k_MHCK
    dk_row_MHCK += own_MHC1 * q_MHCK
    carried_MH1K = (k_MHCK * end_MHCK).sum(-2, keepdim=True)
    carried_MH1K += decay.whole_MH1K * (states_MHVK * dstates_MHVK).sum(-2, keepdim=True)
    dg_MHCK = dG_MHCK.flip(-2).cumsum(-2).flip(-2) + carried_MH1K

    known_MHC = (dv_MHCV * (2 * u_MHCV - v_MHCV)).sum(-1, keepdim=True)
    db_MHC1 = (dv_MHCV * u_MHCV).sum(-1, keepdim=True) * (1 - beta_MHC1)
    o_MHCV = q_start_MHCK @ states_MHVK.mT + a_MHCC @ u_MHCV
    read_MHC = (o_MHCV * do_MHCV).sum(-1, keepdim=True)
    scale = q_NHK.shape[-1] ** -0.5
    dz_NHK, dA_log = gate_gradients(schedule.scatter(dg_MHCK), z_NHK.to(dtype), gate)
    return Gradients(
        through_norm(schedule.scatter(dq_MHCK * scale), schedule.scatter(read_MHC), q_NHK.to(dtype)),
        through_norm(schedule.scatter(dk_row_MHCK + dk_col_MHCK), schedule.scatter(known_MHC), k_NHK.to(dtype)),
        schedule.scatter(dv_MHCV),
        dz_NHK,
        schedule.scatter(db_MHC1)[..., 0],
        dA_log,
        dz_NHK.sum(0),
        dinitial_SHVK,
    )


def reverse_pass(
    a_MHCC: Tensor,
    t_MHCC: Tensor,
    q_start_MHCK: Tensor,
    k_start_MHCK: Tensor,
    k_end_MHCK: Tensor,
    whole_MH1K: Tensor,
    do_MHCV: Tensor,
    dfinal_SHVK: Tensor,
    schedule: Schedule,
) -> tuple[Tensor, Tensor, Tensor]:
    """dV [M, H, C, V], the gradient of the state after each chunk [M, H, V, K], and of the initial states."""
    dstate_SHVK = dfinal_SHVK[schedule.longest_first_S]
    operands = (a_MHCC, t_MHCC, q_start_MHCK, k_start_MHCK, k_end_MHCK, whole_MH1K, do_MHCV)
    steps = zip(*(x.split(schedule.active) for x in operands), strict=True)
    dv_steps, dstate_steps = [], []
    for a, t, q_start, k_start, k_end, whole, do in reversed(list(steps)):
        dafter_SHVK = dstate_SHVK[: a.shape[0]].clone()
        dv_SHCV = t.mT @ (a.mT @ do + k_end @ dafter_SHVK.mT)
        dstate_SHVK[: a.shape[0]] = do.mT @ q_start + dafter_SHVK * whole - dv_SHCV.mT @ k_start
        dv_steps.append(dv_SHCV)
        dstate_steps.append(dafter_SHVK)
    dinitial_SHVK = dstate_SHVK[schedule.longest_first_S.argsort()]
    return torch.cat(dv_steps[::-1]), torch.cat(dstate_steps[::-1]), dinitial_SHVK


def pair_gradients(
    da_MHCC: Tensor, dak_MHCC: Tensor, q_MHCK: Tensor, k_MHCK: Tensor, halves: Halves, decay: Decays
) -> tuple[Tensor, Tensor, Tensor]:
    """What A and Ak give to q, to k as a row, and to k as a column."""
    da_MHGBB, dak_MHGBB = diagonal_blocks(da_MHCC, HALF), diagonal_blocks(dak_MHCC, HALF)
    q_MHGBK, k_MHGBK = q_MHCK.unflatten(2, (2, HALF)), k_MHCK.unflatten(2, (2, HALF))
    if isinstance(halves, NestedHalves):
        found = nested_halves(da_MHGBB, dak_MHGBB, q_MHGBK, k_MHGBK, halves)
    else:
        found = anchored_halves(da_MHGBB, dak_MHGBB, q_MHGBK, k_MHGBK, halves)
    dq_MHCK, dk_row_MHCK, dk_col_MHCK = (x.flatten(2, 3) for x in found)

    from_middle, to_middle = decay.from_middle_MHBK, decay.to_middle_MHBK
    da_MHBB, dak_MHBB = da_MHCC[..., HALF:, :HALF], dak_MHCC[..., HALF:, :HALF]
    q_MHBK, k_MHBK = q_MHGBK[:, :, 1] * from_middle, k_MHGBK[:, :, 1] * from_middle
    k_before_MHBK = k_MHGBK[:, :, 0] * to_middle
    dq_MHCK[:, :, HALF:] += from_middle * (da_MHBB @ k_before_MHBK)
    dk_row_MHCK[:, :, HALF:] += from_middle * (dak_MHBB @ k_before_MHBK)
    dk_col_MHCK[:, :, :HALF] += to_middle * (da_MHBB.mT @ q_MHBK + dak_MHBB.mT @ k_MHBK)
    return dq_MHCK, dk_row_MHCK, dk_col_MHCK


def anchored_halves(
    da_MHGBB: Tensor, dak_MHGBB: Tensor, q_MHGBK: Tensor, k_MHGBK: Tensor, halves: AnchoredHalves
) -> tuple[Tensor, Tensor, Tensor]:
    """Both gradients are brought to magnitude 1 before 2^115 meets them."""
    up_MHGBK, down_MHGBK = halves.x_MHGBK.exp2(), (-halves.x_MHGBK).exp2()
    tiny = torch.finfo(da_MHGBB.dtype).tiny
    size = torch.maximum(da_MHGBB.abs(), dak_MHGBB.abs()).amax((-2, -1), keepdim=True).clamp_min(tiny)
    da_MHGBB, dak_MHGBB = da_MHGBB / size, dak_MHGBB / size
    k_down_MHGBK = k_MHGBK * down_MHGBK
    dq_MHGBK = up_MHGBK * (da_MHGBB @ k_down_MHGBK) * size
    dk_row_MHGBK = up_MHGBK * (dak_MHGBB @ k_down_MHGBK) * size
    columns_MHGBK = da_MHGBB.mT @ (q_MHGBK * up_MHGBK) + dak_MHGBB.mT @ (k_MHGBK * up_MHGBK)
    return dq_MHGBK, dk_row_MHGBK, down_MHGBK * columns_MHGBK * size


def nested_halves(
    da_MHGBB: Tensor, dak_MHGBB: Tensor, q_MHGBK: Tensor, k_MHGBK: Tensor, halves: NestedHalves
) -> tuple[Tensor, Tensor, Tensor]:
    """Border by border. The diagonals of da and dak are zero."""
    dq, dk_row, dk_col = (torch.zeros_like(q_MHGBK) for _ in range(3))
    for size, factor_MHGBK in halves.factors.items():
        da, dak = (x.where(across_border(size, x.device), 0) for x in (da_MHGBB, dak_MHGBB))
        q, k = q_MHGBK * factor_MHGBK, k_MHGBK * factor_MHGBK
        dq += factor_MHGBK * (da @ k)
        dk_row += factor_MHGBK * (dak @ k)
        dk_col += factor_MHGBK * (da.mT @ q + dak.mT @ k)
    return dq, dk_row, dk_col


def diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """[..., n, n] -> [..., n / size, size, size]."""
    return torch.stack([x[..., s : s + size, s : s + size] for s in range(0, x.shape[-1], size)], -3)


def through_norm(dx_NHK: Tensor, along_NH1: Tensor, raw_NHK: Tensor) -> Tensor:
    """From the gradient of x = raw / |raw| to that of raw; along: sum_K x dx."""
    inverse_NH1 = (raw_NHK.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    return inverse_NH1 * (dx_NHK - raw_NHK * inverse_NH1 * along_NH1)


def gate_gradients(dg_NHK: Tensor, z_NHK: Tensor, gate: Gate) -> tuple[Tensor, Tensor]:
    """dz [N, H, K] and dA_log (zero in the padding), from the gradient of the natural log-decay."""
    H, dtype = z_NHK.shape[1], z_NHK.dtype
    rate_H1 = gate.A_log[:H, None].to(dtype).exp()
    x_NHK = z_NHK + gate.dt_bias.to(dtype)
    if gate.lower_bound is None:
        dz_NHK = dg_NHK * -rate_H1 * x_NHK.sigmoid()
        dA_NHK = dg_NHK * -rate_H1 * F.softplus(x_NHK)
    else:
        x_rate_NHK = rate_H1 * x_NHK
        dz_NHK = dg_NHK * gate.lower_bound * rate_H1 * x_rate_NHK.sigmoid() * (-x_rate_NHK).sigmoid()
        dA_NHK = dz_NHK * x_NHK
    return dz_NHK, F.pad(dA_NHK.sum((0, 2)), (0, gate.A_log.shape[0] - H))
