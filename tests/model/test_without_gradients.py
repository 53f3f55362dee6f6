"""A forward call without gradients takes fewer launches: its values are those of the same call op by op, as it runs
where somebody taps the tensors in between."""

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rille.model.context import Context, no_tap
from rille.model.kda import KDA
from rille.model.model import new_model
from rille.model.presets import preset
from rille.packing import Packing
from tests.train.small import MODEL

SMALL = {
    "block": MODEL,
    "full": MODEL.replace(residual="attn_res_full"),
    "standard": MODEL.replace(residual="standard"),
    "no norm": MODEL.replace(latent_norm=False),
    "no latent": MODEL.replace(latent_width=None, latent_norm=False),
    "not shared": MODEL.replace(shared_experts=0),
}


def keep(name, tensor):
    return tensor


def hidden(model, tokens, tap=no_tap, lengths=None):
    packing = Packing.of(lengths or [len(tokens)], device=model.device)
    return model(tokens, Context(packing, tap=tap))


@pytest.mark.parametrize("config", SMALL.values(), ids=SMALL)
def test_on_a_cpu_the_bits_are_the_same(config):
    model = new_model(config.replace(init_std=0.2), seed=3)
    tokens = torch.arange(37) * 5 % config.vocab_size
    with torch.no_grad():
        without, tapped = hidden(model, tokens), hidden(model, tokens, keep)
    assert torch.equal(without, tapped)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64, 1500])
def test_on_a_gpu_the_values_are_the_same(rows):
    """In bf16, with all experts, since rounding chooses others where few are chosen of many."""
    config = preset("nano").replace(num_experts=6, init_std=0.1)
    model = new_model(config, dtype=torch.bfloat16, device="cuda", seed=1)
    tokens = torch.arange(rows, device="cuda") * 977 % config.vocab_size
    with torch.no_grad():
        without, tapped = hidden(model, tokens), hidden(model, tokens, keep)
    assert (without - tapped).float().norm() <= 0.1 * tapped.float().norm()


class Through(TorchDispatchMode):
    """Somebody looks on, so that every op goes through torch."""

    def __init__(self):
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops += func.namespace == "rille"
        return func(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [[700, 5, 300], [64, 1, 130]])
def test_ops_without_the_dispatcher_have_its_bits(lengths):
    model = new_model(preset("nano").replace(init_std=0.1), dtype=torch.bfloat16, device="cuda", seed=1)
    tokens = torch.arange(sum(lengths), device="cuda") * 977 % model.config.vocab_size
    found = []
    for looks_on in (Through(), nullcontext()):
        memory = model.new_memory(len(lengths))
        with torch.no_grad(), looks_on:
            whole = model.hidden(tokens, packing=Packing.of(lengths, device="cuda"), memory=memory)
            more = model.hidden(tokens[: 20 * len(lengths)], packing=memory.packing([20] * len(lengths)), memory=memory)
        states = [memory.state(b.layer).pool for b in model.blocks() if isinstance(b.attn, KDA)]
        ops = looks_on.ops if isinstance(looks_on, Through) else 0
        found.append((whole, more, *states))
        assert ops > 100 or not isinstance(looks_on, Through)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
