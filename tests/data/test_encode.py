"""The table of words gives the tokenizer's own ids, whatever the text; a foreign tokenizer is used as it is."""

import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rille.data import encode
from rille.data.encode import Encoder, cuts_our_words
from rille.text.tokenizer import TrainedTokenizer, load_tokenizer, train_tokenizer

SAMPLE = Path(encode.__file__).read_text(encoding="utf-8")
TOKENIZER = train_tokenizer([SAMPLE, "Größe naïve 中文 текст \u3000 don't WE'LL\r\n\r\n  x"], 700)

characters = st.one_of(
    st.sampled_from(" \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2028\u3000'sStTreLL.,;{}()#@0129azAZ\x00\x7f"),
    st.sampled_from("éßñſKµ中文字иЯ\u0301\u200d🙂"),
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
