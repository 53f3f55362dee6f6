"""What `kda` is called with: the gate's parameters, the pool of states, and the checks on their shapes.

Suffixes: N packed tokens, S sequences, H heads, K key channels, V value channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf

import numpy as np
import torch
from torch import Tensor

from rille.ops.refusing import refuse_kinds, refuse_shapes, refuse_slots
from rille.packing import Packing

HAS_TRITON = find_spec("triton") is not None  # asked once: torch.compile cannot trace the question
CHUNK = 64  # tokens that the blocked forms take at once


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
        if self.lower_bound is not None and not -inf < self.lower_bound < 0:
            raise ValueError(
                f"kda gate: lower_bound {self.lower_bound} must be negative and finite, or None for the softplus gate"
            )


@dataclass(frozen=True, eq=False)
class Between:
    """Q places inside chunks at which states are kept (`checkpoints.py`).

    rows int64 [R], packing: the tokens from a chunk's beginning to each place. spans int32 [M + Q, 2]: the batch's
    chunks and behind them these, as in `ChunkMap`; first int64 [Q]: their numbers. slots int64 [Q]: those that receive
    the states; the pass over the batch leaves the state at the chunk's beginning there. before, after int64: sources
    and targets of what is copied instead, before the pass (which moves the sources on) and behind it.
    """

    rows: Tensor
    packing: Packing
    spans: Tensor
    first: Tensor
    slots: Tensor
    before: tuple[Tensor, Tensor]
    after: tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class PooledState:
    """States that live in a pool, read and overwritten in place; no gradient passes through a pool.

    pool [slots, H, V, K], fp32 as a rule; axis 0 may have any stride. slots int64 [S]: where each sequence's state
    lies. Slots of one batch differ: two sequences with one slot would overwrite each other. That, and whether the pool
    has them, is checked where it costs no wait, on the CPU. checkpoints int64 [M], if given: for each chunk of
    `packing.chunks(64)` the slot that receives the state after it, -1 for none. between: states that are kept inside
    chunks; `Places` makes both.
    """

    pool: Tensor
    slots: Tensor
    checkpoints: Tensor | None = None
    between: Between | None = None

    def __post_init__(self) -> None:
        refuse_slots("kda state", self.slots, self.pool.shape[0], self.checkpoints)

    @property
    def keeps(self) -> bool:
        """Whether sequences leave states on their way."""
        return self.checkpoints is not None or self.between is not None


State = Tensor | PooledState | None
End = tuple[int, int]  # of a chunk: a sequence, and after how many of its tokens
# Third result: the states [P, H, V, K] at the ends of chunks that the last argument names.
PureKda = Callable[
    [Tensor, Tensor, Tensor, Tensor, Tensor, Gate, Packing, Tensor | None, Sequence[End]],
    tuple[Tensor, Tensor, Tensor | None],
]
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
            return pure(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, state, ())[:2]
        if state.between is not None:
            copy(state.pool, *state.between.before)
        asked = state.checkpoints.tolist() if state.checkpoints is not None else []
        after = [m for m, slot in enumerate(asked) if slot >= 0]
        initial_SHVK, ends = state.pool.detach()[state.slots], ends_of(packing, after)
        o_NHV, final_SHVK, kept_PHVK = pure(q_NHK, k_NHK, v_NHV, z_NHK, b_NH, gate, packing, initial_SHVK, ends)
        with torch.no_grad():
            state.pool[state.slots] = final_SHVK.to(state.pool.dtype)
            if kept_PHVK is not None:
                state.pool[[asked[m] for m in after]] = kept_PHVK.to(state.pool.dtype)
        if (some := state.between) is not None:
            copy(state.pool, *some.after)
            q_RHK, k_RHK, v_RHV, z_RHK, b_RH = (x[some.rows] for x in (q_NHK, k_NHK, v_NHV, z_NHK, b_NH))
            kda(q_RHK, k_RHK, v_RHV, z_RHK, b_RH, gate, some.packing, PooledState(state.pool, some.slots))
        return o_NHV, None

    return kda


def copy(pool: Tensor, sources: Tensor, targets: Tensor) -> None:
    """States from slots to other ones, if there are any."""
    if sources.numel():
        pool[targets] = pool[sources]


def ends_of(packing: Packing, chunks: Sequence[int]) -> list[End]:
    """Where chunks of `packing.chunks(64)` end."""
    first = np.cumsum((0, *packing.chunks(CHUNK).per_sequence))
    sequences = (np.searchsorted(first, chunks, side="right") - 1).tolist()
    pairs = zip(sequences, chunks, strict=True)
    return [(s, min((m - int(first[s]) + 1) * CHUNK, packing.lengths[s])) for s, m in pairs]


def check(
    q_NHK: Tensor, k_NHK: Tensor, v_NHV: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, packing: Packing, state: State
) -> None:
    """Raise ValueError with both shapes where one does not fit q [N, H, K] and v [N, H, V], and for tensors that are no
    floats or that lie on several devices."""
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
    indices = {"packing": packing.starts}
    if isinstance(state, Tensor):
        expected["state"] = (state, (S, H, V, K))
    elif isinstance(state, PooledState):
        expected["state.pool"] = (state.pool, (state.pool.shape[0], H, V, K))
        indices["state.slots"] = state.slots
        refuse_shapes("kda", {"state.slots": (state.slots, (S,))})
        if state.checkpoints is not None:
            indices["state.checkpoints"] = state.checkpoints
            of_chunks = (state.checkpoints, (packing.chunks(CHUNK).spans.shape[0],))
            refuse_shapes("kda", {"state.checkpoints": of_chunks})
    elif state is not None:
        raise ValueError(f"kda: state is a {type(state).__name__}; give a tensor, a PooledState or None")
    refuse_shapes("kda", expected)
    if gate.A_log.ndim != 1 or gate.A_log.shape[0] < H:
        raise ValueError(f"kda: gate.A_log has shape {tuple(gate.A_log.shape)}, expected at least ({H},)")
    refuse_kinds("kda", {name: x for name, (x, _) in expected.items()} | {"gate.A_log": gate.A_log}, indices)
