"""A forward call without gradients takes fewer launches: its values are those of the same call op by op, as it runs
where somebody taps the tensors in between."""

import pytest
import torch

from rille.model.context import Context, no_tap
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
