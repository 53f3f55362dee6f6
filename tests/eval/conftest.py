"""A run of a few steps that the evaluations look at."""

from pathlib import Path

import pytest

from rille.eval.config import Where
from rille.eval.opened import Opened, open_checkpoint
from rille.train.pretrain import pretrain
from tests.train.small import small_config


@pytest.fixture(scope="session")
def run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("eval")
    pretrain(small_config(folder, steps=8, eval_every=8, checkpoint_every=8))
    return folder / "run"


@pytest.fixture(scope="session")
def opened(run) -> Opened:
    return open_checkpoint(Where(checkpoint=str(run)))
