"""One phase or two for the sites of a block of layers: by the bytes that each moves.

Unit: one row of the width, N * D elements. Beyond what a plain residual with its norm moves, a site with R finished
blocks, of Q sites that share them, moves

    one phase     R forward (the blocks); 3 R backward (blocks, their gradients read and written)
    two phases    R / Q + 2 forward (the blocks once, its mixture written and read)
                  4 R / Q + 4 backward (the mixture made again; its gradient written and read; blocks and their own)

and two phases take some launches more a block, each worth the bytes that a card moves meanwhile. Blocks so few and
small that they stay in the cache from site to site are not worth it: decoding stays with one phase.
"""

from typing import Literal, get_args

Form = Literal["auto", "one_phase", "two_phase"]

# A launch is about 5 us of a card that moves some 4 TB/s. Launches more a block: forward; with the backward pass.
LAUNCH_BYTES = 20_000_000
LAUNCHES, TRAINING_LAUNCHES = 1, 5
# What stays in an H200's cache (50 MB, in two halves).
CACHE_BYTES = 25_000_000


def bytes_of_block(R: int, Q: int, row_bytes: int, training: bool) -> dict[str, float]:
    """Bytes of the Q sites of a block beyond plain residuals, by form. row_bytes: N * D elements of a source."""
    one = 4 * R if training else R
    two = 6 + 5 * R / Q if training else 2 + R / Q
    more = TRAINING_LAUNCHES if training else LAUNCHES
    return {"one_phase": Q * one * row_bytes, "two_phase": Q * two * row_bytes + more * LAUNCH_BYTES}


def choose_form(R: int, Q: int, row_bytes: int, training: bool) -> tuple[Literal["one_phase", "two_phase"], str]:
    """The form that moves fewer bytes and, in words, why."""
    if R * row_bytes <= CACHE_BYTES:
        return "one_phase", f"{R} finished blocks of {row_bytes / 1e6:.1f} MB stay in the cache"
    found = bytes_of_block(R, Q, row_bytes, training)
    one, two = (found[name] / 1e6 for name in ("one_phase", "two_phase"))
    words = f"{Q} sites over {R} finished blocks move {one:,.0f} MB more in one phase, {two:,.0f} in two"
    return ("two_phase" if two < one else "one_phase"), words


def check_form(form: str) -> None:
    """Raises ValueError for a form that is none."""
    if form not in get_args(Form):
        raise ValueError(f"attn_res: unknown form {form!r}; there are {', '.join(get_args(Form))}")
