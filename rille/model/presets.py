"""Named configurations: `tiny` for a laptop, `nano` and `mini` for one GPU, the released models. No torch."""

from __future__ import annotations

from rille.misspelt import named
from rille.model.config import K3Config
from rille.model.vision_config import VisionConfig

_K3_IDS = {"bos_id": 163584, "eos_id": 163586, "pad_id": 163839, "media_pad_id": 163605}

TINY = K3Config(
    vocab_size=2048,
    hidden_size=96,
    num_layers=8,
    mla_layers=(3, 7),
    kda_heads=3,
    kda_head_dim=32,
    mla_heads=3,
    q_rank=48,
    kv_rank=32,
    key_dim=32,
    shared_key_dim=16,
    value_dim=32,
    dense_width=192,
    num_experts=16,
    active_experts=4,
    shared_experts=1,
    expert_width=32,
    latent_width=32,
    block_layers=2,
    max_positions=4096,
)

NANO = K3Config(
    vocab_size=32768,
    hidden_size=512,
    num_layers=12,
    mla_layers=(3, 7, 11),
    kda_heads=4,
    kda_head_dim=128,
    mla_heads=4,
    q_rank=256,
    kv_rank=256,
    dense_width=896,
    num_experts=256,
    active_experts=6,
    shared_experts=2,
    expert_width=448,
    latent_width=256,
    block_layers=3,
)

NANO_160K = NANO.replace(
    vocab_size=163840,
    tied_embeddings=True,
    mla_heads=8,
    expert_width=416,
    dense_width=832,
    block_layers=1,
    **_K3_IDS,
)

MINI = NANO_160K.replace(
    hidden_size=768,
    num_layers=16,
    mla_layers=(3, 7, 11, 15),
    kda_heads=6,
    mla_heads=6,
    q_rank=384,
    dense_width=1024,
    num_experts=320,
    active_experts=8,
    expert_width=512,
    latent_width=384,
    block_layers=4,
)

KIMI_LINEAR_48B = K3Config(
    vocab_size=163840,
    hidden_size=2304,
    num_layers=27,
    mla_layers=(3, 7, 11, 15, 19, 23, 26),
    kda_heads=32,
    kda_head_dim=128,
    decay_lower_bound=None,
    kda_gate_rank=128,
    mla_heads=32,
    q_rank=None,
    kv_rank=512,
    mla_gate=False,
    dense_width=9216,
    num_experts=256,
    active_experts=8,
    shared_experts=1,
    expert_width=1024,
    latent_width=None,
    latent_norm=False,
    routed_scale=2.446,
    activation="swiglu",
    residual="standard",
    bos_id=163584,
    eos_id=163586,
    pad_id=163839,
    inert={"text_config": {}},
)

K3 = K3Config(
    vocab_size=163840,
    hidden_size=7168,
    num_layers=93,
    mla_layers=(*range(3, 92, 4), 92),
    kda_heads=96,
    kda_head_dim=128,
    mla_heads=96,
    q_rank=1536,
    kv_rank=512,
    dense_width=33792,
    num_experts=896,
    active_experts=16,
    shared_experts=2,
    expert_width=3072,
    latent_width=3584,
    vision=VisionConfig(text_width=7168),
).replace(**_K3_IDS)

PRESETS: dict[str, K3Config] = {
    "tiny": TINY,
    "nano": NANO,
    "nano-160k": NANO_160K,
    "mini": MINI,
    "kimi-linear-48b": KIMI_LINEAR_48B,
    "k3": K3,
}


@named
def preset(name: str) -> K3Config:
    """The configuration of that name. Raises ValueError that lists the names."""
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
