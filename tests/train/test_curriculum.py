"""Stages: what they mean, what they refuse, and a run through three of them that a resume repeats bit for bit."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rille.data.built import open_built
from rille.data.config import DataConfig
from rille.data.mixed_loader import MixedLoader
from rille.data.mixture import Mixture
from rille.train import loop
from rille.train.config import TrainConfig
from rille.train.curriculum import Curriculum, Stage, parse_stages
from rille.train.metrics import MACHINE, read_metrics
from rille.train.pretrain import pretrain, set_up
from rille.train.stopping import Interrupted
from tests.data.sets import build, essay
from tests.train.small import MODEL, small_config

FIRST = Stage(0, 48, 96, 1)


def test_what_is_not_named_stays():
    stages = parse_stages(FIRST, ["at=5 sequence_length=96 code=0.5 prose=1", "at=9 batch_tokens=192", "at=20 code=1"])
    shares = (("code", 0.5), ("prose", 1.0))
    assert stages == (
        FIRST,
        Stage(5, 96, 96, 1, shares),
        Stage(9, 96, 192, 1, shares),
        Stage(20, 96, 192, 1, (("code", 1.0),)),
    )


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["sequence_length=9"], "names no first step; begin with at=STEP"),
        (["at=0"], "at is 0"),
        (["at=5", "at=5 accumulate=2"], "does not begin after step 5"),
        (["at=2 batch_tokens=-1"], "batch_tokens is -1"),
        (["at=2 batch_tokens=1e3"], "batch_tokens is 1e3"),
        (["at=2 lenght=96x"], "lenght=96x .* is no share of a domain from 0 on, and no at, sequence_length"),
        (["at=2 code=nan"], "code=nan"),
        (["at=2 code"], '"code" in "at=2 code" is not NAME=VALUE'),
        (["at=30"], "the last begins at step 30, but steps is 20"),
    ],
)
def test_what_is_refused(tmp_path, texts, message):
    with pytest.raises(ValueError, match=f"stages: .*{message}"):
        small_config(tmp_path, stages=tuple(texts))


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    texts = {"low": [essay(seed) for seed in range(30)], "high": [essay(seed).upper() for seed in range(50, 70)]}
    dataset = build(tmp_path, texts, held_out=0.2)
    width = dataset.tokenizer.vocab_size
    return TrainConfig(
        out=str(tmp_path / "run"),
        steps=6,
        eval_every=3,
        eval_tokens=128,
        stages=("at=2 sequence_length=96 batch_tokens=192 high=1 low=0", "at=4 accumulate=2 high=0 low=1"),
        data=DataConfig(path=str(dataset.directory), vocab_size=width, sequence_length=48, batch_tokens=96),
        model=MODEL.replace(vocab_size=width),
    )


def test_each_stage_has_its_text(config):
    run = set_up(config, open_built(config.data))
    seen = []
    for step in range(6):
        run.step = step
        batches = loop.next_batches(run)
        domains = {run.domains[d] for batch in batches for d in batch.domains}
        longest = max(max(batch.lengths) for batch in batches)
        seen.append((sum(len(batch.tokens) for batch in batches), longest, domains))
    assert [tokens for tokens, _, _ in seen] == [96, 96, 192, 192, 384, 384]
    assert all(longest <= 48 for _, longest, _ in seen[:2]) and all(longest > 48 for _, longest, _ in seen[2:])
    assert seen[2][2] == seen[3][2] == {"high"} and seen[4][2] == seen[5][2] == {"low"}
    epochs = run.loader.epochs()
    assert set(epochs) == {"low", "high"} and all(0 < count < 1 for count in epochs.values())


def test_a_cap_of_epochs_holds_for_all_stages_together(tmp_path):
    dataset = build(tmp_path, {"a": [essay(seed) for seed in range(30)], "b": [essay(seed) for seed in range(50, 60)]})
    capped = Mixture({"a": 0.5, "b": 0.5}, max_epochs=1.5)
    stages = (Stage(0, 48, 96, 1), Stage(40, 200, 300, 1), Stage(60, 64, 128, 1))
    make = lambda stage, number: MixedLoader(dataset, stage.batch_tokens, stage.sequence_length, number, mixture=capped)  # noqa: E731
    curriculum, read = Curriculum(stages, make), Counter()
    with pytest.raises(ValueError, match="used up"):
        for step in range(10_000):
            curriculum.go_to(step)
            if step in (45, 61):  # a resume in a stage keeps what the stages before have read
                state, curriculum = curriculum.state(), Curriculum(stages, make)
                curriculum.restore(json.loads(json.dumps(state)))
            batch = next(curriculum)
            for domain, length in zip(batch.domains, batch.lengths, strict=True):
                read[dataset.domains[domain]] += length
    targets = {stream.domain: stream.size.targets for stream in dataset.streams(48)}
    for name, count in read.items():
        assert count / targets[name] == pytest.approx(1.5, abs=0.06)
        assert curriculum.epochs()[name] == pytest.approx(1.5, abs=0.06)


def test_stopped_after_every_step_it_is_the_same_run(config):
    pretrain(config)
    whole = read_metrics(Path(config.out) / "metrics.jsonl")
    short = replace(config, out=config.out + "-short")
    for again in range(6):
        try:
            pretrain(replace(short, max_minutes=1e-9, resume=again > 0))
        except Interrupted:
            continue
    parts = read_metrics(Path(short.out) / "metrics.jsonl")
    assert [{**r, **dict.fromkeys(MACHINE, 0)} for r in parts] == [{**r, **dict.fromkeys(MACHINE, 0)} for r in whole]
    assert [row["targets"] for row in whole] == [96, 96, 192, 192, 384, 384]


def test_unknown_domains_are_told_before_training(config, tmp_path):
    with pytest.raises(ValueError, match=r"has no domain middle; it has .*low"):
        pretrain(replace(config, stages=("at=2 middle=1 low=1 high=1",)))
    with pytest.raises(ValueError, match="shares of code need a set with domains; make one with rille data build"):
        pretrain(small_config(tmp_path, out=str(tmp_path / "plain"), stages=("at=2 code=1",)))
