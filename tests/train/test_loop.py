"""The loop: what a step computes, that a killed run continues bit for bit, that it stops in good order."""

import json
import os
import signal
from dataclasses import replace
from math import log
from pathlib import Path

import pytest
import torch

from rille.model.names import parameter_table
from rille.optim.config import OptimConfig
from rille.optim.kinds import KINDS
from rille.train import loop
from rille.train.guard import GuardConfig
from rille.train.losses import mean_loss
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from rille.train.stopping import Diverged, Interrupted
from tests.train.small import small_config, small_run


def exact(path: Path) -> list[dict]:
    """The rows without what the clock decides."""
    return [{k: v for k, v in row.items() if k not in MACHINE} for row in read_metrics(path)]


def test_loss_falls_and_rows_are_whole(tmp_path, capsys):
    config = small_config(tmp_path, steps=40)
    pretrain(config)
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 41))
    assert [row["step"] for row in rows if "held_out_loss" in row] == [10, 20, 30, 40]
    assert rows[0]["loss"] == pytest.approx(log(320), abs=0.1)  # an untrained model knows nothing
    assert rows[-1]["loss"] < rows[0]["loss"] - 1.5
    assert rows[-1]["held_out_loss"] < rows[9]["held_out_loss"]
    keys = {"step", "loss", "tokens_per_second", "learning_rate", "gradient_norm", "expert_load_violation"}
    keys |= {f"{what}/{layer}" for what in ("load_violation", "dead_experts") for layer in (1, 2)}
    keys |= {f"gradient_norm/{kind}" for kind in KINDS} | {"memory_gib", "epochs/all", "skipped_steps", "targets"}
    assert set(rows[0]) == keys
    looks = {"held_out_loss", "update_norm", "output_rms", "attn_res"}
    assert {name.partition("/")[0] for name in set(rows[9]) - keys} == looks
    printed = capsys.readouterr().out
    for word in ("held out", "bits a byte", "unigram", "try next", f"rille generate {tmp_path / 'run'}"):
        assert word in printed


class Killed(BaseException):
    """As sudden as a kill: nothing of the package catches it."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rule", ["adamw", "muon"])
def test_resume_is_bit_equal(tmp_path, rule, dtype):
    """20 steps at once, or killed after step 13, continued from the checkpoint of step 10."""
    whole = small_config(tmp_path, optim=OptimConfig(lr=3e-3, rule=rule), dtype=dtype)
    pretrain(whole)

    broken = replace(whole, out=str(tmp_path / "broken"))
    real = loop.log

    def log_then_die(run, work):
        real(run, work)
        if run.step == 13:
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "log", log_then_die)
        with pytest.raises(Killed):
            pretrain(broken)
    assert [row["step"] for row in read_metrics(tmp_path / "broken" / "metrics.jsonl")] == list(range(1, 14))
    half_written = tmp_path / "broken" / "checkpoints" / ".step-000020.partial-7"
    half_written.mkdir()
    torch.manual_seed(99)
    pretrain(replace(broken, resume=True))

    assert exact(tmp_path / "broken" / "metrics.jsonl") == exact(tmp_path / "run" / "metrics.jsonl")
    assert not half_written.exists()
    for name in ("model/model-00001-of-000001.safetensors", "checkpoints/step-000020/training/state.safetensors"):
        assert (tmp_path / "broken" / name).read_bytes() == (tmp_path / "run" / name).read_bytes()


def test_resume_of_a_finished_run_changes_nothing(tmp_path):
    config = small_config(tmp_path, steps=3)
    pretrain(config)
    before = exact(tmp_path / "run" / "metrics.jsonl")
    pretrain(replace(config, resume=True))
    assert exact(tmp_path / "run" / "metrics.jsonl") == before


def test_resume_of_a_run_without_its_rows(tmp_path, capsys):
    config = small_config(tmp_path, steps=3)
    pretrain(config)
    (tmp_path / "run" / "metrics.jsonl").unlink()
    pretrain(replace(config, resume=True))
    assert "not known: metrics.jsonl has no rows" in capsys.readouterr().out


def test_resume_to_more_steps(tmp_path):
    config = small_config(tmp_path, steps=3)
    pretrain(config)
    pretrain(replace(config, steps=5, resume=True))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_directories_that_are_refused(tmp_path):
    config = small_config(tmp_path, steps=2)
    with pytest.raises(ValueError, match="holds no run to resume"):
        pretrain(replace(config, resume=True))
    pretrain(config)
    with pytest.raises(ValueError, match="holds a run already: add --resume"):
        pretrain(config)
    with pytest.raises(ValueError, match=r"other settings: optim\.lr 0\.003, now 0\.5"):
        pretrain(replace(config, resume=True, optim=replace(config.optim, lr=0.5)))
    wider = config.model.replace(hidden_size=64)
    with pytest.raises(ValueError, match=r"other settings: model\.hidden_size 32, now 64"):
        pretrain(replace(config, resume=True, model=wider))
    with pytest.raises(ValueError, match="is beyond the 1 steps asked for; give --steps 2 or more"):
        pretrain(replace(config, resume=True, steps=1))


def test_other_text_is_refused(tmp_path, monkeypatch):
    config = small_config(tmp_path, steps=1)
    pretrain(config)
    with pytest.raises(ValueError, match=r"other settings: data\.path .*text, now None\. Resume with the same"):
        pretrain(replace(config, resume=True, data=replace(config.data, path=None)))
    monkeypatch.chdir(tmp_path)  # another spelling of the same path is no other text
    pretrain(replace(config, resume=True, data=replace(config.data, path="text")))


def test_bad_text_leaves_no_directory(tmp_path):
    config = small_config(tmp_path)
    with pytest.raises(ValueError, match="does not exist"):
        pretrain(replace(config, data=replace(config.data, path=str(tmp_path / "absent"))))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_saves_and_ends(tmp_path, number, code):
    config = small_config(tmp_path)
    real = loop.forward_backward

    def signalled(run, batches):
        if run.step == 4:
            os.kill(os.getpid(), number)
        return real(run, batches)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "forward_backward", signalled)
        with pytest.raises(Interrupted, match="after step 5; a checkpoint is saved") as stopped:
            pretrain(config)
    assert stopped.value.exit_code == code
    assert signal.getsignal(number) in (signal.default_int_handler, signal.SIG_DFL)
    pretrain(replace(config, resume=True))
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == list(range(1, 21))


def test_a_run_that_was_given_little_time_goes_on_bit_equal(tmp_path, capsys):
    whole = small_config(tmp_path, steps=4)
    pretrain(whole)
    short = replace(whole, out=str(tmp_path / "short"))
    for step in (1, 2):
        with pytest.raises(Interrupted, match=f"its time is over, after step {step}; a checkpoint is saved") as stopped:
            pretrain(replace(short, max_minutes=1e-9, resume=step > 1))
        assert stopped.value.exit_code == 0
    pretrain(replace(short, resume=True))
    assert exact(tmp_path / "short" / "metrics.jsonl") == exact(tmp_path / "run" / "metrics.jsonl")


def test_gradient_is_the_mean_over_all_targets_of_the_step(tmp_path):
    run = small_run(tmp_path, accumulate=2)
    batches = loop.next_batches(run)
    batches[1].targets[:100] = -100  # 128 and 28 targets
    work = loop.forward_backward(run, batches)
    loop.reduce(run, work)
    assert work.targets == 156
    expected_loss = (128 * mean_loss(run.model, batches[:1]) + 28 * mean_loss(run.model, batches[1:])) / 156
    assert float(work.loss) == pytest.approx(expected_loss, rel=1e-6)
    both = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    sums = {name: torch.zeros_like(gradient) for name, gradient in both.items()}
    for batch, share in zip(batches, (128 / 156, 28 / 156), strict=True):
        run.optimizer.zero_grad()
        loop.reduce(run, loop.forward_backward(run, [batch]))
        for name, parameter in run.model.named_parameters():
            if parameter.grad is not None:
                sums[name] += share * parameter.grad
    for name, gradient in both.items():
        torch.testing.assert_close(gradient, sums[name], rtol=1e-4, atol=1e-7, msg=name)


def test_every_kind_reaches_the_optimiser_but_the_router_bias(tmp_path):
    run = small_run(tmp_path)
    named = {name for group in run.optimizer.param_groups for name in group["param_names"]}
    table = {entry.parameter for entry in parameter_table(run.model.config)}
    biases = {name for name in table if name.endswith("router_bias")}
    assert named == table - biases
    assert len(biases) == 2


@pytest.mark.parametrize(("balance", "moves"), [("quantile", True), ("sign", True), ("none", False)])
def test_router_biases_follow_the_rule(tmp_path, balance, moves):
    config = small_config(tmp_path)
    run = small_run(tmp_path, model=config.model.replace(balance=balance))
    work = loop.forward_backward(run, loop.next_batches(run))
    assert set(work.counts.load) == {1, 2}
    assert all(int(load_E.sum()) == 128 * 2 for load_E in work.counts.load.values())
    loop.reduce(run, work)
    loop.update(run, work)
    assert all(bool(bias_E.any()) == moves for bias_E in run.model.router_biases().values())
    assert all(bias_E.grad is None for bias_E in run.model.router_biases().values())
    assert not any(p.grad is not None for p in run.model.parameters())


def test_a_bias_that_sends_all_to_two_experts_is_mended_within_five_updates(tmp_path):
    """With the weights at rest. Batches of 2,000 tokens, 500 an expert: by chance the fullest of 16 in two layers is
    off by 0.12 (1.8 standard deviations, of this batch and of the one before); tokens of a text are not independent."""
    config = small_config(tmp_path)
    run = small_run(tmp_path, optim=replace(config.optim, lr=1e-12), data=replace(config.data, batch_tokens=2000))
    for bias_E in run.model.router_biases().values():
        bias_E.data.copy_(torch.linspace(-0.6, 0.6, len(bias_E)))
    seen = []
    for _ in range(6):
        work = loop.forward_backward(run, loop.next_batches(run))
        loop.reduce(run, work)
        loop.update(run, work)
        seen.append(work.values["expert_load_violation"])
    assert seen[0] == 3.0  # 8 experts, 2 of them taken by every token
    assert seen[5] < 0.25, seen


@torch.no_grad()
def test_loud_heads_are_clipped(tmp_path):
    """One head of the MLA layer is loud: after the update its logits on the same batch are at the threshold."""
    config = small_config(tmp_path)
    still = config.model.replace(balance="none")  # what reaches the layer stays the same
    run = small_run(tmp_path, model=still, optim=replace(config.optim, lr=1e-9, qk_clip=0.5))
    layer = run.model.layers["2"].attn
    layer.q_up[24:] *= 1e3
    batch = next(run.loader)
    with torch.enable_grad():
        work = loop.forward_backward(run, [batch])
    quiet, loud = work.counts.largest[2].tolist()
    assert quiet < 0.5 < loud
    loop.reduce(run, work)
    loop.update(run, work)
    with torch.enable_grad():
        after = loop.forward_backward(run, [batch]).counts.largest[2].tolist()
    assert after == pytest.approx([quiet, 0.5], rel=1e-4)


def test_divergence_is_loud_and_touches_nothing(tmp_path):
    run = small_run(tmp_path, guard=GuardConfig(limit=0))
    with torch.no_grad():
        run.model.norm[0] = torch.nan
    before = {name: p.clone() for name, p in run.model.named_parameters()}
    with pytest.raises(Diverged, match=r"step 1: loss nan.*Lower optim\.lr \(now 0\.003\)"):
        loop.train(run)
    for name, parameter in run.model.named_parameters():
        assert torch.equal(parameter, before[name]) or name == "norm"


def test_evaluation_counts_nothing_and_keeps_no_graph(tmp_path):
    run = small_run(tmp_path)
    loss = mean_loss(run.model, run.held_out())
    assert loss == pytest.approx(log(320), abs=0.1)
    assert all(p.grad is None for p in run.model.parameters())
    assert sum(sum(batch.lengths) for batch in run.held_out()) <= 256
    assert mean_loss(run.model, run.held_out()) == loss


def test_the_loop_reads_like_the_algorithm():
    """Six named calls."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(loop.train)).body[0].body[-1]
    calls = [node.func.id for node in ast.walk(body) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    assert calls == ["next_batches", "forward_backward", "reduce", "update", "log", "checkpoint"]


def test_settings_are_on_disk(tmp_path):
    config = small_config(tmp_path, steps=1)
    pretrain(config)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["optim.lr"] == 3e-3
