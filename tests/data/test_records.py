"""Whatever state a source is in, each record is read as it is or counted by the reason why not."""

import gzip
import json
import lzma
import os
import sys
import tempfile
import tracemalloc
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rille.data.archives import limited_lines
from rille.data.records import Fault, Record, read_records, text_of
from rille.data.sources import read_documents

LINES = [json.dumps({"text": f"line {i} of the file"}) for i in range(200)]


def read(path: Path, limit: int = 10_000) -> tuple[list[str], Counter]:
    """Texts, and reasons of what was not read."""
    texts, reasons = [], Counter()
    for record in read_records(str(path), field="text", max_bytes=limit):
        text = text_of(record, "text") if isinstance(record, Record) else record
        if isinstance(text, Fault):
            reasons[text.reason] += 1
        else:
            texts.append(text)
    return texts, reasons


def pack(kind: str, content: bytes) -> bytes:
    if kind == "zst":
        return zstandard.ZstdCompressor(write_checksum=True).compress(content)
    return {"gz": gzip.compress, "xz": lzma.compress}[kind](content)


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_whole_and_truncated_archives(kind: str, tmp_path: Path):
    file = tmp_path / f"a.jsonl.{kind}"
    whole = pack(kind, "\n".join(LINES).encode())
    file.write_bytes(whole)
    texts, reasons = read(file)
    assert texts == [json.loads(line)["text"] for line in LINES]
    assert not reasons
    file.write_bytes(whole[: len(whole) // 2])
    fewer, reasons = read(file)
    assert fewer == texts[: len(fewer)]
    assert reasons == {"archive cut short": 1}
    file.write_bytes(b"no archive at all" * 9)
    assert read(file) == ([], {"archive damaged": 1})


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_every_member_of_an_archive_counts(kind: str, tmp_path: Path):
    """Archives are put together from members; one that is damaged is not passed over, and hides none before it."""
    file = tmp_path / f"a.jsonl.{kind}"
    members = [pack(kind, "".join(f"{line}\n" for line in part).encode()) for part in (LINES[:120], LINES[120:])]
    file.write_bytes(b"".join(members))
    assert len(read(file)[0]) == 200
    broken = bytes([members[1][0] ^ 0xFF]) + members[1][1:]
    for after in (broken, b"no member"):
        file.write_bytes(members[0] + after)
        texts, reasons = read(file)
        assert len(texts) == 120 and reasons == {"archive damaged": 1}
    for cut in (3, len(members[1]) // 2):
        file.write_bytes(members[0] + members[1][:cut])
        texts, reasons = read(file)
        assert len(texts) == 120 and reasons == {"archive cut short": 1}


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
@settings(max_examples=30, deadline=None)
@example(where=0.9765625, bit=0, cut=None)  # deflate goes on to the end of the file and finds none
@given(where=st.floats(0, 1), bit=st.integers(0, 7), cut=st.one_of(st.none(), st.floats(0, 1)))
def test_no_text_of_a_damaged_archive_is_another_one(kind: str, where: float, bit: int, cut: float | None):
    """One bit is wrong anywhere, and perhaps the end is missing: what is read is what was written, or counted."""
    members = [pack(kind, "".join(f"{line}\n" for line in part).encode()) for part in (LINES[:80], LINES[80:])]
    content = bytearray(b"".join(members))
    if cut is None:
        content[int(where * (len(content) - 1))] ^= 1 << bit
    else:
        del content[int(cut * len(content)) :]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"a.jsonl.{kind}"
        file.write_bytes(content)
        texts, reasons = read(file)
    written = [json.loads(line)["text"] for line in LINES]
    assert texts == written[: len(texts)]
    assert len(texts) in (0, 80, 200)
    at_a_border = len(content) == len(members[0])  # which is an archive of the first one
    assert len(texts) == 200 or reasons.total() >= 1 or at_a_border


def test_zeros_pad_archives(tmp_path: Path):
    for kind in ("gz", "xz"):
        (tmp_path / f"a.jsonl.{kind}").write_bytes((pack(kind, b'{"text": "a"}\n') + bytes(64)) * 2 + bytes(70_000))
        assert read(tmp_path / f"a.jsonl.{kind}") == (["a", "a"], {})


@pytest.mark.parametrize("kind", ["gz", "xz", "zst"])
def test_a_small_archive_of_much_text_is_not_held(kind: str, tmp_path: Path):
    file = tmp_path / f"a.jsonl.{kind}"
    file.write_bytes(pack(kind, b'{"text": "a"}\n{"text": "' + b"x" * 40_000_000 + b'"}\n{"text": "b"}\n'))
    tracemalloc.start()
    found = read(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == (["a", "b"], {"longer than 10,000 bytes": 1})
    assert file.stat().st_size < 200_000 and peak < 30_000_000


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "first"}\n{"text": "second"}\n')
    assert read(tmp_path / "a.jsonl") == (["first", "second"], {})


def test_bad_lines_are_counted_and_the_others_kept(tmp_path: Path):
    file = tmp_path / "a.jsonl"
    rows = [
        b'{"text": "good"}',
        b'{"text": "\xff"}',
        b"{broken",
        b'{"other": 1}',
        b'{"text": 5}',
        b'{"text": "\\ud800"}',
        b'{"text": "  "}',
        b"",
        b'{"text": "' + b"x" * 20_000 + b'"}',
        b'{"text": "last, without a line feed"}',
    ]
    file.write_bytes(b"\n".join(rows))
    texts, reasons = read(file)
    assert texts == ["good", "last, without a line feed"]
    assert reasons == {
        "not UTF-8": 1,
        "not JSON": 1,
        "no field 'text'": 1,
        "field 'text' is not a string": 1,
        "lone surrogate": 1,
        "empty": 2,
        "longer than 10,000 bytes": 1,
    }
    assert len(texts) + sum(reasons.values()) == len(rows)


def test_text_is_not_altered(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\nb  \n\n\n\n")
    assert read(tmp_path / "a.txt")[0] == ["\ufeffa\r\nb  \n\n\n\n"]


def test_folder_with_everything(tmp_path: Path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a.txt").write_text("first")
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n')
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "long.txt").write_text("y" * 20_000)
    (tmp_path / ".hidden").write_text("no")
    texts, reasons = read(tmp_path)
    assert sorted(texts) == ["first", "second"]
    assert reasons == {
        "empty": 2,
        "not text (zero bytes)": 1,
        "not UTF-8": 1,
        "longer than 10,000 bytes": 1,
        "hidden": 1,
    }


def test_parquet(tmp_path: Path):
    file = tmp_path / "a.parquet"
    column = pyarrow.array(["one", None, "", "z" * 20_000, "two"])
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), file)
    assert read(file) == (["one", "two"], {"empty": 2, "longer than 10,000 bytes": 1})
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), file)
    assert read(file) == ([], {"field 'text' is not a string": 2})
    pyarrow.parquet.write_table(pyarrow.table({"words": ["a"]}), file)
    assert read(file) == ([], {"no field 'text'": 1})
    pyarrow.parquet.write_table(pyarrow.table({"text": LINES}), file)
    file.write_bytes(file.read_bytes()[:-300])
    assert read(file) == ([], {"table damaged or cut short": 1})


def test_columns_of_strings_in_other_layouts(tmp_path: Path):
    """Categories of pandas and views of newer writers are strings too."""
    column = pyarrow.array(["one", None, "one", "another of more than twelve bytes"])
    for layout in (column.dictionary_encode(), column.cast(pyarrow.string_view()), column.cast(pyarrow.large_string())):
        pyarrow.parquet.write_table(pyarrow.table({"text": layout}), tmp_path / "a.parquet")
        assert read(tmp_path / "a.parquet") == (["one", "one", "another of more than twelve bytes"], {"empty": 1})


def test_a_page_that_is_not_as_it_was_written_is_no_text(tmp_path: Path):
    """Where the writer has left checksums."""
    texts = [f"text {i} of the table" for i in range(2_000)]
    file, table = tmp_path / "a.parquet", pyarrow.table({"text": texts})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True, "row_group_size": 1_000}
    pyarrow.parquet.write_table(table, file, **options)
    assert read(file) == (texts, {})
    content = file.read_bytes()
    file.write_bytes(content.replace(b"text 1500 of", b"text 1500 if"))
    before, reasons = read(file)
    assert before == texts[: len(before)] and 700 < len(before) <= 1_000
    assert reasons == {"table damaged or cut short": 1}


def test_names_that_are_no_utf8_are_spelled(tmp_path: Path):
    for name in (b"bad\xff.txt", "größe-数据.txt".encode()):
        (tmp_path / os.fsdecode(name)).write_text("text")
    sources = {record.source for record in read_records(str(tmp_path), field="text", max_bytes=100)}
    assert sources == {r"bad\xff.txt", "größe-数据.txt"}
    assert [document.source for document in read_documents(tmp_path)][0] == rf"{tmp_path}/bad\xff.txt"


@contextmanager
def without_rights(folder: Path):
    """As a user who may read the folder and no more than it allows; the tests of an image run as one who may all."""
    folder.chmod(0o755)
    if os.geteuid():
        yield
        return
    os.seteuid(65_534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_what_may_not_be_read_is_counted_in_a_folder_and_refused_by_name():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file in ("a.txt", "b.txt", "c.jsonl"):
            (folder / file).write_text("text")
        (folder / "deep").mkdir()
        for secret in ("b.txt", "c.jsonl", "deep"):
            (folder / secret).chmod(0)
        read(folder)  # so that nothing is imported later
        with without_rights(folder):
            assert read(folder) == (["text"], {"no permission to read": 2, "a folder, no permission to read": 1})
            notes: list[str] = []
            assert [document.text for document in read_documents(folder, note=notes.append)] == ["text"]
            assert "1 a folder, no permission to read, 2 no permission to read" in notes[0]
            for secret in ("b.txt", "deep"):
                for reader in (read, read_documents):
                    with pytest.raises(ValueError, match=rf"{secret} may not be read \(no permission to read\)"):
                        reader(folder / secret)


def test_missing_path_is_the_users_mistake(tmp_path: Path):
    with pytest.raises(ValueError, match="does not exist"):
        list(read_records(str(tmp_path / "no"), field="text", max_bytes=10))
    with pytest.raises(ValueError, match="null is neither a file nor a folder"):
        list(read_records("/dev/null", field="text", max_bytes=10))


@given(st.lists(st.binary(max_size=12), max_size=8), st.integers(1, 12), st.integers(1, 12))
def test_lines_are_those_of_split(blocks: list[bytes], limit: int, size: int):
    content = b"".join(blocks)
    expected = content.split(b"\n")
    expected = expected[:-1] if not expected[-1] else expected
    expected = [line if len(line) <= limit else None for line in expected]
    assert list(limited_lines(iter(blocks), limit)) == expected
    cut = [content[i : i + size] for i in range(0, len(content), size)]
    assert list(limited_lines(iter(cut), limit)) == expected


def test_a_line_of_a_gigabyte_is_not_held():
    block = b"x" * 1_000_000
    tracemalloc.start()
    lines = list(limited_lines((block for _ in range(1000)), 5_000_000))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert lines == [None]
    assert peak < 30_000_000


def test_data_sets_of_the_hub_library(tmp_path: Path):
    """A folder of `save_to_disk` needs no network; with a hub's name the same rows come as a stream."""
    datasets = pytest.importorskip("datasets")
    rows = {"text": ["one", "", "z" * 20_000, "two"]}
    datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(tmp_path / "split")
    for name in ("plain", "split", "split:train"):
        records = list(read_records(f"hf:{tmp_path / name}", field="text", max_bytes=10_000))
        texts = [text_of(record, "text") if isinstance(record, Record) else record for record in records]
        assert [text for text in texts if isinstance(text, str)] == ["one", "two"]
        assert [text.reason for text in texts if isinstance(text, Fault)] == ["empty", "longer than 10,000 bytes"]


def test_hub_without_its_library(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the library datasets: pip install 'rille\[hf\]'"):
        list(read_records("hf:some/name", field="text", max_bytes=10))
