"""From sources to kept documents: decode, clean, judge, fingerprint, and count what goes and why.

    record --text_of--> text --clean--> text --rules--> text --language--> text --quality--> document

Records go to worker processes in batches; what comes back is written to the spool in the order of reading. Every record
ends in exactly one count: kept, or dropped for one reason.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from rille.data.build_config import BuildConfig, Domain, FilterConfig
from rille.data.classifier import Classifier, load_classifier
from rille.data.cleaning import clean
from rille.data.duplicates import signatures
from rille.data.heuristics import code_fault, prose_fault
from rille.data.records import Fault, Record, read_records, text_of
from rille.data.spool import ROW, ChunkWriter, Gathered, Spool
from rille.data.workers import in_order

_BATCH_BYTES = 2_000_000
_BATCH_RECORDS = 4_000
_EXCERPT = 300
_SAMPLES = 3  # of each kind, a batch and in the end


@dataclass(frozen=True)
class Judge:
    """What a worker needs to know of the build."""

    kind: str
    field: str
    language: FilterConfig
    quality: FilterConfig
    near: bool


def gather(config: BuildConfig, number: int, domain: Domain, spool: Path, workers: int) -> Iterator[int]:
    """Read one source into the spool, after the chunks that are there; yields bytes of records as they are done.

    number: which source it is. A source that was cut short goes on where its last chunk ended.
    """
    judge = Judge(domain.kind, config.field, config.language, config.quality, config.similarity < 1)
    sealed = Spool(spool)
    mine = [facts for facts in sealed.facts if facts["source"] == number]
    if mine and mine[-1]["last"]:
        return
    done = sum(facts["records"] for facts in mine)
    records = read_records(domain.path, field=config.field, max_bytes=config.max_document_bytes)
    batches = _batches(islice(records, done, None), min(_BATCH_BYTES, config.shard_bytes))
    chunk, facts = len(sealed), _no_facts(number, domain.name)
    writer = ChunkWriter(spool, chunk)
    for batch, size in in_order(partial(judge_batch, judge), batches, workers):
        if writer.bytes >= config.shard_bytes:
            writer.seal(facts)
            chunk, facts = chunk + 1, _no_facts(number, domain.name)
            writer = ChunkWriter(spool, chunk)
        writer.add(batch)
        facts["records"] += batch.records
        facts["tally"] = merge(facts["tally"], batch.tally)
        yield size
    writer.seal({**facts, "last": True})


def _no_facts(source: int, name: str) -> dict[str, Any]:
    return {"source": source, "domain": name, "records": 0, "last": False, "tally": new_tally()}


def new_tally() -> dict[str, Any]:
    """Counts of a domain: what was read, what was changed, what went and why, and examples by hash."""
    return {
        "records": 0,
        "documents": 0,
        "text_bytes": 0,
        "dropped": {},
        "dropped_bytes": {},
        "changed": {},
        "kept_samples": [],
        "dropped_samples": {},
    }


def merge(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Two tallies as one; the order does not matter."""
    merged: dict[str, Any] = {}
    for key, value in one.items():
        if key == "kept_samples":
            merged[key] = sorted([*value, *other[key]])[:_SAMPLES]
        elif key == "dropped_samples":
            reasons = {*value, *other[key]}
            merged[key] = {r: sorted([*value.get(r, ()), *other[key].get(r, ())])[:_SAMPLES] for r in sorted(reasons)}
        elif isinstance(value, dict):
            merged[key] = dict(sorted((Counter(value) + Counter(other[key])).items()))
        else:
            merged[key] = value + other[key]
    return merged


def _batches(records: Iterator[Record | Fault], most: int) -> Iterator[list[Record | Fault]]:
    batch: list[Record | Fault] = []
    size = 0
    for record in records:
        batch.append(record)
        size += len(record.content) if isinstance(record, Record) else 0
        if size >= most or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def judge_batch(judge: Judge, records: list[Record | Fault]) -> tuple[Gathered, int]:
    """The documents of a batch that stay, with what was counted; and the bytes of its records."""
    tally = new_tally()
    tally["records"] = len(records)
    texts: list[bytes] = []
    for record in records:
        text = judge_record(judge, record, tally)
        if text is not None:
            texts.append(text)
    digests = [hashlib.blake2b(text, digest_size=16).digest() for text in texts]
    rows = np.empty(len(texts), ROW)
    rows["length"] = [len(text) for text in texts]
    halves = np.frombuffer(b"".join(digests), dtype=">u8").reshape(-1, 2)
    rows["high"], rows["low"] = halves[:, 0], halves[:, 1]
    tally["documents"], tally["text_bytes"] = len(texts), sum(map(len, texts))
    minhash = [signatures(texts, rows["high"])] if judge.near and texts else []
    size = sum(len(record.content) for record in records if isinstance(record, Record))
    return Gathered(len(records), texts, [rows], minhash, tally), size


def judge_record(judge: Judge, record: Record | Fault, tally: dict[str, Any]) -> bytes | None:
    """The record's text as it will be stored, or None; either way `tally` knows."""
    text = text_of(record, judge.field) if isinstance(record, Record) else record
    if isinstance(text, Fault):
        size = len(record.content) if isinstance(record, Record) else 0
        _drop(tally, text.reason, size, [record.source, text.reason])
        return None
    cleaned, changes = clean(text, judge.kind)
    for change in changes:
        tally["changed"][change] = tally["changed"].get(change, 0) + 1
    reason = "empty after cleaning" if not cleaned.strip() else fault_of(judge, cleaned)
    content = cleaned.encode()
    sample = [record.source, cleaned[:_EXCERPT]]
    if reason is not None:
        _drop(tally, reason, len(content), sample)
        return None
    tally["kept_samples"] = sorted([*tally["kept_samples"], _with_hash(sample)])[:_SAMPLES]
    return content


def fault_of(judge: Judge, text: str) -> str | None:
    """Why a cleaned text goes, or None."""
    if judge.kind == "plain":
        return None
    reason = code_fault(text) if judge.kind == "code" else prose_fault(text)
    if reason is not None or judge.kind == "code":
        return reason
    for name, choice in (("language", judge.language), ("quality", judge.quality)):
        if choice.path is not None:
            classifier = _classifier(choice.path)
            probabilities = classifier.probabilities(text)
            if sum(probabilities[label] for label in choice.labels) < choice.at_least:
                return f"{name}: {max(probabilities, key=lambda label: probabilities[label])}"
    return None


def check_filters(config: BuildConfig) -> None:
    """Raise ValueError for a filter that cannot be read or does not know a label that it is asked for."""
    for choice in (config.language, config.quality):
        if choice.path is not None:
            known = _classifier(choice.path).labels
            unknown = [label for label in choice.labels if label not in known]
            if unknown:
                raise ValueError(f"{choice.path} knows {', '.join(known)}, not {', '.join(unknown)}")


@lru_cache(maxsize=4)
def _classifier(path: str) -> Classifier:
    return load_classifier(path)


def _drop(tally: dict[str, Any], reason: str, size: int, sample: list[str]) -> None:
    tally["dropped"][reason] = tally["dropped"].get(reason, 0) + 1
    tally["dropped_bytes"][reason] = tally["dropped_bytes"].get(reason, 0) + size
    samples = tally["dropped_samples"].setdefault(reason, [])
    samples.append(_with_hash(sample))
    samples.sort()
    del samples[_SAMPLES:]


def _with_hash(sample: list[str]) -> list[str]:
    """The sample behind a hash of it, so that the lowest ones are a choice by chance that does not follow the order."""
    return [hashlib.blake2b("\0".join(sample).encode(), digest_size=8).hexdigest(), *sample]
