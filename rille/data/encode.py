r"""Text to token ids by a table of words: the same ids as `Tokenizer.encode`, several times as fast.

A byte-level BPE never merges across the words that its pattern cuts, and text repeats its words:

    ids(text) = concatenation over words w of table[w],   table[w] = tokenizer.encode(w), asked once

The pattern is written here again for plain text, where `re` is fast: ASCII, Latin-1 without its control characters, and
the dashes, quotes, bullets, arrows and lines of other blocks, which are neither letters nor digits nor spaces and were
so in every version of Unicode. A text is cut where a line feed stands before a printable ASCII character: there a word
ends, whatever stands around it, since no alternative of the pattern goes on from a line feed to such a character. Lines
that are not plain go to the tokenizer itself, up to the next such place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from itertools import groupby

import numpy as np

from rille.text.official import OfficialTokenizer
from rille.text.tokenizer import TrainedTokenizer
from rille.text.vocabulary import WORD_PATTERN, Tokenizer, check_text, cut_text

_SPACES = r" \t\n\r\x0b\x0c\xa0"
_BOTH = r"\xaa\xba"  # letters without case, which the pattern counts as upper and as lower
_UPPER = rf"A-Z\xc0-\xd6\xd8-\xde{_BOTH}"
_LOWER = rf"a-z\xb5\xdf-\xf6\xf8-\xff{_BOTH}"
_DIGITS = r"0-9\xb2\xb3\xb9\xbc-\xbe"
_LETTERS_DIGITS = rf"{_UPPER}{_LOWER}{_DIGITS}"
_LEAD = rf"[^\r\n{_LETTERS_DIGITS}]?"
_CONTRACTION = r"(?:'(?:[sStTmMdD]|[rRvV][eE]|[lL][lL]))?"
WORDS = re.compile(
    "|".join(
        [
            rf"{_LEAD}[{_UPPER}]*[{_LOWER}]+{_CONTRACTION}",
            rf"{_LEAD}[{_UPPER}]+[{_LOWER}]*{_CONTRACTION}",
            rf"[{_DIGITS}]{{1,3}}",
            rf" ?[^{_SPACES}{_LETTERS_DIGITS}]+[\r\n]*",
            rf"[{_SPACES}]*[\r\n]+",
            rf"[{_SPACES}]+(?![^{_SPACES}])",
            rf"[{_SPACES}]+",
        ]
    )
)
_PLAIN = re.compile(r"[\x00-\x7f\xa0-\xff\u2010-\u2027\u2030-\u205e\u2190-\u21ff\u2500-\u257f]*")
_CUT = re.compile(r"(?<=\n)(?=[!-~])")
_RUN, _PIECE = 25_000, 400_000  # characters: what `cut_text` leaves whole
_TOGETHER = 500  # words
_MOST_WORDS = 1_000_000  # then the table starts afresh


class Encoder:
    """Encodes texts with a tokenizer through a table of words."""

    def __init__(self, tokenizer: Tokenizer):
        """A tokenizer that cuts words in another way than ours is used directly."""
        self._tokenizer = tokenizer
        self.vocab_size, self.eos_id = tokenizer.vocab_size, tokenizer.eos_id
        self.by_table = cuts_our_words(tokenizer)
        self._line_feed = tokenizer.encode("\n")[0]
        self._start_table()

    def _start_table(self) -> None:
        self._table = _Table()
        self._flat = np.empty(1 << 16, np.uint32)  # where ids of words lie, with room to grow
        self._used = 0
        self._begins, self._counts = np.empty(0, np.int64), np.empty(0, np.int64)  # a word's first id; how many

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, uint32 [n]: those of `tokenizer.encode`. Raises ValueError for a lone surrogate.

        Give a megabyte or so at once: the tokenizer is asked for new words once a call.
        """
        if not self.by_table:
            return [np.array(ids, dtype=np.uint32) for ids in self._tokenizer.encode_batch(texts)]
        parts = [part for text in map(check_text, texts) for piece in _pieces(text) for part in _parts(piece)]
        plain = [is_plain(part) for part in parts]
        others = self._tokenizer._encode_pieces([part for part, is_one in zip(parts, plain, strict=True) if not is_one])
        known = iter(self._look_up([part for part, is_one in zip(parts, plain, strict=True) if is_one]))
        asked = iter(others)
        ids = [next(known) if is_one else np.array(next(asked), dtype=np.uint32) for is_one in plain]
        return _by_text(texts, parts, ids)

    def _look_up(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of plain texts."""
        if len(self._table) > _MOST_WORDS:
            self._start_table()
        number = self._table.__getitem__
        words = [np.fromiter(map(number, WORDS.findall(text)), dtype=np.int64) for text in texts]
        if self._table.new:
            self._learn(self._table.take_new())
        return [self._gather(which) for which in words]

    def _gather(self, which: np.ndarray) -> np.ndarray:
        begins, counts = self._begins[which], self._counts[which]
        stops = np.cumsum(counts)
        if not len(stops) or stops[-1] == len(which):
            return self._flat[begins]
        starts = np.repeat(begins - stops + counts, counts)
        starts += np.arange(len(starts))
        return self._flat[starts]

    def _learn(self, words: list[str]) -> None:
        """Add words to the arrays, in the order in which the table numbered them.

        The tokenizer is asked for many words at once. Words that end in a letter or a digit are given together, a line
        feed after each: it makes a word of its own there, and no id of another word holds it.
        """
        together = np.array([word[-1].isalnum() for word in words])
        lines = [f"{word}\n" for word in words if word[-1].isalnum()]
        groups = ["".join(lines[start : start + _TOGETHER]) for start in range(0, len(lines), _TOGETHER)]
        # Words are pieces already: nothing is left to cut.
        answers = self._tokenizer._encode_pieces([*groups, *(word for word in words if not word[-1].isalnum())])
        flat = np.array([number for ids in answers for number in ids], dtype=np.uint32)
        stops = np.cumsum([0, *map(len, answers)])
        feeds = np.flatnonzero(flat[: stops[len(groups)]] == self._line_feed)
        begins, counts = np.empty((2, len(words)), np.int64)
        begins[together] = np.append(0, feeds + 1)[:-1]
        counts[together] = feeds - begins[together]
        begins[~together] = stops[len(groups) : -1]
        counts[~together] = np.diff(stops[len(groups) :])
        self._append(flat, begins, counts)

    def _append(self, flat: np.ndarray, begins: np.ndarray, counts: np.ndarray) -> None:
        end = self._used + len(flat)
        if end > len(self._flat):
            self._flat = np.resize(self._flat, 2 * end)
        self._flat[self._used : end] = flat
        self._begins = np.concatenate([self._begins, self._used + begins])
        self._counts = np.concatenate([self._counts, counts])
        self._used = end


def _pieces(text: str) -> Iterable[str]:
    """As `cut_text`, which has nothing to cut in a text without long runs: in such a one every window of half a run has
    spaces and other characters."""
    if not 0 < len(text) <= _PIECE:
        return cut_text(text)
    half = _RUN // 2
    windows = (text[start : start + half] for start in range(0, len(text) - half + 1, half))
    mixed = len(text) <= _RUN or all(len(window.split(None, 1)) == 2 for window in windows)
    return [text] if mixed else cut_text(text)


def is_plain(text: str) -> bool:
    """Whether the table's own pattern holds for a text."""
    return text.isascii() or _PLAIN.fullmatch(text) is not None


def _parts(piece: str) -> list[str]:
    """A text cut where words surely end: parts that are plain, as long as can be, and parts that are not."""
    if is_plain(piece):
        return [piece]
    parts: list[str] = []
    for plain, group in groupby(_CUT.split(piece), key=is_plain):
        run = list(group)
        parts += ["".join(run)] if plain else run
    return parts


def _by_text(texts: Sequence[str], parts: list[str], ids: list[np.ndarray]) -> list[np.ndarray]:
    """Put the ids of the parts together again, text by text."""
    joined: list[np.ndarray] = []
    at = 0
    for text in texts:
        first, room = at, len(text)
        while room:
            room -= len(parts[at])
            at += 1
        joined.append(ids[first] if at == first + 1 else np.concatenate([np.empty(0, np.uint32), *ids[first:at]]))
    return joined


class _Table(dict[str, int]):
    """Numbers words in the order in which it meets them."""

    def __init__(self):
        super().__init__()
        self.new: list[str] = []

    def __missing__(self, word: str) -> int:
        self[word] = number = len(self)
        self.new.append(word)
        return number

    def take_new(self) -> list[str]:
        new, self.new = self.new, []
        return new


def cuts_our_words(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer cuts words by `WORD_PATTERN` and does nothing else to text."""
    if isinstance(tokenizer, OfficialTokenizer):
        return True
    if not isinstance(tokenizer, TrainedTokenizer):
        return False
    steps = (json.loads(tokenizer.to_json()).get("pre_tokenizer") or {}).get("pretokenizers", [])
    if [step.get("type") for step in steps] != ["Split", "ByteLevel"]:
        return False
    words, to_bytes = steps
    ours = words["pattern"] == {"Regex": WORD_PATTERN} and words["behavior"] == "Isolated" and not words["invert"]
    return ours and not to_bytes["add_prefix_space"] and not to_bytes["use_regex"]
