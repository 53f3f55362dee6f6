"""Byte-level BPE: nothing is lost, nothing is recognised that should not be, and the pattern is the published one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from rille.text.tokenizer import END_OF_TEXT, WORD_PATTERN, TextStream, Tokenizer, load_tokenizer, train_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n" * 20, "The tide's in; it'll turn. 混合English和中文123 🙂🚀 café\n" * 20]
ORACLE = Path(__file__).parents[3] / "shared" / "oracle"

any_text = st.text(st.characters(exclude_categories=("Cs",)))  # Cs: surrogates


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(TEXTS, 320, note=quiet)


def test_ids_fill_the_vocabulary(tokenizer: Tokenizer):
    assert tokenizer.vocab_size == 320
    assert tokenizer.eos_id == 319
    ids = tokenizer.encode("".join(TEXTS))
    assert max(ids) > 256
    assert tokenizer.eos_id not in ids
    assert len(ids) < len("".join(TEXTS).encode()) / 2


@settings(max_examples=300, deadline=None)
@given(any_text)
def test_every_text_comes_back(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    "text", ["", "\0", "a\0b", "\ufeff", "🙂", "👩‍👩‍👧", "\r\n\r\n \t x  ", "e\u0301", "\U0010ffff", "中文"]
)
def test_odd_texts_come_back(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_lone_surrogate_is_refused(tokenizer: Tokenizer):
    with pytest.raises(ValueError, match=r"surrogate U\+D83D at character 3"):
        tokenizer.encode("abc\ud83d")
    with pytest.raises(ValueError, match="surrogate"):
        train_tokenizer(["fine", "\udc80"], 300, note=quiet)


@given(st.lists(st.sampled_from([END_OF_TEXT, "<|reserved_token_300|>", " ", "x", "<|", "|>"]), max_size=8))
def test_text_that_spells_a_special_token_is_text(tokenizer: Tokenizer, parts: list[str]):
    text = "".join(parts)
    ids = tokenizer.encode(text)
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == text


def test_special_token_is_text_after_loading_too(tokenizer: Tokenizer, tmp_path: Path):
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    text = f"a{END_OF_TEXT}b"
    assert loaded.encode(text) == tokenizer.encode(text)
    assert loaded.eos_id not in loaded.encode(text)
    assert loaded.decode([loaded.eos_id]) == END_OF_TEXT


@settings(deadline=None)
@given(st.lists(st.integers(0, 319)))
def test_stream_equals_decode(tokenizer: Tokenizer, ids: list[int]):
    stream = TextStream(tokenizer)
    parts = [stream.feed(i) for i in ids] + [stream.finish()]
    assert "".join(parts) == tokenizer.decode(ids)


@settings(deadline=None)
@given(any_text)
def test_stream_gives_only_whole_characters(tokenizer: Tokenizer, text: str):
    stream = TextStream(tokenizer)
    so_far = ""
    for token in tokenizer.encode(text):
        so_far += stream.feed(token)
        assert text.startswith(so_far)
    assert so_far == text
    assert stream.finish() == ""


def test_stream_waits_for_the_last_byte():
    bytes_only = train_tokenizer([""], 257, note=quiet)
    stream = TextStream(bytes_only)
    assert [stream.feed(token) for token in bytes_only.encode("é🙂")] == ["", "é", "", "", "", "🙂"]


def test_invalid_utf8_is_replaced():
    tokenizer = train_tokenizer([""], 257, note=quiet)
    first, second = tokenizer.encode("é")
    assert tokenizer.decode([first]) == "\ufffd"
    assert tokenizer.decode([second, *tokenizer.encode("a"), first]) == "\ufffda\ufffd"


@pytest.mark.parametrize("token", [320, -1, 10**9])
def test_unknown_id(tokenizer: Tokenizer, token: int):
    with pytest.raises(ValueError, match=f"{token} is outside .* 320 tokens"):
        tokenizer.decode([1, token])
    with pytest.raises(ValueError, match=f"{token} is outside"):
        TextStream(tokenizer).feed(token)


def test_ids_may_be_integers_of_other_libraries(tokenizer: Tokenizer):
    torch = pytest.importorskip("torch")
    ids = tokenizer.encode("return")
    assert tokenizer.decode(torch.tensor(ids)) == "return"
    with pytest.raises(TypeError):
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
    with pytest.raises(ValueError, match="256 is too small"):
        train_tokenizer(TEXTS, 256)


def test_training_is_deterministic(tokenizer: Tokenizer):
    assert train_tokenizer(iter(TEXTS), 320, note=quiet).to_json() == tokenizer.to_json()


def test_batch_equals_one_by_one(tokenizer: Tokenizer):
    texts = [*TEXTS, "", "x"]
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


def test_byte_lengths_sum_to_the_text(tokenizer: Tokenizer):
    lengths = tokenizer.byte_lengths()
    for text in TEXTS:
        assert sum(lengths[i] for i in tokenizer.encode(text)) == len(text.encode())
    assert lengths[tokenizer.eos_id] == 0


@pytest.mark.parametrize("text", [" " * 60_000, "a" * 60_000, "ab " * 300_000, "中" * 30_000 + "\n" * 30_000])
def test_long_texts_and_runs(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_save_and_load(tokenizer: Tokenizer, tmp_path: Path):
    path = tokenizer.save(tmp_path / "new")
    assert [p.name for p in path.parent.iterdir()] == ["tokenizer.json"]
    for source in (path, path.parent, str(path)):
        assert load_tokenizer(source).to_json() == tokenizer.to_json()
    assert load_tokenizer(path).encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


def test_missing_tokenizer(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist: give a checkpoint directory"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds no tokenizer\.json: give"):
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
def test_unfit_files(tokenizer: Tokenizer, tmp_path: Path, change, message: str):
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


@pytest.mark.skipif(not (ORACLE / "tokenizer").is_dir(), reason="the published vocabulary is not beside the repository")
def test_pattern_is_the_published_one():
    import tiktoken
    from tiktoken.load import load_tiktoken_bpe

    golden = json.loads((ORACLE / "tokenizer_golden.json").read_text())
    ranks = load_tiktoken_bpe(str(ORACLE / "tokenizer" / "tiktoken.model"))
    published = tiktoken.Encoding("k3", pat_str=WORD_PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert golden["plain"]
    for case in golden["plain"]:
        assert published.encode_ordinary(case["text"]) == case["ids"]


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
