"""Settings of the smaller verbs of `rille data`; those of `build` are in `build_config.py`. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from tyro.conf import Positional, arg

_LONGEST_TIMEOUT = 1e6  # seconds


@dataclass(frozen=True, kw_only=True)
class TrainFilterConfig:
    """Train a small classifier of texts on examples, for `build` to filter by."""

    examples: Annotated[Positional[tuple[str, ...]], arg(metavar="LABEL=PATH ...")]
    """Sources of texts by label; a label may have several."""

    out: str
    """The .npz file to write."""

    features: Literal["words", "bytes"] = "words"
    """words: one and two (quality, topic); bytes: runs of up to four (languages)."""

    field: str = "text"
    """The field of a JSON record, or the column of a table, that holds the text."""

    most: int = 20_000
    """Read at most so many texts a label."""

    buckets: int = 1 << 18
    """Rows of the table that n-grams are hashed into."""

    span: int = 4_096
    """Bytes of a text that are looked at."""

    epochs: int = 5
    """Passes over the examples."""

    seed: int = 0
    """Of the order of the examples."""

    def __post_init__(self):
        for name in ("most", "buckets", "span", "epochs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        wrong = [example for example in self.examples if not all(example.partition("="))]
        if wrong or not self.examples:
            raise ValueError(f"write examples as LABEL=PATH, not {', '.join(wrong) or 'none at all'}")


@dataclass(frozen=True, kw_only=True)
class RephraseConfig:
    """Have a model write texts anew, chunk by chunk, in several styles; keep what stays true to the original.

    The endpoint speaks the OpenAI protocol (chat completions). A run that was stopped goes on when it is given again.
    """

    source: Annotated[Positional[str], arg(metavar="PATH")]
    """Texts: a file, a folder, .jsonl[.gz|.xz|.zst], .parquet or hf:DATASET[:SPLIT]."""

    out: str
    """The .jsonl file to write: text, source, style, fidelity of each."""

    endpoint: str
    """Base address, such as http://localhost:8000/v1."""

    model: str
    """The name that the endpoint knows the model by."""

    styles: tuple[str, ...] = ("textbook", "dialogue")
    """Styles, each giving one rephrasing of a document; `rille.data.styles` lists them."""

    field: str = "text"
    """The field of a JSON record, or the column of a table, that holds the text."""

    most: int | None = None
    """Take at most so many documents."""

    chunk_bytes: int = 2_000
    """Size of the pieces that are rewritten one after the other, cut between paragraphs or sentences."""

    context_bytes: int = 2_000
    """So much of what was written last is shown with the next piece."""

    judge: bool = True
    """Ask the model too whether a rewritten piece says what the original says."""

    attempts: int = 3
    """Tries for a piece before the document is given up."""

    temperature: float = 0.8
    """Of the rewriting; judging is at 0."""

    parallel: int = 8
    """Documents under way at once."""

    timeout: float = 120.0
    """Seconds for one answer."""

    key_variable: str = "OPENAI_API_KEY"
    """The environment variable that holds the key, where the endpoint wants one."""

    def __post_init__(self):
        for name in ("chunk_bytes", "attempts", "parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.most is not None and self.most < 1:
            raise ValueError(f"most is {self.most}; it must be at least 1, or none for all documents")
        if self.context_bytes < 0 or not 0 < self.timeout <= _LONGEST_TIMEOUT or not 0 <= self.temperature <= 100:
            raise ValueError(
                f"context_bytes {self.context_bytes}, timeout {self.timeout} and temperature {self.temperature} must "
                f"not be negative, timeout above 0 and at most {_LONGEST_TIMEOUT:,.0f} seconds, temperature at most 100"
            )
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint {self.endpoint!r} is no address; write http://HOST:PORT/v1")


@dataclass(frozen=True, kw_only=True)
class SynthesiseConfig:
    """Make long documents: others in a new order, with questions whose answers need several of them."""

    source: Annotated[Positional[str], arg(metavar="PATH")]
    """Texts: a file, a folder, .jsonl[.gz|.xz|.zst], .parquet or hf:DATASET[:SPLIT]."""

    out: str
    """The .jsonl file to write."""

    count: int = 100
    """Long documents to make."""

    document_bytes: int = 400_000
    """Size of each, about."""

    questions: int = 8
    """Questions at the end of each."""

    needs: int = 3
    """Documents that each answer needs, at least 2."""

    field: str = "text"
    """The field of a JSON record, or the column of a table, that holds the text."""

    seed: int = 0
    """Of the choice of documents, their order and the questions."""

    def __post_init__(self):
        if self.count < 1 or self.document_bytes < 1 or self.questions < 1:
            raise ValueError(
                f"count {self.count}, document_bytes {self.document_bytes} and questions {self.questions} must be at "
                "least 1"
            )
        if self.needs < 2 or self.seed < 0:
            raise ValueError(f"needs is {self.needs} and seed {self.seed}; at least 2 and at least 0")
