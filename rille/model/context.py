"""Context: what a forward call carries besides the hidden states.

The seams of the house meet here, each a small object with a single-device default: `packing` (boundaries), `memory`
(what earlier calls left), `routes` (record or replay the chosen experts), `counts` (expert load and histogram), `tap`
(the one hook for traces, metrics and draft features), `exchange` (experts on other ranks), `shard` (sequences on other
ranks), `media` (pictures on the token axis).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from rille.ops.conv import PooledTail
from rille.ops.kda import PooledState
from rille.packing import Packing

if TYPE_CHECKING:
    from rille.model.balance import Counts
    from rille.model.experts import ExpertWeights
    from rille.model.media import Media
    from rille.ops.kda import DecodeLayer, Projected
    from rille.ops.mla import LatentCache

Tap = Callable[[str, Tensor], Tensor]


def no_tap(name: str, tensor: Tensor) -> Tensor:
    """The default tap: gives the tensor back unchanged."""
    return tensor


class LayerMemory(Protocol):
    """What a layer asks of the memory of a batch: its pools with the slots of the batch's sequences, (KDA) the places
    on their way at which other slots receive states and tails, and whether its projected inputs are to be remembered,
    so that tokens can be taken back. verify: the output [N, H V] of a layer whose tokens may be taken back, if this
    memory computes it itself. `rille.model.memory.Memory` is one; an engine has others, over pages."""

    def state(self, layer: int) -> PooledState: ...
    def tail(self, layer: int) -> PooledTail: ...
    def latents(self, layer: int) -> LatentCache: ...
    def remember(self, layer: int, inputs: Projected) -> None: ...
    def verify(self, layer: int, inputs: Projected, weights: DecodeLayer) -> Tensor | None: ...


class Exchange(Protocol):
    """Moves tokens to the ranks that hold their experts and the results back.

    `dispatch` gives the rows that this rank's experts compute, with local expert ids and the weights for the combine;
    `weights` gives the operands of the experts that compute here (a redundant expert's parameters may be fetched, and
    its gradient go home); `combine` gives the sums back in the caller's token order, fp32 [N, L]. None of them changes
    its arguments.
    """

    def dispatch(self, x_NL: Tensor, ids_NA: Tensor, weights_NA: Tensor) -> tuple[Tensor, Tensor, Tensor]: ...
    def weights(self, experts: ExpertWeights) -> ExpertWeights: ...
    def combine(self, sum_NL: Tensor) -> Tensor: ...


class LocalExchange:
    """All experts are here: nothing moves."""

    def dispatch(self, x_NL: Tensor, ids_NA: Tensor, weights_NA: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x_NL, ids_NA, weights_NA

    def weights(self, experts: ExpertWeights) -> ExpertWeights:
        return experts

    def combine(self, sum_NL: Tensor) -> Tensor:
        return sum_NL


KdaState = Tensor | PooledState | None
ConvTail = Tensor | PooledTail | None


class Shard(Protocol):
    """Gives a layer what lies before this rank's part of each sequence.

    `conv_tail` and `kda_state` replace the incoming tail and state of a layer (halo and state passing); `latents`
    gathers MLA's cached rows from the ranks before. The single-device shard returns what it is given.
    """

    def conv_tail(self, x_NC: Tensor, tail: ConvTail) -> ConvTail: ...
    def kda_state(self, state: KdaState) -> KdaState: ...
    def latents(self, rows_NR: Tensor) -> Tensor: ...


class WholeSequences:
    """Every sequence lies on this device from its first token."""

    def conv_tail(self, x_NC: Tensor, tail: ConvTail) -> ConvTail:
        return tail

    def kda_state(self, state: KdaState) -> KdaState:
        return state

    def latents(self, rows_NR: Tensor) -> Tensor:
        return rows_NR


@dataclass
class Routes:
    """The experts chosen at each MoE layer: recorded as the forward runs, or replayed.

    chosen: layer -> int64 [N, A]. With `replay` the forward takes the ids from `chosen` instead of the router's scores
    (the weights are still the scores of those experts, so gradients flow).
    """

    chosen: dict[int, Tensor] = field(default_factory=dict)
    replay: bool = False

    def pick(self, layer: int, ids_NA: Tensor) -> Tensor:
        if not self.replay:
            self.chosen[layer] = ids_NA
            return ids_NA
        recorded = self.chosen[layer]
        if recorded.shape != ids_NA.shape:
            raise ValueError(
                f"routes: layer {layer} replays ids of shape {tuple(recorded.shape)}, the batch needs "
                f"{tuple(ids_NA.shape)}"
            )
        return recorded


@dataclass
class Context:
    """Everything a forward call carries besides the hidden states. The defaults: one device that remembers nothing."""

    packing: Packing
    memory: LayerMemory | None = None
    routes: Routes | None = None
    counts: Counts | None = None
    tap: Tap = no_tap
    exchange: Exchange = field(default_factory=LocalExchange)
    shard: Shard = field(default_factory=WholeSequences)
    media: Media | None = None

    @property
    def device(self) -> torch.device:
        return self.packing.device
