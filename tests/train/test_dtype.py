"""bf16 weights over fp32 masters: what the run holds, what its checkpoint holds, what a resume takes from it."""

from dataclasses import replace

import pytest
import torch

from rille.model.checkpoint import load_model
from rille.model.locate import find_checkpoint
from rille.model.names import parameter_table
from rille.optim.masters import Masters
from rille.train.checkpoint import _optimizer_states, read_tensors, restore, save_checkpoint
from rille.train.loop import train
from tests.train.small import small_run


@pytest.fixture
def run(tmp_path):
    run = small_run(tmp_path, dtype="bfloat16", steps=3)
    train(run)
    return run


def weights(run) -> dict[str, torch.Tensor]:
    return dict(run.model.named_parameters())


def test_weights_are_roundings_of_masters(run):
    assert isinstance(run.optimizer, Masters)
    wide = {e.parameter for e in parameter_table(run.model.config) if e.storage == "f32"}
    assert {n for n, p in weights(run).items() if p.dtype == torch.float32} == wide
    names = {id(p): n for n, p in weights(run).items()}
    between = 0
    for held, master in run.optimizer.pairs:
        assert master.dtype == torch.float32 and torch.equal(held, master.to(torch.bfloat16)), names[id(held)]
        between += int((master != held.float()).sum())
    assert between > 10_000  # steps that the rounding alone would have lost


def test_checkpoint_holds_masters_and_the_official_rounding(run, tmp_path):
    path = find_checkpoint(tmp_path / "run")
    saved = read_tensors(path)
    names = {id(p): n for n, p in weights(run).items()}
    for held, master in run.optimizer.pairs:
        assert torch.equal(saved[f"model.{names[id(held)]}"], master)
    official = dict(load_model(path, dtype=torch.bfloat16).named_parameters())
    assert all(torch.equal(official[name], p) for name, p in weights(run).items())


def test_restored_run_is_the_same(run, tmp_path):
    path = save_checkpoint(run)
    other = small_run(tmp_path, dtype="bfloat16", steps=3, seed=0)
    with torch.no_grad():
        for p in other.model.parameters():
            p.fill_(7)
    restore(other, path)
    for (held, master), (mine, twin) in zip(other.optimizer.pairs, run.optimizer.pairs, strict=True):
        assert torch.equal(held, mine) and torch.equal(master, twin)
    states = [dict(_optimizer_states(one.optimizer)) for one in (other, run)]
    assert states[0].keys() == states[1].keys()
    for name, mine in states[1].items():
        assert states[0][name].keys() == mine.keys()
        assert all(torch.equal(states[0][name][key], mine[key]) for key in mine), name


def test_another_dtype_is_another_run(run, tmp_path):
    from rille.train.pretrain import pretrain

    with pytest.raises(ValueError, match="holds no run to resume"):
        pretrain(replace(run.config, resume=True))
    (tmp_path / "run" / "run.json").write_text("{}")
    with pytest.raises(ValueError, match="other settings: dtype bfloat16, now float32"):
        pretrain(replace(run.config, resume=True, dtype="float32"))
