"""The paged latent cache as an op sees it: a pool of pages, and for each sequence the list of its pages.

Row p of sequence s lies in pool[table[s, p // page_rows], p % page_rows]. The pool may be a view whose axis 0 has any
stride. A pool of 8-bit floats (e4m3) holds rows divided by a factor: one for each row, chosen when it is written so
that its largest element becomes 448, or one for each page, which the pool's owner sets.

Axes: S sequences, N tokens, R = latent + shared key channels, T rows of one sequence.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rille.packing import Packing

LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, eq=False)
class LatentCache:
    """pool [pages, page_rows, R]; table int64 [S, max_pages]: entries beyond a sequence's length are never used.

    scales: fp32 [pages, page_rows] or [pages, 1], the factors of an e4m3 pool; None for wider types.
    """

    pool: Tensor
    table: Tensor
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        narrow = self.pool.dtype == torch.float8_e4m3fn
        if narrow != (self.scales is not None):
            raise ValueError(f"latent cache: scales go with pools of float8_e4m3fn alone, not {self.pool.dtype}")
        if self.scales is not None and self.scales.shape not in (self.pool.shape[:2], (self.pool.shape[0], 1)):
            raise ValueError(f"latent cache: scales {tuple(self.scales.shape)} for a pool {tuple(self.pool.shape)}")

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
        place_N = positions_N % self.page_rows
        if self.scales is not None:
            rows_NR = self._narrowed(rows_NR.float(), self.scales, page_N, place_N)
        self.pool[page_N, place_N] = rows_NR.to(self.pool.dtype)

    def _narrowed(self, rows_NR: Tensor, scales: Tensor, page_N: Tensor, place_N: Tensor) -> Tensor:
        """Rows over their factors, within what e4m3 holds. Factors of rows are set here, those of pages stay."""
        if scales.shape[1] == self.page_rows:
            scales[page_N, place_N] = (rows_NR.abs().amax(-1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        else:
            place_N = torch.zeros_like(place_N)
        return (rows_NR / scales[page_N, place_N, None]).clamp(-LARGEST, LARGEST)

    def gather(self, sequence: int, length: int) -> Tensor:
        """The first `length` rows [T, R] of one sequence, copied (fp32 from an e4m3 pool). Rows beyond are not read."""
        pages = self.table[sequence, : -(-length // self.page_rows)]
        rows_TR = self.pool[pages].flatten(0, 1)[:length]
        if self.scales is None:
            return rows_TR
        return rows_TR.float() * self.scales[pages].expand(-1, self.page_rows).flatten()[:length, None]

    def check(self, packing: Packing) -> None:
        """ValueError unless the table has a row for each sequence of the batch, with room for its last token."""
        if self.table.shape[0] != packing.num_sequences:
            raise ValueError(f"latent cache: table of {self.table.shape[0]} rows for {packing.num_sequences} sequences")
        room = self.table.shape[1] * self.page_rows
        needed = max([0, *(a + b for a, b in zip(packing.consumed, packing.lengths, strict=True))])
        if needed > room:
            raise ValueError(
                f"latent cache: a sequence of {needed} tokens does not fit {self.table.shape[1]} pages of "
                f"{self.page_rows} rows; give its table more pages"
            )
