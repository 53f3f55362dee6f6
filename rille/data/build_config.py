"""What `rille data build` is told: sources, filters, duplicates, vocabulary, mixture. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from rille.data.config import SMALLEST_VOCABULARY

Kind = Literal["prose", "code", "plain"]


@dataclass(frozen=True, kw_only=True)
class Domain:
    """A named source and what rules its documents must pass: those of prose, those of code, or none (plain)."""

    name: str
    path: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class FilterConfig:
    """A classifier that `rille data train-filter` saved, and what it must say of a document for it to stay."""

    path: str | None = None
    """The .npz file; none: no such filter."""

    labels: tuple[str, ...] = ()
    """A document stays if these labels together reach `at_least`."""

    at_least: float = 0.5
    """The least probability, 0 to 1."""

    def __post_init__(self):
        if not 0 <= self.at_least <= 1:
            raise ValueError(f"a filter's at_least is {self.at_least}; it is a probability, from 0 to 1")
        if self.path is not None and not self.labels:
            raise ValueError(f"the filter {self.path} is told no labels; name those whose documents stay")
        if self.path is None and self.labels:
            raise ValueError(f"labels {', '.join(self.labels)} without a filter; give the file that train-filter saved")


@dataclass(frozen=True, kw_only=True)
class BuildConfig:
    """Make a training set: read, clean, filter, drop duplicates, split, learn a vocabulary, encode, report.

    A source is NAME=PATH or PATH: a text file, a folder, .jsonl[.gz|.xz|.zst], .parquet, or hf:DATASET[:SPLIT]. Several
    may share a name. The folder appears whole or not at all; a build that was killed goes on when the command is given
    again, and comes to the same bytes.
    """

    sources: Annotated[Positional[tuple[str, ...]], arg(metavar="NAME=PATH ...")]
    """Where text comes from, by domain; of equal documents the one in the domain that stands first is kept."""

    out: str
    """The folder to make; `rille train ... --data OUT` trains on it."""

    code: tuple[str, ...] = ()
    """Names of domains that hold source code: they pass rules for code, all others those for prose."""

    plain: tuple[str, ...] = ()
    """Names of domains that are taken as they are: no cleaning, no filters, only duplicates go."""

    field: str = "text"
    """The field of a JSON record, or the column of a table, that holds the text."""

    max_document_bytes: int = 16_000_000
    """Longer records are skipped and counted; they are never held in memory."""

    language: FilterConfig = FilterConfig()
    """Which languages stay (a classifier of bytes; see train-filter)."""

    quality: FilterConfig = FilterConfig()
    """Which texts are good enough (a classifier of words; prose only)."""

    similarity: float = 0.8
    """Documents that share this part of their 5-word shingles are near-duplicates; 1: only equal ones go."""

    held_out: float = 0.02
    """The share of documents, chosen by a hash of their text, that is kept from training."""

    held_out_bytes: int = 32_000_000
    """At most so many bytes of text are held out."""

    tokenizer: str | None = None
    """Encode with this one (a checkpoint or tokenizer.json); none: train one on the training side."""

    vocab_size: int = 32_768
    """Tokens of the vocabulary that is trained."""

    tokenizer_bytes: int = 100_000_000
    """Train it on at most so many bytes, a sample by hash."""

    rates: tuple[str, ...] = ()
    """NAME=SHARE for every domain: shares of the tokens that training sees; none: as much as there is."""

    max_epochs: float | None = None
    """How often a run reads a domain at most, all its documents alike; one that is used up leaves the mixture."""

    long_tokens: int = 32_768
    """Documents of at least so many tokens are long: they are stored apart."""

    long_times: float = 1.0
    """Long documents are seen so many times as often as others of their domain."""

    shard_bytes: int = 64_000_000
    """Bytes of text behind one file of tokens."""

    workers: int | None = None
    """Processes that clean and encode; none: one a core."""

    def __post_init__(self):
        _check_numbers(self)
        names = self.names()
        for option in ("code", "plain"):
            unknown = [name for name in getattr(self, option) if name not in names]
            if unknown:
                raise ValueError(f"{option} names {', '.join(unknown)}, but the domains are {', '.join(names)}")
        if both := sorted(set(self.code) & set(self.plain)):
            raise ValueError(f"{', '.join(both)} cannot be code and plain both; choose one")
        self.shares()

    def domains(self) -> tuple[Domain, ...]:
        """The sources in their order. Raises ValueError for names that cannot be part of a file name."""
        domains = []
        for source in self.sources:
            name, equals, path = source.partition("=")
            if not equals or "/" in name:
                name, path = Path(source.removeprefix("hf:").split(":")[0]).name.split(".")[0], source
            if not path or not name.replace("-", "").replace("_", "").isalnum():
                raise ValueError(f"source {source!r}: write NAME=PATH, the name of letters, digits, - and _")
            kind: Kind = "code" if name in self.code else "plain" if name in self.plain else "prose"
            domains.append(Domain(name=name, path=path, kind=kind))
        return tuple(domains)

    def names(self) -> list[str]:
        """The names of the domains, each once."""
        return list(dict.fromkeys(domain.name for domain in self.domains()))

    def shares(self) -> dict[str, float]:
        """Shares by domain that sum to 1; empty where none are given. Raises ValueError if they do not fit."""
        if not self.rates:
            return {}
        names = self.names()
        shares: dict[str, float] = {}
        for rate in self.rates:
            name, _, number = rate.partition("=")
            if name in shares:
                raise ValueError(f"rates give {name} a share twice; give one")
            try:
                shares[name] = float(number)
            except ValueError:
                raise ValueError(f"rate {rate!r}: write NAME=SHARE, as in {names[0]}=0.5") from None
        if set(shares) != set(names) or not 0 < sum(shares.values()) < float("inf") or min(shares.values()) < 0:
            raise ValueError(f"rates {shares} must give a share of at least 0 to each of {', '.join(names)}")
        return {name: shares[name] / sum(shares.values()) for name in names}


def _check_numbers(config: BuildConfig) -> None:
    least = dict(max_document_bytes=1, held_out_bytes=1, tokenizer_bytes=1, long_tokens=1, shard_bytes=1)
    for name, low in least.items() | {("vocab_size", SMALLEST_VOCABULARY)}:
        if getattr(config, name) < low:
            raise ValueError(f"{name} is {getattr(config, name)}; it must be at least {low}")
    if not config.sources or not config.out:
        raise ValueError("name at least one source and a folder to make (--out)")
    if not Path(config.out).name:
        raise ValueError(f"out is {config.out}, a folder that is there; name one to make, such as sets/first")
    if config.workers is not None and config.workers < 1:
        raise ValueError(f"workers is {config.workers}; it must be at least 1")
    if not 0.5 <= config.similarity <= 1:
        raise ValueError(f"similarity is {config.similarity}; it must be from 0.5 to 1 (1: only equal documents go)")
    if not 0 < config.held_out <= 0.5:
        raise ValueError(f"held_out is {config.held_out}; it must be above 0 and at most 0.5")
    if not 0 <= config.long_times < float("inf"):
        raise ValueError(f"long_times is {config.long_times}; it must be at least 0")
    if config.max_epochs is not None and not 0 < config.max_epochs < float("inf"):
        raise ValueError(f"max_epochs is {config.max_epochs}; it must be above 0, or none for no limit")
