"""The bands on disk find the pairs that the library's own index finds, and those alone that are similar enough."""

import random
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from rensa import RMinHash, RMinHashLSH

from rille.data import duplicates
from rille.data.duplicates import KEPT, NEAR, Buckets, band_keys, find_duplicates, rows_a_band, signatures
from rille.data.spool import ROW, SIGNATURE, ChunkWriter, Gathered, Spool
from tests.data.sets import essay


def changed(text: str, share: float, seed: int) -> str:
    chance = random.Random(seed)
    return " ".join(f"x{chance.random()}" if chance.random() < share else word for word in text.split())


def shingles(text: str) -> set[tuple[str, ...]]:
    words = "".join(c.lower() if c.isalnum() else " " for c in text).split()
    return {tuple(words[i : i + 5]) for i in range(max(1, len(words) - 4))}


def jaccard(one: str, other: str) -> float:
    a, b = shingles(one), shingles(other)
    return len(a & b) / len(a | b)


TEXTS = [essay(seed, 300) for seed in range(12)]
TEXTS += [changed(TEXTS[i], share, i) for i in range(6) for share in (0.002, 0.01, 0.03, 0.1)]


def spool_of(folder: Path, texts: list[str], per_chunk: int) -> Spool:
    folder.mkdir()
    for number, start in enumerate(range(0, len(texts), per_chunk)):
        contents = [text.encode() for text in texts[start : start + per_chunk]]
        rows = np.zeros(len(contents), ROW)
        rows["length"] = [len(content) for content in contents]
        rows["high"] = [hash(content) & (2**63 - 1) for content in contents]
        writer = ChunkWriter(folder, number)
        writer.add(Gathered(len(contents), contents, [rows], [signatures(contents, rows["high"])]))
        writer.seal({})
    return Spool(folder)


def test_signatures_estimate_the_similarity_of_shingles():
    found = signatures([text.encode() for text in TEXTS], np.arange(len(TEXTS), dtype=np.uint64))
    assert found.shape == (len(TEXTS), SIGNATURE)
    for one, other in combinations(range(len(TEXTS)), 2):
        true, estimated = jaccard(TEXTS[one], TEXTS[other]), (found[one] == found[other]).mean()
        assert abs(true - estimated) <= 5 * (max(true * (1 - true), 1 / SIGNATURE) / SIGNATURE) ** 0.5


def test_bands_are_the_librarys(tmp_path: Path):
    """Candidates of the files equal those of rensa's index in memory, made from the same hashes."""
    contents = [text.encode() for text in TEXTS]
    alone = np.arange(len(TEXTS), dtype=np.uint64)
    found, rows = signatures(contents, alone), rows_a_band(0.8)
    buckets = Buckets(tmp_path / "b", 100)
    for keys in band_keys(found, rows):
        buckets.add(keys, np.arange(len(TEXTS)))
    ours = {pair for group in buckets.groups() for pair in combinations(group.tolist(), 2)}
    index = RMinHashLSH(0.8, SIGNATURE, SIGNATURE // rows)
    sets = [duplicates._shingles(content, alone[i : i + 1]) for i, content in enumerate(contents)]
    offsets = np.cumsum([0, *map(len, sets)]).astype(np.uint64)
    digests = RMinHash.digest_matrix_from_flat_token_hashes(np.concatenate(sets), offsets, SIGNATURE, duplicates._SEED)
    flags = index.query_duplicate_flags_matrix_one_shot(digests)
    candidates = {number for pair in ours for number in pair}
    similar = {number for pair in ours if (found[pair[0]] == found[pair[1]]).mean() >= 0.8 for number in pair}
    flagged = {number for number, flag in enumerate(flags) if flag}
    assert similar <= flagged <= candidates
    assert len(similar) >= 12


@pytest.mark.parametrize("per_chunk", [5, 100])
def test_similar_documents_go_and_others_stay(tmp_path: Path, per_chunk: int):
    spool = spool_of(tmp_path / "spool", TEXTS, per_chunk)
    fate, pairs = find_duplicates(spool, [0] * len(spool), 0.8, tmp_path / "work")
    for number, text in enumerate(TEXTS[12:], start=12):
        similarity = jaccard(text, TEXTS[(number - 12) // 4])
        if similarity > 0.92:
            assert NEAR in (fate[number], fate[(number - 12) // 4])
    assert (fate[6:12] == KEPT).all()
    assert pairs
    assert all(pair.similarity >= 0.8 for pair in pairs)
    assert not (tmp_path / "work").exists()


def test_recall_of_the_bands_at_the_threshold():
    for similarity in (0.5, 0.6, 0.7, 0.8, 0.9, 0.95):
        rows = rows_a_band(similarity)
        assert 1 - (1 - similarity**rows) ** (SIGNATURE // rows) >= 0.9
    assert rows_a_band(0.8) == 8


def test_many_partitions_and_large_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(duplicates, "_PARTITION", 10)
    monkeypatch.setattr(duplicates, "_ALL_PAIRS", 3)
    same = [TEXTS[0] + f"{i}" for i in range(20)]
    spool = spool_of(tmp_path / "spool", [*same, *TEXTS[1:6]], 4)
    fate, _ = find_duplicates(spool, [0] * len(spool), 0.8, tmp_path / "work")
    assert (fate == KEPT).sum() == 6


def test_texts_without_words(tmp_path: Path):
    texts = ["...", "!!!", "a", "a b", "a B!", "中文"]
    spool = spool_of(tmp_path / "spool", texts, 10)
    fate, _ = find_duplicates(spool, [0], 0.8, tmp_path / "work")
    assert (fate == KEPT).sum() == 5
