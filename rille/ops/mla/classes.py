"""Which sequences of a batch the latent kernels take together: those with few new tokens, whose cached rows are split
among programs, and those with more, which have tiles enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rille.packing import Packing, moved

SHORT = 16  # new tokens of a sequence up to which its cached rows are split among programs
WHOLE_SEQUENCE = 2**30

_NAME = "latent classes"


def classes(packing: Packing) -> list[tuple[int, Tensor]]:
    """The sequences with few new tokens and those with more, and the most that one has. A power of two, so that a
    change of the longest within a power changes neither launch nor bits."""
    if _NAME not in packing.derived:
        found = []
        for low, high in ((0, SHORT), (SHORT, WHOLE_SEQUENCE)):
            members = [s for s, length in enumerate(packing.lengths) if low < length <= high]
            if members:
                longest = max(packing.lengths[s] for s in members)
                members = moved(torch.tensor(members, dtype=torch.int32), packing.device)
                found.append((1 << (longest - 1).bit_length(), members))
        packing.derived[_NAME] = found
    return packing.derived[_NAME]


def settle_classes(packing: Packing, settled: Sequence[tuple[int, Tensor]]) -> None:
    """Say what `classes` gives, for a packing whose lengths the host does not know. settled: the most new tokens that a
    sequence of a class can have, and int32 members on the device, among which sequences without tokens may be."""
    packing.derived[_NAME] = list(settled)
