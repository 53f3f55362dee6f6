"""VisionConfig: sizes of MoonViT-V2 and its projector, and the official `vision_config` that spells them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Attention = Literal["joint", "factorised"]


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes, by default those of the release; widths are in channels, patches in pixels."""

    text_width: int  # of the language model, which the projector writes
    patch_size: int = 14
    width: int = 1024
    num_layers: int = 27
    num_heads: int = 12
    qkv_width: int = 1536  # of q, of k and of v: wider than the residual stream in the release
    mlp_width: int = 4096
    table_height: int = 64  # rows and columns of the learned position table, which is resized to any grid
    table_width: int = 64
    max_frames: int = 4  # of one video
    merge: tuple[int, int] = (2, 2)  # rows x columns of patches that become one row of features
    projector_eps: float = 1e-5
    # "joint": all patches of an item attend to each other, as released; "factorised": in space, then over time
    attention: Attention = "joint"
    # official keys without effect on the mathematics, kept to be written back
    inert: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in _KEYS if name not in ("merge", "projector_eps")}
        if wrong := {name: value for name, value in sizes.items() if not isinstance(value, int) or value < 1}:
            raise ValueError(f"vision_config: these sizes must be whole numbers of at least 1: {wrong}")
        if len(self.merge) != 2 or min(self.merge) < 1:
            raise ValueError(f"vision_config: merge {self.merge} must be two numbers of at least 1, rows and columns")
        if self.qkv_width % (4 * self.num_heads):
            raise ValueError(
                f"vision_config: qkv width {self.qkv_width} over {self.num_heads} heads is no multiple of 4 for each, "
                "which the rotation by row and column needs"
            )
        if self.width % 2:
            raise ValueError(
                f"vision_config: width {self.width} must be even: the time vector is half sine, half cosine"
            )
        if self.attention not in ("joint", "factorised"):
            raise ValueError(f"vision_config: attention {self.attention!r}; choose joint or factorised")

    @property
    def head_dim(self) -> int:
        return self.qkv_width // self.num_heads

    @property
    def patch_numbers(self) -> int:
        """Numbers of one patch: three colours."""
        return 3 * self.patch_size**2

    @property
    def merged_width(self) -> int:
        """Channels of the patches that are merged into one row, side by side."""
        return self.merge[0] * self.merge[1] * self.width

    @classmethod
    def from_official(cls, official: dict[str, Any]) -> VisionConfig:
        """Read an official `vision_config`.

        Raises ValueError that lists every unknown or missing key, and every value that this tower cannot compute.
        """
        keys = dict(official)
        own = dict(keys.pop("rille", None) or {})
        unknown = [key for key in keys if key not in {*_KEYS.values(), *_FIXED, *_INERT, "mm_hidden_size"}]
        unknown += [f"rille.{key}" for key in own if key != "attention"]
        missing = [key for key in _KEYS.values() if key not in keys]
        if unknown or missing:
            raise ValueError(f"vision_config: unknown keys {unknown}, missing keys {missing}")
        fixed = _FIXED | {"mm_hidden_size": keys["vt_hidden_size"]}
        if wrong := {key: keys[key] for key, value in fixed.items() if key in keys and keys[key] != value}:
            raise ValueError(
                f"vision_config: this tower only computes { {k: fixed[k] for k in wrong} }, the file says {wrong}"
            )
        values = {name: keys[key] for name, key in _KEYS.items()}
        values["merge"] = tuple(values["merge"])
        return cls(**values, **own, inert={key: keys[key] for key in keys if key in _INERT})

    def to_official(self) -> dict[str, Any]:
        """The official `vision_config`, inert keys included."""
        official: dict[str, Any] = {key: getattr(self, name) for name, key in _KEYS.items()}
        official |= _FIXED | {"merge_kernel_size": list(self.merge), "mm_hidden_size": self.width}
        if self.attention != VisionConfig.attention:
            official["rille"] = {"attention": self.attention}
        return official | (self.inert or {})


# field -> official key
_KEYS = {
    "text_width": "text_hidden_size",
    "patch_size": "patch_size",
    "width": "vt_hidden_size",
    "num_layers": "vt_num_hidden_layers",
    "num_heads": "vt_num_attention_heads",
    "qkv_width": "qkv_hidden_size",
    "mlp_width": "vt_intermediate_size",
    "table_height": "init_pos_emb_height",
    "table_width": "init_pos_emb_width",
    "max_frames": "init_pos_emb_time",
    "merge": "merge_kernel_size",
    "projector_eps": "projector_ln_eps",
}
# keys with a single value that the tower computes
_FIXED = {
    "pos_emb_type": "divided_fixed",
    "pos_emb_interpolation_mode": "bilinear",
    "norm_type": "rmsnorm",
    "mlp_type": "mlp2",
    "attn_bias": False,
    "linear_bias": False,
    "patch_embed_proj_bias": False,
    "activation_func": "gelu_pytorch_tanh",
    "merge_type": "sd2_tpool",
    "mm_projector_type": "patchmergerv2",
    "projector_hidden_act": "gelu",
}
_INERT = frozenset({"_attn_implementation", "model_type", "dtype", "torch_dtype", "transformers_version"})
