"""The one parameter table: official name, our parameter, slice, storage dtype, kind. It never imports torch.

Checkpoints read it to load and save; training and serving pass it as data to the optimiser and to sharding. `count` of
it is the exact size of a model. A stacked tensor of experts is one entry that stands for E official tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from rille.model.config import K3Config

Kind = Literal["heads", "matrix", "router", "vector", "expert", "embedding"]
Storage = Literal["bf16", "f32", "expert"]  # "expert": MXFP4 or bf16, decided tensor by tensor

TEXT_PREFIX = "language_model."
TOWER_PREFIX, PROJECTOR_PREFIX = "vision_tower.", "mm_projector."


@dataclass(frozen=True)
class Entry:
    """One official tensor (or, with `experts` set, one for each expert) and where it lives in our model.

    official: its name; "{expert}" stands for the expert's number. shape: in the official file, for one expert. rows:
    the half-open range of our parameter's rows that it fills, None for all (for experts: rows inside the expert).
    heads: how many equal row blocks a "heads" matrix has, one for each head. parts: heights of the maps that one head's
    block stacks, where it is more than one.
    """

    official: str
    parameter: str
    shape: tuple[int, ...]
    storage: Storage = "bf16"
    kind: Kind = "matrix"
    rows: tuple[int, int] | None = None
    heads: int = 1
    experts: int | None = None
    parts: tuple[int, ...] = ()

    @property
    def count(self) -> int:
        """Numbers in all tensors of the entry."""
        return prod(self.shape) * (self.experts or 1)

    @property
    def blocks(self) -> tuple[int, ...]:
        """Heights of the row blocks that repeat down a matrix, each of them one linear map: of a head, or all rows."""
        return self.parts or (self.shape[0] // self.heads,)

    def official_names(self) -> Iterator[tuple[int | None, str]]:
        """(expert, name) of each official tensor, before any `.weight_packed` suffix."""
        if self.experts is None:
            yield None, self.official
            return
        for expert in range(self.experts):
            yield expert, self.official.replace("{expert}", str(expert))


def parameter_table(c: K3Config, layers: range | None = None) -> list[Entry]:
    """All entries of a model: the text in the order of depth, MTP layers, vision.

    `layers` keeps only those layers of the trunk (all the rest stays).
    """
    return text_table(c, layers) + mtp_table(c) + vision_table(c)


def text_table(c: K3Config, layers: range | None = None) -> list[Entry]:
    """The entries of the language model alone."""
    prefix = text_prefix(c)
    entries = [Entry(f"{prefix}model.embed_tokens.weight", "embed", (c.vocab_size, c.hidden_size), kind="embedding")]
    for i in layers if layers is not None else range(c.num_layers):
        entries += _layer(c, i, f"{prefix}model.layers.{i}.", f"layers.{i}.")
    if c.attends_depth:
        entries += _site(c, f"{prefix}model.output_attn_res_", "output_mix")
    entries.append(Entry(f"{prefix}model.norm.weight", "norm", (c.hidden_size,), kind="vector"))
    if not c.tied_embeddings:
        entries.append(Entry(f"{prefix}lm_head.weight", "head", (c.vocab_size, c.hidden_size), kind="embedding"))
    return entries


def text_prefix(c: K3Config) -> str:
    """What the names of the language model begin with: nothing in a bare Kimi-Linear checkpoint."""
    return "" if c.is_bare else TEXT_PREFIX


def padded_heads(c: K3Config) -> int:
    """Length of `A_log` in a new model: K3 stores 128 numbers for 96 heads, Kimi-Linear one for each head."""
    return c.kda_heads if c.is_bare else -(-c.kda_heads // 128) * 128


def mtp_config(c: K3Config) -> K3Config:
    """The config whose layers from `num_layers` on are the MTP layers: MLA, LatentMoE, an ordinary residual stream."""
    extra = range(c.num_layers, c.num_layers + c.mtp_layers)
    layers = dict(num_layers=c.num_layers + c.mtp_layers, mla_layers=(*c.mla_layers, *extra), mtp_layers=0)
    return c.replace(residual="standard", vision=None, **layers)


def mtp_table(c: K3Config) -> list[Entry]:
    """The MTP layers, by the names of public loaders. Embedding and head are those of the trunk: see `mtp_copies`."""
    block, width, entries = mtp_config(c), (c.hidden_size,), []
    for n in range(c.mtp_layers):
        official, ours = f"{text_prefix(c)}model.layers.{c.num_layers + n}.", f"mtp.{n}."
        entries += [
            Entry(f"{official}enorm.weight", f"{ours}embed_norm", width, kind="vector"),
            Entry(f"{official}hnorm.weight", f"{ours}hidden_norm", width, kind="vector"),
            Entry(f"{official}eh_proj.weight", f"{ours}proj", (c.hidden_size, 2 * c.hidden_size)),
            *_layer(block, c.num_layers + n, official, f"{ours}block."),
            Entry(f"{official}shared_head.norm.weight", f"{ours}norm", width, kind="vector"),
        ]
    return entries


def mtp_copies(c: K3Config) -> list[Entry]:
    """Copies of the trunk's embedding and head that loaders expect beside an MTP layer: written, checked when read."""
    shape = (c.vocab_size, c.hidden_size)
    head = "embed" if c.tied_embeddings else "head"
    copies = []
    for n in range(c.num_layers, c.num_layers + c.mtp_layers):
        official = f"{text_prefix(c)}model.layers.{n}."
        copies.append(Entry(f"{official}embed_tokens.weight", "embed", shape, kind="embedding"))
        copies.append(Entry(f"{official}shared_head.head.weight", head, shape, kind="embedding"))
    return copies


def vision_table(c: K3Config) -> list[Entry]:
    """MoonViT-V2 and the projector; empty without a vision_config."""
    v = c.vision
    if v is None:
        return []

    def tower(theirs: str, name: str, shape: tuple[int, ...], kind: Kind = "matrix", heads: int = 1) -> Entry:
        return Entry(f"{TOWER_PREFIX}{theirs}.weight", f"vision.tower.{name}", shape, kind=kind, heads=heads)

    image = (v.width, 3, v.patch_size, v.patch_size)
    entries = [
        tower("patch_embed.proj", "patch_embed", image, "embedding"),
        tower("patch_embed.pos_emb", "positions", (v.table_height, v.table_width, v.width), "embedding"),
    ]
    for i in range(v.num_layers):
        theirs, ours = f"encoder.blocks.{i}.", f"blocks.{i}."
        entries += [
            tower(f"{theirs}norm0", f"{ours}attn_norm", (v.width,), "vector"),
            tower(f"{theirs}wqkv", f"{ours}qkv_proj", (3 * v.qkv_width, v.width), "heads", 3 * v.num_heads),
            tower(f"{theirs}wo", f"{ours}out_proj", (v.width, v.qkv_width)),
            tower(f"{theirs}norm1", f"{ours}ffn_norm", (v.width,), "vector"),
            tower(f"{theirs}mlp.fc0", f"{ours}up_proj", (v.mlp_width, v.width)),
            tower(f"{theirs}mlp.fc1", f"{ours}down_proj", (v.width, v.mlp_width)),
        ]
    entries.append(tower("encoder.final_layernorm", "norm", (v.width,), "vector"))
    merged, projector = v.merged_width, "vision.projector."
    return [
        *entries,
        Entry(f"{PROJECTOR_PREFIX}proj.0.weight", f"{projector}up_proj", (merged, merged)),
        Entry(f"{PROJECTOR_PREFIX}proj.2.weight", f"{projector}down_proj", (v.text_width, merged)),
        Entry(f"{PROJECTOR_PREFIX}post_norm.weight", f"{projector}norm", (v.text_width,), kind="vector"),
    ]


def _layer(c: K3Config, i: int, official: str, ours: str) -> list[Entry]:
    width = (c.hidden_size,)
    entries = [
        Entry(f"{official}input_layernorm.weight", f"{ours}attn_norm", width, kind="vector"),
        Entry(f"{official}post_attention_layernorm.weight", f"{ours}ffn_norm", width, kind="vector"),
    ]
    if c.attends_depth:
        entries += _site(c, f"{official}self_attention_res_", f"{ours}attn_mix")
        entries += _site(c, f"{official}mlp_res_", f"{ours}ffn_mix")
    attn = (f"{official}self_attn.", f"{ours}attn.")
    entries += _mla(c, *attn) if c.is_mla(i) else _kda(c, *attn)
    if c.is_dense(i):
        entries += _glu(f"{official}mlp.", f"{ours}ffn.", c.hidden_size, c.dense_width)
    else:
        entries += _moe(c, f"{official}block_sparse_moe.", f"{ours}ffn.")
    return entries


def _site(c: K3Config, official: str, ours: str) -> list[Entry]:
    return [
        Entry(f"{official}proj.weight", f"{ours}.query", (1, c.hidden_size), kind="vector"),
        Entry(f"{official}norm.weight", f"{ours}.gain", (c.hidden_size,), kind="vector"),
    ]


def _kda(c: K3Config, official: str, ours: str) -> list[Entry]:
    d, h, k, hk = c.hidden_size, c.kda_heads, c.kda_head_dim, c.kda_width

    def head_split(theirs: str, name: str, shape: tuple[int, ...]) -> Entry:
        return Entry(f"{official}{theirs}.weight", f"{ours}{name}", shape, kind="heads", heads=h)

    entries = [head_split(f"{x}_proj", f"{x}_proj", (hk, d)) for x in "qkv"]
    for j, x in enumerate("qkv"):
        conv = f"{official}{x}_conv1d.weight"
        rows = (j * hk, (j + 1) * hk)
        entries.append(Entry(conv, f"{ours}qkv_conv", (hk, 1, c.conv_width), "f32", "vector", rows=rows))
    entries += [
        Entry(f"{official}f_a_proj.weight", f"{ours}decay_down", (k, d)),
        Entry(f"{official}f_b_proj.weight", f"{ours}decay_up", (hk, k)),
        Entry(f"{official}b_proj.weight", f"{ours}beta_proj", (h, d)),
        Entry(f"{official}A_log", f"{ours}A_log", (h,), "f32", "vector"),
        Entry(f"{official}dt_bias", f"{ours}dt_bias", (hk,), "f32", "vector"),
        Entry(f"{official}o_norm.weight", f"{ours}out_norm", (k,), "f32", "vector"),
    ]
    if c.kda_gate_rank is None:
        entries.append(head_split("g_proj", "gate_proj", (hk, d)))
    else:
        entries.append(Entry(f"{official}g_a_proj.weight", f"{ours}gate_down", (c.kda_gate_rank, d)))
        entries.append(Entry(f"{official}g_b_proj.weight", f"{ours}gate_up", (hk, c.kda_gate_rank)))
    entries.append(Entry(f"{official}o_proj.weight", f"{ours}out_proj", (d, hk)))
    return entries


def _mla(c: K3Config, official: str, ours: str) -> list[Entry]:
    d, h = c.hidden_size, c.mla_heads

    def entry(
        theirs: str,
        name: str,
        shape: tuple[int, ...],
        kind: Kind = "matrix",
        heads: int = 1,
        parts: tuple[int, ...] = (),
    ) -> Entry:
        return Entry(f"{official}{theirs}.weight", f"{ours}{name}", shape, kind=kind, heads=heads, parts=parts)

    query = h * c.query_dim
    if c.q_rank is None:
        entries = [entry("q_proj", "q_proj", (query, d), "heads", h)]
    else:
        entries = [
            entry("q_a_proj", "q_down", (c.q_rank, d)),
            entry("q_a_layernorm", "q_norm", (c.q_rank,), "vector"),
            entry("q_b_proj", "q_up", (query, c.q_rank), "heads", h),
        ]
    entries += [
        entry("kv_a_proj_with_mqa", "kv_down", (c.cache_dim, d)),
        entry("kv_a_layernorm", "kv_norm", (c.kv_rank,), "vector"),
        entry("kv_b_proj", "kv_up", (h * (c.key_dim + c.value_dim), c.kv_rank), "heads", h, (c.key_dim, c.value_dim)),
    ]
    if c.mla_gate:
        entries.append(entry("g_proj", "gate_proj", (h * c.value_dim, d), "heads", h))
    entries.append(entry("o_proj", "out_proj", (d, h * c.value_dim)))
    return entries


def _glu(official: str, ours: str, width: int, inner: int) -> list[Entry]:
    return [
        Entry(f"{official}gate_proj.weight", f"{ours}gate_proj", (inner, width)),
        Entry(f"{official}up_proj.weight", f"{ours}up_proj", (inner, width)),
        Entry(f"{official}down_proj.weight", f"{ours}down_proj", (width, inner)),
    ]


def _moe(c: K3Config, official: str, ours: str) -> list[Entry]:
    d, io, f, e = c.hidden_size, c.expert_io, c.expert_width, c.num_experts
    entries = [
        Entry(f"{official}gate.weight", f"{ours}router", (e, d), kind="router"),
        Entry(f"{official}gate.e_score_correction_bias", f"{ours}router_bias", (e,), "f32", "vector"),
    ]
    if c.latent_width is not None:
        entries.append(Entry(f"{official}routed_expert_down_proj.weight", f"{ours}latent_down", (io, d)))
        entries.append(Entry(f"{official}routed_expert_up_proj.weight", f"{ours}latent_up", (d, io)))
    if c.latent_norm and c.latent_width is not None:
        entries.append(Entry(f"{official}routed_expert_norm.weight", f"{ours}latent_norm", (io,), kind="vector"))
    if c.shared_experts:
        entries += _glu(f"{official}shared_experts.", f"{ours}shared.", d, c.shared_width)

    def expert(theirs: str, name: str, shape: tuple[int, int], rows: tuple[int, int] | None) -> Entry:
        return Entry(
            f"{official}experts.{{expert}}.{theirs}", f"{ours}experts.{name}", shape, "expert", "expert", rows, 1, e
        )

    entries += [
        expert("w1", "w13", (f, io), (0, f)),
        expert("w3", "w13", (f, io), (f, 2 * f)),
        expert("w2", "w2", (io, f), None),
    ]
    return entries


@dataclass(frozen=True)
class ParameterCount:
    """Numbers in a model: all of them; those that one token of text uses (the head, not the input embedding)."""

    total: int
    active: int
    vision: int = 0  # tower and projector, in `total`
    mtp: int = 0  # layers that predict further tokens, in `total`

    @property
    def text(self) -> int:
        """The language model alone."""
        return self.total - self.vision - self.mtp


def count_parameters(c: K3Config) -> ParameterCount:
    """Exact counts: router bias in, padding of `A_log` and copies out."""
    table = text_table(c)
    text, mtp, vision = (sum(entry.count for entry in part) for part in (table, mtp_table(c), vision_table(c)))
    idle = sum(entry.count // c.num_experts * (c.num_experts - c.active_experts) for entry in table if entry.experts)
    looked_up = 0 if c.tied_embeddings else c.vocab_size * c.hidden_size
    return ParameterCount(text + mtp + vision, text - idle - looked_up, vision, mtp)
