"""Drafts in a recorded step: tokens run that may be taken back, and those that came true are kept, in one launch.

    gather    states and tails of the rows from the pages, side by side
    verify    each KDA layer runs all T tokens of a row and leaves its state where it was (`rille.ops.kda.kda_verify`)
    commit    the states move on by the tokens that came true, and go back to the pages

Latents need nothing: what was rejected lies behind the end and is written over. Suffixes: S rows, T tokens of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rille.model.kda import KDA
from rille.model.model import K3
from rille.ops.kda import DecodeLayer, Gate, Pools, Projected, Remembered, kda_commit, kda_verify
from rille.ops.kda.decode import choose_backend
from rille.serve.paged import Batch, Pages


def can_try(model: K3) -> bool:
    """Whether verifying waits for nobody on this model's device, as a recording demands."""
    for block in model.blocks():
        if isinstance(attn := block.attn, KDA):
            decay = Gate(attn.A_log, attn.dt_bias.view(attn.heads, -1), attn.lower_bound)
            weights = DecodeLayer(attn.qkv_conv, decay, attn.out_norm, attn.eps)
            return choose_backend(attn.out_proj, weights)[0] != "reference"
    return True


class Bench:
    """Room for the states of up to `rows` rows, and for what is remembered of `tokens` tokens of each."""

    def __init__(self, pages: Pages, rows: int, tokens: int) -> None:
        self.tokens, self._rows, self._pages = tokens, rows, pages
        self._pools: dict[int, Pools] = {}

    def pools(self, layer: int, weights: DecodeLayer, rows: int) -> Pools:
        """Those of one layer, the first rows of them."""
        if layer not in self._pools:
            states, tails = self._pages.states[layer], self._pages.tails[layer]
            past = Remembered.new(self._rows, self.tokens, weights, tails.dtype)
            states, tails = (x.new_empty(self._rows, *x.shape[1:]) for x in (states, tails))
            self._pools[layer] = Pools(states, tails, past)
        p = self._pools[layer]
        assert p.past is not None
        past = Remembered(*(x[:rows] for x in (p.past.qkv, p.past.z, p.past.u)))
        return Pools(p.states[:rows], p.tails[:rows], past)


class Trial(Batch):
    """`Batch` for a step of T tokens a row over tensors that stay where they are. table [S, pages], slots [G, S];
    spare_page: where rows without a sequence (negative slots) read and write."""

    def __init__(self, pages: Pages, table: Tensor, slots: Tensor, bench: Bench, spare_page: int) -> None:
        self._pages, self._rows, self.inputs = pages, None, {}
        self._table, self._slots, self._bench = table, list(slots), bench
        rows_S = torch.arange(table.shape[0], device=table.device)
        self._at = [torch.where(slots_S < 0, spare_page, slots_S) for slots_S in self._slots]
        self._taken = [torch.where(slots_S < 0, -1, rows_S) for slots_S in self._slots]
        self._weights: dict[int, DecodeLayer] = {}

    def verify(self, layer: int, inputs: Projected, weights: DecodeLayer) -> Tensor:
        pools, group, S = self._of(layer, weights), self._pages.group_of[layer], self._table.shape[0]
        pools.states.copy_(self._pages.states[layer][self._at[group]])
        pools.tails.copy_(self._pages.tails[layer][self._at[group]])
        self._weights[layer] = weights
        rows = Projected(*(x.unflatten(0, (S, -1)) for x in (inputs.qkv, inputs.z, inputs.b, inputs.gate)))
        none_S = torch.zeros(S, dtype=torch.int64, device=self._table.device)
        return kda_verify(rows, weights, pools, self._taken[group], none_S).flatten(0, 1)

    def commit(self, counts_S: Tensor) -> None:
        """Let the states move on by so many tokens of each row."""
        for layer, weights in self._weights.items():
            pools, group = self._of(layer, weights), self._pages.group_of[layer]
            kda_commit(weights, pools, self._taken[group], counts_S)
            self._pages.states[layer][self._at[group]] = pools.states
            self._pages.tails[layer][self._at[group]] = pools.tails

    def _of(self, layer: int, weights: DecodeLayer) -> Pools:
        return self._bench.pools(layer, weights, self._table.shape[0])
