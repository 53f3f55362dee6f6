"""What text a run learns from and how it is cut. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from rille.text.vocabulary import CHAT_SPECIALS, END_OF_TEXT

SMALLEST_VOCABULARY = 256 + len((END_OF_TEXT, *CHAT_SPECIALS))


@dataclass(frozen=True)
class DataConfig:
    """The text of a run.

    max_bytes, held_out and tokenizer_bytes are for raw text: a built set was read, split and given a vocabulary before.
    """

    path: Annotated[str | None, arg(aliases=["--data"], metavar="PATH")] = None
    """A text file, a folder, .jsonl[.gz|.xz|.zst] or .parquet, or a set that `rille data build` made.
    None: the standard library of the running Python."""

    max_bytes: int | None = 10_000_000
    """Read at most so many bytes of raw text, and say so when it cuts; none reads everything."""

    held_out: float = 0.02
    """The share of documents of raw text that is kept from training for evaluation."""

    vocab_size: int = 2048
    """Tokens of the vocabulary that is trained on the text."""

    tokenizer_bytes: int = 16_000_000
    """Train the vocabulary on at most so many bytes of raw training text."""

    sequence_length: int = 256
    """Documents are cut into sequences of at most so many tokens."""

    batch_tokens: int = 2048
    """Tokens of one batch: exactly so many, without padding."""

    seed: int = 0
    """Order of the sequences in each epoch."""

    def __post_init__(self):
        """Raises ValueError that names a field out of range."""
        for name in ("sequence_length", "batch_tokens", "tokenizer_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"data.{name} is {getattr(self, name)}; it must be at least 1")
        if self.max_bytes is not None and self.max_bytes < 1:
            raise ValueError(f"data.max_bytes is {self.max_bytes}; it must be at least 1, or none for all text")
        if self.vocab_size < SMALLEST_VOCABULARY:
            least = f"256 bytes and the special tokens need at least {SMALLEST_VOCABULARY}"
            raise ValueError(f"data.vocab_size is {self.vocab_size}; {least}")
        if not 0 < self.held_out <= 0.5:
            raise ValueError(f"data.held_out is {self.held_out}; it must be above 0 and at most 0.5")
        if self.seed < 0:
            raise ValueError(f"data.seed is {self.seed}; it must not be negative")
