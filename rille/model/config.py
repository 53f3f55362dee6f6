"""K3Config: the sizes and switches of a K3-type model. `official.py` has the `config.json` that spells them.

One frozen dataclass holds the released Kimi K3, its neighbours (Kimi-Linear: softplus decay, low-rank gate, SwiGLU,
ordinary residuals) and the ablations between them. It never imports torch. Layer lists are 0-based here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rille.misspelt import named_fields
from rille.model.official import LINEAR_KEYS, SWITCH_KEYS, TEXT_KEYS, read_official, write_official
from rille.model.vision_config import VisionConfig

Residual = Literal["attn_res", "attn_res_full", "standard"]
Activation = Literal["situ", "swiglu"]
Balance = Literal["quantile", "sign", "none"]


@named_fields
@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Sizes and switches of a model. Widths are in channels; None switches a part off where its line says so."""

    vocab_size: int  # rows of the embedding and of the head
    hidden_size: int  # width of the stream that layers read and add to
    num_layers: int  # each an attention and a feed-forward part
    mla_layers: tuple[int, ...]  # which layers have MLA, counted from 0; the others have KDA

    # Kimi Delta Attention (report §2.1.1)
    kda_heads: int  # heads of Kimi Delta Attention
    kda_head_dim: int  # key = value width, and the rank of the decay projection
    conv_width: int = 4  # tokens that the short convolution of q, k and v sees, its own included
    decay_lower_bound: float | None = -5.0  # least log decay of a token; None: the softplus decay of Kimi Linear
    kda_gate_rank: int | None = None  # of the projection to KDA's output gate; None: full rank

    # gated NoPE MLA (report §2.1.2)
    mla_heads: int  # heads of gated MLA
    q_rank: int | None  # width of the latent that MLA's queries are made from; None: one plain projection
    kv_rank: int  # width of the latent that MLA caches for keys and values
    key_dim: int = 128  # of an MLA head's own part of a key ("nope" in the official names)
    shared_key_dim: int = 64  # of the part that all heads share, never rotated ("rope" in the official names)
    value_dim: int = 128  # of an MLA head's value
    mla_gate: bool = True  # multiply what attention reads by the sigmoid of a projection of the layer's input

    # feed-forward: dense first layers, then Stable LatentMoE (report §2.3)
    dense_layers: int = 1  # the first layers, which have one dense GLU in place of experts
    dense_width: int  # inner width of that GLU
    num_experts: int  # routed experts of a layer
    active_experts: int  # routed experts that a token goes to
    shared_experts: int  # experts that every token goes to
    expert_width: int  # inner width of an expert
    latent_width: int | None  # width that routed experts read and write; None: hidden_size
    latent_norm: bool = True  # norm the experts' sum before it is projected up from the latent
    routed_scale: float = 1.0  # factor of the weights of routed experts
    renormalise: bool = True  # let the weights of a token's routed experts add up to 1, before routed_scale
    activation: Activation = "situ"  # of dense layers and experts; situ is capped by gate_cap and up_cap
    gate_cap: float = 4.0  # SiTU: bound of the gate's factor
    up_cap: float = 25.0  # SiTU: bound of the other factor
    balance: Balance = "quantile"  # how the router's biases follow the experts' loads

    # depth (report §2.2)
    residual: Residual = "attn_res"  # Attention Residuals over blocks, over every sub-layer (full), or plain sums
    block_layers: int = 12  # layers of an Attention-Residual block

    norm_eps: float = 1e-5  # added to the mean square, in all norms but those inside MLA
    inner_norm_eps: float = 1e-6  # the two norms inside MLA
    tied_embeddings: bool = False  # the embedding is the head, too
    init_std: float = 0.02  # standard deviation of fresh matrices
    max_positions: int = 1048576  # longest sequence that the checkpoint is made for
    bos_id: int | None = None  # token that begins a text
    eos_id: int | None = None  # token that ends one
    pad_id: int | None = None  # only written back: nothing is padded here
    media_pad_id: int | None = None  # token that stands for a picture
    mtp_layers: int = 0  # layers after the last that predict further tokens; not in the release
    dtype: str = "bfloat16"  # that the official config.json names
    vision: VisionConfig | None = None
    # official keys without effect on the mathematics, kept to be written back: {"": top level, "text_config": ...}
    inert: dict[str, dict[str, Any]] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        _check(self)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_layers) if i not in self.mla_layers)

    @property
    def kda_width(self) -> int:
        """Channels of q, k, v of a KDA layer: heads x head size."""
        return self.kda_heads * self.kda_head_dim

    @property
    def query_dim(self) -> int:
        """Width of one MLA query or key: per-head part and shared part."""
        return self.key_dim + self.shared_key_dim

    @property
    def cache_dim(self) -> int:
        """Numbers that MLA caches for a token: normed latent and shared key."""
        return self.kv_rank + self.shared_key_dim

    @property
    def expert_io(self) -> int:
        """Width that a routed expert reads and writes."""
        return self.latent_width or self.hidden_size

    @property
    def shared_width(self) -> int:
        """Width of the shared experts, stored as one GLU."""
        return self.shared_experts * self.expert_width

    @property
    def attends_depth(self) -> bool:
        return self.residual != "standard"

    @property
    def is_bare(self) -> bool:
        """Whether the checkpoint is a bare Kimi-Linear one: no `text_config`, no `language_model.` before its names."""
        return self.inert is not None and "" not in self.inert

    def is_mla(self, layer: int) -> bool:
        return layer in self.mla_layers

    def is_dense(self, layer: int) -> bool:
        return layer < self.dense_layers

    def opens_block(self, layer: int) -> bool:
        """Whether the running sum is appended to the block entries before this layer's attention writes to it."""
        return self.residual == "attn_res" and layer % self.block_layers == 0

    @classmethod
    def from_official(cls, official: dict[str, Any]) -> K3Config:
        """Read the contents of an official `config.json` (kimi_k3, or a bare kimi_linear one).

        Raises ValueError that lists every unknown key, and for each known key whose value this model cannot compute.
        """
        values = read_official(official)
        try:
            return cls(**values)
        except TypeError as error:
            missing = str(error).split("argument")[-1].lstrip("s: ")
            keys = TEXT_KEYS | SWITCH_KEYS | {k: f"linear_attn_config.{v}" for k, v in LINEAR_KEYS.items()}
            for name, key in keys.items():
                missing = missing.replace(f"'{name}'", key)
            raise ValueError(f"config: these keys are missing: {missing}") from error

    @classmethod
    def load(cls, path: str | Path) -> K3Config:
        """Read `config.json` from a checkpoint directory or the file itself."""
        if not isinstance(path, str | Path):
            raise ValueError(f"config: path is {path!r}; give a checkpoint directory or its config.json")
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no config.json there; name a checkpoint directory, of a run its model/")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged") from error
        return cls.from_official(content)

    def to_official(self) -> dict[str, Any]:
        """The contents of `config.json` in the official layout, inert keys included."""
        return write_official(self)

    def replace(self, **changes: Any) -> K3Config:
        """Another configuration with these fields changed. Raises ValueError as the constructor does."""
        return replace(self, **changes)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return _whole(value) or (isinstance(value, float) and math.isfinite(value))


# annotation of a field -> whether a value is one, and the words for it ("or None" is added where the field may be None)
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "int": (_whole, "a whole number"),
    "float": (_number, "a finite number"),
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text"),
    "tuple[int, ...]": (lambda value: isinstance(value, list | tuple) and all(map(_whole, value)), "whole numbers"),
    "VisionConfig": (lambda value: isinstance(value, VisionConfig), "a VisionConfig"),
    "Residual": (lambda value: value in get_args(Residual), f"one of {', '.join(get_args(Residual))}"),
    "Activation": (lambda value: value in get_args(Activation), f"one of {', '.join(get_args(Activation))}"),
    "Balance": (lambda value: value in get_args(Balance), f"one of {', '.join(get_args(Balance))}"),
}
_MAY_BE_ZERO = ("dense_layers", "shared_experts", "mtp_layers", "shared_key_dim")
_MAY_BE_NONE_NOT_ZERO = ("q_rank", "kda_gate_rank", "latent_width")


def _check_kinds(c: K3Config) -> None:
    """Every value is what its field says. Raises ValueError that lists all that are not."""
    wrong = []
    for f in fields(c):
        kind, _, none = str(f.type).partition(" | ")
        value = getattr(c, f.name)
        if kind not in _KINDS or (none and value is None):
            continue
        fits, words = _KINDS[kind]
        if not fits(value):
            wrong.append(f"{f.name} {value!r} must be {words}{' or None' if none else ''}")
    if wrong:
        raise ValueError(f"config: {'; '.join(wrong)}")


def _check(c: K3Config) -> None:
    _check_kinds(c)
    whole = {f.name: getattr(c, f.name) for f in fields(c) if f.type == "int"}
    whole |= {name: getattr(c, name) for name in _MAY_BE_NONE_NOT_ZERO if getattr(c, name) is not None}
    if wrong := {name: value for name, value in whole.items() if value < 1 and name not in _MAY_BE_ZERO}:
        raise ValueError(f"config: these sizes must be at least 1: {wrong}")
    if wrong := {name: whole[name] for name in _MAY_BE_ZERO if whole[name] < 0}:
        raise ValueError(f"config: these sizes must not be negative: {wrong}")
    if wrong := {name: getattr(c, name) for name in ("norm_eps", "inner_norm_eps") if getattr(c, name) <= 0}:
        raise ValueError(f"config: these numbers must be positive: {wrong}")
    if len(set(c.mla_layers)) != len(c.mla_layers):
        raise ValueError(f"config: mla_layers {c.mla_layers} name a layer twice")
    if out := [i for i in c.mla_layers if not 0 <= i < c.num_layers]:
        raise ValueError(f"config: mla_layers {out} lie outside the {c.num_layers} layers (they are 0-based)")
    if c.active_experts > c.num_experts:
        raise ValueError(f"config: {c.active_experts} active experts of only {c.num_experts}")
    if c.decay_lower_bound is not None and c.decay_lower_bound >= 0:
        raise ValueError(f"config: decay_lower_bound {c.decay_lower_bound} must be negative (or None for softplus)")
    if c.activation == "situ" and not (c.gate_cap > 0 and c.up_cap > 0):
        raise ValueError(f"config: SiTU caps must be positive, not {c.gate_cap} and {c.up_cap}")
    if c.vision is not None and c.vision.text_width != c.hidden_size:
        raise ValueError(
            f"config: the vision projector writes {c.vision.text_width} channels, the hidden size is {c.hidden_size}"
        )
    if c.vision is not None and c.is_bare:
        raise ValueError("config: a bare Kimi-Linear checkpoint has no place for a vision tower")
