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
from rille.ops.refusing import refuse_kinds, refuse_shapes, refuse_slots
from rille.ops.settling import without_autocast

BACKENDS = ("gluon", "triton", "reference")


def kda_decode(
    inputs: Projected, layer: DecodeLayer, pools: Pools, slots_B: Tensor, *, backend: str | None = None
) -> Tensor:
    """One token of each row; states and tails of the named slots move on by it, in place.

    slots int32 or int64 [B]: slot of each row, all different; negative: the row is idle, its output is 0. (Whether they
    differ and whether the pools have them is checked where it costs no wait, on the CPU.) Returns y [B, H V] in the
    inputs' dtype. All arithmetic is fp32 except that q, k, v and o are rounded to the inputs' dtype, as
    in the ops this is made of. No wait on the device, and the same launch for any slots: CUDA graphs may hold it.
    backend: one of `BACKENDS`, by default what `choose_backend` says. Raises ValueError for shapes or dtypes that do
    not fit and for a backend that cannot run. Kimi K3 report section 2.1.1.
    """
    check(layer, pools, slots_B, inputs.qkv.dtype)
    check_inputs(inputs, layer, slots_B.shape)
    name = settle(backend, inputs.qkv, layer)
    if name == "reference":
        return without_autocast(decode_reference.kda_decode)(inputs, layer, pools, slots_B)
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
    check(layer, pools, slots_B, inputs.qkv.dtype)
    T = inputs.qkv.shape[1] if inputs.qkv.ndim == 3 else 1
    check_inputs(inputs, layer, (*slots_B.shape, T))
    check_past(layer, pools, slots_B, accepted_B, T, inputs.qkv.dtype)
    name = settle(backend, inputs.qkv, layer)
    if name == "reference":
        return without_autocast(decode_reference.kda_verify)(inputs, layer, pools, slots_B, accepted_B)
    from rille.ops.kda import decode_launch

    return decode_launch.verify(inputs, layer, pools, slots_B, accepted_B, name)


def kda_commit(
    layer: DecodeLayer, pools: Pools, slots_B: Tensor, accepted_B: Tensor, *, backend: str | None = None
) -> None:
    """The first half of `kda_verify` alone: states and tails move on by the accepted tokens, before the slot is decoded
    or copied."""
    check(layer, pools, slots_B, pools.tails.dtype)
    check_past(layer, pools, slots_B, accepted_B, 0, pools.tails.dtype)
    assert pools.past is not None
    (B,), (H, K), V = slots_B.shape, layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    widths = (layer.conv_weight.shape[0], H * K, H, H * V)
    inputs = Projected(*(pools.past.qkv.new_empty(B, 0, width) for width in widths))
    name = settle(backend, pools.past.qkv, layer)
    if name == "reference":
        without_autocast(decode_reference.kda_verify)(inputs, layer, pools, slots_B, accepted_B)
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
    parameters = (layer.conv_weight, layer.gate.A_log, layer.gate.dt_bias, layer.norm_weight)
    if any(x.dtype != torch.float32 for x in parameters):
        return f"the kernels take fp32 parameters, not {', '.join(str(x.dtype) for x in parameters)}"
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


def check(layer: DecodeLayer, pools: Pools, slots_B: Tensor, dtype: torch.dtype) -> None:
    """Raise ValueError with both shapes where one does not fit the layer's H, K, V and W, and for tensors that are no
    floats, of another dtype than inputs of `dtype` want, on several devices, or with gaps inside a slot."""
    if layer.gate.dt_bias.ndim != 2 or layer.conv_weight.ndim != 2 or layer.norm_weight.ndim != 1:
        parameters = (layer.gate.dt_bias, layer.conv_weight, layer.norm_weight)
        shapes = "dt_bias {}, conv_weight {} and norm_weight {}".format(*(tuple(x.shape) for x in parameters))
        raise ValueError(f"kda decode: {shapes} must be [H, K], [C, W] and [V]")
    (H, K), (C, W), V = layer.gate.dt_bias.shape, layer.conv_weight.shape, layer.norm_weight.shape[0]
    slots, states = pools.states.shape[0], pools.states
    expected = {
        "conv_weight": (layer.conv_weight, (2 * H * K + H * V, W)),
        "states": (states, (slots, H, V, K)),
        "tails": (pools.tails, (slots, W - 1, C)),
    }
    refuse_shapes("kda decode", expected)
    if layer.gate.A_log.ndim != 1 or layer.gate.A_log.shape[0] < H:
        raise ValueError(f"kda decode: A_log has shape {tuple(layer.gate.A_log.shape)}, expected at least ({H},)")
    parameters = {"A_log": layer.gate.A_log, "dt_bias": layer.gate.dt_bias, "norm_weight": layer.norm_weight}
    refuse_kinds("kda decode", {name: x for name, (x, _) in expected.items()} | parameters, {"slots": slots_B})
    if slots_B.ndim != 1:
        raise ValueError(f"kda decode: slots have shape {tuple(slots_B.shape)}, expected one for each row")
    refuse_slots("kda decode", slots_B, slots, idle=True)
    if pools.tails.dtype != dtype:
        raise ValueError(f"kda decode: inputs of {dtype} and tails of {pools.tails.dtype} must share one dtype")
    if states.dtype != torch.promote_types(dtype, torch.float32):
        raise ValueError(f"kda decode: states of {states.dtype} for inputs of {dtype}; states are fp32 (or float64)")
    if not states[:1].is_contiguous() or not pools.tails[:1].is_contiguous():
        raise ValueError("kda decode: a slot of states and of tails must be dense")


def check_inputs(inputs: Projected, layer: DecodeLayer, lead: tuple[int, ...]) -> None:
    (H, K), V = layer.gate.dt_bias.shape, layer.norm_weight.shape[0]
    widths = dict(qkv=layer.conv_weight.shape[0], z=H * K, b=H, gate=H * V)
    expected = {name: (getattr(inputs, name), (*lead, width)) for name, width in widths.items()}
    refuse_shapes("kda decode", expected)
    floats = {name: x for name, (x, _) in expected.items()}
    refuse_kinds("kda decode", floats, {"conv_weight": layer.conv_weight})
    if {x.dtype for x in floats.values()} != {inputs.qkv.dtype}:
        kinds = ", ".join(str(x.dtype) for x in floats.values())
        raise ValueError(f"kda decode: qkv, z, b and gate must share one dtype, not {kinds}")


def check_past(
    layer: DecodeLayer, pools: Pools, slots_B: Tensor, accepted_B: Tensor, T: int, dtype: torch.dtype
) -> None:
    past = pools.past
    if past is None:
        raise ValueError("kda verify: pools.past is None; make one with Remembered.new")
    (H, K), slots = layer.gate.dt_bias.shape, pools.states.shape[0]
    P = past.qkv.shape[1] if past.qkv.ndim == 3 else 0
    if T > P:
        raise ValueError(f"kda verify: {T} tokens in a call, room to remember {P}")
    expected = {
        "past.qkv": (past.qkv, (slots, P, layer.conv_weight.shape[0])),
        "past.z": (past.z, (slots, P, H * K)),
        "past.u": (past.u, (slots, P, H * layer.norm_weight.shape[0])),
        "accepted": (accepted_B, slots_B.shape),
    }
    refuse_shapes("kda verify", expected)
    kept = {"past.qkv": past.qkv, "past.z": past.z, "past.u": past.u}
    refuse_kinds("kda verify", kept, {"states": pools.states, "accepted": accepted_B})
    if accepted_B.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"kda verify: accepted is {accepted_B.dtype}; expected int32 or int64")
    if {past.qkv.dtype, past.z.dtype} != {dtype} or past.u.dtype != pools.states.dtype:
        raise ValueError(
            f"kda verify: the inputs and what is remembered must share one dtype, {dtype}, and u have that of the"
            f" states, not {', '.join(str(x.dtype) for x in kept.values())}"
        )
    if not all(x.is_contiguous() for x in kept.values()):
        raise ValueError("kda verify: what is remembered must be dense")
