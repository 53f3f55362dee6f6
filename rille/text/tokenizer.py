"""Byte-level byte-pair encoding (BPE): text to token ids and back, without loss.

Text is UTF-8 bytes. A pattern cuts it into words (Kimi's, which is GPT-4's with Han runs kept apart); inside a word the
pair of neighbours that was merged first in training is merged first, until no known pair is left:

    encode(text) = concatenation over words w of merge(bytes(w))
    decode(ids)  = UTF-8(concatenation over ids of bytes(id))

`merge` never crosses a word, and every single byte is a token, so that decode(encode(text)) == text for every text.
A special token (`<|end_of_text|>`) is no result of merges: `encode` never yields its id, whatever the text says.
Source of the pattern and of the cuts of long texts: the published Kimi K3 tokenizer.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import index
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|end_of_text|>"
FILE_NAME = "tokenizer.json"

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
# Alternatives are tried in this order at each position.
WORD_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)

# A word of a million characters would cost time out of all proportion: long texts and runs are cut before encoding.
_PIECE = 400_000
_RUN_END = re.compile(r"\s{25000}(?=\s)|\S{25000}(?=\S)")


class Tokenizer:
    """Text to ids and back. Make one with `train_tokenizer` or `load_tokenizer`."""

    def __init__(self, backend: tokenizers.Tokenizer):
        """Wrap a byte-level BPE of the `tokenizers` library that has `<|end_of_text|>` as a special token."""
        eos_id = backend.token_to_id(END_OF_TEXT)
        if eos_id is None:
            raise ValueError(f"the tokenizer has no token {END_OF_TEXT!r}, which separates documents")
        self._backend = backend
        # The library would recognise special tokens in a user's text; this makes it spell them like any other text.
        backend.encode_special_tokens = True
        self._specials = {number: token.content for number, token in backend.get_added_tokens_decoder().items()}
        self._bytes = {number: _token_bytes(token) for token, number in backend.get_vocab().items()}
        self._bytes |= {number: content.encode() for number, content in self._specials.items()}
        self.eos_id: int = eos_id
        self.vocab_size: int = max(self._bytes) + 1

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are neither added nor recognised. Raises ValueError for a lone surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, the texts spread over all cores. The same ids as `encode` gives one by one."""
        pieces, owners = [], []
        for owner, text in enumerate(texts):
            for piece in _pieces(_checked(text)):
                pieces.append(piece)
                owners.append(owner)
        ids: list[list[int]] = [[] for _ in texts]
        encodings = self._backend.encode_batch_fast(pieces, add_special_tokens=False)
        for owner, encoding in zip(owners, encodings, strict=True):
            ids[owner] += encoding.ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids (ints or integer tensors): their bytes joined, each invalid UTF-8 sequence replaced by U+FFFD.

        Special tokens appear as their names. Raises ValueError for an id that the vocabulary does not hold.
        """
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for (the UTF-8 name of a special one). Raises ValueError for an unknown id."""
        number = index(token)
        if number not in self._bytes:
            raise ValueError(f"token id {number} is outside the tokenizer's vocabulary of {self.vocab_size} tokens")
        return self._bytes[number]

    def byte_lengths(self) -> list[int]:
        """Bytes of text behind each id, 0 for special tokens: sums to a text's length in bytes over its ids."""
        return [0 if i in self._specials else len(self._bytes.get(i, b"")) for i in range(self.vocab_size)]

    def to_json(self) -> str:
        """The content of `tokenizer.json`; equal tokenizers give equal strings."""
        return self._backend.to_str(pretty=False)

    def save(self, directory: str | Path) -> Path:
        """Write `tokenizer.json` into a directory (made if absent), replacing an old one at once; return its path."""
        path = Path(directory) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(FILE_NAME + ".partial")
        partial.write_text(self.to_json(), encoding="utf-8")
        os.replace(partial, path)
        return path


class TextStream:
    """Decodes ids one at a time and gives out only whole characters: a character's last byte brings it.

    The parts joined, with `finish()` at the end, equal `tokenizer.decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        """The text that became complete with this token; often empty. Raises ValueError for an unknown id."""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else nothing."""
        return self._decoder.decode(b"", final=True)


def train_tokenizer(texts: Iterable[str], vocab_size: int, *, note: Callable[[str], None] = print) -> Tokenizer:
    """Learn a byte-level BPE of exactly `vocab_size` tokens: 256 bytes, merges by frequency, `<|end_of_text|>`.

    The same texts give the same tokenizer. A small text runs out of pairs to merge before the vocabulary is full: then
    the ids that are left are filled with `<|reserved_token_ID|>` (as in the published vocabulary), `encode` never
    yields them, and `note` is told both numbers.
    Raises ValueError for a size below 257 or a text that UTF-8 cannot hold.
    """
    if vocab_size < 257:
        raise ValueError(f"vocab_size {vocab_size} is too small: 256 bytes and {END_OF_TEXT} need at least 257")
    backend = _backend(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1, initial_alphabet=sorted(_BYTE_OF_CHARACTER), show_progress=False
    )
    backend.train_from_iterator((piece for text in texts for piece in _pieces(_checked(text))), trainer)
    learned = json.loads(backend.to_str())["model"]
    vocabulary: dict[str, int] = learned["vocab"]
    merges = [(left, right) for left, right in learned["merges"]]
    vocabulary[END_OF_TEXT] = len(vocabulary)
    if len(vocabulary) < vocab_size:
        note(
            f"tokenizer: the text gives only {len(vocabulary):,} of {vocab_size:,} tokens; the other ids stay reserved "
            "and are never used (more text or a smaller vocab_size avoids that)"
        )
    for number in range(len(vocabulary), vocab_size):
        vocabulary[f"<|reserved_token_{number}|>"] = number
    backend = _backend(models.BPE(vocab=vocabulary, merges=merges))
    backend.add_special_tokens([END_OF_TEXT])
    return Tokenizer(backend)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Read a tokenizer from a directory (a checkpoint) or from a `tokenizer.json` file.

    Raises ValueError, in one line, where there is none or where the file is not a byte-level BPE that keeps text as is.
    """
    path = Path(path)
    if not path.exists():
        raise ValueError(f"{path} does not exist: give a checkpoint directory or a {FILE_NAME}")
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"{path} holds no {FILE_NAME}: give a directory that `rille train` wrote, or the file itself")
    text = _read_json_text(file)
    return Tokenizer(tokenizers.Tokenizer.from_str(text))


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


def _checked(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            "which UTF-8 cannot hold; decode the source with errors='replace'"
        ) from None
    return text


def _pieces(text: str) -> Iterator[str]:
    """Cut a text: no piece is longer than 400,000 characters, no run of (non-)whitespace longer than 25,000."""
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        cut = 0
        for run in _RUN_END.finditer(piece):
            yield piece[cut : run.end()]
            cut = run.end()
        yield piece[cut:]
