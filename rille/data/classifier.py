"""A small text classifier: hashed n-grams, one linear layer, softmax; trained and saved here, in numpy.

    p(label | text) = softmax( mean over the text's n-grams g of W[h(g) mod buckets] )

bytes: runs of 1 to 4 bytes (for languages, which their letters give away). words: one word and two (for quality and
topic). Only the first `span` bytes of a text are read. Training is stochastic gradient descent with Adagrad steps over
documents in a shuffled order; equal data give equal weights.
Source: Joulin et al. 2016, "Bag of tricks for efficient text classification", without the hidden layer.
"""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rille.data.words import grams, mix, words_of

FEATURES = ("bytes", "words")
_LONGEST_RUN = 4
_STEP = 0.5
_KEEP = 1e-8


@dataclass(frozen=True, eq=False)
class Classifier:
    """Labels and weights fp32 [buckets, labels]; `features` is one of FEATURES, `span` in bytes."""

    labels: tuple[str, ...]
    features: str
    span: int
    weights: np.ndarray

    def probabilities(self, text: str) -> dict[str, float]:
        """The probability of each label; they sum to 1. A text without n-grams gets equal ones."""
        buckets, shares = features_of(text, self.features, self.span, len(self.weights))
        return dict(zip(self.labels, _softmax(shares @ self.weights[buckets]).tolist(), strict=True))

    def save(self, path: str | Path) -> None:
        """Write an .npz file, whole or not at all."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        facts = json.dumps({"labels": self.labels, "features": self.features, "span": self.span})
        try:
            with open(partial, "wb") as stream:
                np.savez_compressed(stream, facts=np.array(facts), weights=self.weights)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)


def load_classifier(path: str | Path) -> Classifier:
    """Read what `Classifier.save` wrote. Raises ValueError if it is not such a file."""
    try:
        with np.load(path, allow_pickle=False) as stored:
            facts, weights = json.loads(str(stored["facts"])), stored["weights"]
        found = Classifier(tuple(facts["labels"]), facts["features"], int(facts["span"]), weights)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; make a filter with rille data train-filter") from None
    except (ValueError, KeyError, TypeError, IndexError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} is not a filter of rille data train-filter ({error})") from None
    if weights.ndim != 2 or weights.shape[1] != len(found.labels) or found.features not in FEATURES:
        raise ValueError(f"{path} is not a filter of rille data train-filter (its table fits no labels)")
    return found


def features_of(text: str, features: str, span: int, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """Buckets int64 [n], each once, and their shares fp32 [n], which sum to 1, of a text's n-grams."""
    content = text[:span].encode()[:span]
    if features == "words":
        hashes = words_of(content, bare=True).hashes
        runs = [hashes, grams(hashes, 2)]
    else:
        letters = np.frombuffer(content, dtype=np.uint8).astype(np.uint64) + np.uint64(1)
        runs = [grams(letters, size) for size in range(1, _LONGEST_RUN + 1)]
    places = mix(np.concatenate(runs)) % np.uint64(buckets)
    found, counts = np.unique(places.astype(np.int64), return_counts=True)
    return found, (counts / max(1, counts.sum())).astype(np.float32)


@dataclass(frozen=True)
class Training:
    """How a classifier is trained."""

    features: str = "words"
    buckets: int = 1 << 18
    span: int = 4_096
    epochs: int = 5
    seed: int = 0


def train_classifier(
    texts: list[str],
    labels: Sequence[str],
    training: Training = Training(),
    step: Callable[[], None] = lambda: None,
) -> Classifier:
    """Learn from texts and their labels. step is called after each text of each epoch.

    Classes weigh the same, however many texts each has. Raises ValueError for fewer than two labels.
    """
    names = tuple(sorted(set(labels)))
    if len(names) < 2:
        raise ValueError(f"a filter tells at least two labels apart; the texts have {', '.join(names) or 'none'}")
    which = np.array([names.index(label) for label in labels])
    weight = len(texts) / (len(names) * np.bincount(which, minlength=len(names)))
    weights = np.zeros((training.buckets, len(names)), np.float32)
    squares = np.full_like(weights, _KEEP)
    for epoch in range(training.epochs):
        order = np.random.default_rng((training.seed, epoch)).permutation(len(texts))
        for i in order.tolist():
            buckets, shares = features_of(texts[i], training.features, training.span, training.buckets)
            error = _softmax(shares @ weights[buckets])
            error[which[i]] -= 1
            gradient = shares[:, None] * (error * weight[which[i]])
            squares[buckets] += gradient * gradient
            weights[buckets] -= _STEP * gradient / np.sqrt(squares[buckets])
            step()
    return Classifier(names, training.features, training.span, weights)


def confusion(classifier: Classifier, texts: Sequence[str], labels: Sequence[str]) -> np.ndarray:
    """int64 [labels, labels]: how often a text of the first was taken for the second."""
    table = np.zeros((len(classifier.labels),) * 2, np.int64)
    for text, label in zip(texts, labels, strict=True):
        probabilities = classifier.probabilities(text)
        guess = max(classifier.labels, key=lambda name: probabilities[name])
        table[classifier.labels.index(label), classifier.labels.index(guess)] += 1
    return table


def _softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()
