"""One sequence that a model reads on: its memory, and what that has consumed.

    read(ids):   consumed = first part of ids   ->  only the rest goes through the model
                 otherwise                      ->  a new memory reads all of it

A KDA state cannot be rolled back, so there is no middle way. Pictures count by what the model sees of them.

Suffix: W words of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rille.text.images import Images


class LanguageModel(Protocol):
    """What a session asks of a model; `rille.model.model.K3` is one."""

    def new_memory(self) -> Any: ...
    def logits(self, tokens: Tensor, *, memory: Any, images: Any, rows: Any) -> Tensor: ...


class Session:
    """num_kept, num_read: tokens of the last prompt that the memory had already, and that went through the model."""

    def __init__(self, model: LanguageModel):
        self.num_kept = self.num_read = 0
        self._model = model
        self._memory: Any = None  # None: nothing was read, or a forward was broken off
        self._ids: list[int] = []
        self._digests: list[str] = []

    def read(self, ids: Sequence[int], pictures: Sequence[Images] = ()) -> Tensor:
        """Logits fp32 [W] (on the CPU) after a whole prompt, which has one media token for each picture."""
        digests = [digest for picture in pictures for digest in picture.digests]
        if not self._continues(ids, digests):
            self._memory, self._ids, self._digests = self._model.new_memory(), [], []
        self.num_kept = len(self._ids)
        self.num_read = len(ids) - self.num_kept
        new = list(pictures)[len(self._digests) :]
        return self._forward(list(ids[self.num_kept :]), digests[len(self._digests) :], join(new) if new else None)

    def extend(self, token: int) -> Tensor:
        """Logits fp32 [W] after one more token."""
        return self._forward([token], [], None)

    def _continues(self, ids: Sequence[int], digests: Sequence[str]) -> bool:
        """Whether what was consumed is a beginning of the prompt, and something is left to read."""
        num_ids, num_pictures = len(self._ids), len(self._digests)
        same = list(ids[:num_ids]) == self._ids and list(digests[:num_pictures]) == self._digests
        return self._memory is not None and same and len(ids) > num_ids

    @torch.inference_mode()
    def _forward(self, ids: list[int], digests: list[str], images: Images | None) -> Tensor:
        memory, self._memory = self._memory, None  # an interrupted forward leaves it advanced in some layers only
        tokens = torch.tensor(ids, dtype=torch.int64)
        logits_W = self._model.logits(tokens, memory=memory, images=images, rows=torch.tensor([-1]))[0].cpu()
        self._ids += ids
        self._digests += digests
        self._memory = memory
        return logits_W


def join(pictures: Sequence[Images]) -> Images:
    """Several packs of pictures as one."""
    return Images(
        patches=np.concatenate([picture.patches for picture in pictures]),
        grids=np.concatenate([picture.grids for picture in pictures]),
        sizes=tuple(size for picture in pictures for size in picture.sizes),
        digests=tuple(digest for picture in pictures for digest in picture.digests),
        merge=pictures[0].merge,
    )
