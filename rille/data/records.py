"""Raw records out of sources, whatever state the sources are in, and the text out of a record.

    source --read--> records (bytes) and faults --text_of--> a text, or the reason why there is none

Reading never stops for bad data and never repairs it: what cannot be read is a `Fault` with a reason that can be
counted by. Nothing longer than a limit is held in memory. A named path that is not there, or an extra that is not
installed, is the user's mistake and raises.
"""

from __future__ import annotations

import codecs
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from rille.data.archives import CutShort, Damaged, blocks_of, limited_lines
from rille.data.sources import JSON_LINES, KINDS, NO_PERMISSION, check_source, files_below, spelled


@dataclass(frozen=True)
class Record:
    """One record as it lies in its source. json: a line of JSON with the text in a field; else the text itself."""

    source: str
    content: bytes
    json: bool


@dataclass(frozen=True)
class Fault:
    """What could not be read, and why, in words to count by."""

    source: str
    reason: str


def read_records(path: str, *, field: str, max_bytes: int) -> Iterator[Record | Fault]:
    """The records of a source, always in the same order.

    path: a text file, a folder, .jsonl[.gz|.xz|.zst], .parquet or hf:DATASET[:SPLIT]. field: the column of tables.
    max_bytes: longer records are faults. Raises ValueError for a path that does not exist or may not be read, and for
    a missing library.
    """
    if path.startswith("hf:"):
        yield from _read_hub(path.removeprefix("hf:"), field, max_bytes)
        return
    root = _existing(path)
    if root.is_file():
        yield from _read_file(root, root.name, field, max_bytes)
        return
    skipped: Counter[str] = Counter()
    for file in files_below(root, skipped):
        label = spelled(file.relative_to(root).as_posix())
        try:
            yield from _read_file(file, label, field, max_bytes)
        except PermissionError:
            yield Fault(label, NO_PERMISSION)
    for reason, count in sorted(skipped.items()):
        for _ in range(count):
            yield Fault(path, reason)


def source_state(path: str) -> list[list]:
    """Names, sizes and times of change of a source's files: what tells that it is still the same.

    Raises ValueError for a path that does not exist or may not be read.
    """
    if path.startswith("hf:"):
        return []
    root = _existing(path)
    files = [root] if root.is_file() else files_below(root, Counter())
    return [[file.as_posix(), file.stat().st_size, file.stat().st_mtime_ns] for file in files]


def _existing(path: str) -> Path:
    check_source(path, f"{KINDS}, or hf:DATASET")
    return Path(path)


def text_of(record: Record, field: str) -> str | Fault:
    """The record's text, exactly as it was written, or a fault. An empty text is a fault."""
    if not record.json:
        text = _decoded(record.content)
    else:
        text = _field_of(record.content, field)
    if isinstance(text, Fault):
        return Fault(record.source, text.reason)
    if not text or text.isspace():
        return Fault(record.source, "empty")
    return text


def _decoded(content: bytes) -> str | Fault:
    if b"\0" in content:
        return Fault("", "not text (zero bytes)")
    try:
        return content.decode()
    except UnicodeDecodeError:
        return Fault("", "not UTF-8")


def _field_of(line: bytes, field: str) -> str | Fault:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError:
        return Fault("", "not UTF-8")
    except (ValueError, RecursionError):
        return Fault("", "not JSON")
    if not isinstance(record, dict) or field not in record:
        return Fault("", f"no field {field!r}")
    text = record[field]
    if not isinstance(text, str):
        return Fault("", f"field {field!r} is not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        return Fault("", "lone surrogate")
    return text


def _read_file(file: Path, label: str, field: str, max_bytes: int) -> Iterator[Record | Fault]:
    name = file.name.lower()
    if name.endswith(".parquet"):
        yield from _read_parquet(file, label, field, max_bytes)
    elif name.endswith(JSON_LINES):
        yield from _read_lines(file, label, max_bytes)
    elif file.stat().st_size > max_bytes:
        yield Fault(label, f"longer than {max_bytes:,} bytes")
    elif not file.stat().st_size:
        yield Fault(label, "empty")
    else:
        yield Record(label, file.read_bytes(), json=False)


def _read_lines(file: Path, label: str, max_bytes: int) -> Iterator[Record | Fault]:
    number = 0
    try:
        for number, line in enumerate(limited_lines(blocks_of(file, checked=True), max_bytes), start=1):
            if line is None:
                yield Fault(f"{label}:{number}", f"longer than {max_bytes:,} bytes")
            elif line.strip():
                line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line  # which is no part of the record
                yield Record(f"{label}:{number}", line, json=True)
            else:
                yield Fault(f"{label}:{number}", "empty")
    except Damaged as error:
        reason = "archive cut short" if isinstance(error, CutShort) else "archive damaged"
        yield Fault(f"{label} after line {number:,}", reason)
        return
    if not number:
        yield Fault(label, "empty")


def _read_parquet(file: Path, label: str, field: str, max_bytes: int) -> Iterator[Record | Fault]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise ValueError(f"{file} needs pyarrow to be read: pip install 'rille[data]'") from None
    number = 0
    with open(file, "rb") as stream:
        try:
            table = pyarrow.parquet.ParquetFile(stream, page_checksum_verification=True)
            if field not in table.schema_arrow.names:
                yield Fault(label, f"no field {field!r}")
                return
            for batch in table.iter_batches(256, columns=[field]):
                column = batch.column(0)
                for text in column.dictionary_decode() if pyarrow.types.is_dictionary(column.type) else column:
                    number += 1
                    yield _cell(text, f"{label}:{number}", field, max_bytes)
        except (pyarrow.ArrowException, OSError):
            yield Fault(f"{label} after row {number:,}", "table damaged or cut short")
            return
    if not number:
        yield Fault(label, "empty")


def _cell(cell, source: str, field: str, max_bytes: int) -> Record | Fault:
    """One cell of an arrow column, as bytes: what is no UTF-8 inside shows later."""
    import pyarrow

    kinds = pyarrow.types
    if not (kinds.is_string(cell.type) or kinds.is_large_string(cell.type) or kinds.is_string_view(cell.type)):
        return Fault(source, f"field {field!r} is not a string")
    if not cell.is_valid or not cell.as_buffer().size:
        return Fault(source, "empty")
    if cell.as_buffer().size > max_bytes:
        return Fault(source, f"longer than {max_bytes:,} bytes")
    return Record(source, cell.as_buffer().to_pybytes(), json=False)


def _read_hub(name: str, field: str, max_bytes: int) -> Iterator[Record | Fault]:
    """A data set of the Hugging Face hub as a stream, or a folder that `save_to_disk` of its library wrote."""
    try:
        datasets = import_module("datasets")
    except ModuleNotFoundError:
        raise ValueError(f"hf:{name} needs the library datasets: pip install 'rille[hf]'") from None
    identifier, _, split = name.partition(":")
    if Path(identifier).is_dir():
        rows = datasets.load_from_disk(identifier)
        rows = rows[split or "train"] if isinstance(rows, datasets.DatasetDict) else rows
    else:
        rows = datasets.load_dataset(identifier, split=split or "train", streaming=True)
    for number, row in enumerate(rows, start=1):
        source, text = f"{identifier}:{number}", row.get(field) if isinstance(row, dict) else None
        if not isinstance(text, str):
            yield Fault(source, f"no field {field!r}" if text is None else f"field {field!r} is not a string")
        elif len(content := text.encode(errors="surrogatepass")) > max_bytes:
            yield Fault(source, f"longer than {max_bytes:,} bytes")
        else:
            yield Record(source, content, json=False)
