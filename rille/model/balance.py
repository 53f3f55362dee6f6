"""Quantile Balancing: the router's selection bias from the scores themselves (report §2.3.3, appendices C and D).

    s = sigmoid scores [m, E];   experts of a token = top-k of s + b;   alpha_i = (k+1)-th largest of s_i + b
    required bias  r = alpha - s;   q = m k / E;   b^_j = r at rank q + 1 of column j (ascending);   b = b^ - mean(b^)

so that, with everyone else's cutoff held, each expert would be chosen by its fair share of tokens. `exact_bias` is the
definition. Training counts r in B uniform bins over [b_min - 1, b_max + 1] instead: integer counts that add up over
micro-batches and ranks, then `histogram_bias` reads the quantile off with linear interpolation. `sign_bias` is the
older rule, for comparison.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rille.ops.moe import bin_range, required_bias_histogram

# The report uses 1000. Rare experts have their whole share of tokens within a few such bins: at 896 experts, top-16 and
# 20,000 tokens 1000 bins leave a load violation of 0.12 to 0.13 after five updates, 2000 leave 0.11, 4000 leave 0.09
# (exact quantile: 0.04 to 0.07).
BINS = 4000


@dataclass(eq=False)
class Counts:
    """Expert load and required-bias histogram of each MoE layer, int64 on the model's device.

    load: layer -> [E], tokens given to each expert. histogram: layer -> [E, B]. largest: MLA layer -> [H], the largest
    logit of each head, where `attention` asks for it (one more score product). A training forward adds to them once
    per token (not in evaluation, not under recomputation); the trainer sums them over ranks before `update`.
    """

    bins: int = BINS
    attention: bool = False
    load: dict[int, Tensor] = field(default_factory=dict)
    histogram: dict[int, Tensor] = field(default_factory=dict)
    largest: dict[int, Tensor] = field(default_factory=dict)

    def add(self, layer: int, ids_NA: Tensor, scores_NE: Tensor, cutoff_N: Tensor, bias_E: Tensor) -> None:
        """Count a batch: experts taken, raw scores, the cutoffs of the router's own choice and their bias."""
        load_E = torch.bincount(ids_NA.flatten(), minlength=scores_NE.shape[1])
        self.add_counted(layer, load_E, required_bias_histogram(scores_NE, cutoff_N, bias_E, self.bins))

    def add_counted(self, layer: int, load_E: Tensor, histogram_EB: Tensor) -> None:
        if layer in self.load:
            load_E, histogram_EB = load_E + self.load[layer], histogram_EB + self.histogram[layer]
        self.load[layer], self.histogram[layer] = load_E, histogram_EB

    def add_logits(self, layer: int, largest_H: Tensor) -> None:
        self.largest[layer] = torch.maximum(largest_H, self.largest.get(layer, largest_H))


def exact_bias(scores_NE: Tensor, cutoff_N: Tensor, active: int) -> Tensor:
    """The new bias [E] from all margins: minus the (q+1)-th largest of s - alpha in each column, mean removed.

    scores [m, E] raw sigmoid scores, cutoff [m] of the biased scores, active = k. Source: equation 14.
    """
    tokens, experts = scores_NE.shape
    rank = min(tokens * active // experts, tokens - 1)
    required_NE = cutoff_N[:, None] - scores_NE
    bias_E = required_NE.sort(dim=0).values[rank]
    return bias_E - bias_E.mean()


def histogram_bias(histogram_EB: Tensor, bias_E: Tensor, active: int) -> Tensor:
    """The new bias [E] from pooled counts [E, B] made under the old bias [E] (appendix D). Error at most one
    bin, before the mean is removed.

    The first bin whose cumulative count exceeds q holds rank q + 1; linear interpolation inside it. Where q is no whole
    number that is appendix D's bin, which reaches ceil(q); where it is one, D reads rank q, which lies below the rank
    of equation 14 by a gap of any width.
    """
    experts, bins = histogram_EB.shape
    low, width = bin_range(bias_E, bins)
    quota = histogram_EB[0].sum().double() * active / experts  # on the device: nothing waits for it
    cumulative_EB = histogram_EB.cumsum(1)
    bin_E1 = (cumulative_EB <= quota).sum(1, keepdim=True).clamp_(max=bins - 1)
    inside_E1 = histogram_EB.gather(1, bin_E1)
    before_E1 = cumulative_EB.gather(1, bin_E1) - inside_E1
    fraction_E1 = ((quota - before_E1) / inside_E1.clamp(min=1)).clamp(0, 1)
    new_E = low + (bin_E1 + fraction_E1).squeeze(1) * width
    return (new_E - new_E.mean()).to(bias_E.dtype)


def sign_bias(bias_E: Tensor, load_E: Tensor, rate: float) -> Tensor:
    """The auxiliary-loss-free rule: a fixed step towards the mean load."""
    load_E = load_E.to(bias_E.dtype)
    return bias_E + rate * torch.sign(load_E.mean() - load_E)


def load_violation(load_E: Tensor) -> float:
    """max load / mean load - 1; 0 is a perfect balance."""
    load_E = load_E.double()
    return float(load_E.max() / load_E.mean() - 1)


def update_biases(
    biases: Mapping[int, Tensor], counts: Counts, active: int, rule: str, *, ema: float = 0.0, rate: float = 1e-3
) -> None:
    """Set each layer's router bias in place from the counts of a step; the next step uses it.

    biases: layer -> [E] fp32. rule: "quantile", "sign" or "none". ema: weight of the old bias (0 takes the new one
    whole).
    """
    if rule not in ("quantile", "sign", "none"):
        raise ValueError(f"balance: unknown rule {rule!r}; choose quantile, sign or none")
    for layer, bias_E in biases.items():
        if rule == "none" or layer not in counts.load:
            continue
        with torch.no_grad():
            if rule == "sign":
                bias_E.copy_(sign_bias(bias_E, counts.load[layer], rate))
            else:
                bias_E.lerp_(histogram_bias(counts.histogram[layer], bias_E, active), 1.0 - ema)
