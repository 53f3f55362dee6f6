"""Trace: a tap that keeps every named tensor of a forward, and adds what the layers do not hand out themselves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from rille.model.block import Block
from rille.model.kda import KDA
from rille.model.memory import Memory
from rille.ops.kda import Gate
from rille.ops.kda.reference import log_decay


class Trace:
    """Use as `Context.tap`; `tensors` maps names to detached copies."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        self.tensors[name] = tensor.detach().clone()
        return tensor

    def finish(self, blocks: Iterable[Block], memory: Memory) -> None:
        """Add the activated gates of the KDA layers and the caches after the batch; list choices by weight."""
        for block in blocks:
            self._by_weight(f"layers.{block.layer}.router_topk_")
            if isinstance(block.attn, KDA):
                self._gates(block.attn)
                self._caches(block.attn, memory)

    def _by_weight(self, name: str) -> None:
        if f"{name}idx" in self.tensors:
            weights_NA, order_NA = self.tensors[f"{name}weight"].sort(dim=1, descending=True, stable=True)
            self.tensors[f"{name}weight"] = weights_NA
            self.tensors[f"{name}idx"] = self.tensors[f"{name}idx"].gather(1, order_NA)

    def _gates(self, attn: KDA) -> None:
        name = f"layers.{attn.layer}.kda."
        z_NHK, b_NH = self.tensors[f"{name}g_raw"], self.tensors[f"{name}beta_raw"]
        gate = Gate(attn.A_log, attn.dt_bias.view(z_NHK.shape[1:]), attn.lower_bound)
        self.tensors[f"{name}g_log"] = log_decay(z_NHK, gate, torch.float32)
        self.tensors[f"{name}beta"] = torch.sigmoid(b_NH.float())

    def _caches(self, attn: KDA, memory: Memory) -> None:
        state, tail = memory.state(attn.layer), memory.tail(attn.layer)
        state_SHVK = state.pool[state.slots].clone()
        tails_SCW = tail.pool[tail.slots].transpose(1, 2).chunk(3, dim=1)
        single = len(memory.lengths) == 1
        self.tensors[f"cache.{attn.layer}.recurrent_state_vfirst"] = state_SHVK[0] if single else state_SHVK
        self.tensors[f"layers.{attn.layer}.kda.state_v_first"] = state_SHVK[0] if single else state_SHVK
        for which, tail_SCW in zip("qkv", tails_SCW, strict=True):
            self.tensors[f"cache.{attn.layer}.conv_{which}"] = (tail_SCW[0] if single else tail_SCW).contiguous()
