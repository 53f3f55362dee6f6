"""Checkpoints of a run: what is in them, which are kept, that a save that fails leaves the old ones whole."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rille.model.checkpoint import load_model
from rille.model.locate import find_checkpoint, step_checkpoints
from rille.text.tokenizer import load_tokenizer
from rille.train import loop
from rille.train.checkpoint import read_numbers, remove_unfinished, restore, save_checkpoint
from rille.train.pretrain import pretrain
from tests.train.small import largest_file, small_config, small_run


def one_step(run) -> None:
    work = loop.forward_backward(run, loop.next_batches(run))
    loop.reduce(run, work)
    loop.update(run, work)


def test_anything_can_load_it(tmp_path):
    run = small_run(tmp_path)
    one_step(run)
    path = save_checkpoint(run)
    assert path.name == "step-000001"
    loaded = load_model(path)
    for (name, there), (_, here) in zip(loaded.named_parameters(), run.model.named_parameters(), strict=True):
        stored = here if name.endswith(("A_log", "dt_bias", "qkv_conv", "out_norm", "router_bias")) else here.bfloat16()
        assert torch.equal(there, stored.float()), name
    assert loaded.config.bos_id == loaded.config.eos_id == run.tokenizer.eos_id
    assert load_tokenizer(path).encode("def f(x):") == run.tokenizer.encode("def f(x):")
    numbers = read_numbers(path)
    assert numbers["step"] == 1 and numbers["settings"]["model.hidden_size"] == 32


def test_restore_brings_back_everything(tmp_path):
    run = small_run(tmp_path)
    one_step(run)
    path = save_checkpoint(run)
    fresh = small_run(tmp_path)
    restore(fresh, path)
    assert fresh.step == 1 and fresh.loader.state() == run.loader.state()
    one_step(run)
    one_step(fresh)
    for (name, one), (_, other) in zip(run.model.named_parameters(), fresh.model.named_parameters(), strict=True):
        assert torch.equal(one, other), name


def test_a_model_without_training_state_cannot_be_resumed(tmp_path):
    run = small_run(tmp_path)
    path = save_checkpoint(run)
    (path / "training" / "state.json").unlink()
    with pytest.raises(ValueError, match="has no .*: it holds a model, not a run"):
        restore(run, path)


@pytest.mark.parametrize("name", ["state.json", "state.safetensors"])
def test_damage_is_named(tmp_path, name):
    run = small_run(tmp_path)
    path = save_checkpoint(run)
    file = path / "training" / name
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{name} is damaged .*; remove .*step-000000 to go on"):
        restore(run, path)


def test_weights_that_are_gone_are_named(tmp_path):
    run = small_run(tmp_path)
    path = save_checkpoint(run)
    (path / "training" / "state.safetensors").unlink()
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged .*; remove .*step-000000 to go on"):
        restore(run, path)


def test_the_newest_are_kept(tmp_path):
    run = small_run(tmp_path, keep=2)
    for run.step in (1, 2, 3, 1000000):
        save_checkpoint(run)
    kept = step_checkpoints(tmp_path / "run")
    assert [step for step, _ in kept] == [3, 1000000]
    assert find_checkpoint(tmp_path / "run") == kept[-1][1]


def test_what_a_killed_save_left_is_removed(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    save_checkpoint(run)
    folder = tmp_path / "run" / "checkpoints"
    monkeypatch.setattr("rille.model.publish.shutil.rmtree", lambda *_, **__: None)  # as if killed: nothing tidies up
    monkeypatch.setattr("rille.model.checkpoint._write_shards", lambda *_: 1 / 0)
    run.step = 5
    with pytest.raises(ZeroDivisionError):
        save_checkpoint(run)
    monkeypatch.undo()
    assert len(list(folder.iterdir())) == 3  # the run's partial directory, and the model's partial beside it
    remove_unfinished(tmp_path / "run")
    assert [path.name for path in folder.iterdir()] == ["step-000000"]


@pytest.mark.parametrize(
    "content", ["{}", "[]", '{"step": 1, "loader": {}}', '{"step": "1", "loader": {}, "settings": {}}']
)
def test_numbers_of_another_form_are_named(tmp_path, content):
    run = small_run(tmp_path)
    path = save_checkpoint(run)
    (path / "training" / "state.json").write_text(content)
    with pytest.raises(ValueError, match=r"state\.json is damaged \(it must hold step, loader, settings\); remove "):
        restore(run, path)


def test_tensors_that_do_not_fit_the_model_are_named(tmp_path):
    run = small_run(tmp_path)
    path = save_checkpoint(run)
    file = path / "training" / "state.safetensors"
    tensors = load_file(file)
    del tensors["random"]
    tensors["model.norm"] = torch.ones(5)
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"damaged \(absent or of another shape: model\.norm, random\); remove "):
        restore(run, path)


def test_a_checkpoint_of_before_a_setting_was_added_resumes(tmp_path):
    config = small_config(tmp_path, steps=4, checkpoint_every=2)
    pretrain(replace(config, steps=2))
    file = tmp_path / "run" / "checkpoints" / "step-000002" / "training" / "state.json"
    numbers = json.loads(file.read_text())
    for name in ("mtp_weight", "optim.qk_clip", "optim.momentum", "model.mtp_layers", "data.held_out"):
        del numbers["settings"][name]
    file.write_text(json.dumps(numbers))
    with pytest.raises(ValueError, match=r"other settings: data\.held_out 0\.02, now 0\.1\. Resume"):
        pretrain(replace(config, resume=True))
    numbers["settings"]["data.held_out"] = 0.1
    file.write_text(json.dumps(numbers))
    pretrain(replace(config, resume=True))
    assert [step for step, _ in step_checkpoints(tmp_path / "run")] == [2, 4]


@pytest.mark.parametrize("size", [100, 2_000, 40_000, 200_000])
def test_a_save_that_fails_leaves_the_old_one_whole(tmp_path, size):
    run = small_run(tmp_path)
    first = save_checkpoint(run)
    before = {file: file.read_bytes() for file in first.rglob("*") if file.is_file()}
    assert max(len(content) for content in before.values()) > size
    run.step = 7
    with largest_file(size), pytest.raises(OSError):
        save_checkpoint(run)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-000000"]
    assert {file: file.read_bytes() for file in first.rglob("*") if file.is_file()} == before
    assert json.loads((first / "config.json").read_text())
