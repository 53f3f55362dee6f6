"""The published vocabulary: `tiktoken.model`, one token a line, and the specials above it.

    line    := base64(bytes of the token) SPACE rank        id of a token = rank
    special := number of ranks + 0 ... 255                   named by SPECIAL_NAMES, else <|reserved_token_{id}|>

A pair of neighbours merges in the order of the ranks of what comes out. The file has no list of merges and no specials;
their names stand in `tokenizer_config.json` (other models of the family name them differently), and the published K3's
are the default here.
Source: Kimi K3's `tiktoken.model` and `tokenization_kimi.py` (163,584 ranks, 256 specials, 163,840 ids).
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from rille.text.vocabulary import (
    CLOSE,
    END_OF_MESSAGE,
    MEDIA_BEGIN,
    MEDIA_CONTENT,
    MEDIA_END,
    MEDIA_PAD,
    OPEN,
    SEP,
    WORD_PATTERN,
    Tokenizer,
    as_directory,
)

if TYPE_CHECKING:
    import tiktoken

OFFICIAL_FILE_NAME = "tiktoken.model"
CONFIG_FILE_NAME = "tokenizer_config.json"
NUM_SPECIALS = 256
END_OF_DOCUMENT = "[EOS]"
# Offset of each named special token from the first one.
SPECIAL_NAMES = {
    0: "[BOS]",
    1: END_OF_DOCUMENT,
    2: END_OF_MESSAGE,
    3: OPEN,
    4: CLOSE,
    5: SEP,
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: MEDIA_BEGIN,
    19: MEDIA_CONTENT,
    20: MEDIA_END,
    21: MEDIA_PAD,
    65: "<osagent_mode>",
    254: "[UNK]",
    255: "[PAD]",
}


class OfficialTokenizer(Tokenizer):
    """The published byte-level BPE, run by `tiktoken`. Make one with `load_tokenizer`."""

    def __init__(self, ranks: dict[bytes, int], specials: dict[str, int], config: str | None = None):
        """ranks: every ordinary token's id; config: the text of `tokenizer_config.json`, written back by `save`."""
        super().__init__({rank: word for word, rank in ranks.items()}, specials, END_OF_DOCUMENT)
        self._ranks = ranks
        self._config = config
        self._encoding = _encoding(ranks)

    def _encode_pieces(self, pieces: list[str]) -> list[list[int]]:
        if len(pieces) == 1:
            return [self._encoding.encode_ordinary(pieces[0])]
        return self._encoding.encode_ordinary_batch(pieces)

    def digest(self) -> str:
        specials = json.dumps(self.specials, sort_keys=True)
        return hashlib.sha256(_file_content(self._ranks) + specials.encode()).hexdigest()

    def save(self, directory: str | Path) -> Path:
        directory = as_directory(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self._config is not None:
            _replace(directory / CONFIG_FILE_NAME, self._config.encode())
        return _replace(directory / OFFICIAL_FILE_NAME, _file_content(self._ranks))


def read_official(file: Path) -> OfficialTokenizer:
    """Read a `tiktoken.model`; the specials' names come from a `tokenizer_config.json` beside it, if it lists them.

    Raises ValueError, in one line, for a file that is not of this form, ranks with gaps, or a missing single byte.
    """
    ranks = _read_ranks(file)
    config_file = file.with_name(CONFIG_FILE_NAME)
    config = config_file.read_text(encoding="utf-8") if config_file.is_file() else None
    names = SPECIAL_NAMES if config is None else _names_in_config(config, config_file, len(ranks))
    first = len(ranks)
    named = {offset: names.get(offset, f"<|reserved_token_{first + offset}|>") for offset in range(NUM_SPECIALS)}
    specials = {name: first + offset for offset, name in named.items()}
    if len(specials) != NUM_SPECIALS:
        raise ValueError(f"{config_file} gives two special tokens the same name")
    return OfficialTokenizer(ranks, specials, config)


def _read_ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        word, _, rank = line.partition(b" ")
        try:
            ranks[base64.b64decode(word, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"{file} line {number} is not 'base64 rank' ({error}); fetch the file again") from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(f"{file} does not rank its {len(ranks):,} tokens from 0 without gaps; fetch the file again")
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(f"{file} lacks {len(missing)} of the 256 single bytes; only a lossless vocabulary can be used")
    return ranks


def _names_in_config(text: str, file: Path, first: int) -> dict[int, str]:
    """Offset to name of the specials that a `tokenizer_config.json` lists; the published ones if it lists none."""
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error})") from None
    listed = config.get("added_tokens_decoder") if isinstance(config, dict) else None
    if not listed:
        return SPECIAL_NAMES
    names = {int(number) - first: token["content"] for number, token in listed.items()}
    outside = [offset + first for offset in names if not 0 <= offset < NUM_SPECIALS]
    if outside:
        raise ValueError(
            f"{file} lists the special token {outside[0]}, outside {first} to {first + NUM_SPECIALS - 1}: "
            f"it does not belong to this {OFFICIAL_FILE_NAME}"
        )
    return names


def _encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    import tiktoken  # here, so that tokenizers of the other kind do not pay for it

    return tiktoken.Encoding("kimi", pat_str=WORD_PATTERN, mergeable_ranks=ranks, special_tokens={})


def _file_content(ranks: dict[bytes, int]) -> bytes:
    return b"".join(
        base64.b64encode(word) + b" %d\n" % rank for word, rank in sorted(ranks.items(), key=lambda r: r[1])
    )


def _replace(path: Path, content: bytes) -> Path:
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)
    return path
