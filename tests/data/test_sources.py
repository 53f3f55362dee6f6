"""Documents come out whole and in order; what cannot be read is refused or counted, never passed over in silence."""

import gzip
import json
import lzma
import os
import sys
from pathlib import Path

import pytest

from rille.data.sources import Document, read_documents

RECORDS = [{"text": "first\n"}, {"text": "zweites: äöü"}, {"text": "third 🙂", "source": "x"}]
TEXTS = [record["text"] for record in RECORDS]


def read(path, **options) -> tuple[list[Document], list[str]]:
    notes: list[str] = []
    return list(read_documents(path, note=notes.append, **options)), notes


def jsonl(*records) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def refused(path, **options) -> str:
    with pytest.raises(ValueError) as caught:
        read(path, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_standard_library():
    documents, notes = read(None)
    sources = [document.source.partition("/")[2] for document in documents]
    assert {"argparse.py", "json/decoder.py", "collections/__init__.py"} <= set(sources)
    assert sources == sorted(sources, key=lambda s: s.split("/"))
    assert not [s for s in sources if "test" in s.split("/") or s.startswith(("encodings/", "site-packages/"))]
    assert sum(len(document.text) for document in documents) > 4_000_000
    assert "def dump" in documents[sources.index("json/__init__.py")].text
    assert read(None) == (documents, notes)
    assert all(note.startswith("data: skipped in ") for note in notes)


def test_text_file_is_one_document_byte_for_byte(tmp_path: Path):
    content = "\ufeffone\r\ntwo\f\n\n  täil \n".encode()
    (tmp_path / "a.md").write_bytes(content)
    documents, notes = read(tmp_path / "a.md")
    assert [document.text.encode() for document in documents] == [content]
    assert documents[0].source == str(tmp_path / "a.md")
    assert notes == []


def test_folder_is_sorted_and_counts_what_it_skips(tmp_path: Path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("hidden too")
    (tmp_path / "b.txt").write_text("2")
    (tmp_path / "b" / "z").write_text("1")
    (tmp_path / "a.txt").write_text("0")
    (tmp_path / "c.jsonl").write_bytes(jsonl(*RECORDS))
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "empty").write_text("")
    (tmp_path / "d.bin").write_bytes(b"abc\0")
    (tmp_path / "e.png").write_bytes(b"\x89PNG")
    (tmp_path / "link").symlink_to(tmp_path / "b")
    os.mkfifo(tmp_path / "pipe")
    documents, notes = read(tmp_path)
    assert [document.text for document in documents] == ["0", "1", "2", *TEXTS]
    assert documents[1].source == f"{tmp_path}/b/z"
    assert notes == [
        f"data: skipped in {tmp_path}: 1 a link to a folder, 1 empty, 2 hidden, 1 not UTF-8 text, "
        "1 not a regular file, 1 not text"
    ]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "jsonl.xz", "jsonl.zst", "JSONL.ZST"])
def test_jsonl(tmp_path: Path, kind: str):
    file = tmp_path / f"texts.{kind}"
    file.write_bytes(_compressed(jsonl(*RECORDS[:2]) + b"\n" + jsonl(RECORDS[2], {"text": ""}), kind))
    documents, notes = read(file)
    assert [document.text for document in documents] == TEXTS
    assert [document.source for document in documents] == [f"{file}:{line}" for line in (1, 2, 4)]
    assert notes == [f"data: skipped in {file}: 2 empty lines or texts"]


def _compressed(content: bytes, kind: str) -> bytes:
    if kind.endswith("xz"):
        return lzma.compress(content)
    if kind.endswith("gz"):
        return gzip.compress(content)
    if kind.lower().endswith("zst"):
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # two frames, cut inside a line
        return zstandard.compress(content[:half]) + zstandard.compress(content[half:])
    return content


def test_last_line_needs_no_newline(tmp_path: Path):
    for kind in ("jsonl", "jsonl.gz", "jsonl.xz", "jsonl.zst"):
        file = tmp_path / f"t.{kind}"
        file.write_bytes(_compressed(jsonl(*RECORDS).rstrip(), kind))
        assert [document.text for document in read(file)[0]] == TEXTS


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.xz", "jsonl.zst"])
@pytest.mark.parametrize("keep", [0.5, 0.99])
def test_archive_that_is_cut_short(tmp_path: Path, kind: str, keep: float):
    whole = _compressed(jsonl(*[{"text": str(i**5)} for i in range(5000)]), kind)
    file = tmp_path / f"t.{kind}"
    file.write_bytes(whole[: int(len(whole) * keep)])
    assert "cut short" in refused(file)


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.xz", "jsonl.zst"])
def test_archive_that_is_none(tmp_path: Path, kind: str):
    (tmp_path / f"t.{kind}").write_bytes(jsonl(*RECORDS))
    assert "is damaged" in refused(tmp_path / f"t.{kind}")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{oops}", "line 2 is not JSON (Expecting property name"),
        (b"\xff", "line 2 is not JSON ('utf-8' codec"),
        (b"[" * 100_000, "line 2 is not JSON"),
        (b'{"content": "x", "id": 3}', "line 2 has no field 'text' (its fields are 'content', 'id')"),
        (b"{}", "line 2 has no field 'text'"),
        (b'["text"]', "line 2 has no field 'text'"),
        (b'{"text": 3}', "line 2: field 'text' is int"),
        (b'{"text": null}', "line 2: field 'text' is NoneType"),
        (b'{"text": "\\ud800"}', "line 2 has a lone surrogate \\ud800"),
    ],
)
def test_bad_records(tmp_path: Path, line: bytes, message: str):
    file = tmp_path / "t.jsonl"
    file.write_bytes(jsonl(RECORDS[0]) + line + b"\n")
    assert message in refused(file)
    assert message in refused(tmp_path)  # in a folder too: a record is not passed over


def test_parquet(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    for kind in (pyarrow.string(), pyarrow.large_string()):
        table = pyarrow.table({"id": [1, 2, 3, 4], "text": pyarrow.array([*TEXTS, ""], kind)})
        parquet.write_table(table, file, row_group_size=2)
        documents, notes = read(file)
        assert [document.text for document in documents] == TEXTS
        assert documents[2].source == f"{file}:3"
        assert notes == [f"data: skipped in {file}: 1 empty lines or texts"]


def test_bad_parquet(tmp_path: Path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"content": TEXTS, "id": [1, 2, 3]}), file)
    assert "no column 'text' (it has content, id)" in refused(file)
    parquet.write_table(pyarrow.table({"text": [1, 2]}), file)
    assert "holds int64, not strings" in refused(file)
    parquet.write_table(pyarrow.table({"text": ["a", None]}), file)
    assert "row 2 has no text (null)" in refused(file)
    parquet.write_table(pyarrow.table({"text": [str(i**3) for i in range(10_000)]}), file)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in refused(file)
    file.write_bytes(whole[:100] + bytes(2000) + whole[2100:])
    assert "is damaged" in refused(file)
    file.write_text("text")
    assert "is not parquet" in refused(file)


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "t.parquet"), ("zstandard", "t.jsonl.zst")])
def test_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, module, None)
    assert f"needs {module} to be read: pip install 'rille[data]'" in refused(tmp_path / name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"ab\0c", "not text (a zero byte at offset 2)"),
        (b"ab\xff", "byte 0xff at offset 2"),
        ("aé".encode()[:-1], "byte 0xc3 at offset 1"),  # ends inside a character
    ],
)
def test_file_that_is_not_text(tmp_path: Path, content: bytes, message: str):
    (tmp_path / "t.txt").write_bytes(content)
    assert message in refused(tmp_path / "t.txt")
    assert "give a UTF-8 text file, a folder" in refused(tmp_path / "t.txt")
    assert "holds no document" in refused(tmp_path)


def test_no_documents(tmp_path: Path):
    assert "holds no document with text" in refused(tmp_path)
    (tmp_path / "t.jsonl").write_bytes(b"\n")
    assert "holds no document with text" in refused(tmp_path / "t.jsonl")


def test_missing_path_raises_at_once(tmp_path: Path):
    with pytest.raises(ValueError, match="nowhere does not exist; give"):
        read_documents(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="neither a file nor a folder"):
        read_documents("/dev/null")


@pytest.mark.parametrize("limit", [1, 4, 5, 6, 7, 8, 9, 12])
def test_max_bytes_cuts_between_characters_and_says_so(tmp_path: Path, limit: int):
    parts = ["abcd", "é🙂", "xy"]  # 4, 6 and 2 bytes
    for i, part in enumerate(parts):
        (tmp_path / f"{i}.txt").write_text(part)
    documents, notes = read(tmp_path, max_bytes=limit)
    text = "".join(document.text for document in documents)
    assert "".join(parts).startswith(text)
    assert limit - 3 <= len(text.encode()) <= limit
    assert all(document.text for document in documents)
    assert bool(notes) == (limit < 12)
    assert all(f"read {limit:,} bytes of text (max_bytes) and stopped in {tmp_path}" in note for note in notes)


@pytest.mark.parametrize("limit", [1, 3, 4, 9, 10])
def test_max_bytes_in_one_file(tmp_path: Path, limit: int):
    (tmp_path / "t").write_text("abcdefé🙂"[:-1] + "é")
    documents, notes = read(tmp_path / "t", max_bytes=limit)
    assert len(documents[0].text.encode()) in (limit, limit - 1)
    assert bool(notes) == (limit < 10)


def test_max_bytes_at_the_very_end_is_no_cut(tmp_path: Path):
    (tmp_path / "t").write_text("abc")
    assert read(tmp_path, max_bytes=3) == ([Document(f"{tmp_path}/t", "abc")], [])
