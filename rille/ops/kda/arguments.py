"""What `kda` is called with: the gate's parameters, the pool of states, and the checks on their shapes.

Suffixes: N packed tokens, S sequences, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from rille.packing import Packing

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question


@dataclass(frozen=True, eq=False)
class Gate:
    """Parameters of the decay (report Eq. 5). With x = z + dt_bias, the log-decay of a channel and token is

        g = lower_bound * sigmoid(exp(A_log) * x)      lower_bound < 0 (K3: -5), so g in (lower_bound, 0)
        g = -exp(A_log) * softplus(x)                  lower_bound None (Kimi Linear), so g in (-inf, 0)

    A_log fp32 [>= H]: one for each head; entries after the first H are padding of the checkpoint and never read.
    dt_bias fp32 [H, K]: one for each channel.
    """

    A_log: Tensor
    dt_bias: Tensor
    lower_bound: float | None

    def __post_init__(self) -> None:
        if self.lower_bound is not None and not self.lower_bound < 0:
            raise ValueError(
                f"kda gate: lower_bound {self.lower_bound} must be negative, or None for the softplus gate"
            )


@dataclass(frozen=True, eq=False)
class PooledState:
    """States that live in a pool, read and overwritten in place; no gradient passes through a pool.

    pool [slots, H, V, K], fp32 as a rule; axis 0 may have any stride. slots int64 [S]: where each sequence's state
    lies. Slots of one batch differ: two sequences with one slot would overwrite each other. That is checked where it
    costs no wait, on the CPU. checkpoints int64 [M], if given: for each chunk of `packing.chunks(64)` the slot that
    receives the state after it, -1 for none.
    """

    pool: Tensor
    slots: Tensor
    checkpoints: Tensor | None = None

    def __post_init__(self) -> None:
        if self.slots.device.type == "cpu" and self.slots.unique().numel() != self.slots.numel():
            raise ValueError(f"kda state: slots {self.slots.tolist()} name one slot twice; each sequence needs its own")


State = Tensor | PooledState | None
PureKda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Gate, Packing, Tensor | None], tuple[Tensor, Tensor]]
Kda = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Gate, Packing, State], tuple[Tensor, Tensor | None]]


def with_pool(pure: PureKda) -> Kda:
    """Let a function of initial states work on a pool too: gather the states, call it, scatter the final ones."""

    def kda(
        q_NHK: Tensor,
        k_NHK: Tensor,
        v_NHV: Tensor,
        z_NHK: Tensor,
        b_NH: Tensor,
        gate: Gate,
        packing: Packing,
        state: State,
    ) -> tuple[Tensor, Tensor | None]:
        if not isinstance(state, PooledState):
            return pure(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state)
        initial_SHVK = state.pool.detach()[state.slots]
        tokens = (q_NHK, k_NHK, v_NHV, z_NHK, b_NH)
        o_NHV, final_SHVK = pure(*tokens, gate, packing, initial_SHVK)
        with torch.no_grad():
            state.pool[state.slots] = final_SHVK.to(state.pool.dtype)
            for m, slot in enumerate(state.checkpoints.tolist() if state.checkpoints is not None else ()):
                if slot >= 0:
                    state.pool[slot] = state_after(m, pure, tokens, gate, packing, initial_SHVK).to(state.pool.dtype)
        return o_NHV, None

    return kda


def state_after(
    m: int, pure: PureKda, tokens: Sequence[Tensor], gate: Gate, packing: Packing, initial_SHVK: Tensor
) -> Tensor:
    """The state [H, V, K] after chunk m of 64 tokens: its sequence once more, up to there."""
    s, first = int(packing.chunks(64).sequence[m]), int(packing.starts[packing.chunks(64).sequence[m]])
    start, count = packing.chunks(64).spans[m].tolist()
    q_NHK, k_NHK, v_NHV, z_NHK, b_NH = (x[first : start + count] for x in tokens)
    until = Packing.of([start + count - first], device=packing.device)
    return pure(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, until, initial_SHVK[s : s + 1])[1][0]


def check(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, packing: Packing, state: State
) -> None:
    """Raise ValueError with both shapes where one does not fit q [N, H, K] and v [N, H, V]."""
    if q_NHK.ndim != 3 or v_NHV.ndim != 3:
        raise ValueError(f"kda: q {tuple(q_NHK.shape)} and v {tuple(v_NHV.shape)} must be [N, H, K] and [N, H, V]")
    (N, H, K), V, S = q_NHK.shape, v_NHV.shape[2], packing.num_sequences
    expected = {
        "q": (q_NHK, (packing.num_tokens, H, K)),
        "k": (k_NHK, (N, H, K)),
        "v": (v_NHV, (N, H, V)),
        "z": (z_NHK, (N, H, K)),
        "b": (b_NH, (N, H)),
        "gate.dt_bias": (gate.dt_bias, (H, K)),
    }
    if isinstance(state, Tensor):
        expected["state"] = (state, (S, H, V, K))
    elif state is not None:
        expected["state.pool"] = (state.pool, (state.pool.shape[0], H, V, K))
        expected["state.slots"] = (state.slots, (S,))
        if state.checkpoints is not None:
            expected["state.checkpoints"] = (state.checkpoints, (packing.chunks(64).spans.shape[0],))
    for name, (tensor, shape) in expected.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"kda: {name} has shape {tuple(tensor.shape)}, expected {shape}")
    if gate.A_log.ndim != 1 or gate.A_log.shape[0] < H:
        raise ValueError(f"kda: gate.A_log has shape {tuple(gate.A_log.shape)}, expected at least ({H},)")
