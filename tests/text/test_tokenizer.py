"""Byte-level BPE: nothing is lost, nothing is recognised that should not be, and the pattern is the published one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from rille.text.tokenizer import (
    END_OF_TEXT,
    SPECIALS,
    WORD_PATTERN,
    TextStream,
    TrainedTokenizer,
    load_tokenizer,
    train_tokenizer,
)
from rille.text.vocabulary import cut_text

TEXTS = ["def add(a, b):\n    return a + b\n" * 20, "The tide's in; it'll turn. 混合English和中文123 🙂🚀 café\n" * 20]
SMALLEST = 256 + len(SPECIALS)

any_text = st.text(st.characters(exclude_categories=("Cs",)))  # Cs: surrogates


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer() -> TrainedTokenizer:
    return train_tokenizer(TEXTS, 320, note=quiet)


def test_ids_fill_the_vocabulary(tokenizer: TrainedTokenizer):
    assert tokenizer.vocab_size == 320
    assert [tokenizer.specials[name] for name in SPECIALS] == list(range(311, 320))
    assert tokenizer.eos_id == 311
    assert tokenizer.stop_ids == (tokenizer.eos_id, tokenizer.specials["<|end_of_msg|>"])
    ids = tokenizer.encode("".join(TEXTS))
    assert max(ids) > 256
    assert tokenizer.eos_id not in ids
    assert len(ids) < len("".join(TEXTS).encode()) / 2


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_every_text_comes_back(tokenizer: TrainedTokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", "\0", "a\0b", "\ufeff", "🙂", "👩‍👩‍👧", "\r\n\r\n \t x  ", "e\u0301", "\U0010ffff", "中文"]
)
def test_odd_texts_come_back(tokenizer: TrainedTokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogate_is_refused(tokenizer: TrainedTokenizer):
    with pytest.raises(ValueError, match=r"surrogate U\+D83D at character 3"):
        tokenizer.encode("abc\ud83d")
    with pytest.raises(ValueError, match="surrogate"):
        train_tokenizer(["fine", "\udc80"], 300, note=quiet)


@given(st.lists(st.sampled_from([*SPECIALS, "<|reserved_token_300|>", " ", "x", "<|", "|>"]), max_size=8))
def test_text_that_spells_a_special_token_is_text(tokenizer: TrainedTokenizer, parts: list[str]):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert not {*ids} & {*tokenizer.specials.values()}
    assert tokenizer.decode(ids) == text


def test_specials_are_recognised_where_that_is_asked_for(tokenizer: TrainedTokenizer):
    ids = tokenizer.encode_with_specials(f"a{END_OF_TEXT}<|open|>b <|openx|>")
    expected = [tokenizer.eos_id, tokenizer.specials["<|open|>"]]
    assert ids == [*tokenizer.encode("a"), *expected, *tokenizer.encode("b <|openx|>")]
    assert tokenizer.encode_with_specials("") == []
    assert [tokenizer.special_name(i) for i in ids[:3]] == [None, END_OF_TEXT, "<|open|>"]


def test_special_token_is_text_after_loading_too(tokenizer: TrainedTokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = f"a{END_OF_TEXT}b"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.eos_id not in loaded.encode(text)
    assert loaded.decode([loaded.eos_id]) == END_OF_TEXT


@settings(deadline=None)
@given(st.lists(st.integers(0, 319)))
def test_stream_equals_decode(tokenizer: TrainedTokenizer, ids: list[int]):
    stream = TextStream(tokenizer)
    parts = [stream.feed(i) for i in ids] + [stream.finish()]
    assert "".join(parts) == tokenizer.decode(ids)


@settings(deadline=None)
@given(any_text)
def test_stream_gives_only_whole_characters(tokenizer: TrainedTokenizer, text: str):
    stream = TextStream(tokenizer)
    so_far = ""
    for token in tokenizer.encode(text):
        so_far += stream.feed(token)
        assert text.startswith(so_far)
    assert so_far == text
    assert stream.finish() == ""


def test_stream_waits_for_the_last_byte():
    bytes_only = train_tokenizer([""], SMALLEST, note=quiet)
    stream = TextStream(bytes_only)
    assert [stream.feed(token) for token in bytes_only.encode("é🙂")] == ["", "é", "", "", "", "🙂"]


def test_invalid_utf8_is_replaced():
    tokenizer = train_tokenizer([""], SMALLEST, note=quiet)
    first, second = tokenizer.encode("é")
    assert tokenizer.decode([first]) == "\ufffd"
    assert tokenizer.decode([second, *tokenizer.encode("a"), first]) == "\ufffda\ufffd"


@pytest.mark.parametrize("token", [320, -1, 10**9])
def test_unknown_id(tokenizer: TrainedTokenizer, token: int):
    with pytest.raises(ValueError, match=f"{token} is outside .* 320 tokens"):
        tokenizer.decode([1, token])
    with pytest.raises(ValueError, match=f"{token} is outside"):
        TextStream(tokenizer).feed(token)


def test_ids_may_be_integers_of_other_libraries(tokenizer: TrainedTokenizer):
    torch = pytest.importorskip("torch")
    ids = tokenizer.encode("return")
    assert tokenizer.decode(torch.tensor(ids)) == "return"
    with pytest.raises(ValueError):
        tokenizer.decode([1.5])  # type: ignore[list-item]


def test_small_text_leaves_reserved_ids_and_says_so():
    notes: list[str] = []
    tokenizer = train_tokenizer(["aaaa bbbb"], 1000, note=notes.append)
    assert tokenizer.vocab_size == 1000
    assert len(notes) == 1
    assert "of 1,000 tokens" in notes[0]
    assert max(tokenizer.encode("aaaa bbbb <|reserved_token_999|>")) < 300
    assert tokenizer.decode([999]) == "<|reserved_token_999|>"


def test_vocabulary_must_hold_the_bytes():
    with pytest.raises(ValueError, match="264 is too small: .* at least 265"):
        train_tokenizer(TEXTS, SMALLEST - 1)


def test_training_is_deterministic(tokenizer: TrainedTokenizer):
    assert train_tokenizer(iter(TEXTS), 320, note=quiet).to_json() == tokenizer.to_json()


def test_batch_equals_one_by_one(tokenizer: TrainedTokenizer):
    texts = [*TEXTS, "", "x"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_byte_lengths_sum_to_the_text(tokenizer: TrainedTokenizer):
    lengths = tokenizer.byte_lengths()
    for text in TEXTS:
        assert sum(lengths[i] for i in tokenizer.encode(text)) == len(text.encode())
    assert lengths[tokenizer.eos_id] == 0


@pytest.mark.parametrize("text", [" " * 60_000, "a" * 60_000, "ab " * 300_000, "中" * 30_000 + "\n" * 30_000])
def test_long_texts_and_runs(tokenizer: TrainedTokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("a" * 25_000 + " ", [25_001]),
        ("a" * 25_001, [25_000, 1]),
        ("x " + "a" * 50_000 + " " * 25_001 + "b", [25_002, 50_000, 2]),
        ("ab " * 200_000, [400_000, 200_000]),
        ("a" * 400_001, [25_000] * 16 + [1]),
    ],
)
def test_cuts(text: str, lengths: list[int]):
    assert [len(piece) for piece in cut_text(text)] == lengths
    assert "".join(cut_text(text)) == text


def cut_literally(text: str) -> list[str]:
    """The published rule, one character at a time."""
    pieces = []
    for whole in (text[at : at + 400_000] for at in range(0, len(text), 400_000)):
        start = run = 0
        for i, character in enumerate(whole):
            same = i > 0 and character.isspace() == whole[i - 1].isspace()
            run = run + 1 if same else 1
            if run > 25_000:
                pieces.append(whole[start:i])
                start, run = i, 1
        pieces.append(whole[start:])
    return pieces


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from("a \u00a0\n中"), st.sampled_from([1, 2, 24_999, 25_000, 25_001, 60_000])), max_size=8
    )
)
def test_cuts_are_the_published_ones(runs: list[tuple[str, int]]):
    text = "".join(character * length for character, length in runs)
    assert list(cut_text(text)) == cut_literally(text)


def test_cutting_takes_linear_time():
    """Runs just short of the limit: a search that starts anew in the middle of a run needs minutes for this."""
    pieces = list(cut_text(("a" * 24_999 + " ") * 100))
    assert len(pieces) == 7


def test_save_and_load(tokenizer: TrainedTokenizer, tmp_path: Path):
    path = tokenizer.save(tmp_path / "new")
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
    for source in (path, path.parent, str(path)):
        assert load_tokenizer(source).to_json() == tokenizer.to_json()
    assert load_tokenizer(path).encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_missing_tokenizer(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist: give a checkpoint directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json and no tiktoken\.model: give"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c["model"].update(type="Unigram"), "holds no BPE"),
        (lambda c: c["model"].pop("merges"), "lacks the vocabulary"),
        (lambda c: c["model"]["merges"].append(["q", "never"]), "merges of tokens"),
        (lambda c: c.update(decoder=None), "not byte-level"),
        (lambda c: c["model"]["vocab"].pop("~"), "not byte-level"),
        (lambda c: c.update(normalizer={"type": "NFC"}), "changes the text"),
        (lambda c: c["added_tokens"][0].update(special=False), "recognises added tokens"),
        (lambda c: (c["added_tokens"].clear(), c["model"]["vocab"].pop(END_OF_TEXT)), "no token '<|end_of_text|>'"),
    ],
)
def test_unfit_files(tokenizer: TrainedTokenizer, tmp_path: Path, change, message: str):
    content = json.loads(tokenizer.to_json())
    change(content)
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message.replace("|", r"\|")):
        load_tokenizer(file)


@pytest.mark.parametrize("content", [b"", b"not json", b"\xff\xfe", b"[]", b"{}"])
def test_files_that_are_something_else(tmp_path: Path, content: bytes):
    file = tmp_path / "tokenizer.json"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="tokenizer.json") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("I'LL we're  DON'T", ["I'LL", " we're", " ", " DON'T"]),
        ("getHTTPResponse2024a", ["get", "HTTPResponse", "202", "4", "a"]),
        ("混合English和中文123", ["混合", "English", "和中文", "123"]),
        ("x = y[0];\r\n\r\n    return", ["x", " =", " y", "[", "0", "];\r\n\r\n", "   ", " return"]),
        ("a \n \n  b\t", ["a", " \n \n", " ", " b", "\t"]),
        ("naïve e\u0301t\u00a0_x", ["naïve", " e\u0301t", "\u00a0", "_x"]),
    ],
)
def test_words(text: str, words: list[str]):
    split = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    assert [word for word, _ in split.pre_tokenize_str(text)] == words


def test_text_needs_no_torch():
    code = "import sys, rille.text.tokenizer; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
