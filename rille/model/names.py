"""The one parameter table: official name, our parameter, slice, storage dtype, kind. It never imports torch.

Checkpoints read it to load and save; training and serving pass it as data to the optimiser and to sharding. `count` of it is the
exact size of a model. A stacked tensor of experts is one entry that stands for E official tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from rille.model.config import K3Config

Kind = Literal["heads", "matrix", "vector", "expert", "embedding"]
Storage = Literal["bf16", "f32", "expert"]  # "expert": MXFP4 or bf16, decided tensor by tensor

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True)
class Entry:
    """One official tensor (or, with `experts` set, one for each expert) and where it lives in our model.

    official: its name; "{expert}" stands for the expert's number. shape: in the official file, for one expert. rows: the half-open
    range of our parameter's rows that it fills, None for all (for experts: rows inside the expert). heads: how many equal
    row blocks a "heads" matrix has, one for each head.
    """

    official: str
    parameter: str
    shape: tuple[int, ...]
    storage: Storage = "bf16"
    kind: Kind = "matrix"
    rows: tuple[int, int] | None = None
    heads: int = 1
    experts: int | None = None

    @property
    def count(self) -> int:
        """Numbers in all tensors of the entry."""
        return prod(self.shape) * (self.experts or 1)

    def official_names(self) -> Iterator[tuple[int | None, str]]:
        """(expert, name) of each official tensor, before any `.weight_packed` suffix."""
        if self.experts is None:
            yield None, self.official
            return
        for expert in range(self.experts):
            yield expert, self.official.replace("{expert}", str(expert))


def parameter_table(c: K3Config, layers: range | None = None) -> list[Entry]:
    """All entries of a model, in the order of depth; `layers` keeps only those layers (embedding and head stay)."""
    prefix = "" if is_bare(c) else TEXT_PREFIX
    entries = [Entry(f"{prefix}model.embed_tokens.weight", "embed", (c.vocab_size, c.hidden_size), kind="embedding")]
    for i in layers if layers is not None else range(c.num_layers):
        entries += _layer(c, i, f"{prefix}model.layers.{i}.", f"layers.{i}.")
    if c.attends_depth:
        entries += _site(c, f"{prefix}model.output_attn_res_", "output_mix")
    entries.append(Entry(f"{prefix}model.norm.weight", "norm", (c.hidden_size,), kind="vector"))
    if not c.tied_embeddings:
        entries.append(Entry(f"{prefix}lm_head.weight", "head", (c.vocab_size, c.hidden_size), kind="embedding"))
    return entries


def is_bare(c: K3Config) -> bool:
    """Whether the checkpoint is a bare Kimi-Linear one, whose names lack the `language_model.` prefix."""
    return c.inert is not None and "" not in c.inert


def padded_heads(heads: int) -> int:
    """Length of `A_log` in a new model: the release stores 128 numbers for 96 heads."""
    return -(-heads // 128) * 128


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

    def entry(theirs: str, name: str, shape: tuple[int, ...], kind: Kind = "matrix", heads: int = 1) -> Entry:
        return Entry(f"{official}{theirs}.weight", f"{ours}{name}", shape, kind=kind, heads=heads)

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
        entry("kv_b_proj", "kv_up", (h * (c.key_dim + c.value_dim), c.kv_rank), "heads", h),
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
        Entry(f"{official}gate.weight", f"{ours}router", (e, d)),
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
        return Entry(f"{official}experts.{{expert}}.{theirs}", f"{ours}experts.{name}", shape, "expert", "expert", rows, 1, e)

    entries += [
        expert("w1", "w13", (f, io), (0, f)),
        expert("w3", "w13", (f, io), (f, 2 * f)),
        expert("w2", "w2", (io, f), None),
    ]
    return entries


@dataclass(frozen=True)
class ParameterCount:
    """Numbers in a text model: all of them, and those that one token uses (the head, not the input embedding)."""

    total: int
    active: int


def count_parameters(c: K3Config) -> ParameterCount:
    """Exact counts: router bias in, padding of `A_log` out."""
    table = parameter_table(c)
    total = sum(entry.count for entry in table)
    idle = sum(entry.count // c.num_experts * (c.num_experts - c.active_experts) for entry in table if entry.experts)
    looked_up = 0 if c.tied_embeddings else c.vocab_size * c.hidden_size
    return ParameterCount(total, total - idle - looked_up)
