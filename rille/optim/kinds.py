"""Which update a kind of parameter gets, and whether it is decayed. No torch here: `rille plan` prints it.

| kind | update | decayed |
|---|---|---|
| heads: attention projections whose row blocks belong to one head each | the rule's, block by block | yes |
| matrix: all other matrices | the rule's | yes |
| expert: stacks of matrices, one or more for each expert | the rule's, matrix by matrix | yes |
| router: a row of scores for each expert | AdamW | yes |
| embedding: embedding, head, patch embedding | AdamW | yes |
| vector: norm gains, biases, A_log, dt_bias, short convolutions, queries of Attention Residuals | AdamW | no |

Weight decay pulls towards zero. Vectors are exempt: scales and offsets, which have no reason to shrink. A row of the
router or of an embedding is met alone, so there is no linear map whose singular values could be evened out.
"""

from __future__ import annotations

from typing import Literal, get_args

Kind = Literal["heads", "matrix", "router", "vector", "expert", "embedding"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MATRICES: tuple[Kind, ...] = ("heads", "matrix", "expert")


def update_of(kind: Kind, rule: str) -> str:
    """The update of a parameter in a run with `optim.rule`: the rule's own for matrices, AdamW for the rest."""
    return rule if kind in MATRICES else "adamw"


def is_decayed(kind: Kind) -> bool:
    """Whether weight decay applies."""
    return kind != "vector"


def merged(blocks: tuple[int, ...]) -> tuple[int, ...]:
    """The shortest cycle of block heights: (64, 64) repeats as (64,) does."""
    return blocks[:1] if len(set(blocks)) == 1 else blocks
