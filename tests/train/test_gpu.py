"""Training on a card: one wait a step, and a resume that is bit-equal. `nano` with fewer layers and experts.

A kernel that adds in no fixed order shows in no figure of a table, but in the last bit of a loss some steps later.
"""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rille.data.config import DataConfig
from rille.model.context import Context
from rille.model.model import new_model
from rille.model.presets import preset
from rille.optim.config import OptimConfig
from rille.packing import Packing
from rille.train import loop
from rille.train.config import TrainConfig
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain
from tests.train.small import VOCABULARY, small_run

MODEL = preset("nano").replace(vocab_size=VOCABULARY, num_layers=5, mla_layers=(3,), num_experts=16)


# Functions in each document: sequences of 30 to 1024 tokens as they come; or long ones cut into one length, where
# an op may choose another kernel.
TEXTS = {"mixed": [300, 1, 40, 2, 150, 5, 700, 3, 80, 20], "one length": [8_000, 200]}


def documents(folder: Path, sizes: list[int]) -> Path:
    folder.mkdir()
    for number, size in enumerate(sizes):
        lines = [f"def power_{number}_{n}(x):\n    return x ** {n}\n\n" for n in range(size)]
        (folder / f"{number:02}.py").write_text("".join(lines), encoding="utf-8")
    return folder


def config(tmp_path: Path, text: str, **changes) -> TrainConfig:
    files = documents(tmp_path / "text", TEXTS[text])
    return TrainConfig(
        out=str(tmp_path / "run"),
        steps=6,
        eval_every=3,
        checkpoint_every=3,
        device="cuda",
        dtype="bfloat16",
        accumulate=2,
        save_in_background=True,
        data=DataConfig(path=str(files), held_out=0.1, vocab_size=VOCABULARY, sequence_length=1024, batch_tokens=4096),
        optim=OptimConfig(rule="muon", lr=1e-3),
        model=MODEL,
        **changes,
    )


@pytest.mark.gpu
def test_the_host_waits_once_a_step(tmp_path):
    run = small_run(
        tmp_path, **{name: value for name, value in vars(config(tmp_path, "mixed")).items() if name != "out"}
    )
    for _ in range(2):  # the first one compiles
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            batches = loop.next_batches(run)
            work = loop.forward_backward(run, batches)
            loop.reduce(run, work)
            loop.update(run, work)
            torch.cuda.set_sync_debug_mode("default")
    waits = [str(w.filename) + ":" + str(w.lineno) for w in caught if "synchroniz" in str(w.message)]
    assert len(waits) == 1 and "readings.py" in waits[0], waits


@pytest.mark.gpu
@pytest.mark.parametrize(("text", "rule"), [("mixed", "muon"), ("one length", "adamw")])
def test_resume_is_bit_equal(tmp_path, text, rule):
    steady = OptimConfig(rule=rule, lr=1e-3, schedule="constant", warmup_fraction=0.0)  # whatever `steps` is
    whole = replace(config(tmp_path, text), optim=steady)
    broken = replace(whole, out=str(tmp_path / "broken"))
    pretrain(whole)
    pretrain(replace(broken, steps=3))
    pretrain(replace(broken, resume=True))
    rows = [
        [{**row, **dict.fromkeys(MACHINE, 0)} for row in read_metrics(Path(run.out) / "metrics.jsonl")]
        for run in (whole, broken)
    ]
    assert len(rows[0]) == 6
    for row, other in zip(*rows, strict=True):
        assert [name for name in row if row[name] != other.get(name)] == [], row["step"]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [(1,), (70, 300), (2048,)])
def test_fp32_runs_both_ways(lengths):
    """Rows of fp32 take twice the shared memory of bf16; beside the blocked forms of the CPU. Every expert is chosen,
    since rounding would choose others where few are. KDA's operands are bf16 here too. The loss is along a direction of
    its own: the square of what is normed hardly changes, and its gradients are what rounding leaves."""
    config = MODEL.replace(num_experts=4, active_experts=4, num_layers=4)
    gradients = {}
    here = new_model(config, seed=2)
    there = new_model(config, seed=2, device="cuda")
    there.load_state_dict(here.state_dict())
    tokens = torch.arange(sum(lengths)) * 977 % config.vocab_size
    for model in (here, there):
        packing = Packing.of(lengths, device=model.device)
        hidden_ND = model(tokens.to(model.device), Context(packing))
        direction_ND = torch.sin(torch.arange(hidden_ND.numel()) * 0.7).view(hidden_ND.shape)
        (hidden_ND * direction_ND.to(model.device)).mean().backward()
        gradients[model] = {name: x.grad.cpu() for name, x in model.named_parameters() if x.grad is not None}
    assert gradients[here].keys() == gradients[there].keys()
    for name, expected in gradients[here].items():
        assert (gradients[there][name] - expected).norm() <= 0.05 * expected.norm() + 1e-6, name
