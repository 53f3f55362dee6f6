"""Launches of the decode and verify kernels, registered with torch so that compiled models see one op.

Suffixes as in `decode.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rille.ops.kda import decode_gluon, decode_kernels, verify_gluon
from rille.ops.kda.decode_operands import DecodeLayer, Pools, Projected
from rille.ops.kda.operands import multiprocessors
from rille.ops.launching import chained, described
from rille.ops.registering import op


class Spread(NamedTuple):
    """How one program's state lies in registers: over `num_warps` warps, a row of it over `lanes` lanes; `maxnreg`
    makes room for one more program on an SM; `programs` (verify): how many stay on each SM."""

    num_warps: int
    lanes: int
    maxnreg: int | None = None
    programs: int = 0


# Bytes of shared memory one program may have on Hopper.
SHARED_LIMIT = 227 * 1024

# For benchmarks: int32 [items, verify_gluon.SECTIONS], where the programs of verify note their clocks.
CLOCKS: Tensor | None = None

# Below this batch the card is not full and a step is bound by its longest chain: a shuffle less in each sum.
FULL_BATCH = 8


def decode_spread(K: int, V: int, B: int) -> Spread:
    """64 elements of the state in a thread: two programs on an SM, and enough warps to hide a step's short chains. The
    kernel adds in the same order for 4 lanes and for 8: a token's bits do not depend on the batch."""
    num_warps = max(4, K * V // (32 * 64))
    return Spread(num_warps, 4, maxnreg=128) if B < FULL_BATCH else Spread(num_warps, min(8, K // 4))


def verify_spread(K: int, V: int) -> Spread:
    """128 elements in a thread: work on vectors is repeated by every warp, so fewer warps issue less. As many programs
    on an SM as its registers hold: two for K = V = 128; four of a smaller state, if each keeps to its share."""
    programs, num_warps = min(4, max(1, 2 * 128 * 128 // (K * V))), max(4, K * V // (32 * 128))
    return Spread(num_warps, min(8, K // 4), 128 if programs * num_warps > 8 else None, programs)


def fits_ahead(K: int, V: int, tokens: int, past_tokens: int, size: int) -> bool:
    """Whether shared memory has room for the next state beside what every item needs: raw inputs of `size` bytes, and
    fp32 tiles (`verify_gluon.py`)."""
    T, P = (1 << n for n in tiles(tokens, past_tokens).values())
    per_item = 4 * (2 * P * K + 3 * T * K + T * V + 4 * T + V) + 64 * V
    raw = size * (2 * P * K + 3 * T * K + 2 * T * V + 12 * K + 4 * V) + 4 * P * V
    return 4 * K * V + 2048 + per_item + raw <= SHARED_LIMIT  # the state lies at a multiple of 1,024


def aligned(x: Tensor) -> Tensor:
    """Rows that copies of 16 bytes can take."""
    return x if lies_at_16_bytes(x) else x.clone(memory_format=torch.contiguous_format)


def lies_at_16_bytes(x: Tensor) -> bool:
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0


def twin_options(K: int, V: int) -> dict[str, Any]:
    """One number of warps for both kernels, and every product rounded by itself: else sums over warps or products
    contracted as the compiler likes make verify differ from steps in the last bit."""
    return dict(num_warps=decode_spread(K, V, 1).num_warps, enable_fp_fusion=False)


def gluon_options(spread: Spread) -> dict[str, Any]:
    """Fused products and sums are spelled out in the kernels. What else a compiler could contract it would contract
    differently in different kernels, and a token's bits would depend on how it was computed."""
    options = dict(num_warps=spread.num_warps, maxnreg=spread.maxnreg, enable_fp_fusion=False)
    return dict(LANES=spread.lanes, **options)


def tiles(tokens: int, past_tokens: int) -> dict[str, int]:
    """log2 of the rows of the Gluon kernel's tiles, which hold the tokens and those remembered."""
    return dict(LOG_T=max(tokens - 1, 0).bit_length(), LOG_P=max(past_tokens - 1, 0).bit_length())


def decode(inputs: Projected, layer: DecodeLayer, pools: Pools, slots_B: Tensor, name: str) -> Tensor:
    gate, weights = layer.gate, (layer.conv_weight, layer.gate.A_log, layer.gate.dt_bias, layer.norm_weight)
    rows = [dense_rows(x) for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate)]
    return decode_op(*rows, *map(dense, weights), pools.tails, pools.states, slots_B, gate.lower_bound, layer.eps, name)


def verify(
    inputs: Projected, layer: DecodeLayer, pools: Pools, slots_B: Tensor, accepted_B: Tensor, name: str
) -> Tensor:
    past, gate = pools.past, layer.gate
    assert past is not None
    weights = (layer.conv_weight, gate.A_log, gate.dt_bias, layer.norm_weight)
    rows = [dense_rows(x) for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate)]
    return verify_op(
        *rows, past.qkv, past.z, past.u, accepted_B, *map(dense, weights), pools.tails, pools.states, slots_B,
        gate.lower_bound, layer.eps, name,
    )  # fmt: skip


def dense(x: Tensor) -> Tensor:
    return x.detach().contiguous()


def dense_rows(x: Tensor) -> Tensor:
    """x [B, .] or [B, T, .] as it is where all but the first axis is dense, else a copy."""
    return x if x.shape[0] == 0 or x[0].is_contiguous() else x.contiguous()


@op("rille::kda_decode", mutated=("tails", "states"))
def decode_op(
    qkv: Tensor, z: Tensor, b: Tensor, gate: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor,
    norm_weight: Tensor, tails: Tensor, states: Tensor, slots: Tensor, lower_bound: float | None, eps: float, name: str,
) -> Tensor:  # fmt: skip
    B, (H, K), V, W = qkv.shape[0], dt_bias.shape, norm_weight.shape[0], conv_weight.shape[1]
    y = torch.empty(B, H * V, dtype=gate.dtype, device=gate.device)
    if B == 0:
        return y
    kernel: Any = decode_gluon.decode if name == "gluon" else decode_kernels.decode
    options = gluon_options(decode_spread(K, V, B)) | chained(qkv) if name == "gluon" else twin_options(K, V)
    kernel[(H, B)](
        qkv, z, b, gate, y, conv_weight, A_log, dt_bias, norm_weight, tails, states, slots,
        lower_bound or 0.0, eps, qkv.stride(0), z.stride(0), b.stride(0), gate.stride(0),
        tails.stride(0), states.stride(0),
        H=H, K=K, V=V, W=W, BOUNDED=lower_bound is not None, **options,
    )  # fmt: skip
    return y


@decode_op.register_fake
def _(
    qkv, z, b, gate, conv_weight, A_log, dt_bias, norm_weight, tails, states, slots, lower_bound, eps, name
):  # fmt: skip
    return gate.new_empty(gate.shape)


@op("rille::kda_verify", mutated=("past_qkv", "past_z", "past_u", "tails", "states"))
def verify_op(
    qkv: Tensor, z: Tensor, b: Tensor, gate: Tensor, past_qkv: Tensor, past_z: Tensor, past_u: Tensor, accepted: Tensor,
    conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor, tails: Tensor, states: Tensor,
    slots: Tensor, lower_bound: float | None, eps: float, name: str,
) -> Tensor:  # fmt: skip
    (B, T), (H, K), V, W = qkv.shape[:2], dt_bias.shape, norm_weight.shape[0], conv_weight.shape[1]
    y, P = torch.empty(B, T, H * V, dtype=gate.dtype, device=gate.device), past_qkv.shape[1]
    if B == 0:
        return y
    arguments = (
        qkv, z, b, gate, y, past_qkv, past_z, past_u, accepted, conv_weight, A_log, dt_bias, norm_weight, tails, states,
        slots, lower_bound, eps,
    )  # fmt: skip
    if name == "gluon":
        launch_verify(T, P, *arguments)
        return y
    kernel: Any = decode_kernels.verify
    kernel[(H, B)](
        *arguments[:16], lower_bound or 0.0, eps, T, P,
        qkv.stride(0), z.stride(0), b.stride(0), gate.stride(0), tails.stride(0), states.stride(0),
        H=H, K=K, V=V, W=W, BOUNDED=lower_bound is not None, **twin_options(K, V),
    )  # fmt: skip
    return y


def launch_verify(
    T: int, P: int, qkv: Tensor, z: Tensor, b: Tensor, gate: Tensor, y: Tensor, past_qkv: Tensor, past_z: Tensor,
    past_u: Tensor, accepted: Tensor, conv_weight: Tensor, A_log: Tensor, dt_bias: Tensor, norm_weight: Tensor,
    tails: Tensor, states: Tensor, slots: Tensor, lower_bound: float | None, eps: float,
) -> None:  # fmt: skip
    """The Gluon kernel. Its copies need slots as `Pools` says; inputs that lie otherwise are copied first."""
    B, (H, K), V, W = qkv.shape[0], dt_bias.shape, norm_weight.shape[0], conv_weight.shape[1]
    check_slots(states, tails, past_qkv, past_z, past_u)
    qkv, z, gate, spread = aligned(qkv), aligned(z), aligned(gate), verify_spread(K, V)
    kernel: Any = verify_gluon.verify
    kernel[(min(B * H, spread.programs * multiprocessors(qkv.device)),)](
        qkv, z, b, gate, y, past_qkv, past_z, past_u, accepted, conv_weight, A_log, dt_bias, norm_weight,
        tails, states, table_of(states), slots, CLOCKS, lower_bound or 0.0, eps, T, P,
        qkv.stride(0), z.stride(0), b.stride(0), gate.stride(0), tails.stride(0), states.stride(0), B * H,
        H=H, K=K, V=V, W=W, BOUNDED=lower_bound is not None, AHEAD=fits_ahead(K, V, T, P, qkv.element_size()),
        **gluon_options(spread), **tiles(T, P),
    )  # fmt: skip


def check_slots(states: Tensor, tails: Tensor, past_qkv: Tensor, past_z: Tensor, past_u: Tensor) -> None:
    """Raise ValueError where a pool's slots do not lie as copies of 16 bytes and TMA need them (`Pools`)."""
    for what, x in dict(states=states, tails=tails, qkv=past_qkv, z=past_z, u=past_u).items():
        if not lies_at_16_bytes(x):
            raise ValueError(
                f"kda verify: slots of {what} must start at multiples of 16 bytes and lie a multiple of 16 elements"
                f" apart, not at {x.data_ptr() % 16} and {x.stride(0)} apart"
            )
    if states.stride(0) % (K := states.shape[3]):
        raise ValueError(f"kda verify: states of slots must lie a multiple of {K} apart, not {states.stride(0)}")


def table_of(states: Tensor) -> Any:
    """A pool [slots, H, V, K] as a table of rows of K, whatever lies between slots; in blocks of one head's state."""
    slots, H, V, K = states.shape
    return described(True, states, (slots - 1) * (states.stride(0) // K) + H * V, K, K, V, K)


@verify_op.register_fake
def _(
    qkv, z, b, gate, past_qkv, past_z, past_u, accepted, conv_weight, A_log, dt_bias, norm_weight, tails, states,
    slots, lower_bound, eps, name,
):  # fmt: skip
    return gate.new_empty(gate.shape)
