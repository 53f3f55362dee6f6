"""Decode and verify composed of the reference ops: the slow twin that states what the kernels must give.

    y = gated_rms_norm(kda(short_conv(qkv), z, b), gate)

Verify steps token by token and keeps what each wrote, so that the next call need not ask the state again. It reads
slots and counts on the host. Suffixes as in `decode.py`; A rows that are not idle, N packed tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rille.ops.conv import reference as conv
from rille.ops.kda import reference
from rille.ops.kda.decode_operands import DecodeLayer, Pools, Projected
from rille.ops.norm import reference as norm
from rille.packing import Packing


def kda_decode(inputs: Projected, layer: DecodeLayer, pools: Pools, slots_B: Tensor) -> Tensor:
    y_BV = torch.zeros_like(inputs.gate)
    active = [row for row, slot in enumerate(slots_B.tolist()) if slot >= 0]
    if not active:
        return y_BV
    slots_A = slots_B[active].long()
    packing = Packing.of([1] * len(active), device=inputs.qkv.device)
    rows = [x[active] for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate)]
    y_AV, states, tails = run(rows, layer, packing, pools.states[slots_A], pools.tails[slots_A])
    pools.states[slots_A], pools.tails[slots_A] = states, tails
    y_BV[active] = y_AV
    return y_BV


def kda_verify(inputs: Projected, layer: DecodeLayer, pools: Pools, slots_B: Tensor, accepted_B: Tensor) -> Tensor:
    assert pools.past is not None
    past, T = pools.past, inputs.qkv.shape[1]
    y_BTV = torch.zeros_like(inputs.gate)
    for row, (slot, count) in enumerate(zip(slots_B.tolist(), accepted_B.tolist(), strict=True)):
        if slot < 0:
            continue
        count = min(max(count, 0), past.qkv.shape[1])
        state_HVK, tail_PC = pools.states[slot], pools.tails[slot]
        if count:
            remembered = (past.qkv[slot, :count], past.z[slot, :count], past.u[slot, :count])
            state_HVK, tail_PC = replay(*remembered, layer, state_HVK, tail_PC)
            pools.states[slot], pools.tails[slot] = state_HVK, tail_PC
        for t in range(T):
            rows = [x[row, t, None] for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate)]
            past.u[slot, t] = written(rows[0], rows[1], rows[2], layer, state_HVK, tail_PC)
            y_1V, states, tails = run(rows, layer, Packing.of([1], device=y_BTV.device), state_HVK[None], tail_PC[None])
            y_BTV[row, t], state_HVK, tail_PC = y_1V[0], states[0], tails[0]
        past.qkv[slot, :T], past.z[slot, :T] = inputs.qkv[row], inputs.z[row]
    return y_BTV


def replay(
    qkv_TC: Tensor, z_TK: Tensor, u_TV: Tensor, layer: DecodeLayer, state_HVK: Tensor, tail_PC: Tensor
) -> tuple[Tensor, Tensor]:
    """State and tail after tokens whose writes are known: S <- S diag(alpha) + u k^T."""
    k_THK, _, alpha_THK, tail_PC = keys(qkv_TC, z_TK, layer, state_HVK, tail_PC)
    for k_HK, alpha_HK, u_HV in zip(k_THK, alpha_THK, u_TV.unflatten(-1, state_HVK.shape[:2]), strict=True):
        state_HVK = state_HVK * alpha_HK[:, None, :] + u_HV[:, :, None] * k_HK[:, None, :]
    return state_HVK, tail_PC


def written(
    qkv_1C: Tensor, z_1K: Tensor, b_1H: Tensor, layer: DecodeLayer, state_HVK: Tensor, tail_PC: Tensor
) -> Tensor:
    """u [H V]: what a token adds to the state is u k^T, with k as the convolution left it."""
    k_1HK, v_1HV, alpha_1HK, _ = keys(qkv_1C, z_1K, layer, state_HVK, tail_PC)
    k_HK, beta_H1 = k_1HK[0], b_1H[0, :, None].to(state_HVK.dtype).sigmoid()
    per_norm_H1 = (k_HK.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
    said_HV = torch.einsum("hvk,hk->hv", state_HVK * alpha_1HK[0][:, None, :], k_HK * per_norm_H1)
    return (beta_H1 * (v_1HV[0] - said_HV) * per_norm_H1).flatten()


def keys(
    qkv_TC: Tensor, z_TK: Tensor, layer: DecodeLayer, state_HVK: Tensor, tail_PC: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k, v and alpha [T, H, .] in the state's dtype, and the tail after them."""
    H, V, K = state_HVK.shape
    packing = Packing.of([len(qkv_TC)], device=qkv_TC.device)
    x_TC, tails = conv.short_conv(qkv_TC, layer.conv_weight, packing, tail_PC[None])
    _, k_TK, v_TV = x_TC.to(state_HVK.dtype).split([H * K, H * K, H * V], dim=-1)
    alpha_THK = reference.log_decay(z_TK.unflatten(-1, (H, K)), layer.gate, state_HVK.dtype).exp()
    return k_TK.unflatten(-1, (H, K)), v_TV.unflatten(-1, (H, V)), alpha_THK, tails[0]


def run(
    rows: list[Tensor], layer: DecodeLayer, packing: Packing, states: Tensor, tails: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y [N, H V] and the states and tails after a packed batch, out of place."""
    qkv_NC, z_NK, b_NH, gate_NV = rows
    (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    x_NC, tails = conv.short_conv(qkv_NC, layer.conv_weight, packing, tails)
    q_NHK, k_NHK, v_NHV = (x.unflatten(-1, (H, -1)) for x in x_NC.split([H * K, H * K, H * V], dim=-1))
    z_NHK = z_NK.unflatten(-1, (H, K))
    o_NHV, states, _ = reference.kda(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, layer.gate, packing, states)
    gate_NHV = gate_NV.unflatten(-1, (H, V))
    y_NHV = norm.gated_rms_norm(o_NHV, gate_NHV, layer.norm_weight, layer.eps, gate_NV.dtype)
    return y_NHV.flatten(1), states, tails
