"""From documents to token ids on disk: split, learn the vocabulary, encode, keep.

Documents are split by a hash of their content, so that a document's side depends on nothing else, and equal documents
fall on the same side. Each side is one stream of ids; the end-of-text token e stands before, between and after:

    tokens      e d d d d e d d e ... d e        uint32 [N + 1]
    boundaries  ^         ^     ^       ^        int64 [documents + 1]: where a document's inputs begin; the last is N

Position i has input tokens[i] and target tokens[i + 1]. A document's inputs are the e before it and its own ids; its
targets are its own ids and the e after it. So every id of every document is a target once, and none is predicted from
another document.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from rille.data.arrays import load_array, save_array
from rille.data.config import DataConfig
from rille.data.sources import Document, Note, read_documents
from rille.text.tokenizer import Tokenizer, load_tokenizer, train_tokenizer

if TYPE_CHECKING:
    from rille.data.loader import Loader
    from rille.data.mixed_loader import MixedLoader

MANIFEST = "corpus.json"
SIDES = ("train", "held_out")
_SLICE_BYTES = 1_000_000  # of text handed to the encoder at once
_BAR_FROM = 4_000_000  # bytes of text: below, encoding takes about a second


class TrainingText(Protocol):
    """What a run asks of the text that it learns: a `TokenText`, or a built set, which is never held whole."""

    @property
    def byte_lengths(self) -> np.ndarray: ...
    @property
    def num_targets(self) -> int: ...
    @property
    def num_documents(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def bytes_per_token(self) -> float: ...
    @property
    def counts(self) -> np.ndarray: ...
    def loader(
        self, batch_tokens: int, sequence_length: int, seed: int, shares: Mapping[str, float] | None = None
    ) -> Loader | MixedLoader: ...


@dataclass(frozen=True, eq=False)
class TokenText:
    """One side of a corpus: `tokens` and `boundaries` as drawn at the head of this file."""

    tokens: np.ndarray
    boundaries: np.ndarray
    byte_lengths: np.ndarray  # int64 [W]: bytes of text behind each id, 0 for special tokens

    @property
    def num_targets(self) -> int:
        return len(self.tokens) - 1

    @property
    def num_documents(self) -> int:
        return len(self.boundaries) - 1

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of text behind all targets."""
        return int(self.byte_lengths[self.tokens[1:]].sum())

    @cached_property
    def counts(self) -> np.ndarray:
        """int64 [W]: how often each id is a target."""
        return np.bincount(self.tokens[1:], minlength=len(self.byte_lengths))

    def loader(
        self, batch_tokens: int, sequence_length: int, seed: int, shares: Mapping[str, float] | None = None
    ) -> Loader:
        """Batches of this text; see `rille.data.loader`. ValueError for shares: it has no domains."""
        from rille.data.loader import Loader  # with torch, which those who only read do without

        if shares:
            raise ValueError(f"shares of {', '.join(shares)} need a set with domains; make one with rille data build")
        return Loader(self.tokens, self.boundaries, batch_tokens, sequence_length, seed)

    @property
    def bytes_per_token(self) -> float:
        """Bytes of text a target: bits per byte = nats a token / (ln 2 * bytes per token)."""
        return self.num_bytes / self.num_targets

    def head(self, num_targets: int) -> TokenText:
        """The first so many targets (all of them where there are fewer). Raises ValueError below 1."""
        if num_targets < 1:
            raise ValueError(f"{num_targets} targets are too few; ask for at least 1")
        cut = np.unique(np.minimum(self.boundaries, num_targets))
        return TokenText(self.tokens[: cut[-1] + 1], cut, self.byte_lengths)


@dataclass(frozen=True, eq=False)
class Corpus:
    """A run's text, encoded; the tokens are memory-mapped from the directory.

    domains: their names, none where the text has only one. held_out_domains: [documents] the number of each one's.
    """

    directory: Path
    tokenizer: Tokenizer
    train: TrainingText
    held_out: TokenText
    domains: tuple[str, ...] = ()
    held_out_domains: np.ndarray | None = None


def prepare_corpus(
    config: DataConfig, directory: str | Path, *, tokenizer: Tokenizer | None = None, note: Note = print
) -> Corpus:
    """Read, split and encode the text of a run into `directory`, or open what equal settings wrote before.

    tokenizer: encode with this one; none trains one of `config.vocab_size` tokens on the training side. The directory
    appears whole or not at all. note is told sizes, and everything that was skipped or cut.
    Raises ValueError as `read_documents` does, for text that is too small to split, and if the directory holds
    the corpus of other settings; OSError if it cannot be written.
    """
    directory = Path(directory)
    request = _request(config, tokenizer)
    if directory.exists():
        _check_same(_manifest(directory)["request"], request, directory)
        return load_corpus(directory)
    documents = list(read_documents(config.path, max_bytes=config.max_bytes, note=note))
    sides = split_documents(documents, config.held_out)
    if tokenizer is None:
        texts = [document.text for document in _sample(sides[0], config.tokenizer_bytes, note)]
        tokenizer = train_tokenizer(texts, config.vocab_size, note=note)
    _write(directory, sides, tokenizer, request)
    corpus = load_corpus(directory)
    note(_summary(corpus, len(documents)))
    return corpus


def load_corpus(directory: str | Path) -> Corpus:
    """Open what `prepare_corpus` wrote. Raises ValueError if the directory is not a whole corpus."""
    directory = Path(directory)
    manifest = _manifest(directory)
    tokenizer = load_tokenizer(directory)
    byte_lengths = np.array(tokenizer.byte_lengths(), dtype=np.int64)
    sides = []
    for side in SIDES:
        boundaries = _boundaries(directory, side)
        file = directory / f"{side}.tokens"
        expected = 4 * (int(boundaries[-1]) + 1)
        size = file.stat().st_size if file.is_file() else 0
        if size != expected or boundaries[-1] != manifest[side]["targets"]:
            raise ValueError(f"{file} has {size:,} bytes, not {expected:,}; delete {directory}")
        tokens = np.memmap(file, dtype="<u4", mode="r")
        sides.append(TokenText(tokens, boundaries, byte_lengths))
    return Corpus(directory, tokenizer, *sides)


def _boundaries(directory: Path, side: str) -> np.ndarray:
    try:
        return load_array(directory / f"{side}.boundaries.npy")
    except ValueError as error:
        raise ValueError(f"{error}; delete {directory}") from None


def split_documents(documents: Sequence[Document], held_out: float) -> tuple[list[Document], list[Document]]:
    """(train, held-out): held out are the documents whose content hashes into the lowest `held_out` of all hashes.

    Where that leaves a side without documents (there are few), the last `held_out` of the longest one is held out.
    Training documents keep their order; held-out ones stand in the order of their hashes: any prefix is a sample.
    Raises ValueError if all documents are equal (nothing would be unseen) or the longest has one character.
    """
    keys = [_hash(document.text) for document in documents]
    if len(documents) > 1 and len(set(keys)) == 1:
        raise ValueError(f"all {len(documents):,} documents are equal: no unseen text can be held out; give other text")
    threshold = int(held_out * 2**64)
    train = [document for document, key in zip(documents, keys, strict=True) if key >= threshold]
    by_hash = sorted(zip(keys, documents, strict=True), key=lambda pair: pair[0])
    held = [document for key, document in by_hash if key < threshold]
    if train and held:
        return train, held
    longest = max(range(len(documents)), key=lambda i: len(documents[i].text))
    source, text = documents[longest].source, documents[longest].text
    if len(text) < 2:
        raise ValueError(f"{source} has only {len(text)} character: none can be held out; give more text")
    cut = len(text) - max(1, round(len(text) * held_out))
    train = [*documents[:longest], Document(source, text[:cut]), *documents[longest + 1 :]]
    return train, [Document(f"{source} from character {cut:,}", text[cut:])]


def unigram_nats(train: TrainingText, held_out: TokenText) -> float:
    """Cross-entropy in nats a token of held-out targets under the frequencies of the training targets.

    p(w) = (count(w) + 1) / (total + W): what a model that knows only how frequent tokens are would reach.
    """
    width = len(train.byte_lengths)
    nats_W = math.log(train.num_targets + width) - np.log(train.counts + 1)
    return float(held_out.counts @ nats_W / held_out.num_targets)


def bits_per_byte(nats_per_token: float, bytes_per_token: float) -> float:
    """Loss in bits a byte of text, which does not depend on the vocabulary."""
    return nats_per_token / (math.log(2) * bytes_per_token)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _request(config: DataConfig, tokenizer: Tokenizer | None) -> dict:
    """The settings that decide what the stored files hold."""
    fields = ("path", "max_bytes", "held_out", "vocab_size", "tokenizer_bytes")
    request = {name: getattr(config, name) for name in fields}
    request["path"] = str(Path(config.path).resolve()) if config.path is not None else None
    if tokenizer is not None:
        request["vocab_size"] = tokenizer.vocab_size
        request["tokenizer"] = tokenizer.digest()
    return request


def _check_same(old: dict, new: dict, directory: Path) -> None:
    """Raise ValueError that lists differences. A setting newer than the corpus stood at its default then."""
    old = {name: value for name, value in vars(DataConfig()).items() if name in new} | old
    changed = [
        f"{key} {old.get(key)!r}, now {new.get(key)!r}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)
    ]
    if changed:
        raise ValueError(f"{directory} holds text encoded with {'; '.join(changed)}; use another folder or delete it")


def _manifest(directory: Path) -> dict:
    file = directory / MANIFEST
    if not file.is_file():
        raise ValueError(f"{directory} exists but holds no {MANIFEST}; use another folder or delete it")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); delete {directory}") from None
    if not isinstance(manifest, dict) or not {"request", *SIDES} <= set(manifest):
        raise ValueError(f"{file} is damaged (it must hold request, {', '.join(SIDES)}); delete {directory}")
    return manifest


def _sample(documents: list[Document], budget: int, note: Note) -> list[Document]:
    """Documents in hash order until their bytes fill the budget, the last one cut; all, in order, if they fit."""
    total = sum(len(document.text.encode()) for document in documents)
    if total <= budget:
        return documents
    note(f"tokenizer: trained on {budget:,} of {total:,} bytes (tokenizer_bytes)")
    sample, room = [], budget
    for document in sorted(documents, key=lambda document: _hash(document.text)):
        head = document.text.encode()[:room].decode(errors="ignore")
        sample.append(Document(document.source, head))
        room -= len(document.text.encode())
        if room <= 0:
            break
    return sample


def _write(directory: Path, sides: Iterable[list[Document]], tokenizer: Tokenizer, request: dict) -> None:
    """Write everything into a folder beside, then give it the name: a run that is killed leaves no half corpus."""
    partial = directory.with_name(directory.name + ".partial")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    tokenizer.save(partial)
    manifest: dict = {"request": request}
    for side, documents in zip(SIDES, sides, strict=True):
        boundaries = _write_tokens(partial / f"{side}.tokens", documents, tokenizer)
        save_array(partial / f"{side}.boundaries.npy", boundaries)
        manifest[side] = {"documents": len(documents), "targets": int(boundaries[-1])}
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.rename(partial, directory)


def _write_tokens(file: Path, documents: list[Document], tokenizer: Tokenizer) -> np.ndarray:
    """Encode documents into one stream of little-endian uint32; returns its boundaries."""
    lengths = []
    with open(file, "wb") as stream:
        stream.write(np.array([tokenizer.eos_id], dtype="<u4").tobytes())
        for texts in _slices(documents):
            for ids in tokenizer.encode_batch(texts):
                ids.append(tokenizer.eos_id)
                lengths.append(len(ids))
                stream.write(np.array(ids, dtype="<u4").tobytes())
    return np.cumsum([0, *lengths], dtype=np.int64)


def _slices(documents: list[Document]) -> Iterator[list[str]]:
    """Texts in slices of about a megabyte, with a progress bar (of a terminal) where there are many."""
    total, console = sum(len(document.text) for document in documents), Console(stderr=True)
    quiet = total < _BAR_FROM or not console.is_terminal
    columns = (TextColumn("encoding text"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet) as progress:
        task = progress.add_task("", total=total)
        texts, size = [], 0
        for document in documents:
            texts.append(document.text)
            size += len(document.text)
            if size >= _SLICE_BYTES:
                yield texts
                progress.advance(task, size)
                texts, size = [], 0
        if texts:
            yield texts


def _summary(corpus: Corpus, documents: int) -> str:
    train, held = corpus.train, corpus.held_out
    return (
        f"data: {documents:,} documents, {(train.num_bytes + held.num_bytes) / 1e6:.2f} MB of text; "
        f"{train.num_targets:,} tokens to train on, {held.num_targets:,} held out (documents: {held.num_documents:,}); "
        f"{train.bytes_per_token:.2f} bytes a token"
    )
