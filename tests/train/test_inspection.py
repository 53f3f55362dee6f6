"""What is seen inside the model: right numbers, and a run that is the same whether somebody looks or not."""

import json
from dataclasses import replace
from math import sqrt

import pytest
import torch

from rille.model.balance import Counts
from rille.model.names import parameter_table
from rille.model.plan import training_flops
from rille.model.presets import preset
from rille.train import loop
from rille.train.checkpoint import weights
from rille.train.inspection import INSPECTIONS, as_numbers, inspect, watching
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from rille.train.speed import StepFlops, peak_flops, peak_memory
from tests.train.small import small_config, small_run


@pytest.fixture
def run(tmp_path):
    run = small_run(tmp_path)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in run.model.named_parameters():
            if name.endswith("query"):
                p.normal_()
    return run


def test_sites_show_what_they_read(run):
    """The output of a site is the mixture of its sources with the weights of each token; their mean is shown."""
    batch = run.held_out()[0]
    look = inspect(run.model, batch, Counts())
    c = run.model.config
    assert set(look["attn_res"]) == {
        "layers.0.ffn_mix",  # the embedding was closed as a block of its own
        *(f"layers.{i}.{site}" for i in (1, 2) for site in ("attn_mix", "ffn_mix")),
        "output_mix",
    }
    assert len(look["attn_res"]["output_mix"]) == 1 + -(-c.num_layers // c.block_layers)
    for weights_R in look["attn_res"].values():
        assert sum(weights_R) == pytest.approx(1, abs=1e-5) and min(weights_R) > 0
        assert max(weights_R) - min(weights_R) > 1e-3
    numbers = as_numbers(look)
    assert list(numbers)[-3:] == [f"attn_res/output_mix/{source}" for source in ("embedding", "block_1", "running_sum")]
    assert [numbers[name] for name in list(numbers)[-3:]] == look["attn_res"]["output_mix"]
    assert len(numbers) == len(look["output_rms"]) + sum(map(len, look["attn_res"].values()))


def test_output_sizes_are_those_of_the_trace(run):
    batch = run.held_out()[0]
    look = inspect(run.model, batch, Counts())
    lengths = list(batch.lengths)
    first = run.model.trace(batch.tokens[: lengths[0]])
    assert set(look["output_rms"]) == {f"layers.{i}.{part}" for i in range(3) for part in ("attn", "mlp")}
    rest = [run.model.trace(part) for part in batch.tokens.split(lengths)[1:]]
    for name, size in look["output_rms"].items():
        rows = torch.cat([trace[f"{name}_out"] for trace in (first, *rest)])
        assert size == pytest.approx(float(rows.square().mean().sqrt()), rel=1e-4)


def test_standard_residuals_have_no_sites(tmp_path):
    run = small_run(tmp_path, model=small_config(tmp_path).model.replace(residual="standard"))
    look = inspect(run.model, run.held_out()[0], Counts())
    assert look["attn_res"] == {} and len(look["output_rms"]) == 6


def test_nobody_watches_after_an_error(run):
    with pytest.raises(RuntimeError, match="broken"), watching(run.model):
        raise RuntimeError("broken")
    assert not any(module._forward_hooks for module in run.model.modules())


def test_looking_changes_nothing(tmp_path):
    config = small_config(tmp_path, steps=6, eval_every=2)
    pretrain(config)
    pretrain(replace(config, out=str(tmp_path / "blind"), eval_every=6))
    seen, blind = (read_metrics(tmp_path / name / "metrics.jsonl") for name in ("run", "blind"))
    common = set(blind[0]) - set(MACHINE)
    assert all(a[key] == b[key] for a, b in zip(seen, blind, strict=True) for key in common)
    looks = [json.loads(line) for line in (tmp_path / "run" / INSPECTIONS).read_text().splitlines()]
    assert [row["step"] for row in looks] == [2, 4, 6]
    assert all(sum(load) == 128 * 2 for row in looks for load in row["expert_load"].values())


def test_norms_by_kind_make_the_whole(run):
    batches = loop.next_batches(run)
    work = loop.forward_backward(run, batches)
    loop.reduce(run, work)
    before = {name: w.detach().clone() for name, w in weights(run).items()}
    gradients = {name: p.grad.clone() for name, p in run.model.named_parameters() if p.grad is not None}
    run.step = run.config.eval_every - 1
    loop.update(run, work)
    by_kind = {k: v for k, v in work.values.items() if k.startswith("gradient_norm/")}
    kinds = {entry.parameter: entry.kind for entry in parameter_table(run.model.config)}
    assert set(by_kind) == {f"gradient_norm/{kind}" for kind in kinds.values()}
    assert sqrt(sum(v * v for v in by_kind.values())) == pytest.approx(work.values["gradient_norm"], rel=1e-5)
    moved = {name: weights(run)[name].detach() - w for name, w in before.items()}
    updates = work.updates.norms()
    for kind in set(kinds.values()):
        mine = [g.square().sum() for name, g in gradients.items() if kinds[name] == kind]
        assert by_kind[f"gradient_norm/{kind}"] == pytest.approx(float(torch.stack(mine).sum().sqrt()), rel=1e-5)
        mine = [d.square().sum() for n, d in moved.items() if kinds[n] == kind and not n.endswith("router_bias")]
        assert float(updates[f"update_norm/{kind}"]) == pytest.approx(float(torch.stack(mine).sum().sqrt()), rel=1e-5)


@pytest.mark.parametrize("name", ["tiny", "nano", "kimi-linear-48b"])
def test_flops_of_packed_sequences(name):
    c, flops = preset(name), StepFlops(preset(name))
    for n in (1, 17, 4096):
        assert flops([n]) == pytest.approx(n * training_flops(c, n), rel=1e-6)
    assert flops([5, 0, 300]) == pytest.approx(flops([5]) + flops([300]))
    assert flops([600]) > flops([300, 300])


def test_what_the_machine_says():
    cpu = torch.device("cpu")
    assert peak_flops(cpu) is None
    assert 0.05 < peak_memory(cpu) < 1000
