"""A checkpoint opened for evaluation, and the text to evaluate it on as lines of its token ids.

A line is a document with what stands around it in training: models of `rille train` have seen the end-of-text token
before and after each; a released model gets the document alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rille.data.corpus import load_corpus
from rille.data.dataset import Dataset, is_dataset
from rille.data.sources import read_documents
from rille.eval.config import Where
from rille.model.checkpoint import load_model
from rille.model.locate import find_checkpoint
from rille.model.model import K3
from rille.serve.generate import check_device, check_pair
from rille.text.tokenizer import Tokenizer, load_tokenizer
from rille.train.folder import SETTINGS, read_settings

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, eq=False)
class Opened:
    """asked: the path as it was given. place: the checkpoint that it means."""

    asked: Path
    place: Path
    model: K3
    tokenizer: Tokenizer

    @property
    def framed(self) -> bool:
        """Whether documents stand between end-of-text tokens."""
        return self.model.config.bos_id == self.tokenizer.eos_id

    def line(self, ids: Sequence[int], *, end: bool = False) -> np.ndarray:
        """A text's ids as a line, with what stands before and, where it ends here, after it."""
        frame = [self.tokenizer.eos_id] if self.framed else []
        return np.array([*frame, *ids, *(frame if end else ())], dtype=np.int64)

    def settings(self) -> dict:
        """The settings of the run that the path names; {} where it is a checkpoint alone."""
        return read_settings(self.asked) if (self.asked / SETTINGS).is_file() else {}


def open_checkpoint(config: Where) -> Opened:
    """Model and tokenizer. Raises ValueError or FileNotFoundError that says what is wrong."""
    check_device(config.device)
    place = find_checkpoint(config.checkpoint)
    tokenizer = load_tokenizer(place)
    model = load_model(place, device=config.device, dtype=DTYPES[config.dtype])
    check_pair(tokenizer, model)
    return Opened(Path(config.checkpoint), place, model, tokenizer)


@dataclass(frozen=True, eq=False)
class Source:
    """Documents of one name, as lines."""

    name: str
    lines: list[np.ndarray]


def read_sources(opened: Opened, sources: Sequence[str]) -> list[Source]:
    """The documents of NAME=PATH each, or of the run's own held-out side without any.

    Raises ValueError for a source that is written otherwise, or of another vocabulary, or empty.
    """
    if not sources:
        return own_held_out(opened)
    found: list[Source] = []
    for source in sources:
        name, mark, path = source.partition("=")
        if not (name and mark and path):
            raise ValueError(f"source {source!r}: write NAME=PATH")
        found += held_out_side(opened, Path(path), f"{name}/") if is_dataset(path) else [from_files(opened, name, path)]
    return found


def from_files(opened: Opened, name: str, path: str) -> Source:
    texts = [document.text for document in read_documents(path)]
    return Source(name, [opened.line(ids, end=True) for ids in opened.tokenizer.encode_batch(texts)])


def own_held_out(opened: Opened) -> list[Source]:
    """The held-out side of the text that the run was trained on."""
    path = opened.settings().get("data.path")
    if is_dataset(path):
        return held_out_side(opened, Path(str(path)), "")
    if not (opened.asked / "corpus").is_dir():
        raise ValueError(f"{opened.asked} holds no text of its own: name some with --sources NAME=PATH")
    text = load_corpus(opened.asked / "corpus").held_out
    return [Source("held out", lines_of(text.tokens, text.boundaries))]


def held_out_side(opened: Opened, directory: Path, prefix: str) -> list[Source]:
    """The held-out documents of a built set, a source a domain."""
    dataset = Dataset(directory)
    if dataset.tokenizer.digest() != opened.tokenizer.digest():
        raise ValueError(f"{directory} is encoded with another vocabulary than {opened.place}; name the raw text")
    held, domains = dataset.held_out(), dataset.held_out_domains()
    lines = lines_of(held.tokens, held.boundaries)
    return [
        Source(prefix + name, [line for line, domain in zip(lines, domains, strict=True) if domain == number])
        for number, name in enumerate(dataset.domains)
        if (domains == number).any()
    ]


def lines_of(tokens: np.ndarray, boundaries: np.ndarray) -> list[np.ndarray]:
    """The documents of a stream (the head of `data/corpus.py` draws it), each with the tokens around it."""
    return [np.asarray(tokens[a : b + 1]) for a, b in zip(boundaries[:-1], boundaries[1:], strict=True)]


def head(lines: Sequence[np.ndarray], tokens: int) -> list[np.ndarray]:
    """The first so many targets: whole lines, the last one cut."""
    taken: list[np.ndarray] = []
    for line in lines:
        if tokens < 1:
            break
        taken.append(line[: tokens + 1])
        tokens -= len(taken[-1]) - 1
    return [line for line in taken if len(line) > 1]
