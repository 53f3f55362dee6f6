"""The split leaks nothing, the stream holds every token, and what is on disk is whole or absent."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rille.data.config import DataConfig
from rille.data.corpus import (
    TokenText,
    bits_per_byte,
    load_corpus,
    prepare_corpus,
    split_documents,
    unigram_nats,
)
from rille.data.sources import Document
from rille.text.tokenizer import train_tokenizer

WORDS = "the river cut a channel through old stone and left the moon a mark".split()


def make_documents(count: int) -> list[Document]:
    return [Document(str(i), f"{i}: {' '.join(WORDS[: 2 + i % 11])}\n" * (1 + i % 3)) for i in range(count)]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    source = tmp_path / "texts.jsonl"
    source.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in make_documents(200)))
    return DataConfig(path=str(source), held_out=0.1, vocab_size=300)


def prepare(config: DataConfig, directory: Path, **options):
    notes: list[str] = []
    return prepare_corpus(config, directory, note=notes.append, **options), notes


def texts_of(side: TokenText, tokenizer) -> list[str]:
    """Documents read back from the stream."""
    spans = zip(side.boundaries[:-1], side.boundaries[1:], strict=True)
    return [tokenizer.decode(side.tokens[start + 1 : end].tolist()) for start, end in spans]


def test_split_is_by_content():
    documents = make_documents(2000)
    train, held = split_documents(documents, 0.02)
    assert sorted(train + held, key=str) == sorted(documents, key=str)
    assert 20 <= len(held) <= 60  # binomial(2000, 0.02): 40 +- 6.3
    assert train == [document for document in documents if document not in held]
    again_train, again_held = split_documents(documents[::-1], 0.02)
    assert again_held == held
    assert again_train == train[::-1]
    fewer = [document for document in documents if int(document.source) % 2]
    assert set(split_documents(fewer, 0.02)[1]) == set(held) & set(fewer)


def test_equal_texts_fall_on_one_side():
    documents = [
        Document(f"{copy}/{document.source}", document.text) for copy in "ab" for document in make_documents(300)
    ]
    train, held = split_documents(documents, 0.1)
    assert held
    assert not {document.text for document in train} & {document.text for document in held}


@given(
    st.lists(
        st.text(st.characters(exclude_categories=("Cs",)), min_size=2, max_size=50), min_size=1, max_size=3, unique=True
    )
)
def test_few_documents_are_split_without_loss(texts: list[str]):
    documents = [Document(str(i), text) for i, text in enumerate(texts)]
    train, held = split_documents(documents, 0.02)
    assert train
    assert held
    assert all(document.text for document in train + held)
    pieces = sorted("".join(document.text for document in train + held))
    assert pieces == sorted("".join(texts))


def test_one_document_gives_its_end():
    (train,), (held,) = split_documents([Document("a", "0123456789" * 10)], 0.05)
    assert (train.text, held.text) == ("0123456789" * 9 + "01234", "56789")
    assert held.source == "a from character 95"


def test_what_cannot_be_split():
    with pytest.raises(ValueError, match="all 3 documents are equal"):
        split_documents([Document(str(i), "same") for i in range(3)], 0.02)
    with pytest.raises(ValueError, match="only 1 character"):
        split_documents([Document("a", "x")], 0.02)


def test_stream_holds_every_token(config: DataConfig, tmp_path: Path):
    corpus, notes = prepare(config, tmp_path / "corpus")
    train, held = split_documents(make_documents(200), config.held_out)
    assert texts_of(corpus.train, corpus.tokenizer) == [document.text for document in train]
    assert texts_of(corpus.held_out, corpus.tokenizer) == [document.text for document in held]
    for side, documents in ((corpus.train, train), (corpus.held_out, held)):
        assert side.tokens.dtype == np.uint32
        assert (side.tokens[side.boundaries] == corpus.tokenizer.eos_id).all()
        assert np.count_nonzero(side.tokens == corpus.tokenizer.eos_id) == len(documents) + 1
        assert side.num_documents == len(documents)
        assert side.num_bytes == sum(len(document.text.encode()) for document in documents)
        assert side.bytes_per_token == side.num_bytes / (len(side.tokens) - 1)
    assert notes[-1].startswith("data: 200 documents, 0.0")


def test_vocabulary_is_learned_from_the_training_side_alone(config: DataConfig, tmp_path: Path):
    corpus, _ = prepare(config, tmp_path / "corpus")
    train, _ = split_documents(make_documents(200), config.held_out)
    expected = train_tokenizer([document.text for document in train], 300)
    assert corpus.tokenizer.to_json() == expected.to_json()


def test_second_time_opens_what_is_there(config: DataConfig, tmp_path: Path):
    first, _ = prepare(config, tmp_path / "corpus")
    Path(config.path or "").unlink()  # must not be read again
    Path(config.path or "").write_text("{}")
    other_order = replace(config, seed=5, batch_tokens=7, sequence_length=3)
    second, notes = prepare(other_order, tmp_path / "corpus")
    assert notes == []
    for side in ("train", "held_out"):
        one, two = getattr(first, side), getattr(second, side)
        assert np.array_equal(one.tokens, two.tokens)
        assert np.array_equal(one.boundaries, two.boundaries)
        assert isinstance(two.tokens, np.memmap)
    assert second.tokenizer.to_json() == first.tokenizer.to_json()


def test_other_settings_are_refused(config: DataConfig, tmp_path: Path):
    corpus, _ = prepare(config, tmp_path / "corpus")
    with pytest.raises(ValueError, match="held_out 0.1, now 0.2; vocab_size 300, now 400; use another folder"):
        prepare(replace(config, vocab_size=400, held_out=0.2), tmp_path / "corpus")
    with pytest.raises(ValueError, match="tokenizer None, now"):
        prepare(config, tmp_path / "corpus", tokenizer=corpus.tokenizer)


def test_a_given_tokenizer_is_used(config: DataConfig, tmp_path: Path):
    tokenizer = train_tokenizer(["aa bb"], 270)
    corpus, _ = prepare(config, tmp_path / "corpus", tokenizer=tokenizer)
    assert corpus.tokenizer.to_json() == tokenizer.to_json()
    assert prepare(config, tmp_path / "corpus", tokenizer=tokenizer)[1] == []


def test_killed_run_leaves_no_corpus(config: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(np, "save", full)
        with pytest.raises(OSError, match="No space"):
            prepare(config, tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    corpus, _ = prepare(config, tmp_path / "corpus")
    assert corpus.train.num_documents
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []


def test_damaged_corpus_is_refused(config: DataConfig, tmp_path: Path):
    with pytest.raises(ValueError, match=r"holds no corpus\.json"):
        load_corpus(tmp_path)
    prepare(config, tmp_path / "corpus")
    file = tmp_path / "corpus" / "train.tokens"
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with pytest.raises(ValueError, match=f"has {len(whole) - 4:,} bytes, not {len(whole):,}; delete"):
        load_corpus(tmp_path / "corpus")
    (tmp_path / "corpus" / "corpus.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        load_corpus(tmp_path / "corpus")


@pytest.mark.parametrize("content", [150, 60, 0, None])
def test_boundaries_that_are_damaged_are_named(config: DataConfig, tmp_path: Path, content: int | None):
    prepare_corpus(config, tmp_path / "c", note=lambda line: None)
    file = tmp_path / "c" / "held_out.boundaries.npy"
    file.unlink() if content is None else file.write_bytes(file.read_bytes()[: min(content, file.stat().st_size - 1)])
    with pytest.raises(ValueError, match=r"held_out.boundaries.npy is damaged \(.*\); delete .*c"):
        load_corpus(tmp_path / "c")
    (tmp_path / "c" / "train.tokens").unlink()
    with pytest.raises(ValueError, match="train.tokens has 0 bytes, not"):
        load_corpus(tmp_path / "c")


def test_tokenizer_sample_is_noted_and_does_not_follow_the_order(config: DataConfig, tmp_path: Path):
    config = replace(config, tokenizer_bytes=1000)
    corpus, notes = prepare(config, tmp_path / "corpus")
    assert notes[0].startswith("tokenizer: trained on 1,000 of ")
    everything, _ = prepare(replace(config, tokenizer_bytes=10**6), tmp_path / "all")
    assert corpus.tokenizer.to_json() != everything.tokenizer.to_json()
    source = Path(config.path or "")
    source.write_text("\n".join(reversed(source.read_text().splitlines())))
    backwards, _ = prepare(config, tmp_path / "backwards")
    assert backwards.tokenizer.to_json() == corpus.tokenizer.to_json()


def test_head_is_a_prefix(config: DataConfig, tmp_path: Path):
    held = prepare(config, tmp_path / "corpus")[0].held_out
    for wanted in (1, 7, int(held.boundaries[1]), int(held.boundaries[1]) + 1, held.num_targets - 1):
        head = held.head(wanted)
        assert head.num_targets == wanted == head.boundaries[-1]
        assert np.array_equal(head.tokens, held.tokens[: wanted + 1])
        assert set(head.boundaries[:-1]) == {b for b in held.boundaries if b < wanted}
    assert held.head(10**9).num_bytes == held.num_bytes
    with pytest.raises(ValueError, match="at least 1"):
        held.head(0)


def test_unigram_by_hand():
    lengths = np.array([1, 1, 2, 0])
    train = TokenText(np.array([3, 0, 0, 1, 3]), np.array([0, 4]), lengths)  # targets 0 0 1 3
    held = TokenText(np.array([3, 0, 2, 3]), np.array([0, 3]), lengths)  # targets 0 2 3
    expected = -(math.log(3 / 8) + math.log(1 / 8) + math.log(2 / 8)) / 3
    assert unigram_nats(train, held) == pytest.approx(expected, rel=1e-12)
    assert (held.num_bytes, held.bytes_per_token) == (3, 1.0)
    assert bits_per_byte(math.log(2) * 3, 1.5) == pytest.approx(2.0)


def test_smallest_text_works(tmp_path: Path):
    (tmp_path / "t.txt").write_text("ab")
    corpus, notes = prepare(DataConfig(path=str(tmp_path / "t.txt")), tmp_path / "corpus")
    assert texts_of(corpus.train, corpus.tokenizer) == ["a"]
    assert texts_of(corpus.held_out, corpus.tokenizer) == ["b"]
    assert any("of 2,048 tokens" in note for note in notes)
    assert corpus.tokenizer.vocab_size == 2048


@pytest.mark.parametrize(
    "change",
    [
        {"sequence_length": 0},
        {"batch_tokens": -1},
        {"tokenizer_bytes": 0},
        {"max_bytes": 0},
        {"vocab_size": 264},
        {"held_out": 0.0},
        {"held_out": 0.6},
        {"held_out": float("nan")},
        {"seed": -1},
    ],
)
def test_config_names_what_is_out_of_range(change: dict):
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"data\.{name} is {value}"):
        DataConfig(**change)


def test_config_needs_no_torch():
    code = "import sys, rille.data.config; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_setting_newer_than_the_corpus_stood_at_its_default(tmp_path):
    (tmp_path / "text").mkdir()
    for number in range(20):
        (tmp_path / "text" / f"{number}.txt").write_text(f"document {number} of twenty\n" * 5)
    config = DataConfig(path=str(tmp_path / "text"), vocab_size=320, held_out=0.1)
    prepare_corpus(config, tmp_path / "corpus", note=lambda _: None)
    file = tmp_path / "corpus" / "corpus.json"
    manifest = json.loads(file.read_text())
    del manifest["request"]["tokenizer_bytes"]
    file.write_text(json.dumps(manifest))
    prepare_corpus(config, tmp_path / "corpus", note=lambda _: None)
    with pytest.raises(ValueError, match="tokenizer_bytes 16000000, now 999"):
        prepare_corpus(replace(config, tokenizer_bytes=999), tmp_path / "corpus")
    del manifest["request"]["held_out"]
    file.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"held_out 0\.02, now 0\.1"):
        prepare_corpus(config, tmp_path / "corpus")
    for content in ("{}", "[]", '{"request": {}}'):
        file.write_text(content)
        with pytest.raises(ValueError, match=r"corpus\.json is damaged .*it must hold request, train, held_out"):
            prepare_corpus(config, tmp_path / "corpus")
