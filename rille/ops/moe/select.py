"""Top-k selection whose ties are settled by id, without sorting all experts.

    c   = the k-th largest value of a row                      (topk: ties change its indices, not its values)
    in  = all entries above c, and the first k - #(above c) of those equal to c
    ids = the places of `in`, in ascending order               (a running count says where each id goes: no host read)

On a CPU the rows without a tie at c keep the order of an unsorted topk, the released model's: it is the order in which
a token's experts are summed, and a deep model amplifies every rounding that differs.

Axes: N tokens, E experts, A = k active experts.
"""

import torch
from torch import Tensor


def route(scores_NE: Tensor, bias_E: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """(ids [N, A], cutoff [N]): the choice of `reference.route`, in another order."""
    biased_NE = scores_NE.detach() + bias_E.detach()
    experts = biased_NE.shape[1]
    values_NA = torch.topk(biased_NE, min(top + 1, experts), dim=1).values
    cutoff_N = values_NA[:, top] if top < experts else values_NA.new_full(values_NA.shape[:1], -torch.inf)
    last_N1 = values_NA[:, top - 1 : top]
    if biased_NE.is_cuda:
        return _ascending(biased_NE, last_N1, top), cutoff_N
    ids_NA, tied_N1 = torch.topk(biased_NE, top, dim=1, sorted=False).indices, last_N1 == cutoff_N[:, None]
    if tied_N1.any():
        ids_NA = torch.where(tied_N1, _ascending(biased_NE, last_N1, top), ids_NA)
    return ids_NA, cutoff_N


def _ascending(biased_NE: Tensor, last_N1: Tensor, top: int) -> Tensor:
    """Ids [N, A] of the chosen entries, lowest id first. Column `top` takes what is not chosen."""
    above_NE, equal_NE = biased_NE > last_N1, biased_NE == last_N1
    room_N1 = top - above_NE.sum(1, keepdim=True)
    chosen_NE = above_NE | (equal_NE & (equal_NE.cumsum(1, dtype=torch.int32) <= room_N1))
    place_NE = torch.where(chosen_NE, chosen_NE.cumsum(1) - 1, top)
    ids_NE = torch.arange(biased_NE.shape[1], device=biased_NE.device).expand_as(place_NE)
    return ids_NE.new_zeros(len(biased_NE), top + 1).scatter_(1, place_NE, ids_NE)[:, :top]
