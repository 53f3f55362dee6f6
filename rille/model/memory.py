"""Memory: what the layers of one model remember of their sequences between calls.

A KDA layer remembers its state [H, V, K] in fp32 (V first, as the release caches it) and the last W-1 inputs of its
short convolution; an MLA layer remembers the normed latent and the shared key slice of every token, in pages. Ops see
only the pools and the indices, never this object. Training passes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rille.model.arguments import whole
from rille.model.config import K3Config
from rille.ops.conv import PooledTail
from rille.ops.kda import DecodeLayer, PooledState, Projected
from rille.ops.mla import LatentCache
from rille.packing import Packing

PAGE_ROWS = 64


class Memory:
    """The memory of `num_sequences` sequences, which grows with them.

    `lengths` is how many tokens each sequence has consumed. `packing(lengths)` describes the next batch; the model
    calls `advance` at the end of a forward. dtype: that of the activations (conv tails, latents); KDA states are fp32.
    """

    def __init__(
        self,
        c: K3Config,
        num_sequences: int,
        dtype: torch.dtype,
        device: torch.device | str,
        layers: Sequence[int] | None = None,
    ) -> None:
        num_sequences = whole(num_sequences, "memory: the number of sequences", 1)
        self.lengths = [0] * num_sequences
        self._cache: dict[str, Any] = dict(dtype=dtype, device=device)
        self._slots = torch.arange(num_sequences, device=device)
        self.device = self._slots.device
        self._made_for = described(c, dtype, self.device, layers)
        self._states: dict[int, Tensor] = {}
        self._tails: dict[int, Tensor] = {}
        self._latents: dict[int, Tensor] = {}
        for layer in layers if layers is not None else range(c.num_layers):
            if c.is_mla(layer):
                self._latents[layer] = torch.empty(0, PAGE_ROWS, c.cache_dim, **self._cache)
            else:
                shape = (num_sequences, c.kda_heads, c.kda_head_dim, c.kda_head_dim)
                self._states[layer] = torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32), device=device)
                self._tails[layer] = torch.zeros(num_sequences, c.conv_width - 1, 3 * c.kda_width, **self._cache)
        self._table = torch.empty(num_sequences, 0, dtype=torch.int64, device=device)

    def check(self, c: K3Config, dtype: torch.dtype, device: torch.device, layers: Sequence[int] | None = None) -> None:
        """Raise ValueError unless the memory was made for such layers, on that device. It cannot tell two models of one
        config apart."""
        wanted = described(c, dtype, device, layers)
        for name, made in self._made_for.items():
            if made != wanted[name]:
                raise ValueError(
                    f"memory: made for another model: its {name} {made}, this model's {wanted[name]}; make it with "
                    "model.new_memory() (for `draft`: model.new_draft_memory())"
                )

    def packing(self, lengths: Sequence[int]) -> Packing:
        """Describe a batch of the next tokens of every sequence. Raises ValueError for another number of sequences."""
        if not isinstance(lengths, Sequence):
            raise ValueError(f"memory: lengths must be a list, the next tokens of each sequence, not {lengths!r}")
        if len(lengths) != len(self.lengths):
            raise ValueError(f"memory: holds {len(self.lengths)} sequences, the batch has {len(lengths)}")
        return Packing.of(lengths, self.lengths, self.device)

    def reserve(self, packing: Packing) -> None:
        """Make room for the batch, before any layer writes.

        Raises ValueError if the batch does not continue what is remembered.
        """
        if list(packing.consumed) != self.lengths:
            raise ValueError(
                f"memory: the sequences have {self.lengths} tokens, the batch continues after {list(packing.consumed)}"
                "; build it with memory.packing(lengths)"
            )
        longest = max((n + m for n, m in zip(packing.lengths, self.lengths, strict=True)), default=0)
        self._grow(-(-longest // PAGE_ROWS))

    def _grow(self, pages: int) -> None:
        have = self._table.shape[1]
        if pages <= have:
            return
        pages = max(pages, 2 * have)
        rows = len(self.lengths)
        first_new = rows * have
        new = torch.arange(first_new, rows * pages, device=self.device).view(rows, pages - have)
        self._table = torch.cat([self._table, new], dim=1)
        for layer, pool in self._latents.items():
            fresh = pool.new_empty(rows * pages, *pool.shape[1:])
            fresh[:first_new] = pool
            self._latents[layer] = fresh

    def advance(self, packing: Packing) -> None:
        self.lengths = [n + m for n, m in zip(self.lengths, packing.lengths, strict=True)]

    def state(self, layer: int) -> PooledState:
        return PooledState(self._states[layer], self._slots)

    def tail(self, layer: int) -> PooledTail:
        return PooledTail(self._tails[layer], self._slots)

    def latents(self, layer: int) -> LatentCache:
        return LatentCache(self._latents[layer], self._table)

    def remember(self, layer: int, inputs: Projected) -> None:
        """Nothing is taken back here."""

    def verify(self, layer: int, inputs: Projected, weights: DecodeLayer) -> None:
        """Nor here."""


def described(c: K3Config, dtype: torch.dtype, device: torch.device, layers: Sequence[int] | None) -> dict[str, object]:
    """What must agree between a memory and the model that reads it, in words."""
    held = list(layers if layers is not None else range(c.num_layers))
    attending = [layer for layer in held if c.is_mla(layer)]
    return {
        "layers are": f"{held[0]}..{held[-1]}",
        "MLA layers are": attending,
        "cached widths (KDA heads, head size, taps; MLA) are": (c.kda_heads, c.kda_head_dim, c.conv_width, c.cache_dim),
        "dtype is": str(dtype).removeprefix("torch."),
        "device is": str(device),
    }
