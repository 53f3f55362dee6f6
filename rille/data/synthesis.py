"""Long documents out of others: in a new order, end to end, with questions whose answers need several of them.

    documents d_1 ... d_n, chosen and ordered by chance, each under its number and followed by notes
    questions about the notes, each with its answer

Notes are lines of their own behind a document (no document is changed) that hold values, point to other notes, or name
a mark. Four kinds of question, each of which needs `needs` documents, far apart as chance has it:

    sum       the notes of these documents give numbers: what is their sum?
    chain     the note of document a names the next document, whose note names the next ...: which word is in the last?
    order     of these words, each in the note of another document: in which order do they come?
    count     in how many documents does the note carry this mark?

Without any one of the documents that a question needs the answer cannot be told (count: it would be another one). The
order of notes and documents is by chance, so no place gives the answer away.
Source: Kimi K3's report, section 3 (long data by permuting and concatenating documents and sub-tasks so that the answer
needs the whole window); the kinds are ours. No torch here.
"""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rille.data.command_config import SynthesiseConfig
from rille.data.records import Fault, read_records, text_of
from rille.data.steps import Steps

_LONGEST = 16_000_000
_POOL_BYTES = 256_000_000  # of texts, held in memory
_SYLLABLES = "ba ce di fo gu ha ki lo mu na pe ri so tu va we xo yu zi".split()


@dataclass(frozen=True)
class Question:
    """kind, the question, its answer, and the numbers (from 1) of the documents that the answer needs."""

    kind: str
    text: str
    answer: str
    needs: tuple[int, ...]


@dataclass
class Notes:
    """Notes by the number of the document that they follow, and words that stand in no text and no other note."""

    texts: list[str]
    chance: random.Random
    by_document: dict[int, list[str]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)

    def word(self) -> str:
        """A word that stands nowhere else."""
        while True:
            word = "".join(self.chance.choice(_SYLLABLES) for _ in range(5))
            if word not in self.used and not any(word in text for text in self.texts):
                self.used.add(word)
                return word

    def add(self, document: int, note: str) -> None:
        self.by_document.setdefault(document, []).append(note)


def ask_sum(notes: Notes, documents: list[int]) -> Question:
    name = notes.word()
    values = [notes.chance.randrange(10, 1000) for _ in documents]
    for document, value in zip(documents, values, strict=True):
        notes.add(document, f"The {name} of document {document} is {value}.")
    listed = _listed([f"document {document}" for document in documents])
    return Question("sum", f"What is the sum of the {name} of {listed}?", str(sum(values)), tuple(documents))


def ask_chain(notes: Notes, documents: list[int]) -> Question:
    name, last = notes.word(), notes.word()
    for document, following in zip(documents, documents[1:], strict=False):
        notes.add(document, f"The {name} goes on in document {following}.")
    notes.add(documents[-1], f"The {name} ends here with the word {last}.")
    text = f"The {name} begins in document {documents[0]}. With which word does it end?"
    return Question("chain", text, last, tuple(documents))


def ask_order(notes: Notes, documents: list[int]) -> Question:
    words = {document: notes.word() for document in documents}
    for document, word in words.items():
        notes.add(document, f"The word here is {word}.")
    asked = sorted(words.values())
    answer = ", ".join(words[document] for document in sorted(documents))
    return Question("order", f"In which order do the words {_listed(asked)} come?", answer, tuple(sorted(documents)))


def ask_count(notes: Notes, documents: list[int]) -> Question:
    mark = notes.word()
    for document in documents:
        notes.add(document, f"This document carries the mark {mark}.")
    return Question(
        "count", f"How many documents carry the mark {mark}?", str(len(documents)), tuple(sorted(documents))
    )


KINDS: dict[str, Callable[[Notes, list[int]], Question]] = {
    "sum": ask_sum,
    "chain": ask_chain,
    "order": ask_order,
    "count": ask_count,
}


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}"


def long_document(texts: list[str], questions: int, needs: int, chance: random.Random) -> dict[str, Any]:
    """One long document of these texts, in a new order, as a JSON record: text, questions, number of documents.

    Raises ValueError if there are fewer texts than a question needs.
    """
    if len(texts) < needs:
        raise ValueError(f"{len(texts)} documents are too few for questions that need {needs}; ask for longer ones")
    texts = chance.sample(texts, len(texts))
    notes = Notes(texts, chance)
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(questions)]
    chance.shuffle(kinds)
    asked = []
    for kind in kinds:
        # A count differs from question to question; else it would always be the same number.
        size = chance.randint(needs, min(len(texts), 2 * needs)) if kind == "count" else needs
        asked.append(KINDS[kind](notes, chance.sample(range(1, len(texts) + 1), size)))
    parts = []
    for number, text in enumerate(texts, start=1):
        own = notes.by_document.get(number, [])
        lines = "".join(f"\n[note to document {number}] {note}" for note in chance.sample(own, len(own)))
        parts.append(f"[document {number}]\n{text.strip()}\n{lines}".rstrip())
    ends = [f"Question: {question.text}\nAnswer: {question.answer}" for question in asked]
    facts = [{"kind": q.kind, "question": q.text, "answer": q.answer, "needs": list(q.needs)} for q in asked]
    return {"text": "\n\n".join([*parts, *ends]) + "\n", "documents": len(texts), "questions": facts}


def synthesise(config: SynthesiseConfig, steps: Steps) -> str:
    """Write `config.count` long documents to `config.out`; returns a summary.

    Each takes texts of the source until they fill `document_bytes`; a text is used again only after all others were.
    Texts longer than half of that are left out, so that several fit. Raises ValueError for a source that cannot be read
    or holds too little, and for a file that is there.
    """
    out = Path(config.out)
    if out.exists():
        raise ValueError(f"{out} exists already; name another file")
    chance = random.Random(config.seed)
    texts, left_out = _pool(config)
    order: list[str] = []
    kinds: Counter[str] = Counter()
    partial = out.with_name(out.name + ".partial")
    out.parent.mkdir(parents=True, exist_ok=True)
    with steps.step("long documents", config.count) as advance, partial.open("w", encoding="utf-8") as stream:
        for _ in range(config.count):
            chosen, size = [], 0
            while size < config.document_bytes and len(chosen) < len(texts):
                order = order or [text for text in chance.sample(texts, len(texts)) if text not in chosen]
                chosen.append(order.pop())
                size += len(chosen[-1].encode())
            record = long_document(chosen, config.questions, config.needs, chance)
            kinds.update(question["kind"] for question in record["questions"])
            stream.write(json.dumps(record, ensure_ascii=False) + "\n")
            advance(1)
    os.replace(partial, out)
    return (
        f"{out}: {config.count:,} long documents from {len(texts):,} texts, "
        f"{', '.join(f'{n:,} {kind}' for kind, n in sorted(kinds.items()))} questions"
        + "".join(f"; left out: {n:,} {reason}" for reason, n in sorted(left_out.items()))
    )


def _pool(config: SynthesiseConfig) -> tuple[list[str], Counter[str]]:
    """Texts that fit, up to the bound of what is held at once, and what was left out by reason."""
    texts: dict[str, None] = {}
    left_out: Counter[str] = Counter()
    held = 0
    for record in read_records(config.source, field=config.field, max_bytes=_LONGEST):
        text = record if isinstance(record, Fault) else text_of(record, config.field)
        if isinstance(text, Fault):
            left_out[text.reason] += 1
        elif len(text.encode()) * 2 > config.document_bytes:
            left_out["longer than half a document"] += 1
        elif text in texts:
            left_out["equal to another"] += 1
        elif held + len(text.encode()) > _POOL_BYTES:
            left_out[f"beyond the first {_POOL_BYTES / 1e6:,.0f} MB"] += 1
        else:
            texts[text] = None
            held += len(text.encode())
    if len(texts) < config.needs:
        reasons = ", ".join(f"{n:,} {reason}" for reason, n in left_out.items()) or "no more are there"
        raise ValueError(f"{config.source} gives {len(texts)} texts, fewer than the {config.needs} needed ({reasons})")
    return list(texts), left_out
