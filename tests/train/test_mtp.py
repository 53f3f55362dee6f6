"""Multi-token prediction in a training run: loss, gradients, balance, metric, checkpoint, resume."""

import json
from dataclasses import replace
from math import log

import pytest
import torch

from rille.model.checkpoint import load_model
from rille.model.context import Context
from rille.model.mtp import mtp_loss
from rille.ops.cross_entropy import linear_cross_entropy
from rille.optim.config import OptimConfig
from rille.packing import Packing
from rille.train import loop
from rille.train.losses import mean_loss
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from tests.train.small import MODEL, small_config, small_run

WEIGHT = 0.3
AHEAD = dict(model=MODEL.replace(mtp_layers=1), mtp_weight=WEIGHT)


def gradients(run) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("layers", [1, 2])
def test_gradient_is_that_of_the_weighted_sum(tmp_path, layers):
    """(1 / targets) (sum of losses + w / K * sums of the layers'), over both batches of a step."""
    run = small_run(tmp_path, accumulate=2, model=MODEL.replace(mtp_layers=layers), mtp_weight=WEIGHT)
    batches = loop.next_batches(run)
    batches[1].targets[:100] = -100  # 128 and 28 targets
    work = loop.forward_backward(run, batches)
    loop.reduce(run, work)
    ours = gradients(run)
    run.optimizer.zero_grad()

    total, further, rows = torch.zeros(()), torch.zeros(()), 0
    for batch in batches:
        packing = Packing.of(batch.lengths)
        hidden = run.model(batch.tokens, Context(packing))
        total = total + linear_cross_entropy(hidden, run.model.head_weight, batch.targets).loss_sum
        for result in mtp_loss(run.model, hidden, batch.tokens, batch.targets, packing):
            further, rows = further + result.loss_sum, rows + int(result.count)
    ((total + WEIGHT / layers * further) / 156).backward()
    expected = gradients(run)
    assert ours.keys() == expected.keys() and any(name.startswith(f"mtp.{layers - 1}.") for name in ours)
    for name, gradient in expected.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=1e-7, msg=name)
    assert work.targets == 156 and 0 < work.mtp_targets == rows < layers * 156
    assert float(work.loss) == pytest.approx(float(total.detach()) / 156, rel=1e-6)
    assert float(work.mtp_loss) == pytest.approx(float(further.detach()) / rows, rel=1e-6)


def test_the_trunk_learns_from_the_layer_in_proportion_to_the_weight(tmp_path):
    trunk = {}
    for weight in (0.25, 0.5, 1.0):
        run = small_run(tmp_path, model=AHEAD["model"], mtp_weight=weight)
        loop.forward_backward(run, loop.next_batches(run))
        trunk[weight] = run.model.layers["2"].attn.out_proj.grad
    assert (trunk[0.5] - trunk[0.25]).abs().max() > 1e-3 * trunk[0.25].abs().max()
    torch.testing.assert_close(trunk[1.0] - trunk[0.5], 2 * (trunk[0.5] - trunk[0.25]), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("balance", "moves"), [("quantile", True), ("sign", True), ("none", False)])
def test_the_layer_s_experts_are_balanced(tmp_path, balance, moves):
    run = small_run(tmp_path, model=AHEAD["model"].replace(balance=balance), mtp_weight=WEIGHT)
    (batch,) = batches = loop.next_batches(run)
    work = loop.forward_backward(run, batches)
    assert set(work.counts.load) == set(run.model.router_biases()) == {1, 2, 3}
    assert int(work.counts.load[3].sum()) == 2 * (128 - len([n for n in batch.lengths if n]))
    loop.reduce(run, work)
    loop.update(run, work)
    bias_E = run.model.router_biases()[3]
    assert bool(bias_E.any()) == moves and bias_E.grad is None


@torch.no_grad()
def test_loud_heads_of_the_layer_are_clipped(tmp_path):
    run = small_run(tmp_path, optim=OptimConfig(lr=1e-9, qk_clip=0.5), **AHEAD)
    attention = run.model.mtp[0].block.attn
    attention.q_up[24:] *= 1e3
    before = attention.q_up.clone()
    with torch.enable_grad():
        work = loop.forward_backward(run, loop.next_batches(run))
    quiet, loud = work.counts.largest[3].tolist()
    assert quiet < 0.5 < loud
    loop.reduce(run, work)
    loop.update(run, work)
    torch.testing.assert_close(attention.q_up[:24], before[:24], rtol=1e-6, atol=1e-7)
    assert attention.q_up[24:].abs().max() < 0.9 * before[24:].abs().max()


@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_a_run_learns_records_saves_and_resumes_to_the_bit(tmp_path, rule):
    whole = small_config(tmp_path, optim=OptimConfig(lr=3e-3, rule=rule), **AHEAD)
    pretrain(whole)
    rows = [{**row, **dict.fromkeys(MACHINE, 0)} for row in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    assert rows[0]["mtp_loss"] == pytest.approx(log(320), abs=0.1)
    assert rows[-1]["mtp_loss"] < rows[0]["mtp_loss"] - 0.5

    parts = replace(whole, out=str(tmp_path / "parts"), steps=20, checkpoint_every=7)
    with pytest.MonkeyPatch.context() as patch:
        real = loop.log
        patch.setattr(loop, "log", lambda run, work: (real(run, work), 1 / (run.step != 9)))
        with pytest.raises(ZeroDivisionError):
            pretrain(parts)
    pretrain(replace(parts, resume=True))
    assert [{**row, **dict.fromkeys(MACHINE, 0)} for row in read_metrics(tmp_path / "parts" / "metrics.jsonl")] == rows
    for name in ("model/model-00001-of-000001.safetensors", "checkpoints/step-000020/training/state.safetensors"):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()

    official = json.loads((tmp_path / "run" / "model" / "config.json").read_text())
    assert official["text_config"]["num_nextn_predict_layers"] == 1
    loaded = load_model(tmp_path / "run" / "model")
    guesses, _ = loaded.draft(loaded.hidden(torch.arange(5)), torch.arange(1, 6), count=2)
    assert guesses.shape == (1, 2)


def test_the_held_out_loss_is_the_next_token_s(tmp_path):
    run, plain = small_run(tmp_path, **AHEAD), small_run(tmp_path)
    own = dict(run.model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.model.named_parameters():
            parameter.copy_(own[name])
    assert mean_loss(run.model, run.held_out()) == mean_loss(plain.model, plain.held_out())


def test_without_layers_nothing_is_recorded(tmp_path):
    pretrain(small_config(tmp_path, steps=1))
    assert "mtp_loss" not in read_metrics(tmp_path / "run" / "metrics.jsonl")[0]


def test_what_is_refused(tmp_path):
    with pytest.raises(
        ValueError, match=r"mtp_weight is 0\.3, but the model has no MTP layer; give --model\.mtp-layers 1"
    ):
        small_config(tmp_path, mtp_weight=0.3)
    with pytest.raises(ValueError, match=r"model\.mtp_layers is 1 and mtp_weight 0.*; give --mtp-weight 0\.3, or"):
        small_config(tmp_path, model=AHEAD["model"])
    for weight in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=rf"mtp_weight is {weight}; it must be a number of at least 0"):
            small_config(tmp_path, model=AHEAD["model"], mtp_weight=weight)
