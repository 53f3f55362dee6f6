"""Experts that stay packed: the same numbers as from their values, the same bytes back, and what is refused."""

from __future__ import annotations

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from rille.model.checkpoint import load_model, save_model
from rille.model.moe import LatentMoE
from rille.model.packed import PackedExpertWeights, packed_model
from rille.model.presets import preset
from rille.model.shards import CheckpointError
from tests.model.oracle import ORACLE, tokens
from tests.model.test_checkpoint import tensors, text_tensors

EXPERT = "language_model.model.layers.1.block_sparse_moe.experts.0.w1"


@pytest.fixture(scope="module")
def packed():
    return load_model(ORACLE, experts="mxfp4")


def test_logits_are_those_of_the_values(packed) -> None:
    plain = load_model(ORACLE)
    memory = packed.new_memory()
    assert torch.equal(packed.logits(tokens()), plain.logits(tokens()).detach())
    steps = [packed.logits(part, memory=memory) for part in tokens().split([3, 1, len(tokens()) - 4])]
    torch.testing.assert_close(torch.cat(steps), plain.logits(tokens()).detach(), rtol=0, atol=2e-4)


def test_no_expert_has_values(packed) -> None:
    experts = [m.experts for m in packed.modules() if isinstance(m, LatentMoE)]
    assert experts and all(isinstance(e, PackedExpertWeights) and e.w13.dtype == torch.uint8 for e in experts)
    assert not any(p.requires_grad for p in packed.parameters())
    assert packed.dtype == torch.float32 and packed.device.type == "cpu"


@pytest.mark.parametrize("experts", ["keep", "mxfp4"])
def test_saving_gives_the_bytes_back(packed, tmp_path, experts) -> None:
    save_model(packed, tmp_path / "saved", experts=experts)
    want, got = tensors(ORACLE), tensors(tmp_path / "saved")
    for name in text_tensors(ORACLE):
        assert torch.equal(got[name].view(torch.uint8), want[name].view(torch.uint8)), name


def test_saving_values(packed, tmp_path) -> None:
    save_model(packed, tmp_path / "packed", experts="bf16")
    save_model(load_model(ORACLE), tmp_path / "plain", experts="bf16")
    got, want = tensors(tmp_path / "packed"), tensors(tmp_path / "plain")
    assert got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


def damaged(tmp_path, change):
    target = tmp_path / "checkpoint"
    shutil.copytree(ORACLE, target)
    for shard in target.glob("model-*.safetensors"):
        held = load_file(shard)
        if f"{EXPERT}.weight_scale" in held:
            change(held)
            save_file(held, shard)
    return target


def test_scales_that_the_product_cannot_hold_are_named(tmp_path) -> None:
    target = damaged(tmp_path, lambda held: held[f"{EXPERT}.weight_scale"].fill_(161))
    with pytest.raises(CheckpointError, match=r"w1\.weight_packed \(scale byte 161; .* up to 160\)"):
        load_model(target, experts="mxfp4")
    load_model(target)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="experts='fp8': choose values or mxfp4"):
        load_model(ORACLE, experts="fp8")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="widths that 32 divides, not .* and 40"):
        packed_model(preset("tiny").replace(expert_width=40), dtype=torch.float32, device="cpu")


def test_plain_experts_are_refused(tmp_path) -> None:
    save_model(load_model(ORACLE), tmp_path / "plain", experts="bf16")
    with pytest.raises(CheckpointError, match="is not packed, and experts='mxfp4' takes no other; `rille convert"):
        load_model(tmp_path / "plain", experts="mxfp4")
