"""The published vocabulary: the ids of the official encoder, its specials, and files that are not of its kind."""

import base64
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.text.official import SPECIAL_NAMES, OfficialTokenizer
from rille.text.tokenizer import TextStream, Tokenizer, load_tokenizer, train_tokenizer

any_text = st.text(st.characters(exclude_categories=("Cs",)))  # Cs: surrogates
marked_text = st.lists(
    st.one_of(any_text, st.sampled_from(["<|", "|>", "<|kimi_image_placeholder|>", *SPECIAL_NAMES.values()])),
    max_size=6,
).map("".join)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> OfficialTokenizer:
    """A vocabulary of the official form: the bytes and three merges."""
    folder = tmp_path_factory.mktemp("tiny")
    write_ranks(folder, [*BYTES, b"ab", b"abc", b" ab"])
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, OfficialTokenizer)
    return tokenizer


BYTES = [bytes([byte]) for byte in range(256)]


def write_ranks(folder: Path, words: list[bytes]) -> Path:
    file = folder / "tiktoken.model"
    file.write_bytes(b"".join(base64.b64encode(word) + b" %d\n" % rank for rank, word in enumerate(words)))
    return file


def test_plain_strings_of_the_official_encoder(official: Tokenizer, golden: dict):
    assert len(golden["plain"]) == 10
    for case in golden["plain"]:
        assert official.encode(case["text"]) == case["ids"]
        assert official.decode(case["ids"]) == case["text"]


def test_published_specials(official: Tokenizer, golden: dict):
    assert official.vocab_size == 163_840
    assert {name: official.specials[name] for name in golden["special_tokens"]} == golden["special_tokens"]
    assert sorted(official.specials.values()) == list(range(163_584, 163_840))
    others = {*official.specials} - {*golden["special_tokens"]}
    assert others == {f"<|reserved_token_{official.specials[name]}|>" for name in others}
    assert official.eos_id == 163_585
    assert official.stop_ids == (163_585, 163_586)
    assert official.decode([163_587, 163_592]) == "<|open|><|reserved_token_163592|>"


def test_published_file_is_written_back_byte_for_byte(official: Tokenizer, tmp_path: Path):
    from tests.text.conftest import VOCABULARY

    path = official.save(tmp_path / "new")
    assert path.read_bytes() == VOCABULARY.read_bytes()
    assert [p.name for p in path.parent.iterdir()] == ["tiktoken.model"]


@settings(max_examples=200, deadline=None)
@given(marked_text)
def test_text_comes_back_and_holds_no_special(official: Tokenizer, text: str):
    ids = official.encode(text)
    assert official.decode(ids) == text
    assert max(ids, default=0) < 163_584
    stream = TextStream(official)
    assert "".join([stream.feed(i) for i in ids] + [stream.finish()]) == text


@pytest.mark.parametrize("unit", ["a", " ", "\n", "\u0301", "🙂", "中", "<|open|>", "word <|end_of_msg|>\n", "\r\n \t"])
def test_a_megabyte_comes_back(official: Tokenizer, unit: str):
    text = unit * (1_000_000 // len(unit.encode()))
    ids = official.encode(text)
    assert official.decode(ids) == text
    assert max(ids) < 163_584


@given(
    st.lists(st.sampled_from(["ab", "c", " ", "<|open|>", "[EOS]", "<|reserved_token_267|>", "[PAD", "]"]), max_size=8)
)
def test_specials_only_where_asked_for(tiny: OfficialTokenizer, parts: list[str]):
    text = "".join(parts)
    assert tiny.decode(tiny.encode(text)) == text
    assert not {*tiny.encode(text)} & {*tiny.specials.values()}
    ids = tiny.encode_with_specials(text)
    assert tiny.decode(ids) == text
    named = [tiny.special_name(i) for i in ids]
    assert [name for name in named if name] == tiny._special_pattern.findall(text)


def test_merges_go_by_rank(tiny: OfficialTokenizer):
    assert tiny.encode("abc ab") == [257, 258]
    assert tiny.vocab_size == 259 + 256
    assert tiny.eos_id == 260
    assert tiny.byte_lengths()[256:260] == [2, 3, 3, 0]
    assert tiny.encode_batch(["abc", "", "ab"]) == [[257], [], [256]]


@given(st.lists(st.integers(0, 514)))
def test_stream_equals_decode(tiny: OfficialTokenizer, ids: list[int]):
    stream = TextStream(tiny)
    assert "".join([stream.feed(i) for i in ids] + [stream.finish()]) == tiny.decode(ids)


def test_unknown_ids_and_surrogates(tiny: OfficialTokenizer):
    for token in (515, -1):
        with pytest.raises(ValueError, match=f"token id {token} is outside"):
            tiny.decode([token])
    with pytest.raises(ValueError, match=r"surrogate U\+D83D"):
        tiny.encode("a\ud83d")


def test_names_of_another_model(tmp_path: Path):
    file = write_ranks(tmp_path, BYTES)
    config = {"added_tokens_decoder": {"257": {"content": "[EOS]"}, "258": {"content": "<|im_end|>"}}, "other": 1}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(file)
    assert tokenizer.specials["<|im_end|>"] == 258
    assert tokenizer.specials["<|reserved_token_256|>"] == 256
    assert "<|open|>" not in tokenizer.specials
    tokenizer.save(tmp_path / "again")
    again = load_tokenizer(tmp_path / "again")
    assert again.specials == tokenizer.specials
    assert again.digest() == tokenizer.digest()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TikTokenTokenizer"}))
    assert load_tokenizer(file).specials["<|open|>"] == 259
    assert load_tokenizer(file).digest() != tokenizer.digest()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not JSON"),
        ('{"added_tokens_decoder": {"255": {"content": "x"}}}', "lists the special token 255, outside 256 to 511"),
        ('{"added_tokens_decoder": {"257": {"content": "x"}, "258": {"content": "x"}}}', "the same name"),
        ('{"added_tokens_decoder": {"256": {"content": "x"}}}', r"no token '\[EOS\]'"),
    ],
)
def test_unfit_configs(tmp_path: Path, config: str, message: str):
    write_ranks(tmp_path, BYTES)
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "lacks 256 of the 256 single bytes"),
        (b"YQ== 0\nYg== 2\n", "does not rank its 2 tokens"),
        (b"YQ== 0\nYQ== 1\n", "does not rank its 1 tokens"),
        (b"YQ== 0\n\xff\xfe\n", "line 2 is not 'base64 rank'"),
        (b"YQ==\n", "line 1 is not"),
        (b"Y 0\n", "line 1 is not"),
    ],
)
def test_unfit_files(tmp_path: Path, content: bytes, message: str):
    file = tmp_path / "tiktoken.model"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        load_tokenizer(file)
    assert "\n" not in str(caught.value)


def test_the_official_file_goes_first(tmp_path: Path):
    train_tokenizer(["x"], 300, note=lambda _: None).save(tmp_path)
    assert not isinstance(load_tokenizer(tmp_path), OfficialTokenizer)
    write_ranks(tmp_path, BYTES)
    assert isinstance(load_tokenizer(tmp_path), OfficialTokenizer)
