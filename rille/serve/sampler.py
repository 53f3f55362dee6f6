"""From logits to tokens, every row by its own request's parameters.

    l' = l - penalties + bias,  masked by grammar and min_tokens          (greedy: argmax l')
    p  = softmax(l' / t);  keep the top_k likeliest; of these the fewest whose sum reaches top_p; of these the ones with
         p >= min_p max p;  draw the first token, in order of rank, at which the running sum of p exceeds u
    u  = H(seed, choice, place in the reply) in [0, 1)

A row's token depends on its logits, its parameters and its place, never on what else is in the batch. Log-probabilities
are those of the model, log softmax(l). A row with a logit that is no number is an error of its own request.

Suffixes: R rows, W vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import torch
from torch import Tensor

from rille.serve.schema import SamplingParams

LEAST_LOGPROB = -9999.0  # JSON has no infinity


@dataclass(frozen=True)
class Row:
    """What decides one token. place: tokens of the reply before it. prompt, written: the ids before it, where a penalty
    asks for them. allowed bool [W]: what the grammar lets through, None for all. forbidden: ids that min_tokens keeps
    away."""

    params: SamplingParams
    seed: int
    choice: int = 0
    place: int = 0
    prompt: Sequence[int] = ()
    written: Sequence[int] = ()
    allowed: Tensor | None = None
    forbidden: frozenset[int] = field(default_factory=frozenset)

    @property
    def is_plain(self) -> bool:
        """Whether the logits stay as they are."""
        p = self.params
        penalised = p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1
        return not (penalised or p.logit_bias or self.forbidden) and self.allowed is None

    @property
    def cuts(self) -> bool:
        return self.params.top_k > 0 or self.params.top_p < 1 or self.params.min_p > 0


@dataclass(frozen=True)
class Drawn:
    """logprob: by the model; top: the likeliest tokens and theirs. error: why there is none."""

    token: int = -1
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


def draw(logits_RW: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """One token for each row. logits fp32 [R, W], unchanged."""
    changed_RW = changed(logits_RW, rows)
    tokens_R = changed_RW.argmax(-1)
    drawn = [place for place, row in enumerate(rows) if row.params.temperature > 0]
    for cuts in (False, True):
        chosen = [place for place in drawn if rows[place].cuts == cuts]
        if chosen:
            tokens_R[chosen] = sample(changed_RW[chosen], [rows[place] for place in chosen])
    return report(logits_RW, changed_RW, tokens_R, rows)


def changed(logits_RW: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits with penalties, bias and masks."""
    if all(row.is_plain for row in rows):
        return logits_RW
    changed_RW = logits_RW.clone()
    for logits_W, row in zip(changed_RW, rows, strict=True):
        if not row.is_plain:
            change(logits_W, row)
    return changed_RW


def change(logits_W: Tensor, row: Row) -> None:
    p = row.params
    if p.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt, *row.written}), device=logits_W.device)
        there = logits_W[seen]
        logits_W[seen] = torch.where(there > 0, there / p.repetition_penalty, there * p.repetition_penalty)
    if (p.presence_penalty or p.frequency_penalty) and row.written:
        counts = Counter(row.written)
        written = torch.tensor(list(counts), device=logits_W.device)
        times = torch.tensor(list(counts.values()), dtype=logits_W.dtype, device=logits_W.device)
        logits_W[written] -= p.presence_penalty + p.frequency_penalty * times
    for token, bias in p.logit_bias.items():
        logits_W[token] += bias
    if row.allowed is not None:
        logits_W.masked_fill_(~row.allowed.to(logits_W.device), -torch.inf)
    if row.forbidden:
        logits_W[sorted(row.forbidden)] = -torch.inf


def sample(logits_RW: Tensor, rows: Sequence[Row]) -> Tensor:
    """Draw from the rows' distributions: int64 [R]. The rows all cut, or none does."""
    order_RW, mass_RW = distribution(logits_RW, rows)
    running_RW = mass_RW.cumsum(-1)
    numbers = [uniform(row.seed, row.choice, row.place) for row in rows]
    targets_R1 = torch.tensor(numbers, dtype=torch.float64, device=logits_RW.device)[:, None] * running_RW[:, -1:]
    ranks_R = (running_RW <= targets_R1).sum(-1).clamp(max=mass_RW.shape[1] - 1)
    ranks_R = torch.minimum(ranks_R, (mass_RW > 0).long().cumsum(-1).argmax(-1))  # rounding must not reach p = 0
    return ranks_R if order_RW is None else order_RW.gather(-1, ranks_R[:, None])[:, 0]


def distribution(logits_RW: Tensor, rows: Sequence[Row]) -> tuple[Tensor | None, Tensor]:
    """What tokens are drawn from: order [R, W] of the ids (None: as they are) and float64 masses [R, W], not
    normalised, zero where cut."""
    device = logits_RW.device
    heat_R1 = torch.tensor([[row.params.temperature] for row in rows], dtype=torch.float64, device=device)
    mass_RW = torch.softmax(logits_RW.double() / heat_R1, -1)
    if not rows[0].cuts:
        return None, mass_RW
    mass_RW, order_RW = mass_RW.sort(dim=-1, descending=True, stable=True)
    W = mass_RW.shape[1]
    tops = torch.tensor([[r.params.top_k or W, r.params.top_p, r.params.min_p] for r in rows], dtype=torch.float64)
    top_k_R1, top_p_R1, min_p_R1 = tops.to(device).T[:, :, None]
    mass_RW = mass_RW.masked_fill(torch.arange(W, device=device) >= top_k_R1, 0)
    before_RW = mass_RW.cumsum(-1) - mass_RW
    # Above 1 the sum may round: top_p 1 cuts nothing.
    beyond_RW = (before_RW >= top_p_R1 * mass_RW.sum(-1, keepdim=True)) & (top_p_R1 < 1)
    return order_RW, mass_RW.masked_fill(beyond_RW | (mass_RW < min_p_R1 * mass_RW[:, :1]), 0)


def probabilities(logits_RW: Tensor, rows: Sequence[Row]) -> Tensor:
    """The distributions that `draw` draws from, float64 [R, W]; one token has all of it where the temperature is 0."""
    changed_RW = changed(logits_RW, rows)
    result_RW = torch.zeros_like(changed_RW, dtype=torch.float64)
    for place, row in enumerate(rows):
        if row.params.temperature == 0:
            result_RW[place, changed_RW[place].argmax()] = 1
            continue
        order_RW, mass_RW = distribution(changed_RW[place : place + 1], [row])
        ids = torch.arange(mass_RW.shape[1], device=mass_RW.device) if order_RW is None else order_RW[0]
        result_RW[place, ids] = mass_RW[0] / mass_RW[0].sum()
    return result_RW


def uniform(seed: int, choice: int, place: int, purpose: bytes = b"token") -> float:
    """A number in [0, 1) that belongs to a place in a reply."""
    digest = blake2b(b"%s %d %d %d" % (purpose, seed, choice, place), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def report(logits_RW: Tensor, changed_RW: Tensor, tokens_R: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """Tokens with their log-probabilities, on the host. One wait for the device."""
    most = max((row.params.top_logprobs for row in rows), default=0)
    logprobs_RW = torch.log_softmax(logits_RW, -1)
    chosen_R = logprobs_RW.gather(-1, tokens_R[:, None])[:, 0].clamp(min=LEAST_LOGPROB).tolist()
    top_RM, ids_RM = logprobs_RW.topk(min(most, logits_RW.shape[1]), dim=-1) if most else (logprobs_RW[:, :0],) * 2
    tops, ids = top_RM.clamp(min=LEAST_LOGPROB).tolist(), ids_RM.tolist()
    is_number_R = torch.isfinite(logits_RW).all(-1).tolist()
    is_open_R = (changed_RW > -torch.inf).any(-1).tolist()
    result = []
    for place, (token, row) in enumerate(zip(tokens_R.tolist(), rows, strict=True)):
        if not is_number_R[place]:
            result.append(Drawn(error="the model's output for this request is not a number"))
        elif not is_open_R[place]:
            result.append(Drawn(error="nothing may follow here: grammar, min_tokens and stop ids exclude every token"))
        else:
            count = row.params.top_logprobs
            top = tuple(zip(map(int, ids[place][:count]), tops[place][:count], strict=True))
            result.append(Drawn(token, chosen_R[place], top))
    return result
