"""The table of words gives the tokenizer's own ids, whatever the text; a foreign tokenizer is used as it is."""

import json
import re
import unicodedata
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rille.data import encode
from rille.data.encode import Encoder, cuts_our_words
from rille.text import vocabulary
from rille.text.tokenizer import TrainedTokenizer, load_tokenizer, train_tokenizer
from rille.text.vocabulary import cut_text

SAMPLE = Path(encode.__file__).read_text(encoding="utf-8")
TOKENIZER = train_tokenizer([SAMPLE, "Größe naïve 中文 текст \u3000 don't WE'LL\r\n\r\n  x"], 700)

characters = st.one_of(
    st.sampled_from(" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2028\u3000'sStTreLL.,;{}()#@0129azAZ\x00\x7f"),
    st.sampled_from("éßñſKµ中文字иЯ\u0301\u200d🙂"),
    st.sampled_from([chr(c) for c in (*range(0xA0, 0x100), *range(0x2010, 0x2060), *range(0x2190, 0x2200))]),
    st.characters(exclude_categories=("Cs",)),
)
texts = st.one_of(st.text(characters, max_size=60), st.text(st.characters(max_codepoint=127), max_size=200))


@settings(max_examples=400, deadline=None)
@given(st.lists(texts, max_size=4))
@example(
    ["a\n b", "a\nb", "x'S", "x\u017f", "   \n  y", "\r\n\r\na", "HTTPServer's", "12345 67", "\x1c a", "é\n\n\nok"]
)
def test_ids_are_the_tokenizers(batch: list[str]):
    ids = Encoder(TOKENIZER).encode_batch(batch)
    assert [one.tolist() for one in ids] == TOKENIZER.encode_batch(batch)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", " ", "b c", "\x1c", "é"]), st.integers(1, 60)), max_size=12))
def test_pieces_are_those_of_cut_text(parts: list[tuple[str, int]]):
    with pytest.MonkeyPatch.context() as patch:  # the same rules at a size that hypothesis can reach
        patch.setattr(vocabulary, "_RUN", 20)
        patch.setattr(vocabulary, "_PIECE", 150)
        patch.setattr(vocabulary, "_LONG_RUN", re.compile(vocabulary._LONG_RUN.pattern.replace("25001", "21")))
        patch.setattr(encode, "_RUN", 20)
        patch.setattr(encode, "_PIECE", 150)
        text = "".join(character * count for character, count in parts)
        assert list(encode._pieces(text)) == list(cut_text(text))


def test_sizes_of_pieces_are_those_of_the_tokenizer():
    assert (encode._RUN, encode._PIECE) == (vocabulary._RUN, vocabulary._PIECE)
    assert "25001" in vocabulary._LONG_RUN.pattern


def test_long_text_and_a_table_that_starts_afresh(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(encode, "_MOST_WORDS", 50)
    encoder = Encoder(TOKENIZER)
    long = ["a" * 60_000 + " " * 30_000 + SAMPLE * 3, SAMPLE, "中" * 30_000 + "\nabc"]
    for _ in range(3):
        assert [one.tolist() for one in encoder.encode_batch(long)] == TOKENIZER.encode_batch(long)


def test_official_vocabulary_too(tmp_path: Path):
    file = tmp_path / "tiktoken.model"
    import base64

    words = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"in", b"ing"]
    file.write_text("".join(f"{base64.b64encode(word).decode()} {rank}\n" for rank, word in enumerate(words)))
    official = load_tokenizer(file)
    assert cuts_our_words(official)
    batch = [SAMPLE, "the thing\n\u00e9 inging"]
    assert [one.tolist() for one in Encoder(official).encode_batch(batch)] == official.encode_batch(batch)


def test_other_words_are_not_ours():
    content = json.loads(TOKENIZER.to_json())
    content["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\s+|\S+"
    other = TrainedTokenizer(tokenizers.Tokenizer.from_str(json.dumps(content)))
    encoder = Encoder(other)
    assert not encoder.by_table
    assert encoder.encode_batch(["a b1c\n"])[0].tolist() == other.encode("a b1c\n")


def test_lone_surrogate_is_refused():
    with pytest.raises(ValueError, match="lone surrogate"):
        Encoder(TOKENIZER).encode_batch(["a\ud800"])


def test_plain_text_is_classed_as_unicode_says():
    """Letters, digits and spaces of the own pattern are those of the database, for every character it is used for."""
    letters = re.compile(f"[{encode._UPPER}{encode._LOWER}]")
    digits, spaces = re.compile(f"[{encode._DIGITS}]"), re.compile(f"[{encode._SPACES}]")
    plain = [chr(code) for code in range(0x11_0000) if encode.is_plain(chr(code))]
    assert len(plain) == 128 + 96 + 24 + 47 + 112 + 128
    for character in plain:
        category = unicodedata.category(character)
        assert bool(letters.match(character)) == (category[0] == "L")
        assert bool(re.match(f"[{encode._UPPER}]", character)) == (category in ("Lu", "Lt", "Lm", "Lo"))
        assert bool(re.match(f"[{encode._LOWER}]", character)) == (category in ("Ll", "Lm", "Lo"))
        assert bool(digits.match(character)) == (category[0] == "N")
        white = category[0] == "Z" or character in "\t\n\x0b\x0c\r"
        assert bool(spaces.match(character)) == white
