"""The whole way from sources to a training set, in four steps that a killed build takes up again.

    gather       sources -> OUT.partial/spool      read, clean, judge, fingerprint        (gather.py)
    duplicates   -> what becomes of each document                                        (duplicates.py)
    vocabulary   -> tokenizer.json, from a sample of the training side by hash
    encode       -> train/, held_out.*, dataset.json, report                             (shards.py)

Each step writes files that are whole or absent and is a function of what lies before it, so a build that is given again
comes to the same bytes, however often it was stopped. OUT appears by a rename at the end. On disk the spool takes as
much room as the cleaned text, and goes at the end. No torch here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from rille.data.arrays import save_array
from rille.data.build_config import BuildConfig
from rille.data.dataset import FORMAT, MANIFEST, Dataset, is_dataset
from rille.data.duplicates import EQUAL, KEPT, NEAR, Pair, find_duplicates
from rille.data.encode import Encoder
from rille.data.gather import check_filters, gather, merge, new_tally
from rille.data.records import source_state
from rille.data.report import write_report
from rille.data.shards import EncodeTask, ShardWriter, encode_chunk, encoded, token_dtype
from rille.data.sources import Note
from rille.data.spool import Spool, texts_of
from rille.data.steps import NoSteps, Steps
from rille.data.workers import in_order
from rille.text.tokenizer import load_tokenizer, train_tokenizer

REQUEST = "request.json"
FREE = ("out", "workers")  # what may change between two attempts
_EXCERPT = 300


def build_dataset(config: BuildConfig, *, note: Note = print, steps: Steps | None = None) -> Path:
    """Make the training set that `config` describes; returns its folder.

    A finished set of the same settings and sources (those that are still there) is left as it is. Raises ValueError
    for sources, filters or settings that cannot be used, for a source without any document that stays, and for a
    folder that holds something else.
    """
    out = Path(config.out)
    partial = out.with_name(out.name + ".partial")
    if out.exists():
        _check_finished(out, config)
        note(f"{out} holds this set already")
        return out
    workers = config.workers or os.cpu_count() or 1
    request = _claim(partial, config)
    with _advising(partial), _alone_in(partial):
        if not (partial / MANIFEST).exists():
            _make(config, request, partial, workers, note, steps or NoSteps())
        _tidy(partial)
        os.rename(partial, out)
    return out


@contextmanager
def _advising(partial: Path) -> Iterator[None]:
    """A fault of the machine says where the build stands and how it goes on."""
    try:
        yield
    except OSError as error:
        error.add_note(f"{partial} holds what is done; the same command goes on from there")
        raise


@contextmanager
def _alone_in(partial: Path) -> Iterator[None]:
    """Hold the folder against another build of the same set; a process that ends lets go of it."""
    folder = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise ValueError(f"another build is at work in {partial}; wait for it, or name another folder") from None
    finally:
        os.close(folder)


@contextmanager
def _leaving_nothing(partial: Path) -> Iterator[None]:
    """What is refused inside follows from settings and sources, and with others nothing could go on from here."""
    try:
        yield
    except ValueError:
        shutil.rmtree(partial)
        raise


def _tidy(partial: Path) -> None:
    """Remove what only the build needed; the request last, since with it an attempt may be taken up."""
    shutil.rmtree(partial / "spool", ignore_errors=True)
    train = partial / "train"
    for file in (*train.glob("*.counts.npy"), *train.glob("*.json"), partial / "held_out.json", partial / REQUEST):
        file.unlink(missing_ok=True)


def _make(config: BuildConfig, request: dict, partial: Path, workers: int, note: Note, steps: Steps) -> None:
    spool_directory = partial / "spool"
    spool_directory.mkdir(exist_ok=True)
    for number, domain in enumerate(config.domains()):
        size = sum(size for _, size, _ in source_state(domain.path)) or None
        compressed = domain.path.endswith((".gz", ".xz", ".zst", ".parquet"))
        with steps.step(f"reading {domain.name}", None if compressed else size) as advance:
            for done in gather(config, number, domain, spool_directory, workers):
                advance(done)
    spool = Spool(spool_directory)
    with _leaving_nothing(partial):
        _check_any(spool, config)
    names = config.names()
    ranks = [names.index(facts["domain"]) for facts in spool.facts]
    with steps.step("looking for duplicates", None):
        fate, pairs = find_duplicates(spool, ranks, config.similarity, spool_directory / "buckets")
    training = fate == KEPT
    with _leaving_nothing(partial):
        held = _held_out(spool, fate, config)
        training[held] = False
        _check_shares(config, spool, training)
    _vocabulary(config, spool, training, partial, note, steps)
    shards = _encode(config, spool, training, partial, workers, steps)
    _write_held_out(spool, held, ranks, partial)
    report = _report_facts(config, spool, fate, held, pairs)
    _finish(config, request, partial, shards, report)


def _claim(partial: Path, config: BuildConfig) -> dict[str, Any]:
    """Begin a build, or take up one with the same settings and the same sources."""
    check_filters(config)
    settings = {key: value for key, value in asdict(config).items() if key not in FREE}
    request = {"settings": settings, "sources": [source_state(domain.path) for domain in config.domains()]}
    request = json.loads(json.dumps(request))
    file = partial / REQUEST
    if (partial / MANIFEST).exists() and not file.exists():
        return request  # nothing is left to do but the rename
    if not file.exists():
        partial.mkdir(parents=True, exist_ok=True)
        beginning = partial / (REQUEST + ".partial")
        beginning.write_text(json.dumps(request), encoding="utf-8")
        os.replace(beginning, file)
    begun = json.loads(file.read_text(encoding="utf-8"))
    _check_same(begun["settings"], request["settings"], f"{partial} holds an unfinished build")
    if begun["sources"] != request["sources"]:
        raise ValueError(f"sources changed since the build in {partial} began; delete that folder to start anew")
    return request


def _check_finished(out: Path, config: BuildConfig) -> None:
    if not is_dataset(out):
        raise ValueError(f"{out} exists and is no training set; name another folder")
    manifest = Dataset(out).manifest
    now = json.loads(json.dumps({key: value for key, value in asdict(config).items() if key not in FREE}))
    _check_same(manifest["request"]["settings"], now, f"{out} holds a set")
    for domain, state in zip(config.domains(), manifest["request"]["sources"], strict=True):
        if Path(domain.path).exists() and source_state(domain.path) != state:
            raise ValueError(f"{domain.path} changed since {out} was made of it; use another folder or delete that one")


def _check_same(old: dict, new: dict, place: str) -> None:
    changed = [f"{key} {old.get(key)!r}, now {new[key]!r}" for key in new if old.get(key) != new[key]]
    if changed:
        raise ValueError(f"{place} of other settings: {'; '.join(changed)}; use another folder or delete it")


def _check_any(spool: Spool, config: BuildConfig) -> None:
    for number, domain in enumerate(config.domains()):
        tally = new_tally()
        for facts in spool.facts:
            if facts["source"] == number:
                tally = merge(tally, facts["tally"])
        if not tally["documents"]:
            reasons = ", ".join(f"{count:,} {reason}" for reason, count in tally["dropped"].items()) or "it is empty"
            raise ValueError(
                f"{domain.path} gives no document that stays ({reasons}); leave it out, change the rules, or name "
                f"{domain.name} in plain to take it as it is"
            )


def _check_shares(config: BuildConfig, spool: Spool, training: np.ndarray) -> None:
    """Raise ValueError for a domain that is to be read and of which no document is left."""
    left = dict.fromkeys(config.names(), 0)
    for chunk, facts in enumerate(spool.facts):
        left[facts["domain"]] += int(training[spool.first[chunk] : spool.first[chunk + 1]].sum())
    if empty := [name for name, share in config.shares().items() if share > 0 and not left[name]]:
        raise ValueError(
            f"rates give {', '.join(empty)} a share, but every document of it equals one of another domain or is held "
            "out; leave it out or give it 0"
        )


def _held_out(spool: Spool, fate: np.ndarray, config: BuildConfig) -> np.ndarray:
    """Numbers, int64, of the documents held out: lowest fingerprints first, up to the bounds of share and bytes."""
    threshold = np.uint64(max(1, int(config.held_out * 2**64)) - 1)
    found: list[tuple[int, int, int]] = []
    lowest: tuple[int, int, int] | None = None
    for chunk in range(len(spool)):
        rows = spool.rows(chunk)
        kept = np.flatnonzero(fate[spool.first[chunk] : spool.first[chunk + 1]] == KEPT)
        if len(kept):
            best = int(kept[rows["high"][kept].argmin()])
            candidate = (int(rows["high"][best]), spool.first[chunk] + best, int(rows["length"][best]))
            lowest = candidate if lowest is None else min(lowest, candidate)
        low = kept[rows["high"][kept] <= threshold]
        found += [(int(rows["high"][i]), spool.first[chunk] + i, int(rows["length"][i])) for i in low.tolist()]
    if int((fate == KEPT).sum()) < 2:
        raise ValueError("fewer than two different documents stay: none can be held out; give more text")
    held, room = [], config.held_out_bytes
    for _, number, length in sorted(found) or [lowest or (0, 0, 0)]:
        if held and length > room:
            break
        held.append(number)
        room -= length
    return np.array(held, dtype=np.int64)


def _vocabulary(
    config: BuildConfig, spool: Spool, training: np.ndarray, partial: Path, note: Note, steps: Steps
) -> None:
    """Put the tokenizer into the folder: the one that was named, or one that is learned from the training side."""
    if (partial / "tokenizer.json").exists() or (partial / "tiktoken.model").exists():
        return
    if config.tokenizer is not None:
        load_tokenizer(config.tokenizer).save(partial)
        return
    with steps.step(f"learning {config.vocab_size:,} tokens", None):
        tokenizer = train_tokenizer(_sample(config, spool, training), config.vocab_size, note=note)
    tokenizer.save(partial)


def _sample(config: BuildConfig, spool: Spool, training: np.ndarray) -> Iterator[str]:
    """Training documents whose fingerprint falls into the share that fills `tokenizer_bytes`, about."""
    total = sum(facts["bytes"] for facts in spool.facts)
    share = min(1.0, config.tokenizer_bytes / max(1, total))
    bound = np.uint64(min(2**64 - 1, int(share * 2**64)))
    for chunk in range(len(spool)):
        wanted = training[spool.first[chunk] : spool.first[chunk + 1]] & (spool.rows(chunk)["low"] <= bound)
        yield from texts_of(spool.directory, chunk, wanted)


def _encode(
    config: BuildConfig, spool: Spool, training: np.ndarray, partial: Path, workers: int, steps: Steps
) -> list[dict[str, Any]]:
    """Encode every chunk into its shards; what each chunk's .json says."""
    (partial / "train").mkdir(exist_ok=True)

    def task(chunk: int) -> EncodeTask:
        base = partial / "train" / f"{spool.facts[chunk]['domain']}-{chunk:05d}"
        wanted = training[spool.first[chunk] : spool.first[chunk + 1]]
        return EncodeTask(spool.directory, chunk, wanted, base, partial, config.long_tokens)

    done = []
    with steps.step("encoding", sum(facts["bytes"] for facts in spool.facts)) as advance:
        results = in_order(encode_chunk, map(task, range(len(spool))), workers)
        for chunk, facts in enumerate(results):
            done.append({**facts, "domain": spool.facts[chunk]["domain"]})
            advance(spool.facts[chunk]["bytes"])
    return done


def _write_held_out(spool: Spool, held: np.ndarray, ranks: list[int], partial: Path) -> None:
    encoder = Encoder(load_tokenizer(partial))
    writer = ShardWriter(partial / "held_out", encoder.eos_id, token_dtype(encoder.vocab_size))
    for text_bytes, ids in encoded(encoder, map(spool.text, held.tolist())):
        writer.add(ids, text_bytes)
    (partial / "held_out.json").write_text(json.dumps(writer.finish()), encoding="utf-8")
    domains = np.array([ranks[spool.place(n)[0]] for n in held.tolist()], np.uint16)
    save_array(partial / "held_out.domains.npy", domains)


def _report_facts(
    config: BuildConfig, spool: Spool, fate: np.ndarray, held: np.ndarray, pairs: list[Pair]
) -> dict[str, Any]:
    """By domain what was read, changed, dropped, doubled, kept; and near-duplicates to look at."""
    domains: dict[str, dict[str, Any]] = {}
    for chunk, facts in enumerate(spool.facts):
        tally = domains.setdefault(facts["domain"], {**new_tally(), "equal": 0, "near": 0, "held_out": 0})
        merged = merge({key: tally[key] for key in new_tally()}, facts["tally"])
        fates = fate[spool.first[chunk] : spool.first[chunk + 1]]
        here = (held >= spool.first[chunk]) & (held < spool.first[chunk + 1])
        domains[facts["domain"]] = {
            **merged,
            "equal": tally["equal"] + int((fates == EQUAL).sum()),
            "near": tally["near"] + int((fates == NEAR).sum()),
            "held_out": tally["held_out"] + int(here.sum()),
        }
    near = [
        [pair.similarity, *(spool.text(number)[:_EXCERPT] for number in (pair.kept, pair.dropped))] for pair in pairs
    ]
    return {"domains": domains, "near_pairs": near, "similarity": config.similarity}


def _finish(config: BuildConfig, request: dict, partial: Path, chunks: list[dict], report: dict[str, Any]) -> None:
    """Sum up, write the manifest last."""
    train = partial / "train"
    names = config.names()
    streams = [stream for name in names for stream in _streams_of(name, chunks)]
    if not streams:
        raise ValueError("no document is left to train on; give more text")
    tokenizer = load_tokenizer(partial)
    held = json.loads((partial / "held_out.json").read_text(encoding="utf-8"))
    counts = sum(np.load(file) for file in sorted(train.glob("*.counts.npy")))
    save_array(partial / "counts.npy", np.asarray(counts))
    digests = [shard["digest"] for stream in streams for shard in stream["shards"]]
    manifest = {
        "format": FORMAT,
        "dtype": token_dtype(tokenizer.vocab_size),
        "vocab_size": tokenizer.vocab_size,
        "tokenizer": tokenizer.digest(),
        "digest": hashlib.sha256("".join([tokenizer.digest(), *digests, held["digest"]]).encode()).hexdigest(),
        "domains": names,
        "streams": streams,
        "held_out": held,
        "mixture": {"shares": config.shares(), "long_times": config.long_times, "max_epochs": config.max_epochs},
        "request": request,
    }
    write_report(partial, {**report, "streams": streams, "held_out": held, "mixture": manifest["mixture"]})
    beginning = partial / (MANIFEST + ".partial")
    beginning.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    os.replace(beginning, partial / MANIFEST)


def _streams_of(name: str, chunks: list[dict]) -> list[dict[str, Any]]:
    streams = []
    for kind in ("short", "long"):
        shards = [facts[kind] for facts in chunks if kind in facts and facts["domain"] == name]
        if shards:
            sums = {key: sum(shard[key] for shard in shards) for key in ("documents", "targets", "text_bytes")}
            streams.append({"domain": name, "long": kind == "long", **sums, "shards": shards})
    return streams
