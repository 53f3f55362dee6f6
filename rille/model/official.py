"""The official `config.json` of the Kimi K3 and Kimi-Linear families, read into and written from `K3Config`.

    kimi_k3       {"text_config": {...}, "vision_config": {...}, media_placeholder_token_id, ...}
    kimi_linear   the contents of a text_config at the top ("bare"); transformers spells its linear layers flat

Every key is a field, a switch, a value that must be as the model computes it, or inert (kept and written back); any
other raises. Layer lists are 1-based in the files. No torch here.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from rille.model.vision_config import VisionConfig

if TYPE_CHECKING:
    from rille.model.config import K3Config

# field -> official key of text_config; written and read one to one
TEXT_KEYS = {
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
SWITCH_KEYS = {
    "latent_width": "routed_expert_hidden_size",
    "latent_norm": "latent_moe_use_norm",
    "mla_gate": "mla_use_output_gate",
    "block_layers": "attn_res_block_size",
    "gate_cap": "activation_situ_beta",
    "up_cap": "activation_situ_linear_beta",
}
LINEAR_KEYS = {
    "kda_heads": "num_heads",
    "kda_head_dim": "head_dim",
    "conv_width": "short_conv_kernel_size",
    "decay_lower_bound": "gate_lower_bound",
}
# keys with a single value that this model computes: always written, and only checked
_FIXED = {
    "moe_layer_freq": 1,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_expert_group": 1,
    "topk_group": 1,
    "mla_use_nope": True,
}
# inert keys that must have this value where they are there
_ONLY = {"attention_bias": False}
# how transformers spells the linear layers of a Kimi-Linear file
_FLAT_LINEAR = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
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
_DERIVED_TOP = frozenset("bos_token_id eos_token_id pad_token_id dtype torch_dtype tie_word_embeddings".split())
_INERT_TOP = frozenset(
    "_name_or_path architectures auto_map ignore_index image_placeholder model_type quantization_config "
    "transformers_version use_cache".split()
)
_INERT_TEXT = frozenset(
    "_name_or_path add_cross_attention architectures attention_bias attention_dropout auto_map bad_words_ids "
    "begin_suppress_tokens chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id "
    "diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty "
    "finetuning_task forced_bos_token_id forced_eos_token_id head_dim id2label ignore_index is_decoder "
    "is_encoder_decoder label2id length_penalty max_length min_length model_type no_repeat_ngram_size num_beam_groups "
    "num_beams num_return_sequences output_attentions output_hidden_states output_router_logits output_scores prefix "
    "pretraining_tp problem_type pruned_heads qk_head_dim quantization_config remove_invalid_values "
    "repetition_penalty return_dict return_dict_in_generate rope_parameters rope_scaling rope_theta sep_token_id "
    "suppress_tokens task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p "
    "torchscript transformers_version typical_p use_bfloat16 use_cache use_grouped_topk".split()
)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_official(official: dict[str, Any]) -> dict[str, Any]:
    """The fields of K3Config that an official file spells.

    Raises ValueError that lists every unknown key, and for each known key whose value this model cannot compute.
    """
    if not isinstance(official, dict):
        raise ValueError(f"config: expected a JSON object, got {type(official).__name__}")
    nested = "text_config" in official
    text = dict(_part(official, "text_config")) if nested else dict(official)
    if nested:  # the released file says these twice; the text model's own word counts, else that of the top
        text = {key: official[key] for key in _DERIVED_TOP if official.get(key) is not None} | text
    linear, own = _take_linear(text), dict(_part(text, "rille"))
    text.pop("rille", None)
    _respell(text)
    _refuse_unknown(official if nested else {}, text, linear, own)
    _require_fixed(text)
    values = {name: text[key] for name, key in (TEXT_KEYS | SWITCH_KEYS).items() if key in text}
    values |= {name: linear[key] for name, key in LINEAR_KEYS.items() if key in linear}
    values |= _read_switches(text, linear) | _read_layers(text, linear) | own
    values["inert"] = {"text_config": {k: v for k, v in text.items() if k in _INERT_TEXT}}
    if nested:
        vision = _part(official, "vision_config")
        values["vision"] = None if official.get("vision_config") is None else VisionConfig.from_official(vision)
        values["media_pad_id"] = official.get("media_placeholder_token_id")
        values["inert"][""] = {k: v for k, v in official.items() if k in _INERT_TOP}
    return values


def _part(keys: dict[str, Any], name: str) -> dict[str, Any]:
    """An object inside the file, empty where it is absent or null. Raises ValueError for anything else."""
    part = {} if keys.get(name) is None else keys[name]
    if not isinstance(part, dict):
        raise ValueError(f"config: {name} must be a JSON object, not {part!r}")
    return part


def _take_linear(text: dict[str, Any]) -> dict[str, Any]:
    """Take out what describes the linear layers, in either spelling. Raises ValueError where the two differ."""
    linear = dict(_part(text, "linear_attn_config"))
    text.pop("linear_attn_config", None)
    flat = {official: text.pop(key) for key, official in _FLAT_LINEAR.items() if key in text}
    if (kinds := text.pop("layer_types", None)) is not None:
        flat["full_attn_layers"] = [i for i, kind in enumerate(kinds, 1) if kind == "full_attention"]
        flat["kda_layers"] = [i for i, kind in enumerate(kinds, 1) if kind == "linear_attention"]
    if wrong := {key: (linear[key], value) for key, value in flat.items() if linear.get(key, value) != value}:
        raise ValueError(f"config: linear_attn_config and the flat keys of transformers disagree: {wrong}")
    return flat | linear


def _respell(text: dict[str, Any]) -> None:
    """Give keys with two spellings their official one."""
    for other, key in {"torch_dtype": "dtype", "model_max_length": "max_position_embeddings"}.items():
        value = text.pop(other, None)
        if value is not None:
            text.setdefault(key, value)
    if (kinds := text.pop("mlp_layer_types", None)) is not None:
        dense = sum(kind == "dense" for kind in kinds)
        if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense):
            raise ValueError(f"config: mlp_layer_types {kinds}; this model has all dense layers before the sparse ones")
        if (said := text.setdefault("first_k_dense_replace", dense)) != dense:
            raise ValueError(f"config: first_k_dense_replace is {said}, but mlp_layer_types has {dense} dense layers")


def _refuse_unknown(top: dict[str, Any], text: dict[str, Any], linear: dict[str, Any], own: dict[str, Any]) -> None:
    top_known = _INERT_TOP | _DERIVED_TOP | {"text_config", "vision_config", "media_placeholder_token_id"}
    text_known = {*TEXT_KEYS.values(), *SWITCH_KEYS.values(), *_FIXED, *_INERT_TEXT}
    text_known |= {"hidden_act", "num_key_value_heads"}
    linear_known = {*LINEAR_KEYS.values(), "use_full_rank_gate", "full_attn_layers", "kda_layers"}
    unknown = [key for key in top if key not in top_known]
    unknown += [f"text_config.{key}" if top else key for key in text if key not in text_known]
    unknown += [f"linear_attn_config.{key}" for key in linear if key not in linear_known]
    unknown += [f"rille.{key}" for key in own if key not in _OWN_FIELDS]
    if unknown:
        raise ValueError(f"config: unknown keys {unknown}; this model would ignore them. Remove or correct them")


def _require_fixed(text: dict[str, Any]) -> None:
    fixed = _FIXED | _ONLY
    wrong = {key: text[key] for key, value in fixed.items() if text.get(key, value) not in (value, None)}
    if wrong:
        raise ValueError(f"config: this model only computes { ({k: fixed[k] for k in wrong}) }, the file says {wrong}")
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        raise ValueError(f"config: num_key_value_heads {kv_heads} must equal num_attention_heads {heads}")
    if isinstance(text.get("eos_token_id"), list):
        raise ValueError(f"config: eos_token_id {text['eos_token_id']} must be one id")


def _read_switches(text: dict[str, Any], linear: dict[str, Any]) -> dict[str, Any]:
    act = text.get("hidden_act", "silu")
    if act not in ("situ", "silu"):
        raise ValueError(f"config: hidden_act {act!r} is not known; this model computes 'situ' and 'silu'")
    latent, block = text.get("routed_expert_hidden_size"), text.get("attn_res_block_size")
    switches = {
        "q_rank": text.get("q_lora_rank"),
        "activation": "situ" if act == "situ" else "swiglu",
        "residual": "attn_res" if block else "standard",
        "latent_width": latent,
        "latent_norm": bool(latent) and bool(text.get("latent_moe_use_norm", False)),
        "mla_gate": bool(text.get("mla_use_output_gate", False)),
        "decay_lower_bound": linear.get("gate_lower_bound"),
        "kda_gate_rank": None if linear.get("use_full_rank_gate", False) else linear.get("head_dim"),
    }
    return switches | ({"block_layers": block} if block else {})


def _read_layers(text: dict[str, Any], linear: dict[str, Any]) -> dict[str, Any]:
    count = text.get("num_hidden_layers", 0)
    mla = linear.get("full_attn_layers")
    if mla is None:
        raise ValueError("config: linear_attn_config.full_attn_layers is missing; it says which layers are MLA")
    lists = {"full_attn_layers": mla, "kda_layers": linear.get("kda_layers", [])}
    for name, numbers in lists.items():
        if not isinstance(numbers, list) or not all(isinstance(i, int) for i in numbers):
            raise ValueError(f"config: linear_attn_config.{name} must be a list of whole numbers, not {numbers!r}")
    if not isinstance(count, int):
        raise ValueError(f"config: num_hidden_layers must be a whole number, not {count!r}")
    kda = linear.get("kda_layers", [i for i in range(1, count + 1) if i not in mla])
    if sorted([*mla, *kda]) != list(range(1, count + 1)):
        raise ValueError(
            f"config: full_attn_layers {mla} and kda_layers {kda} must name each of the layers 1..{count} once"
        )
    return {"mla_layers": tuple(i - 1 for i in mla)}


# --- writing ----------------------------------------------------------------------------------------------------------


def write_official(c: K3Config) -> dict[str, Any]:
    """The contents of `config.json`, inert keys included; bare where the config was read from a bare file."""
    text = {key: getattr(c, name) for name, key in TEXT_KEYS.items()} | _FIXED
    text |= {"num_key_value_heads": c.mla_heads, "use_grouped_topk": True, "use_cache": True}
    text |= {"model_type": "kimi_linear", "architectures": ["KimiLinearForCausalLM"]}
    text["hidden_act"] = "situ" if c.activation == "situ" else "silu"
    absent = {
        "latent_width": c.latent_width is None,
        "latent_norm": c.latent_width is None,
        "mla_gate": not c.mla_gate,
        "block_layers": c.residual == "standard",
        "gate_cap": c.activation != "situ",
        "up_cap": c.activation != "situ",
    }
    text |= {key: getattr(c, name) for name, key in SWITCH_KEYS.items() if not absent[name]}
    text["linear_attn_config"] = _write_linear(c)
    if own := _write_own(c):
        text["rille"] = own
    inert = copy.deepcopy(c.inert or {})
    if c.is_bare:
        text["model_max_length"] = text.pop("max_position_embeddings")
        return text | inert["text_config"]
    return _write_top(c, {"auto_map": dict(_AUTO_TEXT)} | text | inert.get("text_config", {}), inert.get("", {}))


def _write_top(c: K3Config, text: dict[str, Any], inert: dict[str, Any]) -> dict[str, Any]:
    top = {"architectures": list(_ARCHITECTURE_TOP), "auto_map": dict(_AUTO_TOP), "model_type": "kimi_k3"} | inert
    top |= {"bos_token_id": c.bos_id, "eos_token_id": c.eos_id, "pad_token_id": c.pad_id}
    top |= {"dtype": c.dtype, "tie_word_embeddings": c.tied_embeddings, "text_config": text}
    if c.media_pad_id is not None:
        top["media_placeholder_token_id"] = c.media_pad_id
    if c.vision is not None:
        top["vision_config"] = copy.deepcopy(c.vision.to_official())
    return top


def _write_linear(c: K3Config) -> dict[str, Any]:
    linear = {key: getattr(c, name) for name, key in LINEAR_KEYS.items() if getattr(c, name) is not None}
    if not c.is_bare or c.kda_gate_rank is None:
        linear["use_full_rank_gate"] = c.kda_gate_rank is None
    linear["full_attn_layers"] = [i + 1 for i in c.mla_layers]
    linear["kda_layers"] = [i + 1 for i in c.kda_layers]
    return linear


def _write_own(c: K3Config) -> dict[str, Any]:
    """The switches that a reader of the official keys alone would get wrong."""
    own: dict[str, Any] = {}
    if c.kda_gate_rank not in (None, c.kda_head_dim):
        own["kda_gate_rank"] = c.kda_gate_rank
    if c.inner_norm_eps != type(c).inner_norm_eps:
        own["inner_norm_eps"] = c.inner_norm_eps
    if c.balance != type(c).balance:
        own["balance"] = c.balance
    if c.residual == "attn_res_full":
        own["residual"] = c.residual
    return own


def with_quantization(c: K3Config, packed: bool) -> K3Config:
    """The config with or without the official `quantization_config`, as the tensors are."""
    inert = {key: dict(value) for key, value in (c.inert or {"": {}, "text_config": {}}).items()}
    if packed:
        inert["text_config"].setdefault("quantization_config", _QUANTIZATION)
    else:
        inert["text_config"].pop("quantization_config", None)
    return c.replace(inert=inert)


_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
    "ignore": [
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
        "re:.*lm_head.*",
        "re:.*vision_tower.*",
        "re:.*mm_projector.*",
    ],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "format": "mxfp4-pack-quantized",
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "type": "float",
                "num_bits": 4,
                "group_size": 32,
                "strategy": "group",
                "symmetric": True,
                "dynamic": False,
                "scale_dtype": "torch.uint8",
                "observer": "minmax",
                "observer_kwargs": {},
                "actorder": None,
                "block_structure": None,
                "zp_dtype": None,
            },
        }
    },
}
