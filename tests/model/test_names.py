"""The parameter table: exact counts of the presets, and a module parameter for every row of it."""

import pytest
import torch

from rille.model.model import K3, new_model
from rille.model.names import count_parameters, padded_heads, parameter_table
from rille.model.presets import PRESETS, preset

COUNTS = {  # text, active: design of the presets and, for k3, the report and the released tensors
    "nano": (1_040_214_180, 77_260_964),
    "nano-160k": (1_023_109_284, 144_517_284),
    "mini": (3_055_505_032, 295_128_712),
    "k3": (2_779_484_476_000, 104_189_612_640),
}


@pytest.mark.parametrize(("name", "counts"), COUNTS.items())
def test_exact_counts(name, counts):
    counted = count_parameters(preset(name))
    assert (counted.text, counted.active) == counts
    assert counted.total == counted.text + (447_358_976 if name == "k3" else 0)


def test_the_whole_release():
    counted = count_parameters(preset("k3"))
    assert (counted.total, counted.vision) == (2_779_931_834_976, 401_214_464 + 46_144_512)


def test_tiny_is_tiny_and_kimi_linear_is_48b():
    assert count_parameters(preset("tiny")).total <= 1_500_000
    assert round(count_parameters(preset("kimi-linear-48b")).total / 1e9) == 49


WITH_MTP = preset("tiny").replace(mtp_layers=2)


@pytest.mark.parametrize("c", [*PRESETS.values(), WITH_MTP], ids=[*PRESETS, "tiny with MTP"])
def test_the_module_has_what_the_table_says(c):
    model = K3(c, dtype=torch.bfloat16, device="meta")
    table, parameters = parameter_table(c), dict(model.named_parameters())
    assert {entry.parameter for entry in table} == set(parameters)
    numbers = dict.fromkeys(parameters, 0)
    for entry in table:
        numbers[entry.parameter] += entry.count
        parameter = parameters[entry.parameter]
        assert parameter.dtype == (torch.float32 if entry.storage == "f32" else torch.bfloat16), entry
    for parameter, count in numbers.items():
        padding = padded_heads(c) - c.kda_heads if parameter.endswith("A_log") else 0
        assert parameters[parameter].numel() == count + padding, parameter


def test_official_names_are_unique():
    names = [name for entry in parameter_table(preset("tiny")) for _, name in entry.official_names()]
    assert len(names) == len(set(names))


def test_same_seed_same_model():
    a, b, c = (new_model(preset("tiny"), seed=seed) for seed in (0, 0, 1))
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(a.embed, c.embed)
    assert all(torch.isfinite(p).all() for p in a.parameters())
