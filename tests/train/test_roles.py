"""What the optimiser is told of every parameter, against the model's own tensors; the table for people."""

import pytest
import torch

from rille.cli import main
from rille.model.model import K3
from rille.model.names import padded_heads
from rille.model.presets import PRESETS, preset
from rille.optim.kinds import MATRICES
from rille.train.roles import groups_table, newton_schulz_flops, parameter_roles


@pytest.mark.parametrize("name", PRESETS)
def test_roles_describe_the_tensors(name: str):
    c = preset(name)
    roles = {role.name: role for role in parameter_roles(c)}
    parameters = dict(K3(c, dtype=torch.bfloat16, device="meta").named_parameters())
    assert set(roles) == set(parameters)
    for role in roles.values():
        padding = padded_heads(c) - c.kda_heads if role.name.endswith("A_log") else 0
        assert role.count + padding == parameters[role.name].numel()
        if role.kind in MATRICES:
            shape = parameters[role.name].shape
            assert role.columns == shape[-1]
            assert shape[:-1].numel() % sum(role.blocks) == 0
            assert sum(n * p * q for n, p, q in role.matrices) == role.count


def test_maps_of_k3():
    """Written out by hand from the released shapes."""
    roles = {role.name: role for role in parameter_roles(preset("k3"))}
    assert roles["layers.0.attn.q_proj"].matrices == [(96, 128, 7168)]
    assert roles["layers.0.attn.out_proj"].matrices == [(1, 7168, 12288)]
    assert roles["layers.3.attn.q_up"].matrices == [(96, 192, 1536)]
    assert roles["layers.3.attn.kv_up"].matrices == [(192, 128, 512)]
    assert roles["layers.3.attn.kv_down"].matrices == [(1, 576, 7168)]
    assert roles["layers.1.ffn.experts.w13"].matrices == [(1792, 3072, 3584)]
    assert roles["layers.1.ffn.experts.w2"].matrices == [(896, 3584, 3072)]
    assert roles["vision.tower.blocks.0.qkv_proj"].matrices == [(36, 128, 1024)]
    assert roles["layers.1.ffn.router"].kind == "router"


def test_keys_and_values_of_unequal_width_stay_apart():
    roles = {role.name: role for role in parameter_roles(preset("tiny").replace(value_dim=48))}
    assert roles["layers.3.attn.kv_up"].matrices == [(3, 32, 32), (3, 48, 32)]


def test_the_table(capsys):
    table = groups_table("nano", preset("nano"))
    rows = [line.split() for line in table.splitlines()]
    assert ["muon", "yes", "layers.*.attn.kv_up", "3", "8", "of", "128", "x", "256", "786,432"] in rows
    assert ["adamw", "yes", "layers.*.ffn.router", "11", "1,441,792"] in rows
    assert ["adamw", "no", "layers.*.attn.qkv_conv", "9", "55,296"] in rows
    assert ["256", "x", "448", "8,448", "6,378.0"] in rows  # 151 M FLOPs a step each
    assert newton_schulz_flops(448, 256) == 5 * (4 * 256**2 * 448 + 2 * 256**3)
    assert main(["plan", "nano", "--groups"]) == 0
    assert capsys.readouterr().out == table + "\n"
