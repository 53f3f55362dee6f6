"""A built training set where a run's own corpus would stand: the same face for both.

`rille train --data SET` opens it in place; nothing is read again or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from rille.data.config import DataConfig
from rille.data.corpus import Corpus, TokenText
from rille.data.dataset import Dataset
from rille.data.mixed_loader import MixedLoader


@dataclass(frozen=True, eq=False)
class BuiltText:
    """The training side of a built set; what a run asks of a `TokenText`, answered without holding it."""

    dataset: Dataset
    byte_lengths: np.ndarray

    @property
    def num_targets(self) -> int:
        return self.dataset.num_targets

    @property
    def num_documents(self) -> int:
        return self.dataset.num_documents

    @property
    def num_bytes(self) -> int:
        """Bytes of text behind all targets."""
        return sum(facts["text_bytes"] for facts in self.dataset.manifest["streams"])

    @property
    def bytes_per_token(self) -> float:
        return self.num_bytes / self.num_targets

    @property
    def counts(self) -> np.ndarray:
        """int64 [W]: how often each id is a target."""
        return self.dataset.counts

    def loader(
        self, batch_tokens: int, sequence_length: int, seed: int, shares: Mapping[str, float] | None = None
    ) -> MixedLoader:
        """Batches by the set's mixture, or by these shares of its domains. ValueError for other domains."""
        mixture = self.dataset.mixture
        if shares:
            if other := sorted(set(shares) - set(self.dataset.domains)):
                known = ", ".join(self.dataset.domains)
                raise ValueError(f"{self.dataset.directory} has no domain {', '.join(other)}; it has {known}")
            mixture = replace(mixture, shares=shares)
        return MixedLoader(self.dataset, batch_tokens, sequence_length, seed, mixture=mixture)


def open_built(config: DataConfig, note: Callable[[str], None] = print) -> Corpus:
    """Open the built set at `config.path`. Raises ValueError if it is damaged or of another vocabulary."""
    assert config.path is not None
    dataset = Dataset(config.path)
    tokenizer = dataset.tokenizer
    if tokenizer.vocab_size != config.vocab_size:
        size = tokenizer.vocab_size
        raise ValueError(
            f"{config.path} is encoded with a vocabulary of {size:,} tokens, but data.vocab_size is "
            f"{config.vocab_size:,}; give --data.vocab-size {size} --model.vocab-size {size}"
        )
    byte_lengths = np.array(tokenizer.byte_lengths(), dtype=np.int64)
    held = dataset.held_out()
    note(
        f"data: {config.path}, {dataset.num_documents:,} documents, {dataset.num_targets:,} tokens to train on, "
        f"{len(held.tokens) - 1:,} held out (documents: {len(held.boundaries) - 1:,})"
    )
    held_out = TokenText(held.tokens, held.boundaries, byte_lengths)
    text = BuiltText(dataset, byte_lengths)
    return Corpus(dataset.directory, tokenizer, text, held_out, tuple(dataset.domains), dataset.held_out_domains())
