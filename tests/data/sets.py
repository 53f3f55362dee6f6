"""Small sets for tests: texts, and a build of them."""

import json
import random
from pathlib import Path

from rille.data.build import build_dataset
from rille.data.build_config import BuildConfig
from rille.data.dataset import Dataset
from rille.text.tokenizer import train_tokenizer

WORDS = "the river cut a channel through old stone and left the moon a mark of water that ran over sand once".split()


def essay(seed: int, words: int = 120) -> str:
    """A text of words by chance: two of them share almost no five in a row."""
    chance = random.Random(seed)
    lines = [" ".join(chance.choice(WORDS) + str(chance.randrange(50)) for _ in range(8)) for _ in range(words // 8)]
    return f"Essay {seed} of the river, and what is to be said of it\n" + "\n".join(lines) + "\n"


def write_jsonl(file: Path, texts: list[str]) -> Path:
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return file


def tokenizer_in(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    train_tokenizer([essay(seed) for seed in range(5)], 400).save(folder)
    return str(folder)


def build(tmp_path: Path, sources: dict[str, list[str]], **changes) -> Dataset:
    """A set of plain sources, with a vocabulary of 400."""
    tmp_path.mkdir(exist_ok=True)
    for name, texts in sources.items():
        write_jsonl(tmp_path / f"{name}.jsonl", texts)
    settings = {
        "sources": tuple(f"{name}={tmp_path / f'{name}.jsonl'}" for name in sources),
        "out": str(tmp_path / "set"),
        "plain": tuple(sources),
        "tokenizer": tokenizer_in(tmp_path / "tokenizer"),
        "workers": 1,
        **changes,
    }
    build_dataset(BuildConfig(**settings), note=lambda _: None)
    return Dataset(settings["out"])


def texts_of(dataset: Dataset) -> tuple[list[str], list[str]]:
    """Training and held-out documents, decoded from the tokens on disk."""
    tokenizer = dataset.tokenizer
    trained = []
    for stream in dataset.streams(1 << 30):
        for number in range(stream.size.pieces):
            ids = stream.read(*stream.piece(number))
            assert ids[0] == ids[-1] == tokenizer.eos_id
            trained.append(tokenizer.decode(ids[1:-1].tolist()))
    held, edges = dataset.held_out(), dataset.held_out().boundaries
    spans = zip(edges[:-1], edges[1:], strict=True)
    return trained, [tokenizer.decode(held.tokens[start + 1 : end].tolist()) for start, end in spans]
