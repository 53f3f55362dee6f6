"""The guard: a bad step touches nothing and is counted, too many end the run, a resume remembers."""

from dataclasses import replace

import pytest
import torch

from rille.train import loop
from rille.train.checkpoint import _optimizer_states
from rille.train.guard import FEWEST, Guard, GuardConfig
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from rille.train.stopping import Diverged, Interrupted
from tests.train.small import small_config, small_run


def test_what_is_a_fault():
    guard = Guard(GuardConfig(spike=0.5, window=FEWEST))
    assert guard.fault(1, float("nan"), 1.0) and guard.fault(2, 1.0, float("inf"))
    for step in range(3, 3 + FEWEST):
        assert guard.fault(step, 9.0 if step == 3 else 2.0, 1.0) is None  # too few losses to tell a spike
    assert guard.fault(30, 2.6, 1.0) == "loss 2.600 after a median of 2.000"
    assert guard.fault(31, 2.5, 1.0) is None
    assert guard.total == 3
    without = Guard(GuardConfig(spike=None))
    for step in range(100):
        assert without.fault(step, 1.0, 1.0) is None
    assert without.fault(100, 1e9, 1e9) is None


def test_the_limit_is_of_the_window():
    guard = Guard(GuardConfig(window=20, limit=2))
    for step in (1, 10, 22, 40, 43):
        assert guard.fault(step, float("nan"), 1.0) and not guard.exhausted
    assert guard.fault(44, float("nan"), 1.0) and guard.exhausted
    assert guard.total == 6


@pytest.mark.parametrize("change", [{"spike": 0.0}, {"window": FEWEST - 1}, {"limit": -1}, {"spike": float("nan")}])
def test_settings_out_of_range(change):
    with pytest.raises(ValueError, match=rf"guard\.{next(iter(change))}"):
        GuardConfig(**change)


def poisoned(monkeypatch, *steps: int):
    """Gradients of these steps hold a NaN."""
    real = loop.reduce

    def reduce(run, work):
        real(run, work)
        if run.step + 1 in steps:
            run.model.norm.grad[3] = torch.nan

    monkeypatch.setattr(loop, "reduce", reduce)


def test_a_skipped_step_touches_nothing(tmp_path, monkeypatch):
    run = small_run(tmp_path)
    poisoned(monkeypatch, 2)
    for number in (1, 2):
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        states = {(name, key): x.clone() for name, s in _optimizer_states(run.optimizer) for key, x in s.items()}
        work = loop.forward_backward(run, loop.next_batches(run))
        loop.reduce(run, work)
        loop.update(run, work)
        same = all(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
        assert same == (number == 2)
    now = {(name, key): x for name, s in _optimizer_states(run.optimizer) for key, x in s.items()}
    assert now.keys() == states.keys() and all(torch.equal(now[key], states[key]) for key in now)
    assert run.step == 2 and run.guard.total == 1
    assert all(p.grad is None for p in run.model.parameters())


def test_a_run_goes_on_after_bad_steps_and_resumes_bit_equal(tmp_path, monkeypatch, capsys):
    poisoned(monkeypatch, 2, 3, 7)
    whole = small_config(tmp_path, steps=8, checkpoint_every=4, guard=GuardConfig(limit=3))
    pretrain(whole)
    assert "step 3 is passed over: loss" in capsys.readouterr().out
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["skipped_steps"] for row in rows] == [0, 1, 2, 2, 2, 2, 3, 3]
    assert rows[1]["gradient_norm"] is None and rows[1]["loss"] is not None
    short = replace(whole, out=str(tmp_path / "short"))
    for again in range(8):
        try:
            pretrain(replace(short, max_minutes=1e-9, resume=again > 0))
        except Interrupted:
            continue
    theirs = read_metrics(tmp_path / "short" / "metrics.jsonl")
    assert [{**row, **dict.fromkeys(MACHINE, 0)} for row in theirs] == [
        {**row, **dict.fromkeys(MACHINE, 0)} for row in rows
    ]


def test_too_many_end_the_run_even_across_a_resume(tmp_path, monkeypatch):
    poisoned(monkeypatch, 2, 6)
    config = small_config(tmp_path, steps=8, checkpoint_every=4, guard=GuardConfig(limit=1))
    message = r"step 6: loss .*, gradient norm nan; 2 of the last 128 steps could not be used.*Lower optim\.lr"
    with pytest.raises(Diverged, match=message):
        pretrain(config)
    with pytest.raises(Diverged, match=message):
        pretrain(replace(config, resume=True))
    pretrain(replace(config, resume=True, guard=GuardConfig(limit=2)))
