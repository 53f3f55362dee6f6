"""Byte-level byte-pair encoding (BPE) that is trained here: text to token ids and back, without loss.

Text is UTF-8 bytes. A pattern cuts it into words (Kimi's, which is GPT-4's with Han runs kept apart); inside a word the
pair of neighbours that was merged first in training is merged first, until no known pair is left:

    encode(text) = concatenation over words w of merge(bytes(w))

`merge` never crosses a word. The specials of a trained vocabulary are `<|end_of_text|>` and the chat format's control
and media tokens, so that a small model can learn to chat.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from rille.misspelt import named
from rille.text.official import OFFICIAL_FILE_NAME, read_official
from rille.text.vocabulary import (
    CHAT_SPECIALS,
    END_OF_TEXT,
    WORD_PATTERN,
    TextStream,
    Tokenizer,
    as_directory,
    check_text,
    cut_text,
    kind,
)

__all__ = [
    "END_OF_TEXT",
    "WORD_PATTERN",
    "TextStream",
    "Tokenizer",
    "TrainedTokenizer",
    "load_tokenizer",
    "train_tokenizer",
]

FILE_NAME = "tokenizer.json"
SPECIALS = (END_OF_TEXT, *CHAT_SPECIALS)


class TrainedTokenizer(Tokenizer):
    """Byte-level BPE of the `tokenizers` library, in one file `tokenizer.json`."""

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wrap a byte-level BPE of the `tokenizers` library that has `<|end_of_text|>` as a special token."""
        specials = {token.content: number for number, token in backend.get_added_tokens_decoder().items()}
        words = {number: _token_bytes(token) for token, number in backend.get_vocab().items() if token not in specials}
        super().__init__(words, specials, END_OF_TEXT)
        self._backend = backend
        # The library would recognise special tokens in a user's text; this makes it spell them like any other text.
        backend.encode_special_tokens = True

    def _encode_pieces(self, pieces: list[str]) -> list[list[int]]:
        return [encoding.ids for encoding in self._backend.encode_batch_fast(pieces, add_special_tokens=False)]

    def to_json(self) -> str:
        """The content of `tokenizer.json`; equal tokenizers give equal strings."""
        return self._backend.to_str(pretty=False)

    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def save(self, directory: str | Path) -> Path:
        path = as_directory(directory) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(FILE_NAME + ".partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        os.replace(partial, path)
        return path


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, note: Callable[[str], None] = print) -> TrainedTokenizer:
    """Learn a byte-level BPE of exactly `vocab_size` tokens: 256 bytes, merges by frequency, the specials.

    The specials are `<|end_of_text|>` and the chat format's eight, in the order of `SPECIALS`.

    The same texts give the same tokenizer. A small text runs out of pairs to merge before the vocabulary is full: then
    the ids that are left are filled with `<|reserved_token_ID|>` (as in the published vocabulary), `encode` never
    yields them, and `note` is told both numbers.
    Raises ValueError for a size below 265 or a text that UTF-8 cannot hold.
    """
    if not isinstance(vocab_size, int) or isinstance(texts, str | bytes) or not isinstance(texts, Iterable):
        raise ValueError(f"texts must be several, not {kind(texts)}, and vocab_size a whole number, not {vocab_size!r}")
    if vocab_size < 256 + len(SPECIALS):
        raise ValueError(
            f"vocab_size {vocab_size} is too small: 256 bytes and {len(SPECIALS)} special tokens need at least "
            f"{256 + len(SPECIALS)}"
        )
    backend = _backend(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIALS), initial_alphabet=sorted(_BYTE_OF_CHARACTER), show_progress=False
    )
    backend.train_from_iterator((piece for text in texts for piece in cut_text(check_text(text))), trainer)
    learned = json.loads(backend.to_str())["model"]
    vocabulary: dict[str, int] = learned["vocab"]
    merges = [(left, right) for left, right in learned["merges"]]
    for name in SPECIALS:
        vocabulary[name] = len(vocabulary)
    if len(vocabulary) < vocab_size:
        note(
            f"tokenizer: the text gives only {len(vocabulary):,} of {vocab_size:,} tokens; the other ids stay reserved "
            "and are never used (more text or a smaller vocab_size avoids that)"
        )
    for number in range(len(vocabulary), vocab_size):
        vocabulary[f"<|reserved_token_{number}|>"] = number
    backend = _backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.add_special_tokens(list(SPECIALS))
    return TrainedTokenizer(backend)


@named
def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a directory (a checkpoint) or from a `tiktoken.model` or `tokenizer.json` file.

    A directory's `tiktoken.model` (the official format) goes before its `tokenizer.json`. Raises ValueError, in one
    line, where there is neither or where the file is not a byte-level BPE that keeps text as is.
    """
    if not isinstance(path, str | Path):
        raise ValueError(f"path is {kind(path)}; give a checkpoint directory or a {FILE_NAME}")
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a checkpoint directory or a {FILE_NAME}")
    if path.is_file():
        found = path
    else:
        found = next((path / name for name in (OFFICIAL_FILE_NAME, FILE_NAME) if (path / name).is_file()), None)
        if found is None:
            raise ValueError(
                f"{path} holds no {FILE_NAME} and no {OFFICIAL_FILE_NAME}: give a directory that `rille train` wrote "
                "or a released checkpoint, or the file itself"
            )
    if found.suffix == ".model":
        return read_official(found)
    return TrainedTokenizer(tokenizers.Tokenizer.from_str(_read_json_text(found)))


def _read_json_text(file: Path) -> str:
    """The file's text, after proof that the library can load it and that it is of the kind promised above."""
    try:
        text = file.read_text(encoding="utf-8")
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is not a {FILE_NAME} ({error}); save the tokenizer again") from None
    fault = _fault(content)
    if fault:
        raise ValueError(f"{file} {fault}; only a lossless byte-level BPE can be used")
    return text


def _fault(content: object) -> str | None:
    """What makes a parsed `tokenizer.json` unfit, or None."""
    model = content.get("model") if isinstance(content, dict) else None
    if not isinstance(content, dict) or not isinstance(model, dict) or model.get("type") != "BPE":
        return "holds no BPE model"
    vocabulary, merges = model.get("vocab"), model.get("merges")
    if not isinstance(vocabulary, dict) or not isinstance(merges, list):
        return "lacks the vocabulary or the merges"
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in merges]
    if any(len(pair) != 2 or "".join(pair) not in vocabulary or not vocabulary.keys() >= {*pair} for pair in pairs):
        return "has merges of tokens that its vocabulary lacks"
    decoder = content.get("decoder") or {}
    if decoder.get("type") != "ByteLevel" or any(character not in vocabulary for character in _BYTE_OF_CHARACTER):
        return "is not byte-level"
    if content.get("normalizer"):
        return "changes the text before it encodes it (normalizer)"
    plain = [token["content"] for token in content.get("added_tokens", []) if not token.get("special")]
    if plain:
        return f"recognises added tokens in plain text ({plain[0]!r})"
    return None


def _backend(model: models.BPE) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(model)
    words = pre_tokenizers.Split(tokenizers.Regex(WORD_PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend


def _byte_characters() -> dict[str, int]:
    """The visible character that stands for each byte: itself if printable, else 256 + a running number."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_characters()


def _token_bytes(token: str) -> bytes:
    return bytes(_BYTE_OF_CHARACTER[character] for character in token)
