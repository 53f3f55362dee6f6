"""K3: embedding, layers, output mixture, norm, head (report §2; `facts` of the release: logits = head(RMSNorm(Mix(depth)))).

The model is single-device mathematics over a flat token axis. `forward(tokens, ctx)` is the inner call that trainers and engines
use; `hidden`, `logits` and `trace` are the same for people, with checked input. A model can hold a range of layers only.

Suffixes: N packed tokens, D width, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from rille.model.allocate import Allocate
from rille.model.attn_res import Depth
from rille.model.block import Block, site
from rille.model.config import K3Config
from rille.model.context import Context
from rille.model.initialise import initialise
from rille.model.memory import Memory
from rille.model.moe import LatentMoE
from rille.model.tracing import Trace
from rille.ops.norm import rms_norm
from rille.packing import Packing


class K3(nn.Module):
    """A K3-type language model.

    config: sizes and switches. layers: the half-open range of layers to hold (default all); embedding and head are always there.
    dtype: of every parameter but those that the official format stores in fp32. Parameters are uninitialised: use `new_model`
    or `load_model`.
    """

    def __init__(
        self, config: K3Config, *, dtype: torch.dtype, device: torch.device | str, layers: range | None = None
    ) -> None:
        super().__init__()
        new = Allocate(dtype, device)
        self.config = config
        self.held = layers if layers is not None else range(config.num_layers)
        if self.held.step != 1 or self.held.start < 0 or self.held.stop > config.num_layers or not len(self.held):
            raise ValueError(f"model: layers {self.held} are not a range inside the {config.num_layers} layers")
        self.embed = new(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(config, i, new) for i in self.held})
        self.output_mix, self.norm = site(config, new), new(config.hidden_size)
        if not config.tied_embeddings:
            self.head = new(config.vocab_size, config.hidden_size)

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.dtype

    @property
    def head_weight(self) -> Tensor:
        """[W, D]: the head, or the embedding where they are tied."""
        return self.embed if self.config.tied_embeddings else self.head

    def blocks(self) -> Iterable[Block]:
        for block in self.layers.values():
            assert isinstance(block, Block)
            yield block

    def router_biases(self) -> dict[int, Tensor]:
        """layer -> selection bias [E] fp32, which Quantile Balancing sets and no gradient reaches."""
        return {b.layer: b.ffn.router_bias for b in self.blocks() if isinstance(b.ffn, LatentMoE)}

    def prepare(self) -> None:
        """Rebuild, in place, whatever modules derive from their weights (fused, absorbed, packed). Call after changing weights."""
        for module in self.modules():
            derive = getattr(module, "derive", None)
            if derive is not None:
                derive()

    def forward(self, tokens_N: Tensor, ctx: Context) -> Tensor:
        """Token ids int64 [N] -> final hidden states [N, D], after the last norm. Nothing is checked and nothing synchronises."""
        depth = Depth(ctx.tap("embed", embedding(tokens_N, self.embed)))
        return self.finish(self.run(depth, ctx), ctx)

    def run(self, depth: Depth, ctx: Context) -> Depth:
        """The held layers in order."""
        for block in self.blocks():
            depth = block(depth, ctx)
        return depth

    def finish(self, depth: Depth, ctx: Context) -> Tensor:
        mixed_ND = ctx.tap("output_mix", self.output_mix(depth))
        return ctx.tap("final_norm", rms_norm(mixed_ND, self.norm, self.config.norm_eps))

    def hidden(
        self, tokens: Tensor, *, packing: Packing | None = None, memory: Memory | None = None, images: None = None
    ) -> Tensor:
        """Final hidden states [N, D] in the model's dtype.

        tokens: int64 [N], the sequences of the batch one after another. packing: their boundaries; by default one sequence, or with a
        memory of one sequence its continuation. memory: from `new_memory`; read, and advanced by this batch.

        Raises ValueError for ids outside the vocabulary, a packing that does not fit, or a memory that it does not continue.
        """
        return self._checked(tokens, packing, memory, images, None)

    def logits(
        self,
        tokens: Tensor,
        *,
        packing: Packing | None = None,
        memory: Memory | None = None,
        images: None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Logits fp32 [N, W], or [len(rows), W] for the given rows of the batch (int64). Other arguments as in `hidden`."""
        hidden_ND = self.hidden(tokens, packing=packing, memory=memory, images=images)
        if rows is not None:
            hidden_ND = hidden_ND[torch.as_tensor(rows, device=hidden_ND.device)]
        logits_NW = linear(hidden_ND, self.head_weight)
        return logits_NW.to(torch.promote_types(logits_NW.dtype, torch.float32))

    @torch.no_grad()
    def trace(
        self, tokens: Tensor, *, packing: Packing | None = None, memory: Memory | None = None, images: None = None
    ) -> dict[str, Tensor]:
        """Every named intermediate of one forward: what the taps saw, the caches after it, and the logits.

        Names as in the released model's traces: `layers.{i}.attn_mix`, `.attn_norm`, `.attn_out`, `.mlp_mix`, `.mlp_norm`, `.mlp_out`,
        `.prefix_sum_out`, `.router_topk_idx`, `.router_topk_weight` (by weight, descending), `.routed_expert_*`, `.shared_experts.out`,
        `.kda.*`; `cache.{i}.recurrent_state_vfirst` and `cache.{i}.conv_{q,k,v}` (last W-1 inputs, for one sequence without the leading
        axis); `embed`, `output_mix`, `final_norm`, `logits`.
        """
        packing = self._packing(tokens, packing, memory)
        memory = memory or self.new_memory(packing.num_sequences)
        trace = Trace()
        hidden_ND = self._checked(tokens, packing, memory, images, trace)
        trace.finish(self, memory)
        trace.tensors["logits"] = linear(hidden_ND, self.head_weight).float()
        return trace.tensors

    def new_memory(self, num_sequences: int = 1) -> Memory:
        """An empty memory for that many sequences, on the model's device."""
        return Memory(self.config, num_sequences, self.dtype, self.device, self.held)

    def _packing(self, tokens: Tensor, packing: Packing | None, memory: Memory | None) -> Packing:
        if tokens.ndim != 1 or tokens.dtype != torch.int64:
            raise ValueError(f"tokens must be int64 of shape [N], got {tokens.dtype} {list(tokens.shape)}")
        if packing is None:
            packing = memory.packing([len(tokens)]) if memory else Packing.of([len(tokens)], device=self.device)
        if packing.num_tokens != len(tokens):
            raise ValueError(f"the packing describes {packing.num_tokens} tokens, the batch has {len(tokens)}")
        return packing

    def _checked(
        self, tokens: Tensor, packing: Packing | None, memory: Memory | None, images: None, trace: Trace | None
    ) -> Tensor:
        if images is not None:
            raise ValueError("images: this model has no vision tower")
        packing = self._packing(tokens, packing, memory)
        if len(tokens) and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.config.vocab_size:
            low, high = int(tokens.min()), int(tokens.max())
            raise ValueError(f"token ids run from {low} to {high}, the vocabulary has 0..{self.config.vocab_size - 1}")
        if memory is None and any(packing.consumed):
            raise ValueError(f"the packing continues after {list(packing.consumed)} tokens, but no memory was given")
        ctx = Context(packing, memory)
        if trace is not None:
            ctx.tap = trace
        if memory is not None:
            memory.reserve(packing)
        hidden_ND = self(tokens.to(self.device), ctx)
        if memory is not None:
            memory.advance(packing)
        return hidden_ND


def new_model(
    config: K3Config, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", seed: int = 0
) -> K3:
    """A freshly initialised model (`initialise.py` has the table). On the "meta" device it has shapes only."""
    model = K3(config, dtype=dtype, device=device)
    initialise(model, config.init_std, seed)
    return model
