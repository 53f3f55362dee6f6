"""The smallest run with every mechanism on: two KDA layers, one MLA layer, experts, two AttnRes blocks."""

import resource
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rille.data.config import DataConfig
from rille.data.corpus import prepare_corpus
from rille.model.config import K3Config
from rille.optim.config import OptimConfig
from rille.train.config import TrainConfig
from rille.train.pretrain import set_up
from rille.train.run import Run

VOCABULARY = 320
MODEL = K3Config(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_layers=3,
    mla_layers=(2,),
    kda_heads=2,
    kda_head_dim=16,
    mla_heads=2,
    q_rank=16,
    kv_rank=16,
    key_dim=16,
    shared_key_dim=8,
    value_dim=16,
    dense_width=64,
    num_experts=8,
    active_experts=2,
    shared_experts=1,
    expert_width=32,
    latent_width=32,
    block_layers=2,
)


def write_text(folder: Path) -> Path:
    """Some forty short documents, all different, with a pattern that can be learned."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(40):
        lines = [f"def square_{n}(x):\n    return x * {n}\n\n" for n in range(number, number + 6)]
        (folder / f"{number:02}.py").write_text("".join(lines), encoding="utf-8")
    return folder


def small_config(tmp_path: Path, **changes) -> TrainConfig:
    text = write_text(tmp_path / "text")
    data = DataConfig(path=str(text), held_out=0.1, vocab_size=VOCABULARY, sequence_length=48, batch_tokens=128)
    config = TrainConfig(
        out=str(tmp_path / "run"),
        steps=20,
        eval_every=10,
        eval_tokens=256,
        checkpoint_every=10,
        data=data,
        optim=OptimConfig(lr=3e-3),
        model=MODEL,
    )
    return replace(config, **changes)


def small_run(tmp_path: Path, **changes) -> Run:
    """A run at step 0, without loggers."""
    config = small_config(tmp_path, **changes)
    return set_up(config, prepare_corpus(config.data, Path(config.out) / "corpus"))


@contextmanager
def largest_file(size: int):
    """Writing beyond `size` bytes fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
