"""A set holds every document that should stay, once, whatever the order, the workers, or how often the build died."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rille.data import build as building
from rille.data.build import build_dataset
from rille.data.build_config import BuildConfig, FilterConfig
from rille.data.dataset import Dataset
from rille.data.report import read_report
from rille.data.shards import check_shards
from tests.data.sets import build, essay, texts_of, tokenizer_in, write_jsonl
from tests.train.small import largest_file

TOP = Path(__file__).resolve().parent.parent.parent
words = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=30)


@settings(max_examples=20, deadline=None)
@given(st.lists(words, min_size=2, max_size=30), st.randoms(use_true_random=False))
def test_nothing_lost_nothing_doubled_in_any_order(texts: list[str], chance: random.Random):
    wanted = {text for text in texts if text.strip()}
    if len(wanted) < 3:
        wanted |= {"one", "two", "three"}
        texts = [*texts, "one", "two", "three"]
    found = []
    for order in (texts, chance.sample(texts, len(texts))):
        with TemporaryDirectory() as folder:
            trained, held = texts_of(build(Path(folder), {"a": order}, similarity=1.0, shard_bytes=200))
        assert sorted(trained + held) == sorted(wanted)
        found.append((sorted(trained), held))
    assert found[0] == found[1]


@settings(max_examples=4, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 3))
def test_near_duplicates_go_in_any_order(chance: random.Random, copies: int):
    originals = [essay(seed, 200) for seed in range(6)]
    altered = [text.replace("Essay", f"Copy {i} of essay") for text in originals[:4] for i in range(copies)]
    texts = originals + altered + originals[:2]
    results = []
    for _ in range(2):
        chance.shuffle(texts)
        with TemporaryDirectory() as folder:
            trained, held = texts_of(build(Path(folder), {"a": list(texts)}, shard_bytes=8_000))
            tally = read_report(Path(folder) / "set")["domains"]["a"]
        assert (tally["equal"], tally["near"]) == (2, 4 * copies)
        assert tally["records"] == len(texts)
        assert len(trained + held) == 6
        results.append((sorted(trained), held))
    assert results[0] == results[1]
    assert set(originals[4:]) < set(results[0][0] + results[0][1])


def test_the_first_domain_keeps(tmp_path: Path):
    shared = [essay(seed) for seed in range(10)]
    longer = [text + "and a line more that makes it longer\n" for text in shared]
    dataset = build(tmp_path, {"first": shared, "second": [*longer, essay(77)]})
    tallies = read_report(dataset.directory)["domains"]
    assert tallies["first"]["near"] == tallies["first"]["equal"] == 0
    assert tallies["second"]["near"] == 10
    trained, held = texts_of(dataset)
    assert sorted(trained + held) == sorted([*shared, essay(77)])


def test_every_record_ends_in_one_count(tmp_path: Path):
    source = write_jsonl(tmp_path / "mixed.jsonl", [essay(seed) for seed in range(40)] + ["too short"] * 3 + [essay(1)])
    with source.open("ab") as stream:
        stream.write(b"{broken\n\xff\xff\n")
    config = BuildConfig(
        sources=(f"a={source}",), out=str(tmp_path / "set"), workers=1, tokenizer=tokenizer_in(tmp_path / "t")
    )
    build_dataset(config)
    tally = read_report(tmp_path / "set")["domains"]["a"]
    assert tally["dropped"]["not JSON"] == tally["dropped"]["not UTF-8"] == 1
    assert tally["dropped"]["words: too few"] == 3
    assert tally["records"] == 46 == tally["documents"] + sum(tally["dropped"].values())
    trained, held = texts_of(Dataset(tmp_path / "set"))
    assert len(held) == tally["held_out"]
    assert len(trained) == tally["documents"] - tally["equal"] - tally["near"] - tally["held_out"]
    assert tally["dropped_samples"]["not JSON"][0][1] == "mixed.jsonl:45"
    page = (tmp_path / "set" / "report.html").read_text()
    assert "words: too few" in page
    assert "too short" in page


def files_of(folder: Path) -> dict[str, str]:
    return {
        file.relative_to(folder).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


@pytest.fixture
def sources(tmp_path: Path) -> tuple[str, str]:
    one = write_jsonl(tmp_path / "one.jsonl", [essay(seed) for seed in range(200)] + [essay(3)])
    two = write_jsonl(tmp_path / "two.jsonl", [essay(seed, 800) for seed in range(1000, 1100)])
    return f"one={one}", f"two={two}"


def test_workers_change_nothing(sources: tuple[str, str], tmp_path: Path):
    config = BuildConfig(sources=sources, out=str(tmp_path / "a"), vocab_size=400, shard_bytes=100_000, workers=1)
    build_dataset(config)
    build_dataset(replace(config, out=str(tmp_path / "b"), workers=2))
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")


def test_stopped_anywhere_comes_to_the_same_bytes(
    sources: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Every rename and every removal of the build is, in turn, the one at which it dies."""
    config = BuildConfig(
        sources=sources, out=str(tmp_path / "a"), shard_bytes=100_000, workers=1, tokenizer=tokenizer_in(tmp_path / "t")
    )
    build_dataset(config)
    whole, config = files_of(tmp_path / "a"), replace(config, out=str(tmp_path / "b"))
    real, left = os.replace, [0]

    def dying(source, target):
        if left[0] == 0:
            raise KeyboardInterrupt
        left[0] -= 1
        real(source, target)

    attempts = 0
    for attempts in range(100):
        left[0] = 3 + attempts % 2
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dying)
            try:
                build_dataset(config)
                break
            except KeyboardInterrupt:
                assert not (tmp_path / "b").exists()
    assert attempts > 5
    assert files_of(tmp_path / "b") == whole


def test_kill_in_the_middle_and_run_again(sources: tuple[str, str], tmp_path: Path):
    out = tmp_path / "killed"
    common = ["--vocab-size", "400", "--shard-bytes", "30000", "--workers", "2"]
    command = [sys.executable, "-m", "rille.cli", "data", "build", *sources, *common, "--out"]
    running = subprocess.Popen([*command, str(out)], cwd=TOP, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    spool = tmp_path / "killed.partial" / "spool"
    while not (spool / "00001.json").exists():
        assert running.poll() is None
        time.sleep(0.005)
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children")
    workers = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not out.exists()
    for folder in (out, tmp_path / "whole"):
        subprocess.run([*command, str(folder)], cwd=TOP, check=True, capture_output=True)
    assert files_of(out) == files_of(tmp_path / "whole")
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def test_other_settings_and_changed_sources_are_refused(sources: tuple[str, str], tmp_path: Path, monkeypatch):
    config = BuildConfig(
        sources=sources, out=str(tmp_path / "a"), workers=1, tokenizer=tokenizer_in(tmp_path / "t"), similarity=1.0
    )
    with monkeypatch.context() as patch:
        patch.setattr(building, "find_duplicates", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            build_dataset(config)
    with pytest.raises(ValueError, match="unfinished build of other settings: similarity 1.0, now 0.9"):
        build_dataset(replace(config, similarity=0.9))
    file = tmp_path / "one.jsonl"
    content = file.read_bytes()
    file.write_bytes(content + b"{}\n")
    with pytest.raises(ValueError, match="sources changed since the build"):
        build_dataset(config)
    (tmp_path / "a.partial" / "request.json").unlink()
    build_dataset(config)
    build_dataset(config, note=lambda line: None)
    with pytest.raises(ValueError, match="holds a set of other settings: held_out"):
        build_dataset(replace(config, held_out=0.1))


def test_two_builds_of_one_set_do_not_meet(sources: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config = BuildConfig(sources=sources, out=str(tmp_path / "a"), workers=1, tokenizer=tokenizer_in(tmp_path / "t"))
    real, seen = building.find_duplicates, []

    def second(*arguments):
        with pytest.raises(ValueError, match="another build is at work"):
            build_dataset(config)
        seen.append(True)
        return real(*arguments)

    monkeypatch.setattr(building, "find_duplicates", second)
    build_dataset(config)
    assert seen == [True]


def test_damage_is_seen(tmp_path: Path):
    dataset = build(tmp_path, {"a": [essay(seed) for seed in range(20)]})
    assert check_shards(dataset.directory) == 2
    file = next((dataset.directory / "train").glob("*.tokens"))
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not as it was written"):
        check_shards(dataset.directory)
    file.write_bytes(content[:-2])
    with pytest.raises(ValueError, match="damaged"):
        dataset.streams(8)
    (dataset.directory / "dataset.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        Dataset(dataset.directory)


def test_counts_are_those_of_the_tokens(tmp_path: Path):
    dataset = build(tmp_path, {"a": [essay(seed) for seed in range(30)]}, shard_bytes=5_000, long_tokens=700)
    counted = Counter()
    for stream in dataset.streams(1 << 30):
        for number in range(stream.size.pieces):
            counted.update(stream.read(*stream.piece(number))[1:].tolist())
    assert dataset.counts.sum() == dataset.num_targets == sum(counted.values())
    assert {i: int(n) for i, n in enumerate(dataset.counts) if n} == counted
    assert dataset.held_out_domains().tolist() == [0] * dataset.manifest["held_out"]["documents"]


def test_long_documents_stand_apart(tmp_path: Path):
    texts = [essay(seed) for seed in range(20)] + [essay(seed, 2000) for seed in range(100, 104)]
    dataset = build(tmp_path, {"a": texts}, long_tokens=2_000)
    short, long = dataset.streams(1 << 30)
    assert (short.long, long.long) == (False, True)
    assert all(long.piece(number)[2] > 2_000 for number in range(long.size.pieces))
    assert long.size.pieces + short.size.pieces + len(texts_of(dataset)[1]) == 24


def test_a_source_without_anything_that_stays(tmp_path: Path):
    file = write_jsonl(tmp_path / "a.jsonl", ["short"] * 5)
    config = BuildConfig(sources=(str(file),), out=str(tmp_path / "set"), workers=1)
    with pytest.raises(ValueError, match=r"no document that stays \(5 words: too few\); .* name a in plain"):
        build_dataset(config)
    assert not (tmp_path / "set.partial").exists()  # so the same command with other rules begins anew
    with pytest.raises(ValueError, match="fewer than two different documents"):
        build(tmp_path / "other", {"b": ["same"] * 4})
    assert not list((tmp_path / "other").rglob("*.partial"))


def test_a_domain_of_copies_has_no_share(tmp_path: Path):
    texts = [essay(seed) for seed in range(20)]
    with pytest.raises(ValueError, match="rates give b a share, but every document of it equals one of another domain"):
        build(tmp_path / "one", {"a": texts, "b": texts}, rates=("a=0.5", "b=0.5"))
    dataset = build(tmp_path / "two", {"a": texts, "b": texts})
    assert [stream.domain for stream in dataset.streams(64)] == ["a"]


def test_the_least_share_is_one_document_held_out(tmp_path: Path):
    dataset = build(tmp_path, {"a": [essay(seed) for seed in range(20)]}, held_out=1e-30)
    assert len(texts_of(dataset)[1]) == 1


def test_a_source_that_changed_after_the_set_was_made_is_told(tmp_path: Path):
    texts = [essay(seed) for seed in range(20)]
    build(tmp_path, {"a": texts})
    build_again = BuildConfig(
        sources=(f"a={tmp_path / 'a.jsonl'}",),
        out=str(tmp_path / "set"),
        plain=("a",),
        tokenizer=str(tmp_path / "tokenizer"),
    )
    assert build_dataset(build_again, note=lambda _: None) == tmp_path / "set"
    write_jsonl(tmp_path / "a.jsonl", texts[:19])
    with pytest.raises(ValueError, match="a.jsonl changed since .*set was made of it"):
        build_dataset(build_again)
    (tmp_path / "a.jsonl").unlink()
    assert build_dataset(build_again, note=lambda _: None) == tmp_path / "set"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sources": ()}, "at least one source"),
        ({"sources": ("a b=x",)}, "write NAME=PATH"),
        ({"code": ("other",)}, "code names other, but the domains are a"),
        ({"rates": ("a",)}, "write NAME=SHARE"),
        ({"rates": ("b=1",)}, "must give a share"),
        ({"rates": ("a=0",)}, "must give a share"),
        ({"rates": ("a=nan",)}, "must give a share"),
        ({"similarity": 0.2}, "similarity is 0.2"),
        ({"held_out": 0.0}, "held_out is 0.0"),
        ({"workers": 0}, "workers is 0"),
        ({"shard_bytes": 0}, "shard_bytes is 0"),
        ({"vocab_size": 100}, "vocab_size is 100"),
        ({"max_epochs": 0.0}, "max_epochs is 0.0"),
        ({"max_epochs": float("inf")}, "max_epochs is inf"),
        ({"max_epochs": float("nan")}, "max_epochs is nan"),
        ({"rates": ("a=1", "a=2")}, "give a a share twice"),
        ({"code": ("a",), "plain": ("a",)}, "a cannot be code and plain both"),
        ({"out": "."}, "out is ., a folder that is there"),
    ],
)
def test_mistakes_are_named(changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        BuildConfig(**{"sources": ("a=x.jsonl",), "out": "set", **changes})


def test_filters_are_checked_before_work(tmp_path: Path):
    with pytest.raises(ValueError, match="told no labels"):
        FilterConfig(path="x.npz")
    config = BuildConfig(
        sources=(str(tmp_path),), out=str(tmp_path / "set"), quality=FilterConfig(path="none.npz", labels=("good",))
    )
    with pytest.raises(ValueError, match=r"none\.npz does not exist"):
        build_dataset(config)


def test_a_full_disk_says_how_the_build_goes_on(tmp_path: Path):
    whole = build(tmp_path, {"a": [essay(seed) for seed in range(40)]}, similarity=1.0)
    settings = {**whole.manifest["request"]["settings"], "out": str(tmp_path / "again")}
    asked = BuildConfig(**{**settings, "language": FilterConfig(), "quality": FilterConfig(), "workers": 1})
    with largest_file(20_000), pytest.raises(OSError) as error:
        build_dataset(asked)
    note = f"{tmp_path / 'again.partial'} holds what is done; the same command goes on from there"
    assert error.value.__notes__ == [note]
    assert Dataset(build_dataset(asked)).digest == whole.digest


@pytest.mark.parametrize("name", ["dataset.json", "report.json"])
@pytest.mark.parametrize("content", ["{", "[]", '{"format": 1, "domains": {}}'])
def test_damaged_descriptions_are_named(tmp_path: Path, name: str, content: str):
    out = build(tmp_path, {"a": [essay(seed) for seed in range(20)]}).directory
    (out / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name} is damaged \(.*\); build"):
        Dataset(out) if name == "dataset.json" else read_report(out)


def test_shards_that_are_gone_are_named(tmp_path: Path):
    dataset = build(tmp_path, {"a": [essay(seed) for seed in range(20)]})
    boundaries = dataset.directory / "train" / "a-00000.boundaries.npy"
    for content in (boundaries.read_bytes()[:150], b"", None):
        boundaries.write_bytes(content) if content is not None else boundaries.unlink()
        with pytest.raises(ValueError, match=r"a-00000.boundaries.npy is damaged \(.*\); build the data set again"):
            dataset.streams(64)
    dataset = build(tmp_path / "other", {"a": [essay(seed) for seed in range(20)]})
    (dataset.directory / "train" / "a-00000.tokens").unlink()
    with pytest.raises(ValueError, match="a-00000.tokens has 0 bytes, not .*: the data set is damaged; build it again"):
        dataset.streams(64)
    with pytest.raises(ValueError, match="a-00000.tokens is gone; build the set again"):
        check_shards(dataset.directory)


def test_manifest_is_plain_json(tmp_path: Path):
    dataset = build(tmp_path, {"a": [essay(seed) for seed in range(20)]})
    manifest = json.loads((dataset.directory / "dataset.json").read_text())
    assert manifest["dtype"] == "<u2"
    assert np.memmap(dataset.directory / "held_out.tokens", dtype="<u2").max() < manifest["vocab_size"] == 400
