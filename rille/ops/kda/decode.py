"""KDA while text is generated: one token a sequence (`kda_decode`), or several that may be taken back (`kda_verify`,
`kda_commit`), from projected inputs to the layer's output before its last product, in one launch and in place.

    x~ = silu(conv(qkv))      S <- (I - beta k k^T) diag(alpha) S + beta k v^T      y = RMSNorm(S^T q) w sigmoid(gate)

A rejected draft token must leave no trace in the state, but storing a state for every draft token would cost k times
the bytes of a step. So verify remembers what is small: the projected inputs, and the vector u that each token wrote.
The next call first replays those that were accepted: one read and one write of the state for both, and with u at hand
a replay is two operations an element, S <- S diag(alpha) + u k^T, without a product with the state.

    call n    replay accepted of n-1, store S and conv tail; run k new tokens, remember them, discard their S

Equations: `reference.py`, `conv/reference.py`, `norm/reference.py`; the composition: `decode_reference.py`; kernels:
`decode_gluon.py` and `verify_gluon.py` on a GPU, `decode_kernels.py` their twins that the interpreter runs. Replay
after Kimi K3 report section 5.

Suffixes: B rows of the batch, T tokens of a row, H heads, K key channels, V value channels, C = 2HK + HV channels of
the convolution, W its taps, P remembered tokens of a slot.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from rille.ops.kda import decode_reference
from rille.ops.kda.arguments import HAS_TRITON
from rille.ops.kda.decode_operands import DecodeLayer, Pools, Projected

BACKENDS = ("gluon", "triton", "reference")


def kda_decode(
    inputs: Projected, layer: DecodeLayer, pools: Pools, slots_B: Tensor, *, backend: str | None = None
) -> Tensor:
    """One token of each row; states and tails of the named slots move on by it, in place.

    slots int32 or int64 [B]: slot of each row, all different; negative: the row is idle, its output is 0. Returns y
    [B, H V] in the inputs' dtype. All arithmetic is fp32 except that q, k, v and o are rounded to the inputs' dtype, as
    in the ops this is made of. No wait on the device, and the same launch for any slots: CUDA graphs may hold it.
    backend: one of `BACKENDS`, by default what `choose_backend` says. Raises ValueError for shapes or dtypes that do
    not fit and for a backend that cannot run. Kimi K3 report section 2.1.1.
    """
    check(inputs, layer, pools, slots_B, inputs.qkv.shape[:-1])
    name = settle(backend, inputs.qkv, layer)
    if name == "reference":
        return decode_reference.kda_decode(inputs, layer, pools, slots_B)
    from rille.ops.kda import decode_launch

    return decode_launch.decode(inputs, layer, pools, slots_B, name)


def kda_verify(
    inputs: Projected,
    layer: DecodeLayer,
    pools: Pools,
    slots_B: Tensor,
    accepted_B: Tensor,
    *,
    backend: str | None = None,
) -> Tensor:
    """Commit the first `accepted` remembered tokens of each row, then run T new ones without storing where they lead.

    inputs [B, T, .] with 1 <= T <= P. accepted int [B], on the inputs' device: how many tokens of the slot's last
    verify call came true, 0 where there was none (clamped to [0, P]). After the call states and tails stand after the
    accepted tokens, `pools.past` holds the T new ones. Returns y [B, T, H V]: of every new token what single steps
    would give, bit for bit. A row with a negative slot is idle. Raises as `kda_decode`, and without `pools.past`.
    """
    B, T = inputs.qkv.shape[:2]
    check(inputs, layer, pools, slots_B, (B, T))
    check_past(layer, pools, accepted_B, B, T, inputs.qkv.dtype)
    name = settle(backend, inputs.qkv, layer)
    if name == "reference":
        return decode_reference.kda_verify(inputs, layer, pools, slots_B, accepted_B)
    from rille.ops.kda import decode_launch

    return decode_launch.verify(inputs, layer, pools, slots_B, accepted_B, name)


def kda_commit(
    layer: DecodeLayer, pools: Pools, slots_B: Tensor, accepted_B: Tensor, *, backend: str | None = None
) -> None:
    """The first half of `kda_verify` alone: states and tails move on by the accepted tokens, before the slot is decoded
    or copied."""
    (B,) = slots_B.shape
    check_past(layer, pools, accepted_B, B, 0, pools.tails.dtype)
    assert pools.past is not None
    (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    widths = (layer.conv_weight.shape[0], H * K, H, H * V)
    inputs = Projected(*(pools.past.qkv.new_empty(B, 0, width) for width in widths))
    name = settle(backend, pools.past.qkv, layer)
    if name == "reference":
        decode_reference.kda_verify(inputs, layer, pools, slots_B, accepted_B)
        return
    from rille.ops.kda import decode_launch

    decode_launch.verify(inputs, layer, pools, slots_B, accepted_B, name)


def choose_backend(qkv: Tensor, layer: DecodeLayer) -> tuple[str, str]:
    """The backend for these inputs and, in words, why."""
    reason = obstacle("gluon", qkv, layer)
    if reason is None:
        return "gluon", "CUDA tensors of a supported shape"
    return "reference", reason


def obstacle(name: str, qkv: Tensor, layer: DecodeLayer) -> str | None:
    """Why the kernels of this name cannot run, or None."""
    (_, K), V, W = layer.gate.dt_bias.shape, layer.norm_weight.shape[0], layer.conv_weight.shape[1]
    if not HAS_TRITON:
        return "triton is not installed"
    if qkv.device.type != "cuda" and not (name == "triton" and interpreting()):
        return f"the tensors are on {qkv.device.type}"
    if qkv.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the kernels take bf16, fp16 or fp32, not {qkv.dtype}"
    if any(n & (n - 1) or not 16 <= n <= 256 for n in (K, V)):
        return f"K {K} and V {V} must be powers of two from 16 to 256"
    if K * V > 128 * 256:
        return f"a state of {V} x {K} does not fit the registers of one program"
    if W > 4:
        return f"the kernels know at most 4 taps, the convolution has {W}"
    return None


def interpreting() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)


def settle(backend: str | None, qkv: Tensor, layer: DecodeLayer) -> str:
    if backend is None:
        name, reason = choose_backend(qkv, layer)
        if name == "reference" and qkv.device.type == "cuda":
            warn_once(f"kda decode: the slow twin runs on a GPU, and waits for it: {reason}")
        return name
    if backend not in BACKENDS:
        raise ValueError(f"kda decode: unknown backend {backend!r}; there are {', '.join(BACKENDS)}")
    reason = None if backend == "reference" else obstacle(backend, qkv, layer)
    if reason is not None:
        raise ValueError(f"kda decode: backend {backend!r} cannot run: {reason}")
    return backend


@cache
def warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)


def check(inputs: Projected, layer: DecodeLayer, pools: Pools, slots_B: Tensor, lead: tuple[int, ...]) -> None:
    """Raise ValueError with both shapes where one does not fit the layer's H, K, V and W."""
    (H, K), (C, W), V = layer.gate.dt_bias.shape, layer.conv_weight.shape, layer.norm_weight.shape[0]
    slots = pools.states.shape[0]
    expected = {
        "conv_weight": (layer.conv_weight, (2 * H * K + H * V, W)),
        "qkv": (inputs.qkv, (*lead, C)),
        "z": (inputs.z, (*lead, H * K)),
        "b": (inputs.b, (*lead, H)),
        "gate": (inputs.gate, (*lead, H * V)),
        "states": (pools.states, (slots, H, V, K)),
        "tails": (pools.tails, (slots, W - 1, C)),
        "slots": (slots_B, (lead[0],)),
    }
    same = (inputs.z, inputs.b, inputs.gate, pools.tails)
    refuse(expected, {x.dtype for x in same} == {inputs.qkv.dtype}, "qkv, z, b, gate and tails")
    if layer.gate.A_log.shape[0] < H:
        raise ValueError(f"kda decode: A_log has {layer.gate.A_log.shape[0]} entries for {H} heads")
    if not pools.states[0].is_contiguous() or not pools.tails[0].is_contiguous():
        raise ValueError("kda decode: a slot of states and of tails must be dense")


def check_past(layer: DecodeLayer, pools: Pools, accepted_B: Tensor, B: int, T: int, dtype: torch.dtype) -> None:
    past = pools.past
    if past is None:
        raise ValueError("kda verify: pools.past is None; make one with Remembered.new")
    (H, K), slots, P = layer.gate.dt_bias.shape, pools.states.shape[0], past.qkv.shape[1]
    if T > P:
        raise ValueError(f"kda verify: {T} tokens in a call, room to remember {P}")
    expected = {
        "past.qkv": (past.qkv, (slots, P, layer.conv_weight.shape[0])),
        "past.z": (past.z, (slots, P, H * K)),
        "past.u": (past.u, (slots, P, H * layer.norm_weight.shape[0])),
        "accepted": (accepted_B, (B,)),
    }
    refuse(expected, {past.qkv.dtype, past.z.dtype} == {dtype}, "the inputs and what is remembered")
    if not all(x.is_contiguous() for x in (past.qkv, past.z, past.u)):
        raise ValueError("kda verify: what is remembered must be dense")


def refuse(expected: dict[str, tuple[Tensor, tuple[int, ...]]], one_dtype: bool, what: str) -> None:
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"kda decode: {name} has shape {tuple(tensor.shape)}, expected {shape}")
    if not one_dtype:
        raise ValueError(f"kda decode: {what} must share one dtype")
