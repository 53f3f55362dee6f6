"""K3: embedding, layers, output mixture, norm, head (report §2); vision before them and MTP after them where there are.

    logits = head(RMSNorm(Mix(Layers(embedding))))

The model is single-device mathematics over a flat token axis. `forward(tokens, ctx)` is the inner call that trainers
and engines use; `hidden`, `logits` and `trace` are the same for people, with checked input. A model can hold a range of
layers only.

Suffixes: N packed tokens, S sequences, M rows of pictures, D width, W vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rille.misspelt import named
from rille.model.allocate import Allocate
from rille.model.arguments import (
    as_dtype,
    as_layers,
    as_rows,
    as_seed,
    check_ids,
    check_packing,
    check_tokens,
    check_weights,
    kind,
)
from rille.model.attn_res import Depth
from rille.model.block import Block, share_mixtures, site
from rille.model.config import K3Config
from rille.model.context import Context, no_tap
from rille.model.initialise import initialise
from rille.model.media import Media, PatchedImages, checked_grids, expand, feature_rows
from rille.model.memory import Memory
from rille.model.moe import LatentMoE
from rille.model.mtp import MTPLayer, draft, new_draft_memory
from rille.model.tracing import Trace
from rille.model.vision import Vision
from rille.ops.embedding import embed
from rille.ops.linear import linear
from rille.ops.norm import rms_norm
from rille.packing import Packing, as_device


class K3(nn.Module):
    """A K3-type language model.

    config: sizes and switches. layers: the half-open range of layers to hold (default all); embedding, head, MTP layers
    and vision are always there. dtype: of every parameter but those that the official format stores in fp32. Parameters
    are uninitialised: use `new_model` or `load_model`.

    `vision` (tower and projector) and `mtp` (multi-token-prediction layers) are None where the config has none.
    """

    def __init__(
        self, config: K3Config, *, dtype: torch.dtype, device: torch.device | str, layers: range | None = None
    ) -> None:
        super().__init__()
        new = Allocate(dtype, device)
        self.config = config
        self.held = as_layers(layers, config.num_layers) or range(config.num_layers)
        self.embed = new(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleDict({str(i): Block(config, i, new) for i in self.held})
        self.output_mix, self.norm = site(config, new), new(config.hidden_size)
        share_mixtures(list(self.blocks()), self.output_mix)
        if not config.tied_embeddings:
            self.head = new(config.vocab_size, config.hidden_size)
        self.mtp: nn.ModuleList | None = None
        if config.mtp_layers:
            self.mtp = nn.ModuleList(MTPLayer(config, n, new) for n in range(config.mtp_layers))
        self.vision = Vision(config.vision, new) if config.vision is not None else None

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
        """The layers of the trunk that the model holds, in order."""
        for block in self.layers.values():
            assert isinstance(block, Block)
            yield block

    def router_biases(self) -> dict[int, Tensor]:
        """layer -> selection bias [E] fp32, which Quantile Balancing sets and no gradient reaches."""
        ahead = [layer.block for layer in self.mtp or () if isinstance(layer, MTPLayer)]
        return {b.layer: b.ffn.router_bias for b in (*self.blocks(), *ahead) if isinstance(b.ffn, LatentMoE)}

    def prepare(self) -> None:
        """Rebuild, in place, what modules derive from their weights (fused, absorbed, packed). Call after changes."""
        for module in self.modules():
            derive = getattr(module, "derive", None)
            if derive is not None:
                derive()

    def forward(self, tokens_N: Tensor, ctx: Context) -> Tensor:
        """Token ids int64 [N] -> final hidden states [N, D], after the last norm. Unchecked; nothing synchronises.

        With `ctx.media` the rows of pictures take the places of the embeddings at their rows of the (expanded) axis.
        """
        x_ND = embed(tokens_N, self.embed)
        if ctx.media is not None:
            x_ND = x_ND.index_copy(0, ctx.media.rows, ctx.media.features.to(x_ND.dtype))
        return self.finish(self.run(Depth(ctx.tap("embed", x_ND)), ctx), ctx)

    def run(self, depth: Depth, ctx: Context) -> Depth:
        """The held layers in order."""
        for block in self.blocks():
            depth = block(depth, ctx)
        return depth

    def finish(self, depth: Depth, ctx: Context) -> Tensor:
        if ctx.tap is no_tap:
            return self.output_mix.normed(*depth.take_pending(), self.norm, self.config.norm_eps)[0]
        mixed_ND = ctx.tap("output_mix", self.output_mix(depth))
        return ctx.tap("final_norm", rms_norm(mixed_ND, self.norm, self.config.norm_eps))

    def hidden(
        self,
        tokens: Tensor,
        *,
        packing: Packing | None = None,
        memory: Memory | None = None,
        images: PatchedImages | None = None,
    ) -> Tensor:
        """Final hidden states [N, D] in the model's dtype.

        tokens: int64 [N], the sequences of the batch one after another. packing: their boundaries; by default one
        sequence, or with a memory of one sequence its continuation. memory: from `new_memory`; read, and advanced by
        this batch.

        images: from `rille.preprocess_images`, one for each media token (`config.media_pad_id`) in order, whichever
        sequence it is in. A media token stands for all rows of its image: tokens and packing count it once, while the
        result has the expanded rows and a memory grows by them (`packing.consumed` therefore counts expanded rows).
        Tokens may also come with a media token for every row. Without images a media token is a token like any other.

        Raises ValueError for a model on "meta", tokens of another kind or device, ids outside the vocabulary, a packing
        that does not fit, a memory that it does not continue or that was made for another model, images that do not fit
        the media tokens or the vision tower. Ids on another device than the CPU are read for this where a sequence
        brings more than one token; those of a single step of decoding are not, so that the host need not wait.
        """
        return self._run(*self._batch(tokens, packing, memory, images))

    def logits(
        self,
        tokens: Tensor,
        *,
        packing: Packing | None = None,
        memory: Memory | None = None,
        images: PatchedImages | None = None,
        rows: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Logits fp32 [N, W], or [R, W] for the given rows of `hidden`: int64 [R], negative ones from the end.

        Other arguments as there. Raises ValueError also for rows that the result of `hidden` does not have; those on
        another device than the CPU are read for it as ids are.
        """
        tokens, ctx = self._batch(tokens, packing, memory, images)
        wanted_R = None if rows is None else as_rows(rows, len(tokens), ctx.packing, self.device)
        hidden_ND = self._run(tokens, ctx)
        if wanted_R is not None:
            hidden_ND = hidden_ND[wanted_R]
        logits_NW = linear(hidden_ND, self.head_weight)
        return logits_NW.to(torch.promote_types(logits_NW.dtype, torch.float32))

    @torch.no_grad()
    def trace(
        self,
        tokens: Tensor,
        *,
        packing: Packing | None = None,
        memory: Memory | None = None,
        images: PatchedImages | None = None,
    ) -> dict[str, Tensor]:
        """Every named intermediate of one forward: what the taps saw, the caches after it, and the logits.

        Names as in the released model's traces: `layers.{i}.attn_mix`, `.attn_norm`, `.attn_out`, `.mlp_mix`,
        `.mlp_norm`, `.mlp_out`, `.prefix_sum_out`, `.router_topk_idx`, `.router_topk_weight` (by weight, descending),
        `.routed_expert_*`, `.shared_experts.out`, `.kda.*`; `cache.{i}.recurrent_state_vfirst` and
        `cache.{i}.conv_{q,k,v}` (last W-1 inputs, for one sequence without the leading axis); `embed` (pictures in
        place), `output_mix`, `final_norm`, `logits`.
        """
        tokens, ctx = self._batch(tokens, packing, memory, images)
        ctx.memory = memory = memory or self.new_memory(ctx.packing.num_sequences)
        ctx.tap = trace = Trace()
        hidden_ND = self._run(tokens, ctx)
        trace.finish(self.blocks(), memory)
        trace.tensors["logits"] = linear(hidden_ND, self.head_weight).float()
        return trace.tensors

    def new_memory(self, num_sequences: int = 1) -> Memory:
        """An empty memory for that many sequences, on the model's device."""
        return Memory(self.config, num_sequences, self.dtype, self.device, self.held)

    def encode_images(self, images: PatchedImages) -> Tensor:
        """Feature rows [M, D] of pictures and short videos, item after item, in the model's dtype. Differentiable.

        An item of t x h x w patches has h w / 4 rows (for the released merge of 2 x 2), whatever t is.

        Raises ValueError for a model without vision, and for patches and grids that do not fit it or each other.
        """
        check_weights(self.device)
        if self.vision is None:
            raise ValueError("images: this model has no vision tower (its config has no vision_config)")
        return self.vision(images)

    def new_draft_memory(self, num_sequences: int = 1) -> Memory:
        """An empty memory for `draft`: see `rille.model.mtp.new_draft_memory`."""
        return new_draft_memory(self, num_sequences)

    def draft(
        self, hidden: Tensor, tokens: Tensor, memory: Memory | None = None, **options: Any
    ) -> tuple[Tensor, Tensor]:
        """Guess next tokens with the MTP layer: tokens [S, count], probabilities [S, count, W]; see `mtp.draft`."""
        return draft(self, hidden, tokens, memory, **options)

    def _with_media(self, tokens: Tensor, packing: Packing, images: PatchedImages) -> tuple[Tensor, Packing, Media]:
        """Encode the images and widen the axis for their rows."""
        if self.config.media_pad_id is None:
            raise ValueError("images: the config names no media token (media_pad_id), so pictures have no place")
        if (c := self.config.vision) is None:
            raise ValueError("images: this model has no vision tower (its config has no vision_config)")
        counts = [feature_rows(grid, c) for grid in checked_grids(images, c)]
        tokens, packing, rows_M = expand(tokens, packing, self.config.media_pad_id, counts)
        return tokens, packing, Media(rows_M, self.encode_images(images))

    def _batch(
        self, tokens: Tensor, packing: Packing | None, memory: Memory | None, images: PatchedImages | None
    ) -> tuple[Tensor, Context]:
        """Tokens on the model's device, pictures widened, and their context. Raises ValueError as `hidden` says."""
        check_weights(self.device)
        check_tokens(tokens, self.device)
        if memory is not None:
            if not isinstance(memory, Memory):
                raise ValueError(f"memory must come from model.new_memory(), not be {kind(memory)}")
            memory.check(self.config, self.dtype, self.device, self.held)
        if packing is None:
            packing = memory.packing([len(tokens)]) if memory else Packing.of([len(tokens)], device=self.device)
        check_packing(packing, tokens, self.device)
        check_ids(tokens, packing, self.config.vocab_size)
        if memory is None and any(packing.consumed):
            raise ValueError(f"the packing continues after {list(packing.consumed)} tokens, but no memory was given")
        media = None
        if images is not None:
            tokens, packing, media = self._with_media(tokens, packing, images)
        return tokens.to(self.device), Context(packing, memory, media=media)

    def _run(self, tokens_N: Tensor, ctx: Context) -> Tensor:
        """`forward`, with the memory advanced."""
        memory = ctx.memory if isinstance(ctx.memory, Memory) else None
        if memory is not None:
            memory.reserve(ctx.packing)
        hidden_ND = self(tokens_N, ctx)
        if memory is not None:
            memory.advance(ctx.packing)
        return hidden_ND


@named
def new_model(
    config: K3Config,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
) -> K3:
    """A freshly initialised model (`initialise.py` has the table). On the "meta" device it has shapes only.

    dtype: of the weights, a torch dtype or its name ("bfloat16"). seed: at least 0 and below 2^63. Raises ValueError
    for what is not a config, another dtype than fp32, bf16, fp16 and fp64, a device that is not here, another seed.
    """
    if not isinstance(config, K3Config):
        raise ValueError(f'config must be a K3Config, not {kind(config)}; a named one: rille.preset("tiny")')
    seed = as_seed(seed)
    model = K3(config, dtype=as_dtype(dtype), device=as_device(device))
    initialise(model, config.init_std, seed)
    return model
