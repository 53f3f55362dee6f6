"""What every tokenizer here is: a vocabulary of byte strings, special tokens, and a way to cut text into tokens.

    encode(text) = concatenation over the text's pieces p of tokens(p)
    decode(ids)  = UTF-8(concatenation over ids of bytes(id))

Each single byte is a token, so that decode(encode(text)) == text for every text. A special token is no result of a
merge: `encode` never yields its id, whatever the text says; only `encode_with_specials` does, which is for markup that
this package writes itself. `Tokenizer` is what `rille.text.tokenizer` (trained here) and `rille.text.official` (the
published vocabulary) have in common.
Source of the pattern and of the cuts of long texts: the published Kimi K3 tokenizer.
"""

from __future__ import annotations

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from operator import index
from pathlib import Path

END_OF_TEXT = "<|end_of_text|>"  # between documents, in vocabularies that are trained here

# The control tokens of the chat format (rille.text.markup), then those around and instead of a picture.
OPEN, CLOSE, SEP, END_OF_MESSAGE = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END = "<|media_begin|>", "<|media_content|>", "<|media_end|>"
MEDIA_PAD = "<|media_pad|>"
CONTROLS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)
CHAT_SPECIALS = (*CONTROLS, MEDIA_BEGIN, MEDIA_CONTENT, MEDIA_END, MEDIA_PAD)

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
_RUN = 25_000
# The lookbehinds let a match begin only where a run does, which keeps the search linear.
_LONG_RUN = re.compile(rf"(?<!\S)\S{{{_RUN + 1},}}|(?<!\s)\s{{{_RUN + 1},}}")


class Tokenizer(ABC):
    """Text to ids and back. Make one with `load_tokenizer` or `train_tokenizer`.

    specials: id of each special token by name. eos_id: the token between documents. vocab_size: one above the last id.
    """

    def __init__(self, words: dict[int, bytes], specials: dict[str, int], end_of_text: str):
        """words: the bytes of every ordinary token by id; end_of_text: the special token that separates documents."""
        if end_of_text not in specials:
            raise ValueError(f"the tokenizer has no token {end_of_text!r}, which separates documents")
        self.specials = dict(specials)
        self.eos_id: int = specials[end_of_text]
        self._words = words
        self._names = {number: name for name, number in specials.items()}
        self.vocab_size: int = max(*words, *self._names) + 1

    @abstractmethod
    def _encode_pieces(self, pieces: list[str]) -> list[list[int]]:
        """Ids of each piece, without any special token; pieces are short enough for the library."""

    @abstractmethod
    def save(self, directory: str | Path) -> Path:
        """Write its file into a directory (made if absent), replacing an old one at once; return the file's path."""

    @abstractmethod
    def digest(self) -> str:
        """A hexadecimal SHA-256 that equal tokenizers share: what stored ids are checked against."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens are neither added nor recognised. Raises ValueError for a lone surrogate."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, the texts spread over all cores. The same ids as `encode` gives one by one."""
        if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
            raise ValueError(f"texts must be a list of texts, not {kind(texts)}; `encode` takes one")
        pieces, owners = [], []
        for owner, text in enumerate(texts):
            for piece in cut_text(check_text(text)):
                pieces.append(piece)
                owners.append(owner)
        ids: list[list[int]] = [[] for _ in texts]
        for owner, piece_ids in zip(owners, self._encode_pieces(pieces), strict=True):
            ids[owner] += piece_ids
        return ids

    def encode_with_specials(self, text: str) -> list[int]:
        """Ids of a text in which every special token's name becomes its id. Never for text that others wrote."""
        ids: list[int] = []
        at = 0
        for found in self._special_pattern.finditer(check_text(text)):
            ids += self.encode(text[at : found.start()])
            ids.append(self.specials[found[0]])
            at = found.end()
        return ids + self.encode(text[at:])

    @cached_property
    def _special_pattern(self) -> re.Pattern[str]:
        return re.compile("|".join(re.escape(name) for name in sorted(self.specials, key=len, reverse=True)))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids (ints or integer tensors): their bytes joined, each invalid UTF-8 sequence replaced by U+FFFD.

        Special tokens appear as their names. Raises ValueError for an id that the vocabulary does not hold.
        """
        if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
            raise ValueError(f"ids must be a list or a tensor of token ids, not {kind(ids)}")
        return b"".join(self.token_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def __contains__(self, token: int) -> bool:
        """Whether the vocabulary holds an id; a model may have more words than its tokenizer."""
        return token in self._words or token in self._names

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for (the UTF-8 name of a special one). Raises ValueError for an unknown id."""
        number = token_id(token)
        if number in self._words:
            return self._words[number]
        return self._name(number).encode()

    def special_name(self, token: int) -> str | None:
        """The name of a special token, None for an ordinary one. Raises ValueError for an unknown id."""
        number = token_id(token)
        return None if number in self._words else self._name(number)

    def _name(self, number: int) -> str:
        if number not in self._names:
            raise ValueError(f"token id {number} is outside the tokenizer's vocabulary of {self.vocab_size} tokens")
        return self._names[number]

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """What ends a generation: the token between documents and, where there is one, the end of a message."""
        return tuple(dict.fromkeys((self.eos_id, self.specials.get(END_OF_MESSAGE, self.eos_id))))

    def byte_lengths(self) -> list[int]:
        """Bytes of text behind each id, 0 for special tokens: sums to a text's length in bytes over its ids."""
        return [len(self._words.get(i, b"")) for i in range(self.vocab_size)]


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
        """What is left: U+FFFD for a character that was never completed, else nothing. Then it starts afresh."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest


def kind(value: object) -> str:
    """What a value is, in a word or two."""
    text = " ".join(repr(value).split())
    return "None" if value is None else f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def as_directory(directory: str | Path) -> Path:
    if not isinstance(directory, str | Path):
        raise ValueError(f"directory is {kind(directory)}; give a path")
    return Path(directory)


def token_id(token: int) -> int:
    """An id as an int (of an integer tensor too). Raises ValueError for anything else."""
    try:
        return index(token)
    except TypeError:
        raise ValueError(f"a token id must be a whole number, not {kind(token)}") from None


def check_text(text: str) -> str:
    """The text, if it is one that UTF-8 can hold; else a ValueError, which names a lone surrogate."""
    if not isinstance(text, str):
        raise ValueError(f"text must be a str, not {kind(text)}; decode bytes first")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"text has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, "
            "which UTF-8 cannot hold; decode the source with errors='replace'"
        ) from None
    return text


def cut_text(text: str) -> Iterator[str]:
    """Cut a text: no piece is longer than 400,000 characters, no run of (non-)whitespace longer than 25,000."""
    for start in range(0, len(text), _PIECE):
        piece = text[start : start + _PIECE]
        cut = 0
        for run in _LONG_RUN.finditer(piece):
            for end in range(run.start() + _RUN, run.end(), _RUN):
                yield piece[cut:end]
                cut = end
        yield piece[cut:]
