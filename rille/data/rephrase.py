"""Documents written anew by a model: chunk by chunk, each with the end of what came before, checked, in several styles.

    document -> pieces p_1 ... p_n  (cut between paragraphs, else sentences, else anywhere)
    r_i = model(style, tail of r_1 ... r_{i-1}, p_i)      kept if fidelity(p_i, r_i) and the judging model agree
    rephrased document = r_1 ... r_n

A piece that fails is asked for again with another seed; after `attempts` failures, or where the endpoint refuses the
text, the document is given up and counted by the reason. Results go to OUT.partial, a line each, as they come; a run
that is given again asks only for what is missing, and OUT appears, in the order of the source, when everything was
tried.
Source: Kimi K2's report (chunk-wise autoregressive generation; at most two rephrasings of a corpus were used).
No torch here.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from rich.table import Table

from rille.data.command_config import RephraseConfig
from rille.data.endpoint import Endpoint, Unfit
from rille.data.fidelity import measure
from rille.data.records import Fault, read_records, text_of
from rille.data.steps import Steps
from rille.data.styles import JUDGE_SYSTEM, STYLES, SYSTEM, judging, rewriting

_LONGEST = 16_000_000
FREE = ("out", "endpoint", "parallel", "timeout", "key_variable")  # what may change when a run goes on
_BREAKS = ("\n\n", "\n", ". ", "\u3002", " ")
_TOKENS_A_BYTE = 1.0  # of an answer, at most; a model's tokens hold several bytes, a long answer is refused anyway


@dataclass
class Outcome:
    """What came of a run: documents by what became of them."""

    written: int = 0
    before: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    unreadable: Counter[str] = field(default_factory=Counter)

    def table(self) -> Table:
        table = Table("what became of them", "rephrasings", box=None, pad_edge=False)
        table.add_row("written", f"{self.written:,}")
        if self.before:
            table.add_row("  of these by earlier runs", f"{self.before:,}")
        for reason, count in sorted({**self.failed, **self.unreadable}.items()):
            table.add_row(f"given up: {reason}", f"{count:,}")
        return table


@dataclass(frozen=True)
class Job:
    """One document in one style."""

    number: int
    source: str
    style: str
    text: str

    @property
    def key(self) -> str:
        return hashlib.blake2b(f"{self.style}\0{self.source}\0{self.text}".encode(), digest_size=12).hexdigest()


def rephrase(config: RephraseConfig, steps: Steps) -> Outcome:
    """Rephrase the documents of `config.source` into `config.out`.

    Raises ValueError for unknown styles, sources that cannot be read and an endpoint that refuses requests; OSError for
    one that does not answer: what was written until then stays, and the same command goes on.
    """
    unknown = [style for style in config.styles if style not in STYLES]
    if unknown or not config.styles:
        raise ValueError(f"unknown styles {', '.join(unknown) or '(none given)'}; there are {', '.join(STYLES)}")
    if len(set(config.styles)) < len(config.styles):
        raise ValueError(f"styles {', '.join(config.styles)}: give each once")
    out = Path(config.out)
    if out.exists():
        raise ValueError(f"{out} exists already; name another file")
    journal, outcome = out.with_name(out.name + ".partial"), Outcome()
    settings = {key: value for key, value in asdict(config).items() if key not in FREE}
    endpoint = Endpoint(config.endpoint, config.model, os.environ.get(config.key_variable), config.timeout)
    with (
        _alone_with(journal, settings) as stream,
        _gone_where_empty(journal),
        steps.step("rephrasing", None) as advance,
    ):
        done = _read_journal(journal, settings)
        outcome.before = sum(entry.failed is None for entry in done.values())
        todo = (job for job in _jobs(config, outcome) if job.key not in done)
        for job, line in _spread(todo, endpoint, config):
            stream.write(json.dumps({"key": job.key, **line}, ensure_ascii=False) + "\n")
            stream.flush()
            advance(1)
        _publish(config, journal, out, outcome, settings)
    return outcome


def _jobs(config: RephraseConfig, outcome: Outcome) -> Iterator[Job]:
    records = read_records(config.source, field=config.field, max_bytes=_LONGEST)
    outcome.unreadable.clear()
    for number, record in enumerate(islice(records, config.most)):
        text = record if isinstance(record, Fault) else text_of(record, config.field)
        if isinstance(text, Fault):
            outcome.unreadable[text.reason] += 1
            continue
        yield from (Job(number, record.source, style, text) for style in config.styles)


def _spread(todo: Iterator[Job], endpoint: Endpoint, config: RephraseConfig) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Results as they come, `parallel` documents at once. The first error ends the run; what is under way is lost."""
    with ThreadPoolExecutor(config.parallel) as pool:
        running: dict[Future, Job] = {}
        try:
            for job in todo:
                running[pool.submit(rephrase_one, job, endpoint, config)] = job
                if len(running) >= config.parallel:
                    yield from _finished(running)
            while running:
                yield from _finished(running)
        finally:
            pool.shutdown(cancel_futures=True)


def _finished(running: dict[Future, Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        yield running.pop(future), future.result()


def rephrase_one(job: Job, endpoint: Endpoint, config: RephraseConfig) -> dict[str, Any]:
    """The rephrased text with its source, style and fidelity, or the reason why it was given up."""
    pieces, written, measures = cut_pieces(job.text, config.chunk_bytes), "", []
    facts = {"number": job.number, "source": job.source, "style": job.style}
    for number, piece in enumerate(pieces):
        tail = _tail(written, config.context_bytes)
        request = rewriting(job.style, tail, piece, first=not number, last=number == len(pieces) - 1)
        try:
            answer, fault = _faithful(endpoint, config, request, piece)
        except Unfit as unfit:
            answer, fault = "", str(unfit)
        if fault is not None:
            return {**facts, "failed": fault}
        written = f"{written}\n\n{answer}" if written else answer
        measures.append(asdict(measure(piece, answer)))
    mean = {name: sum(found[name] for found in measures) / len(measures) for name in measures[0]}
    return {**facts, "fidelity": mean, "pieces": len(pieces), "text": written}


def _faithful(endpoint: Endpoint, config: RephraseConfig, request: str, piece: str) -> tuple[str, str | None]:
    """A piece written anew and None, or what was wrong with the last attempt."""
    limit = 256 + int(2 * len(piece.encode()) * _TOKENS_A_BYTE)
    fault = None
    for attempt in range(config.attempts):
        answer = endpoint.ask(SYSTEM, request, temperature=config.temperature, max_tokens=limit, seed=attempt)
        fault = answer.fault or measure(piece, answer.text).fault()
        if fault is None and config.judge and not _agrees(endpoint, piece, answer.text):
            fault = "judged different"
        if fault is None:
            return answer.text.strip(), None
    return "", fault


def _agrees(endpoint: Endpoint, original: str, rewritten: str) -> bool:
    answer = endpoint.ask(JUDGE_SYSTEM, judging(original, rewritten), temperature=0.0, max_tokens=16, seed=0)
    return re.findall(r"SAME|DIFFERENT", answer.text.upper())[:1] == ["SAME"]


def cut_pieces(text: str, most: int) -> list[str]:
    """Pieces of at most `most` bytes that joined give the text: cut at the last paragraph, line, sentence or word that
    fits, else inside one."""
    pieces, at = [], 0
    while at < len(text):
        head = text[at : at + most].encode()[:most].decode(errors="ignore") or text[at]
        ends = (head.rfind(mark) + len(mark) for mark in _BREAKS if head.rfind(mark) > len(head) // 2)
        cut = len(head) if at + len(head) == len(text) else next(ends, len(head))
        pieces.append(text[at : at + cut])
        at += cut
    return pieces


def _tail(text: str, most: int) -> str:
    return text.encode()[-most:].decode(errors="ignore") if most else ""


@dataclass(frozen=True)
class Entry:
    """A line of the journal: document, style, why it failed (None: it did not), where the line begins."""

    number: int
    style: str
    failed: str | None
    offset: int


@contextmanager
def _alone_with(journal: Path, settings: dict[str, Any]) -> Iterator[TextIO]:
    """The journal, open for what comes, held against another run. A new one begins with the settings."""
    if not journal.exists():
        journal.parent.mkdir(parents=True, exist_ok=True)
        beginning = journal.with_name(f"{journal.name}.{os.getpid()}")
        beginning.write_text(json.dumps(settings) + "\n", encoding="utf-8")
        with suppress(FileExistsError):  # another run was faster
            os.link(beginning, journal)
        beginning.unlink()
    with journal.open("a", encoding="utf-8") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another run writes to {journal}; wait for its end, or name another file") from None
        yield stream


@contextmanager
def _gone_where_empty(journal: Path) -> Iterator[None]:
    """A run that ends with an error before its first result leaves nothing that other settings would stumble over."""
    try:
        yield
    except (ValueError, OSError):
        if len(journal.read_bytes().splitlines()) == 1:
            journal.unlink()
        raise


def _read_journal(journal: Path, settings: dict[str, Any]) -> dict[str, Entry]:
    """Lines by key; a last line that a kill cut short is taken away."""
    entries: dict[str, Entry] = {}
    with journal.open("r+b") as stream:
        begun = stream.readline()
        if json.loads(begun) != json.loads(json.dumps(settings)):
            raise ValueError(f"{journal} is of a run with other settings; delete it, or give the same settings")
        offset = stream.tell()
        while (line := stream.readline()).endswith(b"\n"):
            found = json.loads(line)
            entries[found["key"]] = Entry(found["number"], found["style"], found.get("failed"), offset)
            offset = stream.tell()
        stream.truncate(offset)
    return entries


def _publish(config: RephraseConfig, journal: Path, out: Path, outcome: Outcome, settings: dict[str, Any]) -> None:
    """Write the finished file in the order of the source and styles, and count."""
    entries = list(_read_journal(journal, settings).values())
    outcome.failed.update(entry.failed for entry in entries if entry.failed is not None)
    kept = [entry for entry in entries if entry.failed is None]
    kept.sort(key=lambda entry: (entry.number, config.styles.index(entry.style)))
    outcome.written = len(kept)
    finished = out.with_name(out.name + ".finished")
    with finished.open("w", encoding="utf-8") as stream, journal.open("rb") as lines:
        for entry in kept:
            lines.seek(entry.offset)
            facts = json.loads(lines.readline())
            del facts["key"], facts["number"]
            stream.write(json.dumps(facts, ensure_ascii=False) + "\n")
    os.replace(finished, out)
    journal.unlink()
