"""The paged latent cache as an op sees it: a pool of pages, and for each sequence the list of its pages.

Row p of sequence s lies in pool[table[s, p // page_rows], p % page_rows]. The pool may be a view whose axis 0 has any
stride. Axes: S sequences, N tokens, R = latent + shared key channels, T rows of one sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rille.packing import Packing


@dataclass(frozen=True, eq=False)
class LatentCache:
    """pool [pages, page_rows, R]; table int64 [S, max_pages]: entries beyond a sequence's length are never read."""

    pool: Tensor
    table: Tensor

    @property
    def page_rows(self) -> int:
        return self.pool.shape[1]

    @torch.no_grad()
    def write(self, rows_NR: Tensor, packing: Packing) -> None:
        """Store this batch's rows at their positions, cast to the pool's dtype. Changes no other row.

        Raises ValueError when a sequence would outgrow its row of the table.
        """
        self.check(packing)
        positions_N = packing.positions
        page_N = self.table[packing.sequence_of, positions_N // self.page_rows]
        self.pool[page_N, positions_N % self.page_rows] = rows_NR.to(self.pool.dtype)

    def gather(self, sequence: int, length: int) -> Tensor:
        """The first `length` rows [T, R] of one sequence, copied. Rows beyond are not read."""
        pages = self.table[sequence, : -(-length // self.page_rows)]
        return self.pool[pages].flatten(0, 1)[:length]

    def check(self, packing: Packing) -> None:
        """ValueError unless the table has a row for each sequence of the batch, with room for its last token."""
        if self.table.shape[0] != packing.num_sequences:
            raise ValueError(f"latent cache: table of {self.table.shape[0]} rows for {packing.num_sequences} sequences")
        room = self.table.shape[1] * self.page_rows
        needed = max((a + b for a, b in zip(packing.consumed, packing.lengths, strict=True)), default=0)
        if needed > room:
            raise ValueError(
                f"latent cache: a sequence of {needed} tokens does not fit {self.table.shape[1]} pages of "
                f"{self.page_rows} rows; give its table more pages"
            )
