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

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from rille.ops.figures import token_figures
from rille.serve.schema import SamplingParams

LEAST_LOGPROB = -9999.0  # JSON has no infinity
NO_NUMBER = "the model's output for this request is not a number"
LEAST_HEAT = 1e-100  # a lower temperature changes no digit, and logits divided by it could become infinite

Lot = tuple[float, float, float, float, float]
"""What draws one token from its logits: temperature (0: the likeliest), u, top_k (infinite: all), top_p, min_p."""


class Way(IntEnum):
    """What drawing the rows of a batch takes: no draw, a draw, a draw from what is cut and therefore sorted."""

    GREEDY = 0
    DRAWN = 1
    CUT = 2


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
    def lot(self) -> Lot:
        return lot_of(self.params, uniform(self.seed, self.choice, self.place) if self.params.temperature > 0 else 0.0)


def lot_of(params: SamplingParams, number: float) -> Lot:
    heat = max(params.temperature, LEAST_HEAT) if params.temperature > 0 else 0.0
    return heat, number, params.top_k or math.inf, params.top_p, params.min_p


class Drawn(NamedTuple):
    """logprob: by the model; top: the likeliest tokens and theirs. error: why there is none."""

    token: int = -1
    logprob: float = 0.0
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


def draw(logits_RW: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """One token for each row. logits fp32 [R, W], unchanged."""
    changed_RW = changed(logits_RW, rows)
    lots_5R = torch.tensor([row.lot for row in rows], dtype=torch.float64).T.to(logits_RW.device)
    tokens_R = choose(changed_RW, lots_5R, way_of(row.params for row in rows))
    return report(logits_RW, changed_RW, tokens_R, rows)


def way_of(every: Iterable[SamplingParams]) -> Way:
    """The least that a batch needs for all of its rows."""
    way = Way.GREEDY
    for params in every:
        if params.temperature > 0:
            if params.top_k > 0 or params.top_p < 1 or params.min_p > 0:
                return Way.CUT
            way = Way.DRAWN
    return way


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


def choose(logits_RW: Tensor, lots_5R: Tensor, way: Way) -> Tensor:
    """Tokens int64 [R] of rows whose logits are changed already. lots float64 [5, R]: `Row.lot` of each. Nothing waits
    for the device, and the launches depend on `way` alone: a CUDA graph may hold them."""
    likeliest_R = logits_RW.argmax(-1)
    if way is Way.GREEDY:
        return likeliest_R
    order_RW, mass_RW = distribution(logits_RW, lots_5R, way)
    running_RW = mass_RW.cumsum(-1)
    ranks_R = (running_RW <= lots_5R[1][:, None] * running_RW[:, -1:]).sum(-1)
    places_W = torch.arange(mass_RW.shape[1], device=mass_RW.device)
    ranks_R = torch.minimum(ranks_R, torch.where(mass_RW > 0, places_W, 0).amax(-1))  # rounding must not reach p = 0
    drawn_R = ranks_R if order_RW is None else order_RW.gather(-1, ranks_R[:, None])[:, 0]
    return torch.where(lots_5R[0] > 0, drawn_R, likeliest_R)


def distribution(logits_RW: Tensor, lots_5R: Tensor, way: Way) -> tuple[Tensor | None, Tensor]:
    """What tokens are drawn from: order [R, W] of the ids (None: as they are) and float64 masses [R, W], not
    normalised, zero where cut. A row that cuts nothing keeps the order of the ids, whatever its neighbours do."""
    heat_R1, _, top_k_R1, top_p_R1, min_p_R1 = lots_5R[:, :, None]
    plain_RW = torch.softmax(logits_RW.double() / torch.where(heat_R1 > 0, heat_R1, 1), -1)
    if way is not Way.CUT:
        return None, plain_RW
    mass_RW, order_RW = plain_RW.sort(dim=-1, descending=True, stable=True)
    places_W = torch.arange(mass_RW.shape[1], device=mass_RW.device)
    mass_RW = mass_RW.masked_fill(places_W >= top_k_R1, 0)
    before_RW = mass_RW.cumsum(-1) - mass_RW
    # Above 1 the sum may round: top_p 1 cuts nothing.
    beyond_RW = (before_RW >= top_p_R1 * mass_RW.sum(-1, keepdim=True)) & (top_p_R1 < 1)
    mass_RW = mass_RW.masked_fill(beyond_RW | (mass_RW < min_p_R1 * mass_RW[:, :1]), 0)
    cuts_R1 = (top_k_R1 < math.inf) | (top_p_R1 < 1) | (min_p_R1 > 0)
    return torch.where(cuts_R1, order_RW, places_W), torch.where(cuts_R1, mass_RW, plain_RW)


def probabilities(logits_RW: Tensor, rows: Sequence[Row]) -> Tensor:
    """The distributions that `draw` draws from, float64 [R, W]; one token has all of it where the temperature is 0."""
    changed_RW = changed(logits_RW, rows)
    result_RW = torch.zeros_like(changed_RW, dtype=torch.float64)
    for place, row in enumerate(rows):
        if row.params.temperature == 0:
            result_RW[place, changed_RW[place].argmax()] = 1
            continue
        lot_51 = torch.tensor(row.lot, dtype=torch.float64, device=logits_RW.device)[:, None]
        order_RW, mass_RW = distribution(changed_RW[place : place + 1], lot_51, way_of([row.params]))
        ids = torch.arange(mass_RW.shape[1], device=mass_RW.device) if order_RW is None else order_RW[0]
        result_RW[place, ids] = mass_RW[0] / mass_RW[0].sum()
    return result_RW


def uniform(seed: int, choice: int, place: int, purpose: bytes = b"token") -> float:
    """A number in [0, 1) that belongs to a place in a reply."""
    digest = blake2b(b"%s %d %d %d" % (purpose, seed, choice, place), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def choose_unchanged(logits_RW: Tensor, lots_5R: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """`choose` from logits of any dtype that nothing has changed, and `figures`, in as few launches as that takes."""
    if way is not Way.CUT:
        return token_figures(
            logits_RW, None, LEAST_LOGPROB, drawn=None if way is Way.GREEDY else (lots_5R[0], lots_5R[1])
        )
    tokens_R = choose(logits_RW.to(torch.promote_types(logits_RW.dtype, torch.float32)), lots_5R, way)
    return tokens_R, token_figures(logits_RW, tokens_R, LEAST_LOGPROB)[1]


def figures(logits_RW: Tensor, changed_RW: Tensor, tokens_R: Tensor) -> Tensor:
    """What the host wants to know of drawn tokens, float64 so that it comes in one piece, [3, R] or [4, R]: the token,
    its log-probability by the model, whether all logits of the row are numbers, and, where logits were changed, whether
    any token may follow."""
    _, figures_3R = token_figures(logits_RW, tokens_R, LEAST_LOGPROB)
    if changed_RW is logits_RW:
        return figures_3R
    return torch.cat([figures_3R, (changed_RW > -torch.inf).any(-1)[None].double()])


def drawn_of(figures_R: Sequence[Sequence[float]]) -> list[Drawn]:
    """`figures`, on the host."""
    result = []
    for token, logprob, is_number, *open_too in zip(*figures_R, strict=True):
        is_open = all(open_too)
        if not is_number:
            result.append(Drawn(error=NO_NUMBER))
        elif not is_open:
            result.append(Drawn(error="nothing may follow here: grammar, min_tokens and stop ids exclude every token"))
        else:
            result.append(Drawn(int(token), logprob))
    return result


def report(logits_RW: Tensor, changed_RW: Tensor, tokens_R: Tensor, rows: Sequence[Row]) -> list[Drawn]:
    """Tokens with their log-probabilities, on the host. One wait for the device, another one for the likeliest
    tokens."""
    drawn = drawn_of(figures(logits_RW, changed_RW, tokens_R).tolist())
    most = min(max((row.params.top_logprobs for row in rows), default=0), logits_RW.shape[1])
    if not most:
        return drawn
    top_RM, ids_RM = torch.log_softmax(logits_RW, -1).topk(most, dim=-1)
    pairs = [
        tuple(zip(ids, values, strict=True))
        for ids, values in zip(ids_RM.tolist(), top_RM.clamp(min=LEAST_LOGPROB).tolist(), strict=True)
    ]
    return [
        one if one.error is not None else one._replace(top=pair[: row.params.top_logprobs])
        for one, pair, row in zip(drawn, pairs, rows, strict=True)
    ]
