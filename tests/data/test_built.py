"""`rille train --data SET` trains on a built set as on any text: by its mixture, to the same losses after a resume."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from rille.data.config import DataConfig
from rille.data.mixed_loader import MixedLoader
from rille.optim.config import OptimConfig
from rille.train.config import TrainConfig
from rille.train.metrics import METRICS, read_metrics
from rille.train.pretrain import pretrain
from tests.data.sets import build, essay
from tests.train.small import MODEL


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    texts = {"a": [essay(seed) for seed in range(30)], "b": [essay(seed) for seed in range(50, 60)]}
    dataset = build(tmp_path, texts, rates=("a=0.25", "b=0.75"), held_out=0.2)
    vocabulary = dataset.tokenizer.vocab_size
    return TrainConfig(
        out=str(tmp_path / "run"),
        steps=6,
        eval_every=3,
        eval_tokens=128,
        checkpoint_every=3,
        data=DataConfig(path=str(dataset.directory), vocab_size=vocabulary, sequence_length=48, batch_tokens=96),
        optim=OptimConfig(lr=3e-3),
        model=MODEL.replace(vocab_size=vocabulary),
    )


def losses(out: str | Path) -> list[float]:
    return [row["loss"] for row in read_metrics(Path(out) / METRICS)]


def test_train_and_resume_on_a_built_set(config: TrainConfig, capsys: pytest.CaptureFixture):
    pretrain(config)
    assert not (Path(config.out) / "corpus").exists()
    assert "tokens to train on" in capsys.readouterr().out
    whole = losses(config.out)
    assert len(whole) == 6
    shutil.rmtree(Path(config.out) / "checkpoints" / "step-000006")
    pretrain(replace(config, resume=True))
    assert "resuming after step 3" in capsys.readouterr().out
    assert losses(config.out) == whole
    loader = MixedLoader(config.data.path or "", 96, 48)
    draws = loader.state()["draws"]
    assert draws[1] / draws[0] == pytest.approx(3, rel=0.1)


def test_another_vocabulary_is_refused(config: TrainConfig):
    wrong = replace(config, data=replace(config.data, vocab_size=320), model=config.model.replace(vocab_size=320))
    with pytest.raises(ValueError, match="vocabulary of 400 tokens, but data.vocab_size is 320"):
        pretrain(wrong)
