"""The parameter table: exact counts of the presets, and a module parameter for every row of it."""

import pytest
import torch

from rille.model.model import K3, new_model
from rille.model.names import count_parameters, padded_heads, parameter_table
from rille.model.presets import PRESETS, preset

COUNTS = {  # total, active: design of the presets and, for k3, the report and the released tensors
    "nano": (1_040_214_180, 77_260_964),
    "nano-160k": (1_023_109_284, 144_517_284),
    "mini": (3_055_505_032, 295_128_712),
    "k3": (2_779_484_476_000, 104_189_612_640),
}


@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_exact_counts(name, counts):
    counted = count_parameters(preset(name))
    assert (counted.total, counted.active) == counts


def test_tiny_is_tiny_and_kimi_linear_is_48b():
    assert count_parameters(preset("tiny")).total <= 1_500_000
    assert round(count_parameters(preset("kimi-linear-48b")).total / 1e9) == 49


@pytest.mark.parametrize("name", [*PRESETS])
def test_the_module_has_what_the_table_says(name):
    c = preset(name)
    model = K3(c, dtype=torch.bfloat16, device="meta")
    table = [entry for entry in parameter_table(c) if not entry.official.startswith(("vision_tower.", "mm_projector."))]
    text = {n: p for n, p in model.named_parameters() if not n.startswith("vision.")}
    assert {entry.parameter for entry in table} == set(text)
    numbers = dict.fromkeys(text, 0)
    for entry in table:
        numbers[entry.parameter] += entry.count
        parameter = text[entry.parameter]
        assert parameter.dtype == (torch.float32 if entry.storage == "f32" else torch.bfloat16), entry
    for parameter, count in numbers.items():
        padding = padded_heads(c.kda_heads) - c.kda_heads if parameter.endswith("A_log") else 0
        assert text[parameter].numel() == count + padding, parameter


def test_official_names_are_unique():
    names = [name for entry in parameter_table(preset("tiny")) for _, name in entry.official_names()]
    assert len(names) == len(set(names))


def test_same_seed_same_model():
    a, b, c = (new_model(preset("tiny"), seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed, c.embed)
    assert all(torch.isfinite(p).all() for p in a.parameters())
