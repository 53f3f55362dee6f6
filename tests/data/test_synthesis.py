"""Each answer follows from the text alone, and from no text that lacks one of the documents it needs."""

import json
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.data.command_config import SynthesiseConfig
from rille.data.steps import NoSteps
from rille.data.synthesis import KINDS, long_document, synthesise
from tests.data.sets import essay, write_jsonl

TEXTS = [essay(seed) for seed in range(12)]
NOTE = re.compile(r"^\[note to document (\d+)\] (.*)$", re.MULTILINE)


def solve(question: str, text: str) -> str | None:
    """The answer, read from the notes of a text; None where the notes do not tell."""
    notes = [(int(number), note) for number, note in NOTE.findall(text)]
    if found := re.fullmatch(r"What is the sum of the (\w+) of (.*)\?", question):
        wanted = re.findall(r"\d+", found[2])
        values = [re.findall(rf"The {found[1]} of document {n} is (\d+)\.", text) for n in wanted]
        return str(sum(int(value[0]) for value in values)) if all(values) else None
    if found := re.fullmatch(r"The (\w+) begins in document (\d+)\. With which word does it end\?", question):
        place = int(found[2])
        while True:
            mine = " ".join(note for number, note in notes if number == place)
            if end := re.search(rf"The {found[1]} ends here with the word (\w+)\.", mine):
                return end[1]
            step = re.search(rf"The {found[1]} goes on in document (\d+)\.", mine)
            if not step:
                return None
            place = int(step[1])
    if found := re.fullmatch(r"In which order do the words (.*) come\?", question):
        places = {w: text.find(f"The word here is {w}.") for w in re.findall(r"\w+", found[1].replace(" and ", " "))}
        return ", ".join(sorted(places, key=lambda w: places[w])) if min(places.values()) >= 0 else None
    found = re.fullmatch(r"How many documents carry the mark (\w+)\?", question)
    assert found is not None
    return str(sum(note == f"This document carries the mark {found[1]}." for _, note in notes))


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(1, 9), st.randoms(use_true_random=False))
def test_answers_need_all_their_documents(needs: int, questions: int, chance: random.Random):
    record = long_document(TEXTS, questions, needs, chance)
    assert len(record["questions"]) == questions
    body = record["text"][: record["text"].index("\n\nQuestion: ")]
    documents = re.split(r"(?m)^(?=\[document \d+\]$)", body)[1:]
    assert sorted(part.split("\n", 1)[1].split("\n\n[note")[0].strip() for part in documents) == sorted(
        text.strip() for text in TEXTS
    )
    for asked in record["questions"]:
        assert f"Question: {asked['question']}\nAnswer: {asked['answer']}\n" in record["text"]
        assert solve(asked["question"], body) == asked["answer"]
        assert len(set(asked["needs"])) >= needs
        for needed in asked["needs"]:
            without = "".join(documents[: needed - 1] + documents[needed:])
            assert solve(asked["question"], without) != asked["answer"]


def test_kinds_and_places_are_spread():
    chance = random.Random(0)
    records = [long_document(TEXTS, 4, 3, chance) for _ in range(200)]
    assert {q["kind"] for record in records for q in record["questions"]} == set(KINDS)
    places = [place for record in records for q in record["questions"] for place in q["needs"]]
    counts = [places.count(place) for place in range(1, len(TEXTS) + 1)]
    mean = len(places) / len(TEXTS)
    assert max(abs(count - mean) for count in counts) < 5 * mean**0.5
    orders = [q for record in records for q in record["questions"] if q["kind"] == "order"]
    asked_in_order = sum(
        q["answer"].split(", ") == sorted(q["answer"].split(", ")) for q in orders
    )  # by chance one in six
    assert asked_in_order < len(orders) / 3


def config(tmp_path: Path, **changes) -> SynthesiseConfig:
    source = write_jsonl(tmp_path / "texts.jsonl", [*TEXTS, "x" * 6_000])
    settings = {"count": 7, "document_bytes": 5_000, **changes}
    return SynthesiseConfig(source=str(source), out=str(tmp_path / "long.jsonl"), **settings)


def test_file_of_long_documents(tmp_path: Path):
    summary = synthesise(config(tmp_path), NoSteps())
    assert "7 long documents from 12 texts" in summary
    assert "left out: 1 longer than half a document" in summary
    lines = (tmp_path / "long.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [len(record["questions"]) for record in records] == [8] * 7
    assert all(5_000 <= len(record["text"]) < 9_000 for record in records)
    with pytest.raises(ValueError, match="exists already"):
        synthesise(config(tmp_path), NoSteps())
    (tmp_path / "long.jsonl").unlink()
    synthesise(config(tmp_path), NoSteps())
    assert (tmp_path / "long.jsonl").read_text().splitlines() == lines


def test_equal_texts_are_one(tmp_path: Path):
    settings = config(tmp_path)
    file = Path(settings.source)
    file.write_text(file.read_text() * 4)
    assert "7 long documents from 12 texts" in (summary := synthesise(settings, NoSteps()))
    assert "left out: 36 equal to another; left out: 4 longer than half a document" in summary


def test_too_little_text(tmp_path: Path):
    with pytest.raises(ValueError, match="fewer than the 3 needed"):
        synthesise(config(tmp_path, document_bytes=100), NoSteps())
    with pytest.raises(ValueError, match="needs is 1"):
        config(tmp_path, needs=1)
