"""Pictures on the token axis: each media token gives its place to all feature rows of one picture (or short video).

    tokens    a  b  M  c                  with a picture of 3 rows
    expanded  a  b  M  M  M  c            the embeddings of the Ms are the picture's features

Suffixes: N packed tokens, M feature rows, P patches, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rille.model.arguments import kind
from rille.model.vision_config import VisionConfig
from rille.packing import Packing

Grid = tuple[int, int, int]  # frames, rows and columns of patches


class PatchedImages(Protocol):
    """Pictures cut into patches, as `rille.preprocess_images` gives them; arrays of numpy or tensors of torch.

    patches float [P, 3, p, p]: normalised pixels, row by row and frame after frame, item after item. grids int
    [items, 3]: frames, rows and columns of patches of each item.
    """

    @property
    def patches(self) -> Any: ...
    @property
    def grids(self) -> Any: ...


@dataclass(frozen=True, eq=False)
class Media:
    """Feature rows and where they belong on the (expanded) token axis. rows int64 [M], features [M, D]."""

    rows: Tensor
    features: Tensor


def feature_rows(grid: Grid, c: VisionConfig) -> int:
    """Rows of features, that is tokens, of one item: frames are averaged, patches merged."""
    return grid[1] * grid[2] // (c.merge[0] * c.merge[1])


def checked_grids(images: PatchedImages, c: VisionConfig) -> tuple[Grid, ...]:
    """The grids of the items, on the host.

    Raises ValueError for patches of another shape or number than the grids say, a grid that the merge does not divide,
    or too many frames.
    """
    if not (hasattr(images, "grids") and hasattr(images, "patches")):
        raise ValueError(f"images must come from rille.preprocess_images([...]), not be {kind(images)}")
    grids = torch.as_tensor(images.grids)
    shape, side = tuple(images.patches.shape), c.patch_size
    if grids.ndim != 2 or grids.shape[1] != 3 or grids.is_floating_point():
        raise ValueError(f"images: grids {list(grids.shape)} {grids.dtype}; want whole numbers of shape [items, 3]")
    if shape[1:] != (3, side, side):
        raise ValueError(f"images: patches of shape {list(shape)}; this model wants [P, 3, {side}, {side}]")
    items = tuple((int(t), int(h), int(w)) for t, h, w in grids.tolist())
    for item, (t, h, w) in enumerate(items):
        if min(t, h, w) < 1 or h % c.merge[0] or w % c.merge[1]:
            raise ValueError(
                f"images: item {item} has a grid of {t} x {h} x {w} patches; rows and columns must be multiples of "
                f"{c.merge[0]} and {c.merge[1]}: pad the picture to whole groups of patches"
            )
        if t > c.max_frames:
            raise ValueError(f"images: item {item} has {t} frames, this model takes at most {c.max_frames}")
    if (patches := sum(t * h * w for t, h, w in items)) != shape[0]:
        raise ValueError(f"images: the grids describe {patches} patches, there are {shape[0]}")
    return items


def expand(tokens_N: Tensor, packing: Packing, media_id: int, rows: Sequence[int]) -> tuple[Tensor, Packing, Tensor]:
    """Widen the token axis: tokens, packing and the rows that hold features, int64 [M].

    rows: feature rows of each item, in the order of the media tokens on the axis (which may run over several
    sequences). A batch in which every item has its rows already (the ids of `rille.text.expand_media`) stays as it is.

    Raises ValueError when there are neither as many media tokens as items nor as many as rows.
    """
    ids = tokens_N.cpu().numpy()
    places = np.flatnonzero(ids == media_id)
    if len(places) not in (len(rows), sum(rows)):
        raise ValueError(
            f"images: {len(places)} media tokens (id {media_id}) for {len(rows)} images of {sum(rows)} rows; give one "
            "token for each image, or one for each row"
        )
    if len(places) == len(rows):
        repeats = np.ones(len(ids), dtype=np.int64)
        repeats[places] = rows
        starts = np.cumsum((0, *packing.lengths))
        lengths = [int(repeats[a:b].sum()) for a, b in zip(starts[:-1], starts[1:], strict=True)]
        ids, packing = np.repeat(ids, repeats), Packing.of(lengths, packing.consumed, packing.device)
    where = np.flatnonzero(ids == media_id)
    return torch.from_numpy(ids).to(tokens_N.device), packing, torch.from_numpy(where).to(packing.device)
