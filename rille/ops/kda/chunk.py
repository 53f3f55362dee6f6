"""Kimi Delta Attention in blocks of 64 tokens: what a kernel does, in plain PyTorch, batched over all chunks and heads.

With G the log2-decay summed from the chunk's first row through each row (Gc: through the last), S the state before the
chunk and b = diag(beta):

    A  = tril( [q 2^G] [k 2^-G]^T ) b      L = strict_tril( [k 2^G] [k 2^-G]^T ) b        T = (I + L)^-1
    W  = T (k 2^G)                         U = T v - W S
    o  = (q 2^G) S + A U                   S' = diag(2^Gc) S + (b k 2^(Gc-G))^T U

Only U and S' depend on earlier chunks: that is `state_pass`, the one loop over chunks. 2^-G overflows, so A and L are
made of blocks, each with its own origin for G. The README derives all of this from the recurrence.

Suffixes: N packed tokens, S sequences, M chunks, H heads, C = 64 rows of a chunk, G = 2 halves of a chunk, B = 32 rows
of a half, T = 2 tiles of a half, R = 16 rows of a tile, K key channels, V value channels. Matrices over pairs of rows
end in CC, BB or RR.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rille.ops.kda.arguments import CHUNK, End, Gate
from rille.ops.kda.reference import compute_dtype, initial_state, log_decay, normalised, normalised_queries
from rille.packing import Packing

TILE, HALF = 16, 32

# exp(80) = 2^115.4 leaves fp32 a factor of 6,000 for sums of what it multiplies.
LARGEST_EXPONENT = 80.0


def kda(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHV: Tensor,
    z_NHK: Tensor,
    b_NH: Tensor,
    gate: Gate,
    packing: Packing,
    initial_SHVK: Tensor | None,
    ends: Sequence[End] = (),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same function as `reference.kda`. Raises ValueError if 16 |lower_bound| > 80."""
    check_lower_bound(gate)
    dtype = compute_dtype(q_NHK, k_NHK, v_NHV, z_NHK, b_NH)
    state_SHVK = initial_state(initial_SHVK, packing, k_NHK, v_NHV, dtype)
    if packing.num_tokens == 0:
        return v_NHV.clone(), state_SHVK.clone(), None
    schedule = schedule_chunks(packing)
    k_MHCK, beta_MHC1, decay, halves, t_MHCC = within_chunks(k_NHK, z_NHK, b_NH, gate, schedule, dtype)
    q_MHCK = schedule.gather(normalised_queries(q_NHK, dtype))
    v_MHCV = schedule.gather(v_NHV.to(dtype))
    a_MHCC = pair_products(q_MHCK, k_MHCK, halves, decay).tril() * beta_MHC1.mT
    w_MHCK = t_MHCC @ (k_MHCK * decay.from_start_MHCK)
    u_MHCV, states_MHVK, final_SHVK = state_pass(
        w_MHCK, t_MHCC @ v_MHCV, beta_MHC1 * k_MHCK * decay.to_end_MHCK, decay.whole_MH1K, state_SHVK, schedule
    )
    o_MHCV = (q_MHCK * decay.from_start_MHCK) @ states_MHVK.mT + a_MHCC @ u_MHCV
    first_S = packing.chunks(CHUNK).first
    kept = [
        final_SHVK[s] if tokens == packing.lengths[s] else states_MHVK[schedule.place_M[first_S[s] + tokens // CHUNK]]
        for s, tokens in ends
    ]
    return schedule.scatter(o_MHCV).to(v_NHV.dtype), final_SHVK, torch.stack(kept) if kept else None


def check_lower_bound(gate: Gate) -> None:
    """A tile's decay must fit an fp32 exponent in both directions; the softplus gate has a form that needs no bound."""
    if gate.lower_bound is not None and -TILE * gate.lower_bound > LARGEST_EXPONENT:
        raise ValueError(
            f"kda: lower_bound {gate.lower_bound} can decay by exp({TILE * gate.lower_bound:g}) in {TILE} tokens, the "
            f'chunk backend holds exp(-{LARGEST_EXPONENT:g}), a bound of -5; take backend="reference" or a weaker one'
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """Chunks in the order of the state pass: step by step, and within a step the longest sequence first.

    rows_MC, mask_MC: as in `ChunkMap`, in this order. place_M: where chunk m of the packing lies in it. place_N: where
    token n lies in the flattened [M * C] rows. longest_first_S: sequences by number of chunks. active: how many
    sequences have a chunk at each step, on the host.
    """

    rows_MC: Tensor
    mask_MC: Tensor
    place_M: Tensor
    place_N: Tensor
    longest_first_S: Tensor
    active: list[int]

    def gather(self, x_NHK: Tensor) -> Tensor:
        """Rows of chunks, [M, H, C, K], zeros where a chunk has no token: they neither write nor decay."""
        x_MCHK = x_NHK.index_select(0, self.rows_MC.flatten()).unflatten(0, self.rows_MC.shape)
        return x_MCHK.masked_fill(~self.mask_MC[:, :, None, None], 0).transpose(1, 2)

    def scatter(self, x_MHCV: Tensor) -> Tensor:
        """Back to packed tokens, [N, H, V]."""
        return x_MHCV.transpose(1, 2).flatten(0, 1).index_select(0, self.place_N)


def schedule_chunks(packing: Packing) -> Schedule:
    """Made once a batch: a model asks for it in every layer."""
    if (name := "chunk schedule") not in packing.derived:
        with torch.inference_mode(False):  # it serves where gradients are wanted, whatever the first call was
            packing.derived[name] = _scheduled(packing)
    return packing.derived[name]


def _scheduled(packing: Packing) -> Schedule:
    chunks = packing.chunks(CHUNK)
    per_sequence_S = np.array(chunks.per_sequence)
    longest_first_S = torch.from_numpy(np.argsort(-per_sequence_S, kind="stable")).to(packing.device)
    active = (per_sequence_S[:, None] > np.arange(per_sequence_S.max())).sum(0).tolist()

    order_M = (chunks.order * packing.num_sequences + longest_first_S.argsort()[chunks.sequence]).argsort()
    offset_N = torch.arange(packing.num_tokens, device=packing.device) - packing.starts[packing.sequence_of]
    place_M = order_M.argsort()
    chunk_N = place_M[chunks.first[packing.sequence_of] + offset_N // CHUNK]
    place_N = chunk_N * CHUNK + offset_N % CHUNK
    return Schedule(chunks.rows[order_M], chunks.mask[order_M], place_M, place_N, longest_first_S, active)


class TileSums(NamedTuple):
    """Log2-decay g summed inside each tile: `through` from the tile's first row through each row, `after` over the rows
    that follow. Sums that start or end at a tile's edge serve for everything, so no difference of large sums is formed.
    """

    g_MHGTRK: Tensor
    through_MHGTRK: Tensor
    after_MHGTRK: Tensor


def tile_sums(g_MHCK: Tensor) -> TileSums:
    g_MHGTRK = g_MHCK.unflatten(2, (2, 2, TILE))
    following_MHGTRK = F.pad(g_MHGTRK[..., 1:, :], (0, 0, 0, 1))
    return TileSums(g_MHGTRK, g_MHGTRK.cumsum(-2), following_MHGTRK.flip(-2).cumsum(-2).flip(-2))


class Decays(NamedTuple):
    """Factors of rows, none above 1: from_start 2^G, to_end 2^(Gc-G), whole 2^Gc; with Gm the sum at the border between
    the halves, from_middle 2^(G-Gm) for rows of the second half and to_middle 2^(Gm-G) for rows of the first.
    """

    from_start_MHCK: Tensor
    to_end_MHCK: Tensor
    whole_MH1K: Tensor
    from_middle_MHBK: Tensor
    to_middle_MHBK: Tensor


def decays(sums: TileSums) -> Decays:
    through_0, through_1 = sums.through_MHGTRK.unbind(3)
    after_0, after_1 = sums.after_MHGTRK.unbind(3)
    tile_0, tile_1 = through_0[..., -1:, :], through_1[..., -1:, :]
    from_0, from_middle = torch.cat([through_0, tile_0 + through_1], -2).exp2().unbind(2)
    to_middle, to_1 = torch.cat([after_0 + tile_1, after_1], -2).exp2().unbind(2)
    half_0, half_1 = (tile_0 + tile_1).exp2().unbind(2)
    return Decays(
        from_start_MHCK=torch.cat([from_0, half_0 * from_middle], -2),
        to_end_MHCK=torch.cat([to_middle * half_1, to_1], -2),
        whole_MH1K=half_0 * half_1,
        from_middle_MHBK=from_middle,
        to_middle_MHBK=to_middle,
    )


class AnchoredHalves:
    """Pairs inside a half for the bounded gate: the border between the half's tiles is the origin of G, so both factors
    stay within 2^(16 * 5 / ln 2) = 2^115.4 and one dense product gives the whole half.
    """

    def __init__(self, sums: TileSums, k_MHCK: Tensor) -> None:
        self.x_MHGBK = torch.cat([-sums.after_MHGTRK[:, :, :, 0], sums.through_MHGTRK[:, :, :, 1]], -2)
        self.k_MHGBK = k_MHCK.unflatten(2, (2, HALF))

    def products(self, r_MHGBK: Tensor) -> Tensor:
        """[M, H, G, B, B]; what stands above the diagonal means nothing and may be infinite."""
        product_MHGBB = _AnchoredProduct.apply(r_MHGBK, self.k_MHGBK, self.x_MHGBK)
        assert isinstance(product_MHGBB, Tensor)
        return product_MHGBB


class _AnchoredProduct(torch.autograd.Function):
    """P = (r 2^x) (k 2^-x)^T. Backward brings the gradient to magnitude 1 before 2^115 meets it, where plain autograd
    turns gradients of 1e6 into NaN under a saturated gate.
    """

    @staticmethod
    def forward(ctx: Any, r_BK: Tensor, k_BK: Tensor, x_BK: Tensor) -> Tensor:
        ctx.save_for_backward(r_BK, k_BK, x_BK)
        return (r_BK * x_BK.exp2()) @ (k_BK * (-x_BK).exp2()).mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        (r_BK, k_BK, x_BK), (dp_BB,) = ctx.saved_tensors, grads
        up_BK, down_BK = x_BK.exp2(), (-x_BK).exp2()
        size_11 = dp_BB.detach().abs().amax((-2, -1), keepdim=True).clamp_min(torch.finfo(dp_BB.dtype).tiny)
        dp_BB = dp_BB / size_11
        dr_BK = dp_BB @ (k_BK * down_BK) * up_BK * size_11
        dk_BK = dp_BB.mT @ (r_BK * up_BK) * down_BK * size_11
        return dr_BK, dk_BK, (r_BK * dr_BK - k_BK * dk_BK) * log(2)


class NestedHalves:
    """Pairs inside a half for the softplus gate, which has no bound. Each pair of rows has one border between blocks of
    1, 2, 4, 8 or 16 rows that it lies across, the row in the second block of two and the column in the first; with that
    as origin no factor exceeds 1. A row with itself decays by nothing.
    """

    def __init__(self, sums: TileSums, k_MHCK: Tensor) -> None:
        g_MHGBK = sums.g_MHGTRK.flatten(3, 4)
        self.factors = {size: (to_border(size, g_MHGBK) @ g_MHGBK).exp2() for size in (1, 2, 4, 8, TILE)}
        self.k_MHGBK = k_MHCK.unflatten(2, (2, HALF))

    def products(self, r_MHGBK: Tensor) -> Tensor:
        """[M, H, G, B, B], zero above the diagonal."""
        product_MHGBB = (r_MHGBK * self.k_MHGBK).sum(-1).diag_embed()
        for size, factor_MHGBK in self.factors.items():
            between_MHGBB = (r_MHGBK * factor_MHGBK) @ (self.k_MHGBK * factor_MHGBK).mT
            product_MHGBB = torch.where(across_border(size, r_MHGBK.device), between_MHGBB, product_MHGBB)
        return product_MHGBB


def to_border(size: int, like: Tensor) -> Tensor:
    """[B, B] of ones that sum the rows from i to the border in the middle of its block of 2 `size` rows: from the
    border through i if i lies after it, else those that stand between. A sum has its own terms alone, so that strong
    decays blur no other one."""
    row_B = torch.arange(HALF, device=like.device)
    i, j = row_B[:, None], row_B[None, :]
    border = i // (2 * size) * 2 * size + size
    return (((j >= border) & (j <= i)) | ((j > i) & (j < border))).to(like.dtype)


def across_border(size: int, device: torch.device) -> Tensor:
    """[B, B]: pairs with that border between them, the row after it and the column before it."""
    block_B = torch.arange(HALF, device=device) // size
    return (block_B[:, None] % 2 == 1) & (block_B[:, None] == block_B[None, :] + 1)


Halves = AnchoredHalves | NestedHalves


def halves_of(gate: Gate, sums: TileSums, k_MHCK: Tensor) -> Halves:
    return NestedHalves(sums, k_MHCK) if gate.lower_bound is None else AnchoredHalves(sums, k_MHCK)


class Within(NamedTuple):
    """What the tokens of a chunk make of each other, whatever the state before them: keys, write strengths, decays and
    T = (I + L)^-1."""

    k_MHCK: Tensor
    beta_MHC1: Tensor
    decay: Decays
    halves: Halves
    t_MHCC: Tensor


def within_chunks(
    k_NHK: Tensor, z_NHK: Tensor, b_NH: Tensor, gate: Gate, schedule: Schedule, dtype: torch.dtype
) -> Within:
    k_MHCK = schedule.gather(normalised(k_NHK, dtype))
    beta_MHC1 = schedule.gather(b_NH.to(dtype).sigmoid()[..., None])
    sums = tile_sums(schedule.gather(log_decay(z_NHK, gate, dtype) / log(2)))
    decay, halves = decays(sums), halves_of(gate, sums, k_MHCK)
    # The mask comes before beta: above the diagonal there may be infinities, whose product with a gradient of 0 is NaN.
    l_MHCC = pair_products(k_MHCK, k_MHCK, halves, decay).tril(-1) * beta_MHC1.mT
    return Within(k_MHCK, beta_MHC1, decay, halves, inverse_of_unit_lower(l_MHCC))


def pair_products(r_MHCK: Tensor, k_MHCK: Tensor, halves: Halves, decay: Decays) -> Tensor:
    """[M, H, C, C]: sum_K r_i k_j 2^(Gi-Gj) for i >= j. The block between the halves has their border as origin."""
    r_MHGBK, k_MHGBK = r_MHCK.unflatten(2, (2, HALF)), k_MHCK.unflatten(2, (2, HALF))
    upper_left, lower_right = halves.products(r_MHGBK).unbind(2)
    lower_left = (r_MHGBK[:, :, 1] * decay.from_middle_MHBK) @ (k_MHGBK[:, :, 0] * decay.to_middle_MHBK).mT
    return block_lower(upper_left, lower_left, lower_right)


def block_lower(upper_left: Tensor, lower_left: Tensor, lower_right: Tensor) -> Tensor:
    """[[a, 0], [c, b]] of three square blocks."""
    return torch.cat([F.pad(upper_left, (0, upper_left.shape[-1])), torch.cat([lower_left, lower_right], -1)], -2)


class _InverseOfUnitLower(torch.autograd.Function):
    """X = (I + L)^-1 with dL = -strict_tril(X^T dX X^T): one small formula instead of a graph through every step."""

    @staticmethod
    def forward(ctx: Any, l_MHCC: Tensor) -> Tensor:
        x_MHCC = merged_inverse(l_MHCC)
        ctx.save_for_backward(x_MHCC)
        return x_MHCC

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x_MHCC,), (dx_MHCC,) = ctx.saved_tensors, grads
        return -(x_MHCC.mT @ dx_MHCC @ x_MHCC.mT).tril(-1)


def inverse_of_unit_lower(l_MHCC: Tensor) -> Tensor:
    """(I + L)^-1 for strictly lower triangular L [..., C, C]."""
    x_MHCC = _InverseOfUnitLower.apply(l_MHCC)
    assert isinstance(x_MHCC, Tensor)
    return x_MHCC


def merged_inverse(l_MHCC: Tensor) -> Tensor:
    """Substitution in the 16-row tiles, where a series in powers of L would lose everything for repeated keys; then two
    merges, [[I + La, 0], [Lba, I + Lb]]^-1 = [[Xa, 0], [-Xb Lba Xa, Xb]], from 16 to 32 and from 32 to 64 rows."""
    size, blocks = TILE, l_MHCC.shape[-1] // TILE
    tiles = torch.stack([l_MHCC[..., i * TILE :, i * TILE :][..., :TILE, :TILE] for i in range(blocks)], 2)
    x = substituted_inverse(tiles)
    while size < l_MHCC.shape[-1]:
        starts = range(0, l_MHCC.shape[-1], 2 * size)
        between = torch.stack([l_MHCC[..., s + size : s + 2 * size, s : s + size] for s in starts], 2)
        x_a, x_b = x[:, :, 0::2], x[:, :, 1::2]
        x = block_lower(x_a, -x_b @ between @ x_a, x_b)
        size *= 2
    return x.squeeze(2)


def substituted_inverse(l_RR: Tensor) -> Tensor:
    """Forward substitution, batched over all leading axes: once row j of X is final, take it out of the rows below."""
    x_RR = torch.eye(TILE, dtype=l_RR.dtype, device=l_RR.device).expand(l_RR.shape).clone()
    for j in range(TILE - 1):
        below = slice(j + 1, None)
        x_RR[..., below, : j + 1].addcmul_(l_RR[..., below, j : j + 1], x_RR[..., j : j + 1, : j + 1], value=-1)
    return x_RR


def state_pass(
    w_MHCK: Tensor,
    tv_MHCV: Tensor,
    k_to_end_MHCK: Tensor,
    whole_MH1K: Tensor,
    initial_SHVK: Tensor,
    schedule: Schedule,
) -> tuple[Tensor, Tensor, Tensor]:
    """U [M, H, C, V], the state before each chunk [M, H, V, K], and the final states. The only loop over chunks.

    Sequences lie longest first, so those that still run are always the first ones.
    """
    state_SHVK = initial_SHVK[schedule.longest_first_S]
    u_steps, state_steps, finished = [], [], []
    steps = zip(*(x.split(schedule.active) for x in (w_MHCK, tv_MHCV, k_to_end_MHCK, whole_MH1K)), strict=True)
    for w_SHCK, tv_SHCV, k_to_end_SHCK, whole_SH1K in steps:
        running = w_SHCK.shape[0]
        finished.append(state_SHVK[running:])
        state_SHVK = state_SHVK[:running]
        u_SHCV = tv_SHCV - w_SHCK @ state_SHVK.mT
        u_steps.append(u_SHCV)
        state_steps.append(state_SHVK)
        state_SHVK = state_SHVK * whole_SH1K + u_SHCV.mT @ k_to_end_SHCK
    final_SHVK = torch.cat([state_SHVK, *reversed(finished)])[schedule.longest_first_S.argsort()]
    return torch.cat(u_steps), torch.cat(state_steps), final_SHVK
