"""K3Config: the sizes and switches of a K3-type model, and the official `config.json` that spells them.

One frozen dataclass holds the released Kimi K3, its neighbours (Kimi-Linear: softplus decay, low-rank gate, SwiGLU, ordinary
residuals) and the ablations between them. It never imports torch. Layer lists are 0-based here; the official file counts from 1.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

Residual = Literal["attn_res", "attn_res_full", "standard"]
Activation = Literal["situ", "swiglu"]
Balance = Literal["quantile", "sign", "none"]


@dataclass(frozen=True, kw_only=True)
class K3Config:
    """Sizes and switches. Widths are in channels, `None` switches a part off where its comment says so."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    mla_layers: tuple[int, ...]  # 0-based; every other layer is KDA

    # Kimi Delta Attention (report §2.1.1)
    kda_heads: int
    kda_head_dim: int  # key = value width, and the rank of the decay projection
    conv_width: int = 4
    decay_lower_bound: float | None = -5.0  # None: the softplus decay of Kimi Linear
    kda_gate_rank: int | None = None  # None: full rank

    # gated NoPE MLA (report §2.1.2)
    mla_heads: int
    q_rank: int | None  # None: one plain query projection
    kv_rank: int
    key_dim: int = 128  # per head ("nope")
    shared_key_dim: int = 64  # shared by all heads, never rotated ("rope" in the official names)
    value_dim: int = 128
    mla_gate: bool = True

    # feed-forward: dense first layers, then Stable LatentMoE (report §2.3)
    dense_layers: int = 1
    dense_width: int
    num_experts: int
    active_experts: int
    shared_experts: int
    expert_width: int
    latent_width: int | None  # None: experts at full width
    latent_norm: bool = True
    routed_scale: float = 1.0
    renormalise: bool = True
    activation: Activation = "situ"
    gate_cap: float = 4.0
    up_cap: float = 25.0
    balance: Balance = "quantile"

    # depth (report §2.2)
    residual: Residual = "attn_res"
    block_layers: int = 12  # layers of an Attention-Residual block

    norm_eps: float = 1e-5
    inner_norm_eps: float = 1e-6  # the two norms inside MLA
    tied_embeddings: bool = False
    init_std: float = 0.02
    max_positions: int = 1048576
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    media_pad_id: int | None = None
    mtp_layers: int = 0
    dtype: str = "bfloat16"
    vision: dict[str, Any] | None = field(default=None, compare=False)
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
        return _read(official)

    @classmethod
    def load(cls, path: str | Path) -> K3Config:
        """Read `config.json` from a checkpoint directory or the file itself."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no config.json there; name a checkpoint directory in the official layout")
        try:
            return cls.from_official(json.loads(path.read_text(encoding="utf-8")))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: not valid JSON ({error}); the file is damaged") from error

    def to_official(self) -> dict[str, Any]:
        """The contents of `config.json` in the official layout, inert keys included."""
        return _write(self)

    def replace(self, **changes: Any) -> K3Config:
        return replace(self, **changes)


def _check(c: K3Config) -> None:
    sizes = {
        f.name: getattr(c, f.name)
        for f in fields(c)
        if f.type == "int" and f.name not in ("dense_layers", "shared_experts", "mtp_layers", "shared_key_dim")
    }
    if wrong := {name: value for name, value in sizes.items() if value < 1}:
        raise ValueError(f"config: these sizes must be at least 1: {wrong}")
    if out := [i for i in c.mla_layers if not 0 <= i < c.num_layers]:
        raise ValueError(f"config: mla_layers {out} lie outside the {c.num_layers} layers (they are 0-based)")
    if c.active_experts > c.num_experts:
        raise ValueError(f"config: {c.active_experts} active experts of only {c.num_experts}")
    if c.decay_lower_bound is not None and c.decay_lower_bound >= 0:
        raise ValueError(f"config: decay_lower_bound {c.decay_lower_bound} must be negative (or None for softplus)")
    if c.activation == "situ" and not (c.gate_cap > 0 and c.up_cap > 0):
        raise ValueError(f"config: SiTU caps must be positive, not {c.gate_cap} and {c.up_cap}")


# --- the official file ------------------------------------------------------------------------------------------------

# field -> official key of text_config; written and read one to one
_TEXT_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "mla_heads": "num_attention_heads",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "key_dim": "qk_nope_head_dim",
    "shared_key_dim": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
    "dense_layers": "first_k_dense_replace",
    "dense_width": "intermediate_size",
    "num_experts": "num_experts",
    "active_experts": "num_experts_per_token",
    "shared_experts": "num_shared_experts",
    "expert_width": "moe_intermediate_size",
    "routed_scale": "routed_scaling_factor",
    "renormalise": "moe_renormalize",
    "norm_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
    "max_positions": "max_position_embeddings",
    "bos_id": "bos_token_id",
    "eos_id": "eos_token_id",
    "pad_id": "pad_token_id",
    "mtp_layers": "num_nextn_predict_layers",
    "dtype": "dtype",
}
# written for K3 only, where the switch is on: field -> official key
_SWITCH_KEYS = {
    "latent_width": "routed_expert_hidden_size",
    "latent_norm": "latent_moe_use_norm",
    "mla_gate": "mla_use_output_gate",
    "block_layers": "attn_res_block_size",
    "gate_cap": "activation_situ_beta",
    "up_cap": "activation_situ_linear_beta",
}
_LINEAR_KEYS = {
    "kda_heads": "num_heads",
    "kda_head_dim": "head_dim",
    "conv_width": "short_conv_kernel_size",
    "decay_lower_bound": "gate_lower_bound",
}
# keys with a single value that this model computes
_FIXED = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "mla_use_nope": True,
}
# switches that the official file has no key for; written under "rille" where they differ from the default
_OWN_FIELDS = ("kda_gate_rank", "inner_norm_eps", "balance", "residual")

_ARCHITECTURE_TOP = ["KimiK3ForConditionalGeneration"]
_AUTO_TOP = {
    "AutoConfig": "configuration_kimi_k3.KimiK3Config",
    "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
}
_AUTO_TEXT = {
    "AutoConfig": "configuration_kimi_k3.KimiLinearConfig",
    "AutoModel": "modeling_kimi_linear.KimiLinearModel",
    "AutoModelForCausalLM": "modeling_kimi_linear.KimiLinearForCausalLM",
}
_INERT_TOP = frozenset(
    "architectures auto_map bos_token_id dtype torch_dtype eos_token_id pad_token_id ignore_index image_placeholder model_type "
    "tie_word_embeddings transformers_version quantization_config use_cache _name_or_path".split()
)
_INERT_TEXT = frozenset(
    "_name_or_path add_cross_attention architectures auto_map bad_words_ids begin_suppress_tokens chunk_size_feed_forward "
    "cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample early_stopping "
    "encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task forced_bos_token_id "
    "forced_eos_token_id id2label is_decoder is_encoder_decoder label2id length_penalty max_length min_length model_type "
    "no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_attentions output_hidden_states "
    "output_scores prefix problem_type pruned_heads quantization_config remove_invalid_values repetition_penalty return_dict "
    "return_dict_in_generate sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss "
    "tie_encoder_decoder tokenizer_class top_k top_p torchscript transformers_version typical_p use_bfloat16 use_cache "
    "use_grouped_topk torch_dtype model_max_length head_dim rope_theta rope_scaling rope_parameters attention_dropout "
    "attention_bias ignore_index layer_types".split()
)


def _read(official: dict[str, Any]) -> K3Config:
    if not isinstance(official, dict):
        raise ValueError(f"config: expected a JSON object, got {type(official).__name__}")
    nested = "text_config" in official
    text: dict[str, Any] = dict(official["text_config"]) if nested else dict(official)
    linear = dict(text.pop("linear_attn_config", None) or {})
    own = dict(text.pop("rille", None) or {})
    if "dtype" not in text and "torch_dtype" in text:
        text["dtype"] = text["torch_dtype"]
    top_known = _INERT_TOP | {"text_config", "vision_config", "media_placeholder_token_id"}
    unknown = [key for key in official if nested and key not in top_known]
    unknown += [f"text_config.{key}" if nested else key for key in text if key not in _text_known()]
    unknown += [f"linear_attn_config.{key}" for key in linear if key not in _linear_known()]
    unknown += [f"rille.{key}" for key in own if key not in _OWN_FIELDS]
    if unknown:
        raise ValueError(f"config: unknown keys {unknown}; this model would ignore them. Remove or correct them")
    _require_fixed(text)
    values = {name: text[key] for name, key in (_TEXT_KEYS | _SWITCH_KEYS).items() if key in text}
    values |= {name: linear[key] for name, key in _LINEAR_KEYS.items() if key in linear}
    values |= _read_switches(text, linear) | _read_layers(text, linear) | own
    values["vision"] = official.get("vision_config") if nested else None
    values["media_pad_id"] = official.get("media_placeholder_token_id") if nested else None
    values["inert"] = {"text_config": {k: v for k, v in text.items() if k in _INERT_TEXT}}
    if nested:
        values["inert"][""] = {k: v for k, v in official.items() if k in _INERT_TOP}
    return _construct(values)


def _construct(values: dict[str, Any]) -> K3Config:
    try:
        return K3Config(**values)
    except TypeError as error:
        missing = str(error).split("argument")[-1].lstrip("s: ")
        keys = _TEXT_KEYS | _SWITCH_KEYS | {k: f"linear_attn_config.{v}" for k, v in _LINEAR_KEYS.items()}
        for name, key in keys.items():
            missing = missing.replace(f"'{name}'", key)
        raise ValueError(f"config: these keys are missing or of the wrong type: {missing}") from error


def _text_known() -> set[str]:
    return {*_TEXT_KEYS.values(), *_SWITCH_KEYS.values(), *_FIXED, *_INERT_TEXT, "hidden_act", "num_key_value_heads"}


def _linear_known() -> set[str]:
    return {*_LINEAR_KEYS.values(), "use_full_rank_gate", "full_attn_layers", "kda_layers"}


def _require_fixed(text: dict[str, Any]) -> None:
    wrong = {key: text[key] for key, value in _FIXED.items() if key in text and text[key] != value}
    if wrong:
        raise ValueError(f"config: this model only computes {({k: _FIXED[k] for k in wrong})}, the file says {wrong}")
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ValueError(f"config: num_key_value_heads {kv_heads} must equal num_attention_heads {heads}")


def _read_switches(text: dict[str, Any], linear: dict[str, Any]) -> dict[str, Any]:
    act = text.get("hidden_act", "silu")
    if act not in ("situ", "silu"):
        raise ValueError(f"config: hidden_act {act!r} is not known; this model computes 'situ' and 'silu'")
    latent = text.get("routed_expert_hidden_size")
    return {
        "q_rank": text.get("q_lora_rank"),
        "activation": "situ" if act == "situ" else "swiglu",
        "residual": "attn_res" if text.get("attn_res_block_size") else "standard",
        "block_layers": text.get("attn_res_block_size") or K3Config.block_layers,
        "latent_width": latent,
        "latent_norm": bool(latent) and bool(text.get("latent_moe_use_norm", False)),
        "mla_gate": bool(text.get("mla_use_output_gate", False)),
        "decay_lower_bound": linear.get("gate_lower_bound"),
        "kda_gate_rank": None if linear.get("use_full_rank_gate", False) else linear.get("head_dim"),
    }


def _read_layers(text: dict[str, Any], linear: dict[str, Any]) -> dict[str, Any]:
    count = text.get("num_hidden_layers", 0)
    mla = linear.get("full_attn_layers")
    if mla is None:
        raise ValueError("config: linear_attn_config.full_attn_layers is missing; it says which layers are MLA")
    kda = linear.get("kda_layers", [i for i in range(1, count + 1) if i not in mla])
    if sorted([*mla, *kda]) != list(range(1, count + 1)):
        raise ValueError(
            f"config: full_attn_layers {mla} and kda_layers {kda} must name each of the layers 1..{count} once"
        )
    return {"mla_layers": tuple(i - 1 for i in mla)}


def _write(c: K3Config) -> dict[str, Any]:
    text = {key: getattr(c, name) for name, key in _TEXT_KEYS.items()} | _FIXED
    text |= {"num_key_value_heads": c.mla_heads, "use_grouped_topk": True, "use_cache": True, "model_type": "kimi_linear"}
    text |= {"architectures": ["KimiLinearForCausalLM"], "auto_map": dict(_AUTO_TEXT)}
    text["hidden_act"] = "situ" if c.activation == "situ" else "silu"
    absent = {
        "latent_width": c.latent_width is None,
        "latent_norm": c.latent_width is None,
        "mla_gate": not c.mla_gate,
        "block_layers": c.residual == "standard",
        "gate_cap": c.activation != "situ",
        "up_cap": c.activation != "situ",
    }
    text |= {key: getattr(c, name) for name, key in _SWITCH_KEYS.items() if not absent[name]}
    text["linear_attn_config"] = _write_linear(c)
    if own := _write_own(c):
        text["rille"] = own
    inert = copy.deepcopy(c.inert or {})
    text |= inert.get("text_config", {})
    if "" not in inert and c.inert is not None:  # read from a bare kimi_linear file
        return text
    top = {"architectures": list(_ARCHITECTURE_TOP), "auto_map": dict(_AUTO_TOP), "model_type": "kimi_k3"}
    top |= {"bos_token_id": c.bos_id, "eos_token_id": c.eos_id, "pad_token_id": c.pad_id}
    top |= {"dtype": c.dtype, "tie_word_embeddings": c.tied_embeddings} | inert.get("", {})
    top["text_config"] = text
    if c.media_pad_id is not None:
        top["media_placeholder_token_id"] = c.media_pad_id
    if c.vision is not None:
        top["vision_config"] = copy.deepcopy(c.vision)
    return top


def _write_linear(c: K3Config) -> dict[str, Any]:
    linear = {key: getattr(c, name) for name, key in _LINEAR_KEYS.items() if getattr(c, name) is not None}
    linear["use_full_rank_gate"] = c.kda_gate_rank is None
    linear["full_attn_layers"] = [i + 1 for i in c.mla_layers]
    linear["kda_layers"] = [i + 1 for i in c.kda_layers]
    return linear


def _write_own(c: K3Config) -> dict[str, Any]:
    """The switches that a reader of the official keys alone would get wrong."""
    own: dict[str, Any] = {}
    if c.kda_gate_rank not in (None, c.kda_head_dim):
        own["kda_gate_rank"] = c.kda_gate_rank
    if c.inner_norm_eps != K3Config.inner_norm_eps:
        own["inner_norm_eps"] = c.inner_norm_eps
    if c.balance != K3Config.balance:
        own["balance"] = c.balance
    if c.residual == "attn_res_full":
        own["residual"] = c.residual
    return own
