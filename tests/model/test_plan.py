"""What a model costs on paper, against what is counted elsewhere: the parameter table and torch's own operations."""

import re
from math import prod

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rille.model import plan
from rille.model.memory import Memory
from rille.model.model import new_model
from rille.model.names import count_parameters
from rille.model.plan_table import plan_table
from rille.model.presets import PRESETS, preset
from rille.ops import attn_res


@pytest.mark.parametrize("c", [*PRESETS.values(), preset("k3").replace(mtp_layers=1)], ids=[*PRESETS, "k3 with MTP"])
def test_parts_add_up_to_the_count(c):
    parts = plan.parts(c)
    assert sum(p.total for p in parts) == count_parameters(c).total
    assert sum(p.active for p in parts) == count_parameters(c).active
    assert len({p.name for p in parts}) == len(parts)


class CountProducts(TorchDispatchMode):
    """FLOPs of all products of two matrices (not of batched ones)."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.flops += 2 * prod(args[0].shape) * args[1].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("changes", [{}, {"q_rank": None, "mla_gate": False, "kda_gate_rank": 16}])
def test_matrix_flops_are_those_that_run(changes):
    c = preset("tiny").replace(latent_width=64, expert_width=96, **changes)
    model, tokens = new_model(c), torch.arange(40)
    with torch.no_grad(), CountProducts() as products:
        model.logits(tokens)
    assert products.flops == 40 * plan.matrix_flops(c)


@pytest.mark.parametrize("residual", ["attn_res", "attn_res_full", "standard"])
def test_sources_are_those_that_are_mixed(residual, monkeypatch):
    c = preset("tiny").replace(residual=residual, block_layers=3)
    seen = []
    real = attn_res.reference.attn_res
    monkeypatch.setattr(attn_res.reference, "attn_res", lambda s, *rest: seen.append(len(s)) or real(s, *rest))
    with torch.no_grad():
        new_model(c).hidden(torch.arange(3))
    assert seen == list(plan.sources(c))


def test_terms_that_grow_with_the_context():
    c = preset("tiny")
    assert plan.forward_flops(c, 1) == plan.fixed_flops(c) + 2 * 2 * 3 * (48 + 32)
    assert plan.forward_flops(c, 101) - plan.forward_flops(c, 1) == 2 * 2 * 3 * (48 + 32) * 50
    assert plan.training_flops(c, 101) == 3 * plan.forward_flops(c, 101)
    assert plan.decode_flops(c, 100) - plan.decode_flops(c, 0) == 2 * 2 * 3 * (48 + 32) * 100


def test_memory_is_what_a_memory_holds():
    c = preset("tiny")
    memory = Memory(c, 1, torch.bfloat16, "cpu")
    memory.reserve(memory.packing([128]))
    state = sum(t.nbytes for t in (*memory._states.values(), *memory._tails.values()))
    latents = sum(t.nbytes for t in memory._latents.values())
    assert plan.state_bytes(c) == state
    assert plan.cache_bytes(c) * 128 == latents


def test_kimi_linear_fits_one_card():
    table = plan_table("kimi-linear-48b", preset("kimi-linear-48b"), (1048576,), 1)
    cards = {row[0]: row[-1] for row in (re.split(r" {2,}", line) for line in table.splitlines())}
    assert cards["bf16 and 1,048,576 tokens"] == cards["MXFP4 and 1,048,576 tokens"] == "1"
    assert cards["training, fp32 with AdamW"] == "6"


def test_the_full_model():
    c = preset("k3")
    assert plan.weight_bytes(c, mxfp4=False) > 2 * 2_779_484_476_000
    table = plan_table("k3", c, (4096, 1048576), 2048)
    for number in ("2,779,484,476,000", "2,779,931,834,976", "104,189,612,640", "each of 2,048 GPUs", "1,048,576"):
        assert number in table
