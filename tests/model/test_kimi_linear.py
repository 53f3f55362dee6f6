"""Kimi-Linear through the switches: agreement with transformers on random models, and checkpoints both ways."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rille.model.checkpoint import load_model, save_model
from rille.model.config import K3Config
from rille.model.model import new_model
from rille.model.presets import preset

transformers = pytest.importorskip("transformers", minversion="5.23")
BOUND = 2e-4
LINEAR = {
    "num_heads": 3,
    "head_dim": 16,
    "short_conv_kernel_size": 4,
    "full_attn_layers": [3, 5],
    "kda_layers": [1, 2, 4],
}
FLAT = {
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
}
SIZES = dict(
    vocab_size=131,
    hidden_size=48,
    intermediate_size=80,
    moe_intermediate_size=24,
    num_hidden_layers=5,
    num_attention_heads=3,
    num_key_value_heads=3,
    n_shared_experts=1,
    kv_lora_rank=24,
    qk_rope_head_dim=8,
    v_head_dim=12,
    qk_nope_head_dim=16,
    num_experts_per_tok=3,
    num_local_experts=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
MODELS = {
    "as released": {"linear_attn_config": LINEAR, "first_k_dense_replace": 1},
    "flat config, two dense layers": FLAT,
    "low-rank queries, two shared experts, plain sum": {
        "linear_attn_config": LINEAR,
        "q_lora_rank": 20,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
}


def random_model(changes, seed=0):
    """A transformers model in which every part matters: gates, decays and biases away from their initial values."""
    from transformers.models.kimi_linear import KimiLinearConfig, KimiLinearForCausalLM

    generator = torch.Generator().manual_seed(seed)
    model = KimiLinearForCausalLM(KimiLinearConfig(**(SIZES | changes))).eval()
    for name, tensor in model.state_dict().items():
        noise = torch.randn(tensor.shape, generator=generator)
        if name.endswith(("norm.weight", "layernorm.weight")):
            tensor.copy_(1 + 0.2 * noise)
        elif tensor.ndim > 1 and "A_log" not in name and "conv" not in name:
            tensor.copy_(noise * 1.5 * tensor.shape[-1] ** -0.5)
        else:
            tensor.copy_(0.5 * noise)
    return model


def token_ids(count, seed=0):
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def theirs(model, tokens):
    return model(tokens[None]).logits[0]


def distance(a, b):
    return float((a - b).abs().max())


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_same_logits_and_back(name, tmp_path):
    model, tokens = random_model(MODELS[name]), token_ids(83)
    expected = theirs(model, tokens)
    assert expected.std() > 0.3
    model.save_pretrained(tmp_path / "theirs")
    ours = load_model(tmp_path / "theirs")
    assert distance(ours.logits(tokens), expected) <= BOUND
    memory = ours.new_memory()
    pieces = [ours.logits(piece, memory=memory) for piece in tokens.split([40, 1, 1, 41])]
    assert distance(torch.cat(pieces), expected) <= BOUND
    save_model(ours, tmp_path / "ours", dtype=torch.float32)
    again, report = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(report.values())
    assert distance(theirs(again.eval(), tokens), expected) <= 1e-6


def tensors(directory):
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@torch.no_grad()
@pytest.mark.parametrize("shape", [(3,), (1, 1, 3, 1)])
def test_both_shapes_of_A_log_are_kept(shape, tmp_path):
    model, tokens = random_model(MODELS["as released"]), token_ids(30)
    model.save_pretrained(tmp_path)
    stored = tensors(tmp_path)
    stored = {name: t.view(shape) if name.endswith("A_log") else t for name, t in stored.items()}
    save_file(stored, tmp_path / "model.safetensors")
    ours = load_model(tmp_path)
    assert distance(ours.logits(tokens), theirs(model, tokens)) <= BOUND
    save_model(ours, tmp_path / "again", dtype=torch.float32)
    again = tensors(tmp_path / "again")
    assert {t.shape for name, t in again.items() if name.endswith("A_log")} == {torch.Size(shape)}
    layer_0 = {name: name.replace("layers.0.block_sparse_moe.", "layers.0.mlp.") for name in stored}
    assert set(again) == set(layer_0.values())  # released name of the dense layer, which transformers writes otherwise
    assert all(torch.equal(again[layer_0[name]], t) for name, t in stored.items())


@torch.no_grad()
def test_a_new_model_loads_in_transformers(tmp_path):
    from transformers.models.kimi_linear import KimiLinearForCausalLM

    c = preset("kimi-linear-48b").replace(
        vocab_size=97,
        hidden_size=40,
        num_layers=4,
        mla_layers=(1, 3),
        kda_heads=2,
        kda_head_dim=16,
        kda_gate_rank=16,
        mla_heads=2,
        kv_rank=16,
        dense_width=64,
        num_experts=6,
        active_experts=2,
        expert_width=16,
        bos_id=1,
        eos_id=2,
        pad_id=0,
        init_std=0.2,
    )
    model, tokens = new_model(c), token_ids(40) % 97
    save_model(model, tmp_path, dtype=torch.float32)
    other, report = KimiLinearForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert distance(theirs(other.eval(), tokens), model.logits(tokens)) <= BOUND


RELEASED = {
    "architectures": ["KimiLinearForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_kimi.KimiLinearConfig"},
    "bos_token_id": 163584,
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15, 17, 18, 19, 21, 22, 23, 25, 26],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "pad_token_id": 163839,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_cache": True,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}


def test_the_released_config():
    c = K3Config.from_official(RELEASED)
    assert c == preset("kimi-linear-48b")
    written = json.loads(json.dumps(c.to_official()))
    assert {key: written.get(key) for key in RELEASED} == RELEASED
    assert set(written) - set(RELEASED) == {"topk_method"}  # always the same, always written


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_heads": 16}, "disagree.*num_heads"),
        ({"layer_types": ["linear_attention"] * 27}, "disagree.*full_attn_layers"),
        ({"mlp_layer_types": ["sparse"] * 27}, "first_k_dense_replace is 1.* 0 dense"),
        ({"mlp_layer_types": ["sparse", "dense"]}, "dense layers before the sparse"),
        ({"attention_bias": True}, "attention_bias"),
        ({"eos_token_id": [1, 2]}, "one id"),
        ({"linear_attn_config": {}}, "full_attn_layers is missing"),
        ({"rope_thetta": 1}, "unknown keys.*rope_thetta"),
    ],
)
def test_files_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        K3Config.from_official(RELEASED | changes)
