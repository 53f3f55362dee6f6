"""Decode and verify composed of the reference ops: the slow twin that states what the kernels must give.

    y = gated_rms_norm(kda(short_conv(qkv), z, b), gate)

It reads slots and counts on the host. Suffixes as in `decode.py`; A rows that are not idle, N packed tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rille.ops.conv import reference as conv
from rille.ops.kda import reference
from rille.ops.norm import reference as norm
from rille.packing import Packing

if TYPE_CHECKING:
    from rille.ops.kda.decode import DecodeLayer, Pools, Projected


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
        states, tails = pools.states[slot, None], pools.tails[slot, None]
        if count:
            gate = inputs.gate.new_zeros(count, inputs.gate.shape[-1])
            rows = [past.qkv[slot, :count], past.z[slot, :count], past.b[slot, :count], gate]
            _, states, tails = run(rows, layer, Packing.of([count], device=gate.device), states, tails)
            pools.states[slot], pools.tails[slot] = states[0], tails[0]
        if T:
            rows = [x[row] for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate)]
            y_BTV[row] = run(rows, layer, Packing.of([T], device=y_BTV.device), states, tails)[0]
            past.qkv[slot, :T], past.z[slot, :T], past.b[slot, :T] = rows[:3]
    return y_BTV


def run(
    rows: list[Tensor], layer: DecodeLayer, packing: Packing, states: Tensor, tails: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y [N, H V] and the states and tails after a packed batch, out of place."""
    qkv_NC, z_NK, b_NH, gate_NV = rows
    (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    x_NC, tails = conv.short_conv(qkv_NC, layer.conv_weight, packing, tails)
    q_NHK, k_NHK, v_NHV = (x.unflatten(-1, (H, -1)) for x in x_NC.split([H * K, H * K, H * V], dim=-1))
    o_NHV, states = reference.kda(q_NHK, k_NHK, v_NHV, z_NK.unflatten(-1, (H, K)), b_NH, layer.gate, packing, states)
    gate_NHV = gate_NV.unflatten(-1, (H, V))
    y_NHV = norm.gated_rms_norm(o_NHV, gate_NHV, layer.norm_weight, layer.eps, gate_NV.dtype)
    return y_NHV.flatten(1), states, tails
