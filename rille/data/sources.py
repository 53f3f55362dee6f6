"""Where text comes from: documents out of files, in an order that does not change from run to run.

    None                     the standard library of the running Python: .py sources, without tests and generated tables
    a text file              one document
    a folder                 every file in it, folders inside folders too, sorted by path
    .jsonl .gz .xz .zst      one document a line, its field `text` (.jsonl.gz and so on)
    .parquet                 one document a row, its column `text`

Text is UTF-8 and is passed on byte for byte: nothing is stripped, normalised or dropped. What cannot be read as text
stops the run when it was named; in a folder it is counted by reason and reported.
"""

from __future__ import annotations

import codecs
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rille.data.archives import CutShort, Damaged, blocks_of, limited_lines

Note = Callable[[str], None]

NO_PERMISSION = "no permission to read"
KINDS = "a UTF-8 text file, a folder, .jsonl, .jsonl.gz, .jsonl.xz, .jsonl.zst or .parquet"
JSON_LINES = (".jsonl", ".jsonl.gz", ".jsonl.xz", ".jsonl.zst")
FIELD = "text"

_LIBRARY_SKIPS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "__pycache__",
    "__phello__",
    "ensurepip",
}
# Generated from tables (codec maps, HTML entities, build variables) or a copy of the manual.
_LIBRARY_TABLES = ("encodings", "pydoc_data", "html/entities.py", "_sysconfigdata")


@dataclass(frozen=True)
class Document:
    """One text and where it comes from (a path, for records with line or row number)."""

    source: str
    text: str


class NotText(ValueError):
    """A file that holds no UTF-8 text; `reason` is short enough to be counted by."""

    def __init__(self, file: Path, reason: str, detail: str = ""):
        super().__init__(f"{file} is {reason}{detail}; give {KINDS}")
        self.reason = reason


def read_documents(
    path: str | Path | None = None, *, max_bytes: int | None = None, note: Note = print
) -> Iterator[Document]:
    """The documents of a source, one by one, always in the same order.

    path: see the head of this file. max_bytes: stop after so many bytes of text, inside a document if need be. note
    is told, in one line each, what was skipped and why, and where max_bytes cut.
    Raises ValueError (one line that says what to do): no such path, empty or not text, a record that is not JSON or has
    no text, a damaged archive, an extra that is not installed, no document at all. A missing path raises at once, the
    rest while reading.
    """
    skipped: Counter[str] = Counter()
    if path is None:
        documents = _read_library(max_bytes, skipped)
    else:
        check_source(str(path), KINDS)
        documents = (_read_folder if Path(path).is_dir() else _read_file)(Path(path), max_bytes, skipped)
    place = sysconfig.get_path("stdlib") if path is None else str(path)
    documents = _at_least_one(_reported(documents, skipped, place, note), place)
    return documents if max_bytes is None else _up_to(documents, max_bytes, note)


def check_source(path: str, kinds: str) -> None:
    """Raise ValueError for a path that is no file or folder that may be read. kinds: what may be given instead."""
    if not os.path.exists(path):
        raise ValueError(f"{path} does not exist; give {kinds}")
    if not (os.path.isdir(path) or os.path.isfile(path)):
        raise ValueError(f"{path} is neither a file nor a folder; give {kinds}")
    rights = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    if not os.access(path, rights, effective_ids=os.access in os.supports_effective_ids):
        raise ValueError(f"{path} may not be read ({NO_PERMISSION}); change that, or give {kinds}")


def spelled(path: str) -> str:
    r"""A path as text: bytes of names that are no UTF-8 are written \xNN."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _reported(documents: Iterator[Document], skipped: Counter[str], place: str, note: Note) -> Iterator[Document]:
    try:
        yield from documents
    finally:
        if skipped:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(skipped.items()))
            note(f"data: skipped in {place}: {reasons}")


def _at_least_one(documents: Iterable[Document], place: str) -> Iterator[Document]:
    empty = True
    for document in documents:
        empty = False
        yield document
    if empty:
        raise ValueError(f"{place} holds no document with text; give {KINDS}")


def _up_to(documents: Iterable[Document], max_bytes: int, note: Note) -> Iterator[Document]:
    room = max_bytes
    for document in documents:
        encoded = document.text.encode()
        if len(encoded) <= room:
            room -= len(encoded)
            yield document
            continue
        head = encoded[:room].decode(errors="ignore")
        note(f"data: read {max_bytes:,} bytes of text (max_bytes) and stopped in {document.source}; more text follows")
        if head:
            yield Document(document.source, head)
        return


def _read_library(max_bytes: int | None, skipped: Counter[str]) -> Iterator[Document]:
    root = Path(sysconfig.get_path("stdlib"))
    label = "python-" + ".".join(map(str, sys.version_info[:3]))
    return _read_files(root, label, _library_sources(root, skipped), max_bytes, skipped)


def _library_sources(root: Path, skipped: Counter[str]) -> list[Path]:
    files = []
    for folder, subfolders, names in os.walk(root, onerror=_raise):
        subfolders[:] = [name for name in subfolders if name not in _LIBRARY_SKIPS]
        for file in (Path(folder, name) for name in names if name.endswith(".py")):
            if file.relative_to(root).as_posix().startswith(_LIBRARY_TABLES):
                continue
            if file.is_file():
                files.append(file)
            else:
                skipped["not a regular file"] += 1
    return _sorted(files, root)


def _sorted(files: list[Path], root: Path) -> list[Path]:
    return sorted(files, key=lambda file: file.relative_to(root).parts)


def _read_folder(root: Path, max_bytes: int | None, skipped: Counter[str]) -> Iterator[Document]:
    return _read_files(root, str(root), files_below(root, skipped), max_bytes, skipped)


def files_below(root: Path, skipped: Counter[str]) -> list[Path]:
    """Files that may hold text, sorted by path; hidden ones, links to folders, special files and folders that may not
    be read are counted instead."""
    files = []

    def unreadable(error: OSError) -> None:
        if not isinstance(error, PermissionError):
            raise error
        skipped[f"a folder, {NO_PERMISSION}"] += 1

    for folder, subfolders, names in os.walk(root, onerror=unreadable):
        for name in subfolders:
            if name.startswith("."):
                skipped["hidden"] += 1
            elif os.path.islink(os.path.join(folder, name)):
                skipped["a link to a folder"] += 1
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            file = Path(folder, name)
            if name.startswith("."):
                skipped["hidden"] += 1
            elif not os.path.isfile(file):
                skipped["not a regular file"] += 1
            else:
                files.append(file)
    return _sorted(files, root)


def _raise(error: OSError):
    raise error


def _read_files(
    root: Path, label: str, files: list[Path], max_bytes: int | None, skipped: Counter[str]
) -> Iterator[Document]:
    """Documents of the files below a root; `label` stands for the root in their sources."""
    for file in files:
        try:
            for document in _read_file(file, max_bytes, skipped):
                yield Document(spelled(f"{label}/{document.source.removeprefix(f'{root}{os.sep}')}"), document.text)
        except NotText as error:
            skipped[error.reason] += 1
        except PermissionError:
            skipped[NO_PERMISSION] += 1


def _read_file(file: Path, max_bytes: int | None, skipped: Counter[str]) -> Iterator[Document]:
    name = file.name.lower()
    if name.endswith(".parquet"):
        return _read_parquet(file, skipped)
    if name.endswith(JSON_LINES):
        return _read_jsonl(file, skipped)
    return _read_text(file, max_bytes)


def _read_text(file: Path, max_bytes: int | None) -> Iterator[Document]:
    with open(file, "rb") as stream:
        # A character more than wanted, so that `_up_to` sees the cut.
        content = stream.read() if max_bytes is None else stream.read(max_bytes + 4)
        whole = not stream.read(1)
    if not content:
        raise NotText(file, "empty")
    if b"\0" in content:
        raise NotText(file, "not text", f" (a zero byte at offset {content.index(0):,})")
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(content, final=whole)
    except UnicodeDecodeError as error:
        where = f" (byte 0x{content[error.start]:02x} at offset {error.start:,})"
        raise NotText(file, "not UTF-8 text", where) from None
    yield Document(str(file), text)


def _read_jsonl(file: Path, skipped: Counter[str]) -> Iterator[Document]:
    for number, line in enumerate(_lines(file), start=1):
        text = _text_of_record(line, f"{file} line {number:,}") if line.strip() else ""
        if text:
            yield Document(f"{file}:{number}", text)
        else:
            skipped["empty lines or texts"] += 1


def _text_of_record(line: bytes, place: str) -> str:
    try:
        record = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{place} is not JSON ({reason}); write one object with a field {FIELD!r} on each line"
        ) from None
    if not isinstance(record, dict) or FIELD not in record:
        found = (
            f"its fields are {', '.join(map(repr, record))}" if isinstance(record, dict) and record else "it has none"
        )
        raise ValueError(f"{place} has no field {FIELD!r} ({found}); rename the field that holds the text")
    text = record[FIELD]
    if not isinstance(text, str):
        raise ValueError(f"{place}: field {FIELD!r} is {type(text).__name__}, not a string; write the text as a string")
    return _encodable(text, place)


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = f"\\u{ord(text[error.start]):04x}"
        raise ValueError(f"{place} has a lone surrogate {code}, which is no character; write the text anew") from None
    return text


def _lines(file: Path) -> Iterator[bytes]:
    try:
        for line in limited_lines(blocks_of(file), sys.maxsize):
            assert line is not None
            yield line
    except CutShort as error:
        raise ValueError(f"{file} is cut short ({error}); get it again") from None
    except Damaged as error:
        raise ValueError(f"{file} is damaged ({error}); get it again") from None


def _read_parquet(file: Path, skipped: Counter[str]) -> Iterator[Document]:
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise ValueError(f"{file} needs pyarrow to be read: pip install 'rille[data]'") from None
    with open(file, "rb") as stream:
        try:
            for number, text in enumerate(_rows(stream, file), start=1):
                if text is None:
                    raise ValueError(f"{file} row {number:,} has no text (null); fill it or remove the row")
                elif text:
                    yield Document(f"{file}:{number}", text)
                else:
                    skipped["empty lines or texts"] += 1
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            reason = str(error).splitlines()[0]
            raise ValueError(f"{file} is not parquet or is damaged ({reason}); get it again") from None


def _rows(stream: BinaryIO, file: Path) -> Iterator[str | None]:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.ParquetFile(stream)
    schema = table.schema_arrow
    if FIELD not in schema.names:
        raise ValueError(f"{file} has no column {FIELD!r} (it has {', '.join(schema.names)}); rename the column")
    kind = schema.field(FIELD).type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise ValueError(f"{file}: column {FIELD!r} holds {kind}, not strings; convert it")
    for batch in table.iter_batches(1024, columns=[FIELD]):
        yield from batch.column(0).to_pylist()
