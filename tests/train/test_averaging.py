"""The running mean of the weights: the formula, its own checkpoint and model, and weights that nobody else sees."""

import shutil
from dataclasses import replace

import pytest
import torch

from rille.model.checkpoint import load_model
from rille.train import loop
from rille.train.checkpoint import weights
from rille.train.losses import mean_loss
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from tests.train.small import small_config, small_run


def steps(run, count: int):
    for _ in range(count):
        work = loop.forward_backward(run, loop.next_batches(run))
        loop.reduce(run, work)
        loop.update(run, work)
        yield {name: w.detach().double() for name, w in weights(run).items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_formula(tmp_path, dtype):
    run = small_run(tmp_path, ema=0.3, dtype=dtype)
    mean = {name: w.detach().double() for name, w in weights(run).items()}
    for t, now in enumerate(steps(run, 6), 1):
        d = min(0.3, t / (t + 9))
        mean = {name: d * mean[name] + (1 - d) * now[name] for name in mean}
    assert run.average is not None
    assert set(dict(run.average.named())) == set(mean)
    for name, value in run.average.named():
        torch.testing.assert_close(value.double(), mean[name], rtol=1e-5, atol=1e-7)


def test_worn_weights_come_off_again(tmp_path):
    run = small_run(tmp_path, ema=0.9)
    list(steps(run, 3))
    own = {name: p.detach().clone() for name, p in run.model.named_parameters()}
    before = mean_loss(run.model, run.held_out())
    assert run.average is not None
    with pytest.raises(RuntimeError, match="in between"), run.average.worn_by(run.model):
        assert mean_loss(run.model, run.held_out()) != before
        raise RuntimeError("in between")
    assert all(torch.equal(p, own[name]) for name, p in run.model.named_parameters())
    assert mean_loss(run.model, run.held_out()) == before


def test_resume_and_the_finished_mean(tmp_path):
    whole = small_config(tmp_path, steps=4, checkpoint_every=2, eval_every=2, ema=0.5)
    pretrain(whole)
    pretrain(replace(whole, ema=None, out=str(tmp_path / "plain")))
    rows, plain = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "plain"))
    assert all("held_out_loss_ema" in row for row in rows[1::2])
    for row in rows:
        row.pop("held_out_loss_ema", None)
    assert [{**r, **dict.fromkeys(MACHINE, 0)} for r in rows] == [{**r, **dict.fromkeys(MACHINE, 0)} for r in plain]
    mean = load_model(tmp_path / "run" / "model-ema", dtype=torch.float32)
    final = load_model(tmp_path / "run" / "model", dtype=torch.float32)
    assert not torch.equal(mean.embed, final.embed)
    for gone in ("model-ema", "checkpoints/step-000004"):
        shutil.rmtree(tmp_path / "run" / gone)
    pretrain(replace(whole, resume=True))
    again = load_model(tmp_path / "run" / "model-ema", dtype=torch.float32)
    assert all(torch.equal(p, dict(mean.named_parameters())[name]) for name, p in again.named_parameters())
