"""From one media token for a whole picture to one for each of its feature rows.

    rows of an item with the grid (t, h, w) in patches  =  h w / merge^2        the tower averages over the frames

Source: `modeling_kimi_k3.py` of the release, which replaces each single `<|media_pad|>` by a picture's block of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index

from rille.text.vocabulary import kind, token_id

MEDIA_PAD_ID = 163_605  # `<|media_pad|>` in the published vocabulary


def num_media_tokens(grid: Sequence[int], merge: int = 2) -> int:
    """Feature rows of one item. grid: (frames, rows, columns) in patches. Raises ValueError if they do not merge."""
    try:
        (t, h, w), merge = (index(side) for side in grid), index(merge)
    except (TypeError, ValueError):
        raise ValueError(f"a grid must be three whole numbers (frames, rows, columns), not {kind(grid)}") from None
    if merge < 1:
        raise ValueError(f"merge is {merge}; it must be at least 1")
    if min(t, h, w) < 1 or h % merge or w % merge:
        raise ValueError(f"a grid of {t} x {h} x {w} patches does not merge {merge} x {merge}")
    return h // merge * (w // merge)


def expand_media(
    ids: Iterable[int], grids: Iterable[Sequence[int]], *, media_id: int = MEDIA_PAD_ID, merge: int = 2
) -> list[int]:
    """Repeat each media token as often as its item has feature rows.

    ids: a prompt's ids with one `media_id` for each item (a list, an array or a tensor). grids: (t, h, w) in patches of
    each item, in order. Raises ValueError unless there is one media token for each grid.
    """
    for name, value in (("ids", ids), ("grids", grids)):
        if isinstance(value, str | bytes) or not isinstance(value, Iterable):
            raise ValueError(f"{name} must be a list, not {kind(value)}")
    media_id = token_id(media_id)
    tokens = [token_id(token) for token in ids]
    counts = [num_media_tokens(grid, merge) for grid in grids]
    if tokens.count(media_id) != len(counts):
        raise ValueError(f"{tokens.count(media_id)} media tokens (id {media_id}) in the ids, but {len(counts)} grids")
    remaining = iter(counts)
    return [copy for token in tokens for copy in [token] * (next(remaining) if token == media_id else 1)]
